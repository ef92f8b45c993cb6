"""An empty volume of the project's profile: an image builder with nothing put in."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from ext4lite.blockdev import StrPath
from ext4lite.builder import ImageBuilder


@dataclass(slots=True, frozen=True)
class MkfsResult:
    """What was made; ``size`` is that of the file in bytes."""

    path: str
    uuid: UUID
    size: int
    blocks: int
    inodes: int
    journal_blocks: int


def mkfs(
    path: StrPath,
    *,
    size: int,
    uuid: UUID | None = None,
    label: str = "",
    journal_size: int | None = None,
    timestamp: int | None = None,
    force: bool = False,
) -> MkfsResult:
    """Make an empty volume; arguments and errors are :class:`ImageBuilder`'s."""
    with ImageBuilder(
        path, size=size, uuid=uuid, label=label, journal_size=journal_size, timestamp=timestamp, force=force
    ) as builder:
        builder.finish()
        plan = builder.geometry
        return MkfsResult(str(path), builder.uuid, size, plan.blocks, plan.inodes, plan.journal_blocks)
