"""Changing a block map of ext2 and ext3 in place; the same calls as :class:`ext4lite.extent_tree.ExtentTree`.

Blocks 0 to 11 are in ``i_block``, then come blocks of pointers one, two and three levels deep (source:
Documentation/filesystems/ext4/ifork.rst, "Direct/Indirect Block Addressing").
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import TYPE_CHECKING

from ext4lite.alloc import Run
from ext4lite.errors import CorruptImage, FileTooLarge
from ext4lite.extents import Extent
from ext4lite.indirect import DIRECT
from ext4lite.inode import InodeRecord

if TYPE_CHECKING:
    from ext4lite.writable import WritableBase

_POINTER = Struct("<I")


class BlockMap:
    """The block map of one inode, for changing."""

    def __init__(self, volume: WritableBase, record: InodeRecord) -> None:
        self._volume = volume
        self.record = record
        self._root = bytearray(record.fields.i_block)
        self._per = volume.block_size // 4
        self._where = f"{volume.where}: inode {record.ino}"
        self.limit = DIRECT + self._per + self._per**2 + self._per**3

    def _position(self, logical: int) -> tuple[int, list[int]]:
        """Return (slot in the root, indices in the pointer blocks below it)."""
        if logical < DIRECT:
            return logical, []
        logical -= DIRECT
        for level in (1, 2, 3):
            if logical < self._per**level:
                steps = [logical // self._per**power % self._per for power in range(level - 1, -1, -1)]
                return DIRECT + level - 1, steps
            logical -= self._per**level
        raise FileTooLarge("the file's block map cannot reach that far", where=self._where)

    def _get(self, data: bytearray, index: int) -> int:
        number = int(_POINTER.unpack_from(data, 4 * index)[0])
        if number and not self._volume.first_data_block < number < self._volume.blocks:
            raise CorruptImage(f"block map points to block {number}, outside the volume", where=self._where)
        return number

    def _one(self, logical: int) -> int:
        slot, steps = self._position(logical)
        number = self._get(self._root, slot)
        for step in steps:
            if not number:
                return 0
            number = self._get(self._volume.cache.get(number, self._where), step)
        return number

    def find(self, logical: int) -> Extent | None:
        """Return the run of mapped blocks from ``logical`` on, as far as one look shows, or None for a hole."""
        if logical >= self.limit:
            return None
        first = self._one(logical)
        if not first:
            return None
        count = 1
        end = min(self.limit, logical + 1024)
        while logical + count < end and self._one(logical + count) == first + count:
            count += 1
        return Extent(logical, first, count)

    def next_after(self, logical: int) -> int:
        """Return the first block behind ``logical`` (a hole) that may be mapped."""
        if logical < DIRECT:
            return logical + 1
        slot, steps = self._position(logical)
        number = self._get(self._root, slot)
        span = self._per ** len(steps)
        base = DIRECT + sum(self._per**n for n in range(1, len(steps)))
        for step in steps:
            if not number:
                return int(base + ((logical - base) // span + 1) * span)
            span //= self._per
            number = self._get(self._volume.cache.get(number, self._where), step)
        return logical + 1

    def before(self, logical: int) -> Extent | None:
        """Return the block just before ``logical`` if it is mapped."""
        number = self._one(logical - 1) if 0 < logical <= self.limit else 0
        return Extent(logical - 1, number, 1) if number else None

    def insert(self, extent: Extent) -> None:
        """Map a hole."""
        for k in range(extent.count):
            self._set(extent.logical + k, extent.physical + k)

    def _set(self, logical: int, physical: int) -> None:
        cache = self._volume.cache
        slot, steps = self._position(logical)
        data, index, above = self._root, slot, 0
        for step in steps:
            number = self._get(data, index)
            if not number:
                number = self._volume.new_metadata_block(self.record)
                cache.create(number)
                if above:
                    data = cache.change(above)
                _POINTER.pack_into(data, 4 * index, number)
            data, index, above = cache.get(number, self._where), step, number
        if self._get(data, index):
            raise CorruptImage(f"file block {logical} is mapped already", where=self._where)
        if above:
            data = cache.change(above)
        _POINTER.pack_into(data, 4 * index, physical)
        self.record.fields.i_block = bytes(self._root)

    def remove(self, start: int, end: int) -> list[Run]:
        """Unmap file blocks ``[start, end)``; return the runs that were there; empty pointer blocks are freed."""
        freed: list[Run] = []
        for slot in range(DIRECT):
            if start <= slot < end:
                self._take(self._root, slot, freed)
        base = DIRECT
        for level in (1, 2, 3):
            span = self._per**level
            if start < base + span and base < end and self._get(self._root, DIRECT + level - 1):
                number = self._get(self._root, DIRECT + level - 1)
                if self._prune(number, level, base, (start, end), freed):
                    _POINTER.pack_into(self._root, 4 * (DIRECT + level - 1), 0)
            base += span
        self.record.fields.i_block = bytes(self._root)
        return freed

    def _take(self, data: bytearray, index: int, freed: list[Run]) -> None:
        number = self._get(data, index)
        if not number:
            return
        _POINTER.pack_into(data, 4 * index, 0)
        if freed and freed[-1].start + freed[-1].count == number:
            freed[-1].count += 1
        else:
            freed.append(Run(number, 1))

    def _prune(self, number: int, level: int, base: int, span: tuple[int, int], freed: list[Run]) -> bool:
        """Remove what is in ``span`` below a pointer block; free it and return True when nothing is left in it."""
        cache = self._volume.cache
        start, end = span
        step = self._per ** (level - 1)
        low = max(0, (start - base) // step)
        high = min(self._per, -(-(end - base) // step))
        data = cache.change(number, self._where)
        for index in range(low, high):
            if level == 1:
                self._take(data, index, freed)
            else:
                below = self._get(data, index)
                if below and self._prune(below, level - 1, base + index * step, span, freed):
                    _POINTER.pack_into(data, 4 * index, 0)
        if any(data):
            return False
        self._volume.free_metadata_block(self.record, number)
        return True

    def move_nodes(self, away: Callable[[int], bool]) -> int:
        """Give each pointer block whose number ``away`` is true for another place; return how many. VolumeFull."""
        moved = 0
        for level in (1, 2, 3):
            moved += self._move_node(self._root, 0, DIRECT + level - 1, level, away)
        self.record.fields.i_block = bytes(self._root)
        return moved

    def _move_node(self, above: bytearray, holder: int, index: int, level: int, away: Callable[[int], bool]) -> int:
        """Move the pointer block at ``index`` of ``above`` (block ``holder``, 0 for the inode) and those below it."""
        cache, moved = self._volume.cache, 0
        number = self._get(above, index)
        if not number:
            return 0
        if away(number):
            fresh = self._volume.new_metadata_block(self.record)
            data = cache.create(fresh)
            data[:] = cache.get(number, self._where)
            self._volume.free_metadata_block(self.record, number)
            if holder:
                above = cache.change(holder)
            _POINTER.pack_into(above, 4 * index, fresh)
            number, moved = fresh, 1
        for below in range(self._per if level > 1 else 0):
            moved += self._move_node(cache.get(number, self._where), number, below, level - 1, away)
        return moved

    def blocks_needed(self) -> int:
        """Metadata blocks that one more insertion may change or take."""
        return 4
