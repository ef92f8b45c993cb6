"""What a rebuild did, in numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

Progress = Callable[[int, int], object]
"""Called now and then with (bytes done, bytes in all) of the volume's content."""


@dataclass(slots=True)
class RebuildReport:
    """A volume before and after; sizes in bytes."""

    size_before: int
    size_after: int
    """Of the file system, which is also the new file's size."""
    block_size: int
    used_bytes: int
    """Of blocks in use in the new volume, metadata and journal included."""
    inodes: int
    """Inodes in use, the reserved ones included."""
    inodes_before: int
    inodes_after: int
    """Inodes that the volume can have."""
    renumbered: bool
    """Whether inodes have other numbers than before."""
    journal_before: int
    journal_after: int
    extents_before: int
    extents_after: int
    """Runs of contiguous blocks, in all files and directories."""
    fragmented_before: int
    fragmented_after: int
    """Files and directories whose content lies in more than one piece."""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data for JSON."""
        return asdict(self)
