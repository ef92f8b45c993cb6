"""The names of large directories, looked up on disk by their hash, so that memory does not grow with a directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ext4lite.dirwrite import DirState, DirWriter, Name
from ext4lite.errors import CorruptImage

if TYPE_CHECKING:
    from ext4lite.writable import WritableBase


class NamesOnDisk:
    """What :attr:`DirState.names` is for a directory with an index: as far as a writer needs it, a dict.

    What is set and deleted here is what the caller has changed in the blocks already, so both do nothing.
    """

    def __init__(self, volume: WritableBase, ino: int) -> None:
        self._volume = volume
        self._ino = ino
        self.state: DirState
        """The directory's state, whose names these are; set by who makes both."""

    @property
    def _writer(self) -> DirWriter:
        return DirWriter(self._volume, self._volume.inode(self._ino), self.state)

    def get(self, name: bytes) -> Name | None:
        """Return what a name names."""
        return self._writer.find_by_hash(name)

    def __getitem__(self, name: bytes) -> Name:
        found = self.get(name)
        if found is None:
            raise CorruptImage(f"has lost the name {name!r}", where=f"{self._volume.where}: directory {self._ino}")
        return found

    def __contains__(self, name: bytes) -> bool:
        return self.get(name) is not None

    def __setitem__(self, name: bytes, value: Name) -> None:
        pass

    def __delitem__(self, name: bytes) -> None:
        pass

    def __len__(self) -> int:
        """How many names are in memory."""
        return 0

    def __bool__(self) -> bool:
        """Whether there is any name."""
        return self._writer.has_names()
