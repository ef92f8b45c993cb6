"""The blocks of a new volume's directories, from the table of names."""

from __future__ import annotations

from collections.abc import Iterable

from ext4lite.building.inodes import Inodes
from ext4lite.building.names import Names
from ext4lite.checksum import inode_seed
from ext4lite.directory import DirEntry, HashedDirectory, entry_size, linear_size, pack_leaf, pack_linear
from ext4lite.geometry import BLOCK
from ext4lite.layout import constants as c

_LOST_FOUND_BLOCKS = 4


class DirectoryWriter:
    """Makes the blocks of directories. ``seed`` is that of the volume's checksums, ``hash_seed`` its directories'."""

    def __init__(self, inodes: Inodes, names: Names, *, seed: int, hash_seed: tuple[int, ...]) -> None:
        self._inodes = inodes
        self._names = names
        self._seed = seed
        self._hash_seed = hash_seed

    def blocks(self, ino: int) -> tuple[int, Iterable[bytes], bool]:
        """Return (number of blocks, the blocks, whether they are indexed) of a directory.

        One linear block if the names fit, else an index and full leaves. Unsupported beyond 20 million names.
        """
        names, seed = self._names, inode_seed(self._seed, ino, 0)
        parent = self._inodes.body(ino)[0]
        linear = self._linear(ino)
        if linear is not None:
            blocks = [pack_linear(ino, parent, linear, BLOCK, seed)]
            if ino == c.FIRST_INO and not linear:
                blocks += [pack_leaf([], BLOCK, seed)] * (_LOST_FOUND_BLOCKS - 1)
            return len(blocks), blocks, False
        hashed = HashedDirectory(
            ino,
            parent,
            ((entry, names.name(entry)) for entry, _ in names.children(ino)),
            self._entry,
            block_size=BLOCK,
            seed=seed,
            hash_seed=self._hash_seed,
            unsigned=False,
        )
        return hashed.count, hashed.blocks(), True

    def _linear(self, ino: int) -> list[DirEntry] | None:
        """Return what is in a directory if that fits into one block."""
        name, kind, types = self._names.name, self._inodes.type, c.FT_BY_MODE
        entries = []
        room = BLOCK - linear_size(())
        for entry, child in self._names.children(ino):
            found = name(entry)
            room -= entry_size(len(found))
            if room < 0:
                return None
            entries.append((found, child, types[kind(child)]))
        return entries

    def _entry(self, entry: int) -> DirEntry:
        name, ino = self._names.entry(entry)
        return name, ino, c.FT_BY_MODE[self._inodes.type(ino)]
