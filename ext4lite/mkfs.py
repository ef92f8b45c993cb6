"""An empty volume of the project's profile, or one filled from a directory of the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

from ext4lite.blockdev import StrPath
from ext4lite.builder import ImageBuilder

if TYPE_CHECKING:
    from ext4lite.transfer import Copied


@dataclass(slots=True, frozen=True)
class MkfsResult:
    """What was made; ``size`` is that of the file in bytes, ``copied`` what was put in from a directory."""

    path: str
    uuid: UUID
    size: int
    blocks: int
    inodes: int
    journal_blocks: int
    copied: Copied | None = None


def mkfs(
    path: StrPath,
    *,
    size: int,
    uuid: UUID | None = None,
    label: str = "",
    journal_size: int | None = None,
    timestamp: int | None = None,
    force: bool = False,
    directory: StrPath | None = None,
    progress: Callable[[int], None] | None = None,
) -> MkfsResult:
    """Make a volume: an empty one, or with everything below the host directory ``directory`` in it.

    ``progress`` is called with each number of bytes copied; see :func:`ext4lite.populate.populate`. Other arguments and
    the errors are :class:`ImageBuilder`'s.
    """
    with ImageBuilder(
        path, size=size, uuid=uuid, label=label, journal_size=journal_size, timestamp=timestamp, force=force
    ) as builder:
        copied = None
        if directory is not None:
            from ext4lite.populate import populate

            copied = populate(builder, directory, progress)
        builder.finish()
        plan = builder.geometry
        return MkfsResult(str(path), builder.uuid, size, plan.blocks, plan.inodes, plan.journal_blocks, copied)
