"""Moving what lies in the way: data, directories, trees, attribute blocks, bitmaps and inode tables out of blocks that
the volume is to lose or needs for descriptors, and inodes out of groups that go.

Each step is an operation of its own, all or nothing, after which the tree is what it was.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import partial

from ext4lite import bitmap, indirect
from ext4lite.alloc import Group
from ext4lite.block_map import BlockMap
from ext4lite.checksum import crc32c, inode_seed, xattr_block_checksum
from ext4lite.errors import CorruptImage, Ext4LiteError, Unsupported, VolumeFull
from ext4lite.extents import HEADER, Extent
from ext4lite.inode import InodeRecord
from ext4lite.jbd2.transaction import TransactionTooLarge
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import XattrHeader
from ext4lite.layout_volume import LayoutVolume
from ext4lite.shape import Shape

_CHUNK = 1 << 20
_METADATA_A_STEP = 32
_MOST_SHARERS = 1024
_INODES_A_PASS = 100_000
RESIZE_INO = 7
_BAD_BLOCKS_INO = 1
_DIND = 13
_PARTS = ("block_bitmap", "inode_bitmap", "inode_table")


class JournalInTheWay(Ext4LiteError):
    """The journal's own blocks must be moved first, which its own transactions cannot do."""


class Mover:
    """Moves things out of ``ranges`` ([start, end) in blocks, ascending) of a volume.

    ``progress`` is called with each number of bytes moved.
    """

    def __init__(
        self,
        volume: LayoutVolume,
        shape: Shape,
        ranges: list[tuple[int, int]],
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.v = volume
        self.shape = shape
        self.ranges = [(low, high) for low, high in ranges if low < high]
        self._starts = [low for low, _ in self.ranges]
        self._progress = progress or (lambda _: None)
        self._shared: dict[int, int] = {}
        self.blocks = self.inodes = 0
        """How many were moved."""
        raw = volume.super.raw
        self._orphan_file = raw.s_orphan_file_inum if volume.super.compat & c.COMPAT_ORPHAN_FILE else 0

    # -- where ------------------------------------------------------------------------------------------------------

    def away(self, number: int) -> bool:
        """Tell whether a block is to be freed."""
        i = bisect_right(self._starts, number) - 1
        return i >= 0 and number < self.ranges[i][1]

    def pieces(self, start: int, count: int) -> Iterator[tuple[int, int]]:
        """Yield (start, count) of what of a run of blocks is to be freed."""
        i = max(0, bisect_right(self._starts, start) - 1)
        for low, high in self.ranges[i:]:
            if low >= start + count:
                return
            first, end = max(low, start), min(high, start + count)
            if first < end:
                yield first, end - first

    def _parts(self, group: Group) -> tuple[tuple[int, int], ...]:
        return (group.block_bitmap, 1), (group.inode_bitmap, 1), (group.inode_table, self.shape.table)

    def in_use(self) -> int:
        """Return how many blocks of the ranges are in use by files, journal and resize inode.

        Not counted are copies of descriptors, bitmaps and inode tables.
        """
        v, shape = self.v, self.shape
        alloc = v.alloc
        used = 0
        for low, high in self.ranges:
            first, last = (low - shape.first) // shape.per_group, (high - 1 - shape.first) // shape.per_group
            for number in range(first, last + 1):
                group = alloc.groups[number]
                if group.flags & c.BG_BLOCK_UNINIT and v._uninit:
                    continue
                start = shape.start(number)
                bits = v.verified_bitmap(number, blocks=True)
                used += _count_set(bits, max(low, start) - start, min(high, shape.end(number)) - start)
                used -= max(0, min(high, start + shape.base(number)) - max(low, start))
        for group in alloc.groups:
            for start, count in self._parts(group):
                for first, length in self.pieces(start, count):
                    used -= self._initialised(first, length)
        return used

    def _initialised(self, start: int, count: int) -> int:
        """Return how many of some blocks lie in groups whose bitmap is on disk."""
        shape, out = self.shape, 0
        while count:
            number = (start - shape.first) // shape.per_group
            part = min(count, shape.end(number) - start)
            if not (self.v.alloc.groups[number].flags & c.BG_BLOCK_UNINIT and self.v._uninit):
                out += part
            start, count = start + part, count - part
        return out

    # -- everything -------------------------------------------------------------------------------------------------

    def run(self, groups: int) -> None:
        """Move all that lies in the ranges; bitmaps, tables and inodes only of the first ``groups`` groups.

        VolumeFull, Unsupported, JournalInTheWay, TransactionTooLarge.
        """
        v = self.v
        for number in range(groups):
            group = v.alloc.groups[number]
            if any(self.away(start) or next(self.pieces(start, n), None) for start, n in self._parts(group)):
                self._group_metadata(group)
        if not self.in_use():
            return
        self._resize_inode()
        for record in self._owners(groups):
            self._inode(record)

    def require_journal_elsewhere(self) -> None:
        """Raise JournalInTheWay when the ranges hold blocks of the journal."""
        v = self.v
        ino = v.super.raw.s_journal_inum
        if v.journal is None or not ino:
            return
        for run in v.map(v.inode(ino))[0]:
            if next(self.pieces(run.physical, run.count), None):
                raise JournalInTheWay("the journal is in the way", where=v.where)

    def _owners(self, groups: int | None = None) -> Iterator[InodeRecord]:
        """Yield every inode of the first groups that may own blocks of the ranges, but the resize inode."""
        v = self.v
        if v.inode(_BAD_BLOCKS_INO).fields.i_blocks_lo:
            raise Unsupported("the volume has a list of bad blocks", where=v.where)
        yield from v.used_inodes(groups)

    # -- groups -----------------------------------------------------------------------------------------------------

    def _group_metadata(self, group: Group) -> None:
        if not self.shape.movable:
            self._make_window(group)
        before = [getattr(group, name) for name in _PARTS]

        def move() -> None:
            for name, (start, count) in zip(_PARTS, self._parts(group), strict=True):
                if next(self.pieces(start, count), None):
                    self._part(group, name, start, count)

        try:
            self.v.step(move)
        except BaseException:
            for name, number in zip(_PARTS, before, strict=True):
                _place(group, name, number)
            raise

    def _make_window(self, group: Group) -> None:
        """Have room in a group for those of its bitmaps and table that must move, which may not leave it (no flex_bg).

        VolumeFull; TransactionTooLarge when blocks would be used again that the running transaction frees.
        """
        v, alloc = self.v, self.v.alloc
        need = sum(count for start, count in self._parts(group) if next(self.pieces(start, count), None))
        if alloc.has_room_in(group.number, need):
            return
        if v.journal is not None and v.in_operation:
            raise TransactionTooLarge("a group's metadata needs a place where files are", where=v.where)
        low, end = self.shape.start(group.number) + self.shape.base(group.number), self.shape.end(group.number)
        taken = sorted([*self.ranges, *((start, start + count) for start, count in self._parts(group))])
        for start, stop in [*taken, (end, end)]:
            if start - low >= need:
                break
            low = max(low, stop)
        if low + need > end:
            raise VolumeFull(f"group {group.number} is too short for its metadata", where=v.where)
        ranges = sorted([*self.ranges, (low, low + need)])
        alloc.confine(ranges)
        other = Mover(v, self.shape, ranges, self._progress)
        other._resize_inode()
        for record in other._owners():
            other._inode(record)
        self.blocks += other.blocks
        if not v.in_operation:
            v.write_through()
        alloc.confine(self.ranges)

    def _part(self, group: Group, name: str, start: int, count: int) -> None:
        """Move a bitmap or the inode table of a group."""
        v, alloc = self.v, self.v.alloc
        within = None if self.shape.movable else group.number
        new = alloc.allocate_whole(self.shape.start(group.number), count, within)
        alloc.free(start, count)
        uninit = {"block_bitmap": c.BG_BLOCK_UNINIT, "inode_bitmap": c.BG_INODE_UNINIT}.get(name, 0)
        if name == "inode_table":
            step = max(1, _CHUNK // v.block_size)
            for at in range(0, count, step):
                v.write_raw(new + at, v.newest(start + at, min(step, count - at)))
            for number in range(start, start + count):
                v.let_go(number)
        elif not (group.flags & uninit and v._uninit):
            v.cache.create(new)[:] = v.cache.get(start)
            v.cache.forget(start)
        _place(group, name, new)
        alloc.touch(group)
        self._count(count)

    def _resize_inode(self) -> None:
        """Move the resize inode's block of pointers; what it points to is settled with the new geometry."""
        v = self.v
        record = v.inode(RESIZE_INO)
        number = int.from_bytes(record.fields.i_block[4 * _DIND : 4 * _DIND + 4], "little")
        if not record.fields.i_links_count or not number or not self.away(number):
            return

        def move() -> None:
            fresh = v.new_metadata_block(record)
            v.cache.create(fresh)[:] = v.cache.get(number)
            v.free_metadata_block(record, number)
            block = record.fields.i_block
            record.fields.i_block = block[: 4 * _DIND] + fresh.to_bytes(4, "little") + block[4 * _DIND + 4 :]
            v.put_inode(record)

        v.step(move)
        self._count(1)

    def _count(self, blocks: int) -> None:
        self.blocks += blocks
        self._progress(blocks * self.v.block_size)

    # -- files ------------------------------------------------------------------------------------------------------

    def _inode(self, record: InodeRecord) -> None:
        v, ino = self.v, record.ino
        if record.file_acl and self.away(record.file_acl):
            self._attributes(ino)
        if not self._has_map(record):
            return
        journal = ino == v.super.raw.s_journal_inum
        moved = False
        for run in self._runs(record):
            for start, count in self.pieces(run.physical, run.count):
                if journal and v.journal is not None:
                    raise JournalInTheWay("the journal is in the way", where=v.where)
                self._run_of(record, run, start, count)
                moved = True
        if self._has_nodes(record):
            v.step(partial(self._nodes, ino))
        if journal and moved:
            raw, fields = v.super.raw, v.inode(ino).fields
            words = [int.from_bytes(fields.i_block[at : at + 4], "little") for at in range(0, 60, 4)]
            raw.s_jnl_blocks = (*words, fields.i_size_high, fields.i_size_lo)
            v.super_changed()

    def _has_map(self, record: InodeRecord) -> bool:
        if record.type == c.S_IFLNK:
            return not self.v._is_fast_symlink(record)
        return record.type in (c.S_IFREG, c.S_IFDIR)

    @staticmethod
    def _has_nodes(record: InodeRecord) -> bool:
        if record.fields.i_flags & c.EXTENTS_FL:
            return bool(HEADER.unpack_from(record.fields.i_block)[3])
        return any(record.fields.i_block[48:60])

    def _runs(self, record: InodeRecord) -> list[Extent]:
        """Return the runs of a file, with a block map also those behind its end."""
        v = self.v
        fmap = v.file_map(record)
        if not isinstance(fmap, BlockMap):
            return v.map(record)[0]
        where = v._at(f"inode {record.ino}")
        return indirect.read_map(record.fields.i_block, v, v.block_size, fmap.limit, where)[0]

    def _nodes(self, ino: int) -> None:
        record = self.v.inode(ino)
        moved = self.v.file_map(record).move_nodes(self.away)
        if moved:
            self.v.put_inode(record)
            self._count(moved)

    def _run_of(self, record: InodeRecord, run: Extent, start: int, count: int) -> None:
        """Move a piece of a file in steps."""
        metadata = record.type == c.S_IFDIR or record.ino == self._orphan_file
        most = _METADATA_A_STEP if metadata else max(1, 8 * _CHUNK // self.v.block_size)
        for skip in range(0, count, most):
            part = min(most, count - skip)
            logical = run.logical + start + skip - run.physical
            self.v.step(partial(self._piece, record.ino, Extent(logical, start + skip, part, run.unwritten)))
            self._count(part)

    def _piece(self, ino: int, piece: Extent) -> None:
        v = self.v
        record = v.inode(ino)
        v._changed = True
        fmap = v.file_map(record)
        fmap.remove(piece.logical, piece.logical + piece.count)
        done = 0
        while done < piece.count:
            logical = piece.logical + done
            got = v.alloc.allocate(v._data_goal(record, logical), piece.count - done)
            self._copy(record, piece, piece.physical + done, got.start, got.count)
            fmap.insert(Extent(logical, got.start, got.count, piece.unwritten))
            done += got.count
        v.alloc.free(piece.physical, piece.count)
        v._names_gone(ino)
        v.put_inode(record)

    def _copy(self, record: InodeRecord, piece: Extent, source: int, target: int, count: int) -> None:
        v = self.v
        if piece.unwritten:
            return
        if record.type == c.S_IFDIR or record.ino == self._orphan_file:
            for i in range(count):
                data = v.cache.create(target + i)
                data[:] = v.cache.get(source + i)
                if record.ino == self._orphan_file and v.super.metadata_csum:
                    seed = inode_seed(v.super.seed, record.ino, record.fields.i_generation)
                    total = crc32c(crc32c(seed, (target + i).to_bytes(8, "little")), bytes(data[:-8]))
                    data[-4:] = total.to_bytes(4, "little")
                v.cache.forget(source + i)
            return
        step = max(1, _CHUNK // v.block_size)
        for at in range(0, count, step):
            v.write_raw(target + at, v._blocks.read(source + at, min(step, count - at)))

    # -- attributes -------------------------------------------------------------------------------------------------

    def _attributes(self, ino: int) -> None:
        """Move an inode from an attribute block to its copy; who shared it shares the copy in the end."""
        v = self.v
        old = v.inode(ino).file_acl
        place = 0

        def move() -> None:
            nonlocal place
            record = v.inode(ino)
            place = self._shared.get(old, 0)
            if place and XattrHeader.unpack(bytes(v.cache.get(place))).h_refcount < _MOST_SHARERS:
                self._refer(place, 1)
            else:
                place = v.alloc.allocate(v.goal_of(record), 1).start
                v.cache.create(place)[:] = v.cache.get(old)
                self._refer(place, 0)
            if XattrHeader.unpack(bytes(v.cache.get(old))).h_refcount <= 1:
                v.alloc.free(old, 1)
                v.cache.forget(old)
            else:
                self._refer(old, -1)
            record.fields.i_file_acl_lo, record.fields.l_i_file_acl_high = place & 0xFFFFFFFF, place >> 32
            v.put_inode(record)

        v.step(move)
        self._shared[old] = place
        self._count(1)

    def _refer(self, number: int, change: int) -> None:
        """Count users of an attribute block; 0 is for a new one, which has one."""
        v = self.v
        data = v.cache.change(number)
        head = XattrHeader.unpack(bytes(data))
        head.h_refcount = head.h_refcount + change if change else 1
        data[: XattrHeader.SIZE] = head.pack()
        if v.super.metadata_csum:
            head.h_checksum = xattr_block_checksum(v.super.seed, number, bytes(data))
            data[: XattrHeader.SIZE] = head.pack()


class Renumberer:
    """Gives the inodes of groups from ``groups`` on other numbers, and tells every directory that names them."""

    def __init__(self, volume: LayoutVolume, groups: int) -> None:
        self.v = volume
        self.first = groups * volume.super.raw.s_inodes_per_group + 1
        self.inodes = 0
        self._moved: dict[int, int] = {}

    def run(self) -> None:
        """Move them all. VolumeFull, TransactionTooLarge, CorruptImage."""
        while True:
            batch = self._batch()
            if not batch:
                return
            names = self._names(batch)
            self._moved = {}
            for ino in batch:
                where = names.pop(ino, [])
                if not where:
                    raise CorruptImage("is in use, but has no name", where=self.v._at(f"inode {ino}"))
                new = 0

                def move(ino: int = ino, where: list[tuple[int, bytes]] = where) -> None:
                    nonlocal new
                    new = self._one(ino, where)

                self.v.step(move)
                self._moved[ino] = new
                self.inodes += 1

    def _batch(self) -> list[int]:
        """Return the next inodes to move."""
        v = self.v
        per = v.super.raw.s_inodes_per_group
        out: list[int] = []
        for number in range((self.first - 1) // per, len(v.alloc.groups)):
            group = v.alloc.groups[number]
            if group.free_inodes == per:
                continue
            bits = v.verified_bitmap(number, blocks=False)
            at = bitmap.next_set(bits, 0, per)
            while at < per:
                out.append(number * per + at + 1)
                if len(out) == _INODES_A_PASS:
                    return out
                at = bitmap.next_set(bits, at + 1, per)
        return out

    def _names(self, batch: list[int]) -> dict[int, list[tuple[int, bytes]]]:
        """Return (directory, name) of every name of some inodes."""
        v = self.v
        wanted = set(batch)
        own = v.super.raw.s_orphan_file_inum if v.super.compat & c.COMPAT_ORPHAN_FILE else 0
        out: dict[int, list[tuple[int, bytes]]] = {own: [(0, b"")]} if own in wanted else {}
        for record in v.used_inodes():
            if record.type == c.S_IFDIR:
                for name, ino, _ in v.iterdir(record.ino):
                    if ino in wanted:
                        out.setdefault(ino, []).append((record.ino, name))
        return out

    def _one(self, old: int, names: list[tuple[int, bytes]]) -> int:
        """Give one inode another number; return it."""
        v = self.v
        sb = v.super
        record = v.inode(old)
        directory = record.type == c.S_IFDIR
        children = []
        if directory:
            children = [ino for _, ino, _ in v.iterdir(old) if v.inode(ino).type == c.S_IFDIR]
        new = v.alloc.allocate_inode(c.FIRST_INO, directory=directory)
        fields = copy.copy(record.fields)
        if sb.metadata_csum:
            # Number and generation are the seed of the checksums of all that belongs to an inode. Of crc32c's register,
            # four bytes are simply taken off by xor: so another generation makes up for another number.
            fields.i_generation ^= _number_sum(sb.seed, old) ^ _number_sum(sb.seed, new)
        moved = v._records[new] = InodeRecord(new, record.raw, fields, record.extra_isize)
        v._maps.pop(new, None)
        v._names_gone(new)
        v.put_inode(moved)
        per = sb.raw.s_inodes_per_group
        group, index = divmod(old - 1, per)
        block, offset = divmod(index * sb.inode_size, v.block_size)
        data = v.cache.change(v.alloc.groups[group].inode_table + block)
        data[offset : offset + sb.inode_size] = bytes(sb.inode_size)
        v.alloc.free_inode(old, directory=directory)
        v._records.pop(old, None)
        v._maps.pop(old, None)
        v._names_gone(old)
        raw = sb.raw
        for field in ("s_orphan_file_inum", "s_lpf_ino"):
            if getattr(raw, field) == old:
                setattr(raw, field, new)
                v.super_changed()
        for above, name in names:
            if above:
                at = v._writer(self._moved.get(above, above))
                at.replace(name, new, at.state.names[name].kind)
        if directory:
            v._writer(new).set_self()
            for child in children:
                v._writer(child).set_parent(new)
        return new


def _place(group: Group, name: str, number: int) -> None:
    """Say where a group's bitmap or table lies."""
    setattr(group, name, number)
    setattr(group.desc, f"bg_{name}_lo", number & 0xFFFFFFFF)
    setattr(group.desc, f"bg_{name}_hi", number >> 32)


def _number_sum(seed: int, ino: int) -> int:
    return crc32c(seed, ino.to_bytes(4, "little"))


def _count_set(bits: bytearray, start: int, end: int) -> int:
    """Return how many bits of [start, end) are set."""
    if start >= end:
        return 0
    first, last = start >> 3, (end + 7) >> 3
    value = int.from_bytes(bits[first:last], "little") >> (start & 7)
    return (value & ((1 << (end - start)) - 1)).bit_count()
