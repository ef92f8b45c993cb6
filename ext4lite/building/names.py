"""The names of a volume that is being built, all in one table: a dozen bytes a name beside the name itself.

Each name is an entry in one long piece of memory; the entries of a directory are a ring in the order in which they were
made, and a hash table with open addressing finds one by directory and name. Python's own hash decides only where in
the table an entry lies, never an order that shows in the image (and it is keyed, so nobody can choose names that
collide).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from struct import Struct

_HEAD = Struct("<II")  # next entry of the ring, inode number (0: removed)
_KEY = Struct("<IB")  # directory, length of the name
_U32 = Struct("<I")
_KEY_AT = _HEAD.size
_NAME_AT = _HEAD.size + _KEY.size
_PADDING = tuple(bytes(-(_NAME_AT + length) & 3) for length in range(4))
_SMALLEST = 1 << 10
_MAX_NAME = 255


class Names:
    """A map from (directory, name) to inode numbers that keeps the order of insertion within each directory.

    An entry is known by its number, that of its first word in the table; 0 is none.
    """

    def __init__(self) -> None:
        self._entries = bytearray(4)
        self._last = array("I")  # by inode number of a directory: its last entry, whose next one is the first
        self._slots = array("I", bytes(4 * _SMALLEST))
        self._mask = _SMALLEST - 1
        self._used = 0  # slots, those of removed entries among them

    def find(self, directory: int, name: bytes) -> int:
        """Return the inode number that a name has, 0 if there is no such name."""
        if len(name) > _MAX_NAME:
            return 0
        _, at = self._probe(_KEY.pack(directory, len(name)) + name)
        return self._ino(at) if at else 0

    def add(self, directory: int, name: bytes, ino: int) -> bool:
        """Append a name of 1 to 255 bytes to a directory; False if it has it already."""
        length = len(name)
        key = _KEY.pack(directory, length) + name
        entries, last = self._entries, self._last
        slot, old = self._probe(key)
        if old:
            if self._ino(old):
                return False
        else:
            self._used += 1
        new = len(entries) >> 2
        if directory >= len(last):
            last.frombytes(bytes(4 * (directory + 1 - len(last))))
        before = last[directory]
        first = new
        if before:
            (first,) = _U32.unpack_from(entries, before << 2)
            _U32.pack_into(entries, before << 2, new)
        entries += _HEAD.pack(first, ino) + key + _PADDING[length & 3]
        last[directory] = new
        self._slots[slot] = new
        if self._used * 3 > self._mask * 2:
            self._rebuild()
        return True

    def remove(self, directory: int, name: bytes) -> None:
        """Remove a name that is there."""
        _, at = self._probe(_KEY.pack(directory, len(name)) + name)
        _U32.pack_into(self._entries, (at << 2) + 4, 0)

    def forget(self, directory: int) -> None:
        """Let go of a directory all whose names are removed: its number is not used again."""
        if directory < len(self._last):
            self._last[directory] = 0

    def children(self, directory: int) -> Iterator[tuple[int, int]]:
        """Yield (entry, inode number) of a directory in order, those that it had at the beginning and still has.

        Names may come and go meanwhile.
        """
        last = self._last[directory] if directory < len(self._last) else 0
        entries, unpack = self._entries, _HEAD.unpack_from
        at = unpack(entries, last << 2)[0] if last else 0
        while at:
            after, ino = unpack(entries, at << 2)
            if ino:
                yield at, ino
            at = 0 if at == last else after

    def name(self, entry: int) -> bytes:
        """Return the name of an entry."""
        entries, at = self._entries, (entry << 2) + _NAME_AT
        return bytes(entries[at : at + entries[at - 1]])

    def entry(self, entry: int) -> tuple[bytes, int]:
        """Return (name, inode number) of an entry."""
        return self.name(entry), self._ino(entry)

    def _ino(self, entry: int) -> int:
        ino: int = _U32.unpack_from(self._entries, (entry << 2) + 4)[0]
        return ino

    def _probe(self, key: bytes) -> tuple[int, int]:
        """Return (slot, entry) of a key: its entry, perhaps a removed one, or a free slot and 0."""
        slots, entries, mask = self._slots, self._entries, self._mask
        slot = hash(key) & mask
        while at := slots[slot]:
            if entries.startswith(key, (at << 2) + _KEY_AT):
                return slot, at
            slot = (slot + 1) & mask
        return slot, 0

    def _rebuild(self) -> None:
        """Make the hash table anew without the removed entries, at least twice as large as it needs to be."""
        entries = self._entries
        count = sum(1 for at in self._slots if at and self._ino(at))
        size = _SMALLEST
        while size < count * 3:
            size *= 2
        old, mask = self._slots, size - 1
        slots = array("I", bytes(4 * size))
        for at in old:
            if at and self._ino(at):
                start = (at << 2) + _KEY_AT
                slot = hash(bytes(entries[start : start + _KEY.size + entries[start + 4]])) & mask
                while slots[slot]:
                    slot = (slot + 1) & mask
                slots[slot] = at
        self._slots, self._mask, self._used = slots, mask, count
