"""Changing a block map of ext2 and ext3 in place; the same calls as :class:`ext4lite.extent_tree.ExtentTree`.

Blocks 0 to 11 are in ``i_block``, then come blocks of pointers one, two and three levels deep (source:
Documentation/filesystems/ext4/ifork.rst, "Direct/Indirect Block Addressing").
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct, pack, unpack_from
from typing import TYPE_CHECKING

from ext4lite.alloc import Run
from ext4lite.errors import CorruptImage, FileTooLarge
from ext4lite.extent_tree import FILE_END
from ext4lite.extents import Extent
from ext4lite.indirect import DIRECT
from ext4lite.inode import InodeRecord

if TYPE_CHECKING:
    from ext4lite.writable import WritableBase

_POINTER = Struct("<I")


def _zero_pointers(data: bytearray, index: int) -> int:
    """Return how many pointers from ``index`` on are zero."""
    left = bytes(data[4 * index :])
    return (len(left) - len(left.lstrip(b"\0"))) // 4


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

    def _leaf(self, logical: int) -> tuple[bytearray | None, int, int]:
        """Return (pointers, index, room) for a file block: where its pointer is, and how many follow from it on there.

        Without pointers, the next ``room`` blocks all are a hole.
        """
        slot, steps = self._position(logical)
        if not steps:
            return self._root, slot, DIRECT - slot
        span = self._per ** len(steps)
        inside = logical - DIRECT - sum(self._per**n for n in range(1, len(steps)))
        holes, number = 1, self._get(self._root, slot)
        for depth, step in enumerate(steps):
            if not number:
                return None, 0, holes * span - inside
            data = self._volume.cache.get(number, self._where)
            if depth == len(steps) - 1:
                return data, step, self._per - step
            number = self._get(data, step)
            if not number:
                holes = _zero_pointers(data, step)
            span //= self._per
            inside %= span
        raise AssertionError("a block map without levels")  # pragma: no cover

    def find(self, logical: int) -> Extent | None:
        """Return the run of mapped blocks from ``logical`` on, as far as one look shows, or None for a hole."""
        if logical >= self.limit:
            return None
        data, index, room = self._leaf(logical)
        first = self._get(data, index) if data is not None else 0
        if data is None or not first:
            return None
        count = 1
        for number in unpack_from(f"<{room - 1}I", data, 4 * (index + 1)):
            if number != first + count:
                break
            count += 1
        if first + count > self._volume.blocks:
            raise CorruptImage(f"block map points to block {first + count - 1}, outside the volume", where=self._where)
        return Extent(logical, first, count)

    def next_after(self, logical: int) -> int:
        """Return the next mapped block behind ``logical``, which lies in a hole, or FILE_END."""
        at = logical
        while at < self.limit:
            data, index, room = self._leaf(at)
            if data is not None:
                holes = _zero_pointers(data, index)
                if holes < room:
                    return at + holes
            at += room
        return FILE_END

    def before(self, logical: int) -> Extent | None:
        """Return the block just before ``logical`` if it is mapped."""
        if not 0 < logical <= self.limit:
            return None
        data, index, _ = self._leaf(logical - 1)
        number = self._get(data, index) if data is not None else 0
        return Extent(logical - 1, number, 1) if number else None

    def insert(self, extent: Extent) -> None:
        """Map a hole."""
        logical, physical, left = extent.logical, extent.physical, extent.count
        while left:
            data, index, room = self._leaf_for_change(logical)
            count = min(left, room)
            low, high = 4 * index, 4 * (index + count)
            if any(data[low:high]):
                raise CorruptImage(f"one of file blocks {logical}+{count} is mapped already", where=self._where)
            data[low:high] = pack(f"<{count}I", *range(physical, physical + count))
            logical, physical, left = logical + count, physical + count, left - count
        self.record.fields.i_block = bytes(self._root)

    def _leaf_for_change(self, logical: int) -> tuple[bytearray, int, int]:
        """As :meth:`_leaf`, for changing; pointer blocks that are missing are made."""
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
        if above:
            data = cache.change(above)
        return data, index, self._per - index if steps else DIRECT - index

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
