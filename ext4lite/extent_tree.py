"""Changing an extent tree in place: insert, merge, split, remove, grow and collapse.

A node is the 60 bytes of ``i_block`` or a block: a header, then entries of 12 bytes sorted by file block (source:
Documentation/filesystems/ext4/ifork.rst). Nodes are changed as bytes, since a full leaf has 340 entries and decoding
them all for each insertion would cost more than everything else. An index entry's key always is the first file block
below it, as e2fsck wants.

Nothing here needs to undo anything: an operation that fails is taken back as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING

from ext4lite.alloc import Run
from ext4lite.checksum import crc32c, inode_seed
from ext4lite.errors import CorruptImage
from ext4lite.extents import ENTRY, HEADER, INDEX, ROOT_MAX, Extent, entries_per_block
from ext4lite.inode import InodeRecord
from ext4lite.layout.constants import EXTENT_MAGIC, MAX_EXTENT_DEPTH, MAX_EXTENT_LEN

if TYPE_CHECKING:
    from ext4lite.writable import WritableBase

FILE_END = 0xFFFFFFFF
"""Number of blocks a file can have: the last block number is never used."""
_KEY = Struct("<I")
_SIZE = ENTRY.size


@dataclass(slots=True)
class _Step:
    """A node on the way to a leaf. ``index`` is the entry taken (in a leaf: the last one not after, or -1)."""

    data: bytearray
    number: int
    """Block number, 0 for the root."""
    index: int


def empty_root() -> bytes:
    """The 60 bytes of ``i_block`` of a file without blocks."""
    return HEADER.pack(EXTENT_MAGIC, 0, ROOT_MAX, 0, 0) + bytes(60 - HEADER.size)


def _count(data: bytearray) -> int:
    return data[2] | data[3] << 8


def _room(data: bytearray) -> int:
    return data[4] | data[5] << 8


def _depth(data: bytearray) -> int:
    return data[6] | data[7] << 8


def _set_count(data: bytearray, count: int) -> None:
    data[2:4] = count.to_bytes(2, "little")


def _key(data: bytearray, index: int) -> int:
    return int(_KEY.unpack_from(data, HEADER.size + _SIZE * index)[0])


def _child_of(data: bytearray, index: int) -> int:
    _, low, high, _ = INDEX.unpack_from(data, HEADER.size + _SIZE * index)
    return int(low | high << 32)


def _get(data: bytearray, index: int) -> Extent:
    logical, length, high, low = ENTRY.unpack_from(data, HEADER.size + _SIZE * index)
    unwritten = length > MAX_EXTENT_LEN
    return Extent(logical, low | high << 32, length - MAX_EXTENT_LEN if unwritten else length, unwritten)


def _pack(e: Extent) -> bytes:
    return ENTRY.pack(
        e.logical, e.count + (MAX_EXTENT_LEN if e.unwritten else 0), e.physical >> 32, e.physical & 0xFFFFFFFF
    )


def _find(data: bytearray, logical: int) -> int:
    """Return the last entry whose key is at most ``logical``, or -1."""
    low, high = 0, _count(data)
    while low < high:
        middle = (low + high) // 2
        if _KEY.unpack_from(data, HEADER.size + _SIZE * middle)[0] > logical:
            high = middle
        else:
            low = middle + 1
    return low - 1


def _insert_raw(data: bytearray, index: int, entry: bytes) -> None:
    count = _count(data)
    at, end = HEADER.size + _SIZE * index, HEADER.size + _SIZE * count
    data[at + _SIZE : end + _SIZE] = data[at:end]
    data[at : at + _SIZE] = entry
    _set_count(data, count + 1)


def _delete_raw(data: bytearray, index: int, number: int = 1) -> None:
    count = _count(data)
    at, end = HEADER.size + _SIZE * index, HEADER.size + _SIZE * count
    data[at : end - number * _SIZE] = data[at + number * _SIZE : end]
    data[end - number * _SIZE : end] = bytes(number * _SIZE)
    _set_count(data, count - number)


def _mergeable(left: Extent, right: Extent) -> bool:
    most = MAX_EXTENT_LEN - left.unwritten
    return (
        left.unwritten == right.unwritten
        and left.logical + left.count == right.logical
        and left.physical + left.count == right.physical
        and left.count + right.count <= most
    )


class ExtentTree:
    """The tree of one inode, for changing. Keeps ``record.fields.i_block`` up to date; the caller stores the inode."""

    def __init__(self, volume: WritableBase, record: InodeRecord) -> None:
        self._volume = volume
        self.record = record
        self._root = bytearray(record.fields.i_block)
        sb = volume.super
        self._seed = inode_seed(sb.seed, record.ino, record.fields.i_generation) if sb.metadata_csum else None
        self._per = entries_per_block(volume.block_size)
        self._where = f"{volume.where}: inode {record.ino}"
        self._check(self._root, ROOT_MAX, None)

    # -- nodes ------------------------------------------------------------------------------------------------------

    def _check(self, data: bytearray, most: int, depth: int | None) -> None:
        magic, count, room, found, _ = HEADER.unpack_from(data)
        if magic != EXTENT_MAGIC or count > room or room > most or found > MAX_EXTENT_DEPTH:
            raise CorruptImage("extent header is wrong", where=self._where)
        if depth is not None and (found != depth or not count):
            raise CorruptImage(f"extent header says depth {found}, {count} entries", where=self._where)

    def _load(self, number: int, depth: int) -> bytearray:
        cache = self._volume.cache
        data = cache.get(number, self._where)
        if number not in cache.dirty:
            self._check(data, self._per, depth)
            if self._seed is not None:
                at = HEADER.size + _room(data) * _SIZE
                if crc32c(self._seed, bytes(data[:at])) != int.from_bytes(data[at : at + 4], "little"):
                    raise CorruptImage(f"extent block {number}: checksum is wrong", where=self._where)
        return data

    def _writable(self, step: _Step) -> bytearray:
        if step.number:
            step.data = self._volume.cache.change(step.number)
        return step.data

    def _seal(self, step: _Step) -> None:
        """Store a changed node: its checksum, or the root in the inode."""
        if not step.number:
            self.record.fields.i_block = bytes(self._root)
        elif self._seed is not None:
            at = HEADER.size + _room(step.data) * _SIZE
            step.data[at : at + 4] = crc32c(self._seed, bytes(step.data[:at])).to_bytes(4, "little")

    def _new_node(self, depth: int) -> _Step:
        number = self._volume.new_metadata_block(self.record)
        data = self._volume.cache.create(number)
        HEADER.pack_into(data, 0, EXTENT_MAGIC, 0, self._per, depth, 0)
        return _Step(data, number, 0)

    def _path(self, logical: int) -> list[_Step]:
        """Go down to the leaf where ``logical`` is or would be."""
        data, number = self._root, 0
        path = []
        depth = _depth(data)
        while True:
            index = _find(data, logical)
            path.append(_Step(data, number, index if not depth else max(index, 0)))
            if not depth:
                return path
            depth -= 1
            number = _child_of(data, path[-1].index)
            data = self._load(number, depth)

    # -- looking ----------------------------------------------------------------------------------------------------

    def find(self, logical: int) -> Extent | None:
        """Return the extent that holds file block ``logical``, or None for a hole."""
        if not self._root[2]:
            return None
        leaf = self._path(logical)[-1]
        if leaf.index < 0:
            return None
        found = _get(leaf.data, leaf.index)
        return found if logical < found.logical + found.count else None

    def next_after(self, logical: int) -> int:
        """Return the first mapped file block behind ``logical``, which lies in a hole, or FILE_END."""
        if not self._root[2]:
            return FILE_END
        path = self._path(logical)
        for step in reversed(path):
            if step.index + 1 < _count(step.data):
                return _key(step.data, step.index + 1)
        return FILE_END

    def before(self, logical: int) -> Extent | None:
        """Return the last extent that begins before ``logical`` in the same leaf: a good neighbour."""
        if not self._root[2]:
            return None
        leaf = self._path(logical)[-1]
        return _get(leaf.data, leaf.index) if leaf.index >= 0 else None

    # -- inserting --------------------------------------------------------------------------------------------------

    def insert(self, extent: Extent) -> None:
        """Map a hole. Merges with its neighbours; longer than an entry can say is cut up."""
        most = MAX_EXTENT_LEN - extent.unwritten
        logical, physical, left = extent.logical, extent.physical, extent.count
        while left:
            count = min(left, most)
            self._insert(Extent(logical, physical, count, extent.unwritten))
            logical, physical, left = logical + count, physical + count, left - count

    def _insert(self, e: Extent) -> None:
        path = self._path(e.logical)
        leaf = path[-1]
        count, at = _count(leaf.data), leaf.index
        left = _get(leaf.data, at) if at >= 0 else None
        right = _get(leaf.data, at + 1) if at + 1 < count else None
        if left is not None and e.logical < left.logical + left.count:
            raise CorruptImage(f"file block {e.logical} is mapped already", where=self._where)
        if left is not None and _mergeable(left, e):
            left.count += e.count
            self._writable(leaf)
            closed = right is not None and _mergeable(left, right)
            if right is not None and closed:
                left.count += right.count
                _delete_raw(leaf.data, at + 1)
            self._put(leaf, at, left)
            if closed:
                self._join(e.logical)
            return
        if right is not None and _mergeable(e, right):
            self._writable(leaf)
            self._put(leaf, at + 1, Extent(e.logical, e.physical, e.count + right.count, e.unwritten))
            if at + 1 == 0:
                self._correct_keys(path, len(path) - 1)
            return
        self._add(path, len(path) - 1, at + 1, _pack(e))

    def _put(self, leaf: _Step, index: int, e: Extent) -> None:
        at = HEADER.size + _SIZE * index
        leaf.data[at : at + _SIZE] = _pack(e)
        self._seal(leaf)

    def _correct_keys(self, path: list[_Step], level: int) -> None:
        """The first key of the node at ``level`` changed: tell the index above, as far as it is the first there."""
        while level > 0:
            above = path[level - 1]
            key = _key(path[level].data, 0)
            if _key(above.data, above.index) == key:
                return
            _KEY.pack_into(self._writable(above), HEADER.size + _SIZE * above.index, key)
            self._seal(above)
            if above.index:
                return
            level -= 1

    def _add(self, path: list[_Step], level: int, index: int, entry: bytes) -> None:
        """Insert an entry at ``index`` of the node at ``level``, splitting what is full."""
        node = path[level]
        self._writable(node)
        count = _count(node.data)
        if count < _room(node.data):
            _insert_raw(node.data, index, entry)
            self._seal(node)
            if index == 0:
                self._correct_keys(path, level)
            return
        if level == 0:
            self._deepen(path)
            self._add(path, 1, index, entry)
            return
        fresh = self._new_node(_depth(node.data))
        # Files grow at their end, some towards their beginning: then the full node stays full.
        half = count if index == count else 0 if index == 0 else count // 2
        at, end = HEADER.size + _SIZE * half, HEADER.size + _SIZE * count
        fresh.data[HEADER.size : HEADER.size + end - at] = node.data[at:end]
        _set_count(fresh.data, count - half)
        node.data[at:end] = bytes(end - at)
        _set_count(node.data, half)
        if index > half or half == count:  # an entry at the border goes to the left one
            _insert_raw(fresh.data, index - half, entry)
        else:
            _insert_raw(node.data, index, entry)
        self._seal(fresh)
        self._seal(node)
        if index == 0:
            self._correct_keys(path, level)
        first = _key(fresh.data, 0)
        self._add(
            path,
            level - 1,
            path[level - 1].index + 1,
            INDEX.pack(first, fresh.number & 0xFFFFFFFF, fresh.number >> 32, 0),
        )

    def _deepen(self, path: list[_Step]) -> None:
        """Move the root's entries to a block of their own below it."""
        root = path[0]
        depth = _depth(root.data)
        if depth >= MAX_EXTENT_DEPTH:
            raise CorruptImage("extent tree is too deep", where=self._where)
        below = self._new_node(depth)
        size = _SIZE * _count(root.data)
        below.data[HEADER.size : HEADER.size + size] = root.data[HEADER.size : HEADER.size + size]
        _set_count(below.data, _count(root.data))
        self._seal(below)
        key = _key(below.data, 0)
        HEADER.pack_into(root.data, 0, EXTENT_MAGIC, 1, ROOT_MAX, depth + 1, 0)
        root.data[HEADER.size :] = INDEX.pack(key, below.number & 0xFFFFFFFF, below.number >> 32, 0) + bytes(
            len(root.data) - HEADER.size - _SIZE
        )
        self._seal(root)
        below.index = root.index
        root.index = 0
        path.insert(1, below)

    # -- removing ---------------------------------------------------------------------------------------------------

    def remove(self, start: int, end: int) -> list[Run]:
        """Unmap file blocks ``[start, end)``; return the runs that were there, which the caller frees.

        Tree blocks that become empty are freed here.
        """
        freed: list[Run] = []
        if start >= end:
            return freed
        path = self._path(start)
        leaf = path[-1]
        if leaf.index >= 0:
            e = _get(leaf.data, leaf.index)
            stop = e.logical + e.count
            if e.logical < start < stop:
                self._writable(leaf)
                self._put(leaf, leaf.index, Extent(e.logical, e.physical, start - e.logical, e.unwritten))
                freed.append(Run(e.physical + start - e.logical, min(stop, end) - start))
                if stop > end:
                    rest = Extent(end, e.physical + end - e.logical, stop - end, e.unwritten)
                    self._insert(rest)
                    return freed
        if end < FILE_END:
            path = self._path(end)
            leaf = path[-1]
            if leaf.index >= 0:
                e = _get(leaf.data, leaf.index)
                stop = e.logical + e.count
                if start <= e.logical < end < stop:
                    self._writable(leaf)
                    cut = end - e.logical
                    self._put(leaf, leaf.index, Extent(end, e.physical + cut, e.count - cut, e.unwritten))
                    freed.append(Run(e.physical, cut))
                    if leaf.index == 0:
                        self._correct_keys(path, len(path) - 1)
        root = _Step(self._root, 0, 0)
        self._prune(root, start, end, freed)
        if not _count(self._root):
            self._root[:] = empty_root()
        self._seal(root)
        self._join(start)
        return freed

    def _prune(self, node: _Step, start: int, end: int, freed: list[Run]) -> None:
        """Remove the whole extents in ``[start, end)`` below a node."""
        depth = _depth(node.data)
        low = max(0, _find(node.data, start))
        if not depth:
            if low < _count(node.data) and _key(node.data, low) < start:
                low += 1
            high = _find(node.data, end - 1) + 1
            if high > low:
                self._writable(node)
                for index in range(low, high):
                    e = _get(node.data, index)
                    freed.append(Run(e.physical, e.count))
                _delete_raw(node.data, low, high - low)
                self._seal(node)
            return
        index = low
        while index < _count(node.data) and _key(node.data, index) < end:
            number = _child_of(node.data, index)
            child = _Step(self._load(number, depth - 1), number, 0)
            self._prune(child, start, end, freed)
            if not _count(child.data):
                self._volume.free_metadata_block(self.record, number)
                _delete_raw(self._writable(node), index)
                self._seal(node)
                continue
            key = _key(child.data, 0)
            if key != _key(node.data, index):
                _KEY.pack_into(self._writable(node), HEADER.size + _SIZE * index, key)
                self._seal(node)
            index += 1

    def _join(self, logical: int) -> None:
        """After a removal or a merge near ``logical``: put nodes together with neighbours that have room for them.

        So a tree shrinks again when its holes are filled or its ends are cut. Only nodes that are a quarter full or
        less, and only into half a node, lest the next insertion splits it.
        """
        while _depth(self._root):
            path = self._path(logical)
            if not any(self._join_at(path, level) for level in range(len(path) - 1, 0, -1)):
                break
        self._collapse()
        self._seal(_Step(self._root, 0, 0))

    def _join_at(self, path: list[_Step], level: int) -> bool:
        """Join the node at ``level`` with a neighbour below the same parent, if both are small; tell whether."""
        node, above = path[level], path[level - 1]
        if _count(node.data) > _room(node.data) // 4:
            return False
        depth = _depth(node.data)
        for index in (above.index, above.index - 1):  # the left one of two
            if index < 0 or index + 1 >= _count(above.data):
                continue
            numbers = _child_of(above.data, index), _child_of(above.data, index + 1)
            left, right = (_Step(self._load(number, depth), number, 0) for number in numbers)
            if _count(left.data) + _count(right.data) <= _room(left.data) // 2:
                self._append_node(left, right)
                self._volume.free_metadata_block(self.record, right.number)
                _delete_raw(self._writable(above), index + 1)
                self._seal(above)
                return True
        return False

    def _append_node(self, left: _Step, right: _Step) -> None:
        """Move all entries of ``right`` behind those of ``left``; extents that touch become one."""
        self._writable(left)
        count, more, source = _count(left.data), _count(right.data), bytearray(right.data)
        if not _depth(left.data):
            last, first = _get(left.data, count - 1), _get(source, 0)
            if _mergeable(last, first):
                last.count += first.count
                at = HEADER.size + _SIZE * (count - 1)
                left.data[at : at + _SIZE] = _pack(last)
                _delete_raw(source, 0)
                more -= 1
        at = HEADER.size + _SIZE * count
        left.data[at : at + _SIZE * more] = source[HEADER.size : HEADER.size + _SIZE * more]
        _set_count(left.data, count + more)
        self._seal(left)

    def _collapse(self) -> None:
        """Take the root's only child into the root while it fits."""
        while _depth(self._root) and _count(self._root) == 1:
            number = _child_of(self._root, 0)
            depth = _depth(self._root) - 1
            child = self._load(number, depth)
            count = _count(child)
            if count > ROOT_MAX:
                return
            body = bytes(child[HEADER.size : HEADER.size + count * _SIZE])
            self._root[:] = HEADER.pack(EXTENT_MAGIC, count, ROOT_MAX, depth, 0) + body + bytes(48 - len(body))
            self._volume.free_metadata_block(self.record, number)

    # -- moving -----------------------------------------------------------------------------------------------------

    def move_nodes(self, away: Callable[[int], bool]) -> int:
        """Give each tree block whose number ``away`` is true for another place; return how many. VolumeFull."""
        return self._move_below(_Step(self._root, 0, 0), away)

    def _move_below(self, node: _Step, away: Callable[[int], bool]) -> int:
        depth, moved, changed = _depth(node.data), 0, False
        for index in range(_count(node.data) if depth else 0):
            number = _child_of(node.data, index)
            child = _Step(self._load(number, depth - 1), number, 0)
            if away(number):
                fresh = self._volume.new_metadata_block(self.record)
                data = self._volume.cache.create(fresh)
                data[:] = child.data
                self._volume.free_metadata_block(self.record, number)
                child = _Step(data, fresh, 0)
                entry = INDEX.pack(_key(node.data, index), fresh & 0xFFFFFFFF, fresh >> 32, 0)
                at = HEADER.size + _SIZE * index
                self._writable(node)[at : at + _SIZE] = entry
                moved, changed = moved + 1, True
            moved += self._move_below(child, away)
        if changed:
            self._seal(node)
        return moved
