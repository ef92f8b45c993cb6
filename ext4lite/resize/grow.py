"""Growing a volume in place: new groups behind its end, and one transaction that makes them part of it.

What lies behind the end is written first, where nobody looks. Tables of descriptors that become longer need the blocks
behind them; what lies there is moved in the same transaction, into the new groups if there is no other room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ext4lite import bitmap
from ext4lite.alloc import Group
from ext4lite.checksum import crc32c, group_desc_checksum, group_desc_crc16
from ext4lite.errors import Unsupported
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import GroupDesc
from ext4lite.layout_volume import LayoutVolume
from ext4lite.resize import resize_inode
from ext4lite.resize.move import Mover
from ext4lite.shape import Shape, has_resize_inode
from ext4lite.super import Super

_LENT_GROUPS = 32
_TABLE_STEP = 256  # blocks of descriptors written at once


@dataclass(slots=True, frozen=True)
class NewGroup:
    """A group to come: where its bitmaps and table lie, and which of its own blocks metadata takes.

    ``taken`` are (bit, count) in the group, its copy of the superblock and descriptors not among them.
    """

    number: int
    block_bitmap: int
    inode_bitmap: int
    inode_table: int
    taken: list[tuple[int, int]]
    foreign: bool
    """Whether metadata of other groups lies in it."""


def new_groups(shape: Shape, first: int) -> Iterator[NewGroup]:
    """Plan the groups from ``first`` on, flex group by flex group. Unsupported if they do not fit."""
    while first < shape.groups:
        end = min(shape.groups, (first // shape.flex + 1) * shape.flex)
        yield from _flex_group(shape, first, end)
        first = end


def _flex_group(shape: Shape, first: int, end: int) -> list[NewGroup]:
    """Lay all bitmaps, then all tables of groups [first, end) behind one another, around copies of the superblock."""
    numbers = range(first, end)
    free: list[tuple[int, int]] = []
    for number in numbers:
        start = shape.start(number) + shape.base(number)
        if free and free[-1][1] == start:
            free[-1] = (free[-1][0], shape.end(number))
        else:
            free.append((start, shape.end(number)))
    at = 0

    def take(count: int) -> int:
        nonlocal at
        while at < len(free):
            low, high = free[at]
            if high - low >= count:
                free[at] = (low + count, high)
                return low
            at += 1
        raise Unsupported(f"the metadata of groups {first} to {end - 1} does not fit into them")

    block_bitmaps = [take(1) for _ in numbers]
    inode_bitmaps = [take(1) for _ in numbers]
    tables = [take(shape.table) for _ in numbers]
    taken: dict[int, list[tuple[int, int]]] = {number: [] for number in numbers}
    foreign: set[int] = set()
    for i, number in enumerate(numbers):
        for start, count in ((block_bitmaps[i], 1), (inode_bitmaps[i], 1), (tables[i], shape.table)):
            at_block, end_block = start, start + count
            while at_block < end_block:
                inside = (at_block - shape.first) // shape.per_group
                part = min(end_block, shape.start(inside) + shape.per_group) - at_block
                taken[inside].append((at_block - shape.start(inside), part))
                if inside != number:
                    foreign.add(inside)
                at_block += part
    return [
        NewGroup(number, block_bitmaps[i], inode_bitmaps[i], tables[i], taken[number], number in foreign)
        for i, number in enumerate(numbers)
    ]


def wanted_for_descriptors(old: Shape, new: Shape) -> list[tuple[int, int]]:
    """Return [start, end) of the blocks that longer tables of descriptors take in the groups there are."""
    if new.base(0) <= old.base(0):
        return []
    groups = [0, *old.backups()]
    return [(old.start(g) + old.base(g), min(old.start(g) + new.base(g), old.end(g))) for g in groups]


class Growth:
    """One growth of a volume. ``zeros``: what lies behind its old end is known to be zeros (a file's hole)."""

    def __init__(self, volume: LayoutVolume, old: Shape, new: Shape, *, zeros: bool) -> None:
        self.v, self.old, self.new = volume, old, new
        self._zeros = zeros
        self._sums = bool(volume.super.ro_compat & (c.RO_METADATA_CSUM | c.RO_GDT_CSUM))
        self.mover = Mover(volume, old, wanted_for_descriptors(old, new))

    # -- in two ways ------------------------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Move what is in the way inside of the volume as it is, in steps. VolumeFull, TransactionTooLarge."""
        self.v.alloc.confine(self.mover.ranges)
        self.mover.require_journal_elsewhere()
        self.mover.run(self.old.groups)
        self.v.write_through()

    def run(self) -> None:
        """Grow: one transaction. The file must be long enough. VolumeFull, TransactionTooLarge, JournalInTheWay."""
        v, old, new = self.v, self.old, self.new
        self.mover.require_journal_elsewhere()
        v.begin_at_once()
        alloc = v.alloc
        free_before = self._free_for_descriptors()
        last = old.groups - 1
        added = new.end(last) - old.end(last)
        totals = _Totals()
        lent: list[NewGroup] = []
        busy = self._in_the_way()
        if busy:
            alloc.confine(self.mover.ranges)
        alloc.initialise(last)
        if added:
            v.blocks = old.blocks + added  # bits of a bitmap made now end there
            alloc.set_bits(last, old.end(last) - old.start(last), added, used=False)
        if busy:
            lent = self._lend()
            self.mover.run(old.groups)
        alloc.confine([])
        self._tables(lent, totals, free_before)
        grown = new.base(0) - old.base(0)
        for number in (0, *old.backups()) if grown > 0 else ():
            group = alloc.groups[number]
            if group.flags & c.BG_BLOCK_UNINIT and self._sums:
                alloc.count(group, -grown)
            else:
                alloc.set_bits(number, old.base(number), grown, used=True)
        alloc.free_blocks += totals.blocks
        alloc.free_inodes += totals.inodes
        v.take_shape(new)
        if has_resize_inode(v.super):
            resize_inode.settle(v, old, new)
        v.commit_at_once()

    def _in_the_way(self) -> bool:
        mover = self.mover
        if not mover.ranges:
            return False
        parts = (part for group in self.v.alloc.groups for part in mover._parts(group))
        return any(next(mover.pieces(*part), None) for part in parts) or mover.in_use() > 0

    def _free_for_descriptors(self) -> set[int]:
        """Return the blocks behind the first table of descriptors that nothing has used yet."""
        v, old, new = self.v, self.old, self.new
        start, end = old.first + 1 + old.gdt + old.reserved, old.first + 1 + new.gdt
        if start >= end:
            return set()
        group = v.alloc.groups[0]
        if group.flags & c.BG_BLOCK_UNINIT and self._sums:
            return set()
        bits = v.verified_bitmap(0, blocks=True)
        return {n for n in range(start, end) if not bits[n - old.first >> 3] >> (n - old.first & 7) & 1}

    # -- new groups -------------------------------------------------------------------------------------------------

    def _lend(self) -> list[NewGroup]:
        """Let the allocator use the first of the new groups already."""
        v, alloc = self.v, self.v.alloc
        lent: list[NewGroup] = []
        for planned in new_groups(self.new, self.old.groups):
            if len(lent) == _LENT_GROUPS:
                break
            lent.append(planned)
        for planned in lent:
            desc = self._describe(planned)
            group = Group(planned.number, desc, longest=self.new.per_group)
            v._descriptors[planned.number] = desc
            alloc.groups.append(group)
            alloc.free_blocks += group.free
            alloc.free_inodes += group.free_inodes
        if lent:
            v.blocks = self.new.end(lent[-1].number)
        return lent

    def _describe(self, planned: NewGroup) -> GroupDesc:
        """Write a new group's bitmaps, as far as they must be on disk, and return its descriptor (not yet sealed)."""
        v, new, number = self.v, self.new, planned.number
        size = new.end(number) - new.start(number)
        base = new.base(number)
        free = size - base - sum(count for _, count in planned.taken)
        desc = GroupDesc(
            bg_block_bitmap_lo=planned.block_bitmap & 0xFFFFFFFF,
            bg_block_bitmap_hi=planned.block_bitmap >> 32,
            bg_inode_bitmap_lo=planned.inode_bitmap & 0xFFFFFFFF,
            bg_inode_bitmap_hi=planned.inode_bitmap >> 32,
            bg_inode_table_lo=planned.inode_table & 0xFFFFFFFF,
            bg_inode_table_hi=planned.inode_table >> 32,
            bg_free_blocks_count_lo=free & 0xFFFF,
            bg_free_blocks_count_hi=free >> 16,
            bg_free_inodes_count_lo=new.inodes_per_group & 0xFFFF,
            bg_free_inodes_count_hi=new.inodes_per_group >> 16,
        )
        if self._sums:
            desc.bg_flags = c.BG_INODE_UNINIT | (c.BG_INODE_ZEROED if self._zeros else 0)
            desc.bg_itable_unused_lo = new.inodes_per_group & 0xFFFF
            desc.bg_itable_unused_hi = new.inodes_per_group >> 16
        else:
            bits = bytearray(v.block_size)
            bitmap.fill(bits, new.inodes_per_group, 8 * v.block_size - new.inodes_per_group, used=True)
            v.write_raw(planned.inode_bitmap, bytes(bits))
            if not self._zeros:
                for at in range(0, new.table, _TABLE_STEP):
                    v.write_raw(planned.inode_table + at, bytes(v.block_size * min(_TABLE_STEP, new.table - at)))
        if self._sums and not planned.foreign and number != new.groups - 1:
            desc.bg_flags |= c.BG_BLOCK_UNINIT
            return desc
        bits = bytearray(v.block_size)
        for bit, count in ((0, base), *planned.taken, (size, 8 * v.block_size - size)):
            bitmap.fill(bits, bit, count, used=True)
        v.write_raw(planned.block_bitmap, bytes(bits))
        if v.super.metadata_csum:
            total = crc32c(v.super.seed, bytes(bits[: new.per_group // 8]))
            desc.bg_block_bitmap_csum_lo, desc.bg_block_bitmap_csum_hi = total & 0xFFFF, total >> 16
        return desc

    # -- descriptors ------------------------------------------------------------------------------------------------

    def _tables(self, lent: list[NewGroup], totals: _Totals, free_before: set[int]) -> None:
        """Write the descriptors of the new groups into the first table.

        What the volume has already goes through the transaction, blocks that are new for it are written at once.
        """
        v, old, new = self.v, self.old, self.new
        per = v.block_size // new.desc_size
        known = {planned.number for planned in lent}
        for planned in lent:
            v.alloc.touch(v.alloc.groups[planned.number])
        block, data = -1, bytearray()

        def put() -> None:
            if block >= 0:
                if block in free_before:
                    v.write_raw(block, bytes(data))
                    v.let_go(block)
                else:
                    v.cache.create(block)[:] = data

        for planned in new_groups(new, old.groups):
            number = planned.number
            at, offset = v.descriptor_place(number)
            if at != block:
                put()
                block, data = at, bytearray(v.block_size)
                if number % per:
                    data[:] = v.cache.get(at)
            if number in known:
                free_before.discard(at)  # the allocator seals it with the others
                continue
            desc = self._describe(planned)
            totals.blocks += desc.bg_free_blocks_count_lo | desc.bg_free_blocks_count_hi << 16
            totals.inodes += new.inodes_per_group
            raw = desc.pack()[: new.desc_size]
            data[offset : offset + new.desc_size] = sealed(v.super, number, raw + bytes(new.desc_size - len(raw)))
        put()


@dataclass(slots=True)
class _Totals:
    """What is free in the new groups that the allocator does not know."""

    blocks: int = 0
    inodes: int = 0


def sealed(sb: Super, number: int, raw: bytes) -> bytes:
    """Return a descriptor with its checksum."""
    if sb.metadata_csum:
        total = group_desc_checksum(sb.seed, number, raw)
    elif sb.ro_compat & c.RO_GDT_CSUM:
        total = group_desc_crc16(sb.raw.s_uuid, number, raw)
    else:
        return raw
    at = GroupDesc.OFFSET_bg_checksum
    return raw[:at] + total.to_bytes(2, "little") + raw[at + 2 :]


def write_copies(volume: LayoutVolume, shape: Shape, progress: Callable[[int], None] | None = None) -> None:
    """Write the copies of superblock and descriptors in all groups that have one; no flush."""
    v = volume
    v.write_superblock_copies()
    copies = list(shape.backups())
    table = c.SUPERBLOCK_OFFSET // v.block_size + 1
    for at in range(0, shape.gdt, _TABLE_STEP):
        count = min(_TABLE_STEP, shape.gdt - at)
        data = v.newest(table + at, count)
        for group in copies:
            v.write_raw(shape.start(group) + 1 + at, data)
            if progress:
                progress(len(data))
