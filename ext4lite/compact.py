"""``ext4lite compact``: a volume written afresh in the least space, in place of the old one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ext4lite.blockdev import StrPath
from ext4lite.rebuild import Progress, RebuildReport


@dataclass(slots=True)
class CompactReport:
    """What :func:`compact` did."""

    path: str
    volume: RebuildReport
    host_bytes_before: int
    host_bytes_after: int
    """Bytes that the files take on the host."""
    recovered: bool
    """Whether the volume's journal was replayed first."""

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data for JSON."""
        return asdict(self)


def compact(
    path: StrPath,
    *,
    size: int | None = None,
    output: StrPath | None = None,
    keep_numbers: bool = False,
    force: bool = False,
    progress: Progress | None = None,
    command: str = "",
) -> CompactReport:
    """Write a volume afresh and put the result in its place (or to ``output``, leaving the old one).

    Locks the volume exclusively itself (call it without holding a lock), recovers it first where needed. Killed at any
    moment, it leaves the old file or the new one under the name, whole and durable. Arguments and errors are those of
    :func:`ext4lite.rebuild.rebuild`.
    """
    raise NotImplementedError
