"""An inode's blocks: how many it needs, where they come to lie, and the extent tree or block map that says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from struct import Struct, pack_into
from typing import TYPE_CHECKING

from ext4lite.errors import CorruptImage
from ext4lite.extents import ENTRY, HEADER, ROOT_MAX, Extent, build_tree, tree_blocks_needed
from ext4lite.indirect import DIRECT
from ext4lite.inode import InodeRecord
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import XattrHeader
from ext4lite.rebuild.target import Space

if TYPE_CHECKING:
    from ext4lite.rebuild.survey import Source

_POINTERS = Struct("<15I")
_U32 = Struct("<I")
_MAX_UNWRITTEN = c.MAX_EXTENT_LEN - 1

Copy = Callable[[int, int, int], None]
"""Called with (first old block, first new block, count)."""


def clusters_of(runs: list[Extent], ratio: int) -> int:
    """Return how many clusters of ``ratio`` blocks the blocks of ``runs`` take, each file cluster once."""
    if ratio == 1:
        return sum(run.count for run in runs)
    total, last = 0, -1
    for run in runs:
        first, end = run.logical // ratio, (run.logical + run.count - 1) // ratio
        total += end - max(first, last + 1) + 1
        last = end
    return total


def is_fragmented(runs: list[Extent]) -> bool:
    """Tell whether blocks do not all lie one behind the other."""
    return len(runs) > 1 and any(b.physical != a.physical + a.count for a, b in pairwise(runs))


def joined(runs: list[Extent]) -> list[Extent]:
    """Return the extents that ``runs`` become when their blocks lie one behind the other."""
    out: list[Extent] = []
    physical = 0
    for run in runs:
        add(out, Extent(run.logical, physical, run.count, run.unwritten))
        physical += run.count
    return out


def add(extents: list[Extent], new: Extent) -> None:
    """Append an extent, or lengthen the last one by it."""
    if extents:
        last = extents[-1]
        end = last.logical + last.count
        if end == new.logical and last.physical + last.count == new.physical and last.unwritten == new.unwritten:
            last.count += new.count
            return
    extents.append(new)


def split(extents: list[Extent]) -> list[Extent]:
    """Cut extents to what an entry can say: 32768 blocks, or 32767 unwritten ones."""
    if all(e.count <= _MAX_UNWRITTEN for e in extents):
        return extents
    out = []
    for e in extents:
        most = _MAX_UNWRITTEN if e.unwritten else c.MAX_EXTENT_LEN
        for skip in range(0, e.count, most):
            out.append(Extent(e.logical + skip, e.physical + skip, min(most, e.count - skip), e.unwritten))
    return out


class Demand:
    """Adds up what inodes need."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._ratio = source.super.cluster_size // source.block_size
        self._shared: set[int] = set()
        self._limit = source.super.blocks // self._ratio
        self.clusters = 0
        self.data_bytes = 0
        self.extents = 0
        self.fragmented = 0

    def add(self, record: InodeRecord) -> None:
        """Count an inode's blocks, the map's own and its attribute block with them. CorruptImage."""
        source = self._source
        volume = source.volume
        runs, _ = volume.map(record)
        if runs:
            self.clusters += clusters_of(runs, self._ratio) + map_blocks(record, runs, source.block_size)
            self.data_bytes += sum(run.count for run in runs if not run.unwritten) * source.block_size
            self.extents += len(runs)
            self.fragmented += is_fragmented(runs)
        number = record.file_acl
        if number and number not in self._shared:
            where = f"{source.where}: inode {record.ino}, attribute block {number}"
            if XattrHeader.unpack(volume.block(number, where)).h_refcount > 1:
                self._shared.add(number)
            self.clusters += 1
        self._check()

    def add_run(self, count: int) -> None:
        """Count a plain file's blocks. CorruptImage."""
        self.clusters += count
        self.data_bytes += count * self._source.block_size
        self.extents += 1
        self._check()

    def _check(self) -> None:
        if self.clusters > self._limit:
            what = "inodes claim more blocks than the volume has"
            raise CorruptImage(what, where=self._source.where, hint="run e2fsck -fy on it")


def map_blocks(record: InodeRecord, runs: list[Extent], block_size: int) -> int:
    """Return how many blocks the map of these runs takes when they lie one behind the other."""
    if record.fields.i_flags & c.EXTENTS_FL:
        if len(runs) == 1 and runs[0].count <= _MAX_UNWRITTEN:
            return 0
        return tree_blocks_needed(len(split(joined(runs))), block_size)
    return sum(1 for _ in _pointer_blocks(runs, block_size // 4))


def place(runs: list[Extent], space: Space, ratio: int, copy: Copy) -> list[Extent]:
    """Give the blocks of ``runs`` new places, call ``copy`` for those that are written, return the new runs."""
    if ratio > 1:
        return _place_clusters(runs, space, ratio, copy)
    if len(runs) == 1:  # nearly always
        (run,) = runs
        pieces = space.take(run.count)
        if len(pieces) == 1:
            start = pieces[0][0]
            if not run.unwritten:
                copy(run.physical, start, run.count)
            return [Extent(run.logical, start, run.count, run.unwritten)]
        return _fill(runs, pieces, copy)
    return _fill(runs, space.take(sum(run.count for run in runs)), copy)


def _fill(runs: list[Extent], places: list[tuple[int, int]], copy: Copy) -> list[Extent]:
    """Put the blocks of ``runs`` into places (start, count) of the same total."""
    out: list[Extent] = []
    pieces = iter(places)
    start = left = 0
    for run in runs:
        logical, physical, count = run.logical, run.physical, run.count
        while count:
            if not left:
                start, left = next(pieces)
            got = min(count, left)
            if not run.unwritten:
                copy(physical, start, got)
            add(out, Extent(logical, start, got, run.unwritten))
            logical, physical, count = logical + got, physical + got, count - got
            start, left = start + got, left - got
    return out


def _place_clusters(runs: list[Extent], space: Space, ratio: int, copy: Copy) -> list[Extent]:
    out: list[Extent] = []
    clusters = iter(space.take_each(clusters_of(runs, ratio)))
    current, start = -1, 0
    for run in runs:
        logical, physical, count = run.logical, run.physical, run.count
        while count:
            cluster, skip = divmod(logical, ratio)
            if cluster != current:
                current, start = cluster, next(clusters)
            got = min(count, ratio - skip)
            if not run.unwritten:
                copy(physical, start + skip, got)
            add(out, Extent(logical, start + skip, got, run.unwritten))
            logical, physical, count = logical + got, physical + got, count - got
    return out


Put = Callable[[int, bytes], None]
"""Called with (block, content)."""


def tree(extents: list[Extent], space: Space, block_size: int, seed: int | None, put: Put) -> tuple[bytes, int]:
    """Write the extent tree of ``extents``; return the 60 bytes of ``i_block`` and the number of tree blocks."""
    if len(extents) == 1 and extents[0].count <= _MAX_UNWRITTEN:  # nearly always
        e = extents[0]
        length = e.count + c.MAX_EXTENT_LEN if e.unwritten else e.count
        root = HEADER.pack(c.EXTENT_MAGIC, 1, ROOT_MAX, 0, 0)
        return root + ENTRY.pack(e.logical, length, e.physical >> 32, e.physical & 0xFFFFFFFF) + bytes(36), 0
    extents = split(extents)
    need = tree_blocks_needed(len(extents), block_size)
    root, blocks = build_tree(extents, space.take_each(need) if need else [], block_size, seed or 0)
    for number, content in blocks:
        put(number, content)
    return root, need


def block_map(runs: list[Extent], space: Space, block_size: int, put: Put) -> tuple[bytes, int]:
    """Write the pointer blocks of a block map; return the 60 bytes of ``i_block`` and the number of pointer blocks."""
    root = [0] * 15
    for run in runs:
        for k in range(max(0, min(run.count, DIRECT - run.logical))):
            root[run.logical + k] = run.physical + k
    per = block_size // 4
    need = sum(1 for _ in _pointer_blocks(runs, per))
    numbers = iter(space.take_each(need) if need else [])
    where: dict[tuple[int, int, int], int] = {}
    for slot, level, index, fill in _pointer_blocks(runs, per):
        number = next(numbers)
        data = bytearray(block_size)
        if level == 1:
            for at, physical, count in fill:
                pack_into(f"<{count}I", data, 4 * at, *range(physical, physical + count))
        else:
            for at in range(per):
                below = where.pop((slot, level - 1, index * per + at), 0)
                if below:
                    _U32.pack_into(data, 4 * at, below)
        put(number, bytes(data))
        if level == slot - DIRECT + 1:
            root[slot] = number
        else:
            where[slot, level, index] = number
    return _POINTERS.pack(*root), need


def _pointer_blocks(runs: list[Extent], per: int) -> Iterator[tuple[int, int, int, list[tuple[int, int, int]]]]:
    """Yield (slot of i_block, level, index in its level, entries of level 1) of the pointer blocks that runs need.

    Each comes behind those that it points to. Entries are (position, first block, count).
    """
    base = DIRECT
    at = 0  # of runs
    for slot in (DIRECT, DIRECT + 1, DIRECT + 2):
        height = slot - DIRECT + 1
        end = base + per**height
        last = -1
        fill: list[tuple[int, int, int]] = []
        while at < len(runs) and runs[at].logical + runs[at].count <= base:
            at += 1
        for run in runs[at:] if at else runs:
            if run.logical >= end:
                break
            first, stop = max(run.logical, base), min(run.logical + run.count, end)
            while first < stop:
                index, position = divmod(first - base, per)
                if index != last:
                    if last >= 0:
                        yield from _close(slot, last, index, per, height, fill)
                    last, fill = index, []
                count = min(stop - first, per - position)
                fill.append((position, run.physical + first - run.logical, count))
                first += count
        if last >= 0:
            yield from _close(slot, last, -1, per, height, fill)
        base = end


def _close(  # noqa: PLR0917 (all are one position)
    slot: int, index: int, following: int, per: int, height: int, fill: list[tuple[int, int, int]]
) -> Iterator[tuple[int, int, int, list[tuple[int, int, int]]]]:
    """Yield a block of level 1, and those above it that nothing else will come into (``following`` -1: all)."""
    yield slot, 1, index, fill
    for level in range(2, height + 1):
        index //= per
        following = following // per if following >= 0 else -1
        if index == following:
            return
        yield slot, level, index, []
