"""Where things lie in a volume of a given shape and size, and the least size that holds so much.

Unlike :mod:`ext4lite.geometry`, which knows the one profile that ``mkfs`` makes, this follows a volume's own features:
any block size, flex_bg or not, meta_bg, sparse_super and sparse_super2, reserved descriptor blocks, clusters (source:
Documentation/filesystems/ext4/blockgroup.rst, group_descr.rst, bigalloc.rst).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from ext4lite.geometry import has_sparse_super
from ext4lite.layout import constants as c
from ext4lite.super import Super

LEAST_IN_LAST_GROUP = 50
"""Blocks that the last group has beside its metadata, as mke2fs and resize2fs want it."""
_MAX_RESIZE_BLOCKS = (1 << 32) - 1
_RESIZE_FACTOR = 1024
_FOR_A_BREAK = 3


class DoesNotFit(Exception):
    """A volume of that size cannot hold its own metadata."""


@dataclass(slots=True, frozen=True)
class Shape:
    """What a rebuild keeps of a volume's geometry."""

    block_size: int
    first_data_block: int
    blocks_per_group: int
    ratio: int
    """Blocks a cluster: 1 without bigalloc."""
    inode_size: int
    desc_size: int
    flex: int
    """Groups whose bitmaps and inode tables lie together; 1 without flex_bg."""
    sparse: bool
    sparse2: bool
    backups: int
    """How many of the two backup superblocks of sparse_super2 there are."""
    first_meta_bg: int | None
    """Descriptor blocks that lie behind the superblocks; None: all of them (no meta_bg)."""
    descriptor_room: int
    """Descriptor blocks in use and reserved, with resize_inode; 0 without."""
    wide: bool

    @classmethod
    def of(cls, sb: Super) -> Shape:
        """Return the shape of a volume."""
        raw = sb.raw
        meta_bg = bool(sb.incompat & c.INCOMPAT_META_BG)
        room = 0
        if sb.compat & c.COMPAT_RESIZE_INODE:
            room = -(-sb.groups * sb.desc_size // sb.block_size) + raw.s_reserved_gdt_blocks
        flex = 1 << raw.s_log_groups_per_flex if sb.incompat & c.INCOMPAT_FLEX_BG else 1
        return cls(
            block_size=sb.block_size,
            first_data_block=sb.first_data_block,
            blocks_per_group=raw.s_blocks_per_group,
            ratio=sb.cluster_size // sb.block_size,
            inode_size=sb.inode_size,
            desc_size=sb.desc_size,
            flex=flex,
            sparse=bool(sb.ro_compat & c.RO_SPARSE_SUPER),
            sparse2=bool(sb.compat & c.COMPAT_SPARSE_SUPER2),
            backups=sum(1 for g in raw.s_backup_bgs if g),
            first_meta_bg=raw.s_first_meta_bg if meta_bg else None,
            descriptor_room=room,
            wide=bool(sb.incompat & c.INCOMPAT_64BIT),
        )

    @property
    def inode_step(self) -> int:
        """Inodes a group come in multiples of this: whole table blocks, whole bytes of the bitmap."""
        return max(8, self.block_size // self.inode_size)

    def groups_of(self, blocks: int) -> int:
        """Groups of a volume of so many blocks."""
        return -(-(blocks - self.first_data_block) // self.blocks_per_group)

    def reserved_descriptors(self, blocks: int, descriptor_blocks: int) -> int:
        """Descriptor blocks to reserve for growth (resize_inode).

        As many as mke2fs would for 1024 times the size, at most those that the volume had, and what the resize inode
        can list.
        """
        if not self.descriptor_room:
            return 0
        most = min(blocks * _RESIZE_FACTOR, _MAX_RESIZE_BLOCKS)
        groups = -(-(most - self.first_data_block) // self.blocks_per_group)
        wanted = -(-groups * self.desc_size // self.block_size) - descriptor_blocks
        return max(min(wanted, self.descriptor_room - descriptor_blocks, self.block_size // 4), 0)


class Layout:
    """The metadata of a volume of ``blocks`` blocks, with ``per_group`` inodes a group. DoesNotFit."""

    def __init__(self, shape: Shape, blocks: int, per_group: int) -> None:
        self.shape = shape
        self.blocks = blocks
        self.per_group = per_group
        self.groups = shape.groups_of(blocks)
        self.table_blocks = -(-per_group * shape.inode_size // shape.block_size)
        per_block = shape.block_size // shape.desc_size
        self.descriptor_blocks = -(-self.groups // per_block)
        self.first_meta_bg = shape.first_meta_bg
        self.behind_super = self.descriptor_blocks
        """Descriptor blocks that follow each superblock."""
        if shape.first_meta_bg is not None:
            self.first_meta_bg = self.behind_super = min(shape.first_meta_bg, self.descriptor_blocks)
        self.reserved = shape.reserved_descriptors(blocks, self.descriptor_blocks)
        self.backups = self._backups()
        self.block_bitmaps = array("Q", bytes(8 * self.groups))
        self.inode_bitmaps = array("Q", bytes(8 * self.groups))
        self.tables = array("Q", bytes(8 * self.groups))
        self.taken: list[tuple[int, int]] = []
        """(start, count) of the runs of metadata, ascending, not touching each other."""
        self._place()
        self.free_blocks = sum(count for _, count in self.free_runs())

    def _backups(self) -> tuple[int, int]:
        """The groups with backup superblocks under sparse_super2: as mke2fs has it, the second one and the last one."""
        wanted = self.shape.backups
        first = 1 if wanted >= 1 and self.groups > 1 else 0
        return first, self.groups - 1 if wanted == 2 and self.groups > 2 else 0

    @property
    def inodes(self) -> int:
        """All inodes."""
        return self.per_group * self.groups

    def group_first(self, group: int) -> int:
        """First block of a group."""
        return self.shape.first_data_block + group * self.shape.blocks_per_group

    def group_size(self, group: int) -> int:
        """Blocks in a group."""
        return min(self.shape.blocks_per_group, self.blocks - self.group_first(group))

    def has_super(self, group: int) -> bool:
        """Tell whether a group begins with a copy of the superblock."""
        if self.shape.sparse2:
            return group == 0 or group in self.backups
        return has_sparse_super(group) if self.shape.sparse else True

    def super_block(self, group: int) -> int:
        """Return the block that holds a group's superblock, which it must have."""
        first = self.group_first(group)
        return first + 1 if group == 0 and first == 0 and self.shape.block_size == 1024 else first

    def descriptors_at(self, group: int) -> int:
        """Return the meta_bg descriptor block that lies in a group, 0 for none."""
        if self.first_meta_bg is None:
            return 0
        per_block = self.shape.block_size // self.shape.desc_size
        table, index = divmod(group, per_block)
        if table < self.first_meta_bg or index not in (0, 1, per_block - 1):
            return 0
        if not self.has_super(group):
            return self.group_first(group)
        return self.super_block(group) + 1

    def descriptors_behind(self, group: int) -> bool:
        """Tell whether a group's superblock is followed by descriptors that do not belong to meta_bg."""
        if not self.has_super(group):
            return False
        table = group // (self.shape.block_size // self.shape.desc_size)
        return self.first_meta_bg is None or table < self.first_meta_bg

    def fixed(self, group: int) -> int:
        """Blocks at a group's beginning that superblock and descriptors take."""
        end = first = self.group_first(group)
        if self.has_super(group):
            end = self.super_block(group) + 1
            if self.descriptors_behind(group):
                end += self.behind_super + self.reserved
        if self.descriptors_at(group):
            end += 1
        return end - first

    def _place(self) -> None:
        """Find a place for bitmaps and inode tables: in each group, or those of a flex group together."""
        flex = self.shape.flex
        runs = [(self.group_first(g), n) for g in range(self.groups) if (n := self.fixed(g))]
        for leader in range(0, self.groups, flex):
            members = range(leader, min(leader + flex, self.groups))
            cursor = self.group_first(leader) + self.fixed(leader)
            for numbers, count in ((self.block_bitmaps, 1), (self.inode_bitmaps, 1), (self.tables, self.table_blocks)):
                for group in members:
                    cursor = self._find(cursor, count)
                    numbers[group] = cursor
                    if runs[-1][0] + runs[-1][1] == cursor:
                        runs[-1] = (runs[-1][0], runs[-1][1] + count)
                    else:
                        runs.append((cursor, count))
                    cursor += count
            end = self.blocks if flex > 1 else self.group_first(leader) + self.group_size(leader)
            if cursor > end:
                raise DoesNotFit
        if runs[0][0] + runs[0][1] > self.blocks:
            raise DoesNotFit
        runs.sort()
        last = self.groups - 1
        if self.group_first(last) + self.fixed(last) > self.blocks:
            raise DoesNotFit
        for start, count in runs:
            if self.taken and self.taken[-1][0] + self.taken[-1][1] == start:
                self.taken[-1] = (self.taken[-1][0], self.taken[-1][1] + count)
            else:
                self.taken.append((start, count))

    def _find(self, cursor: int, count: int) -> int:
        """Return the first block from ``cursor`` on where ``count`` blocks follow that no superblock lies in."""
        per = self.shape.blocks_per_group
        while True:
            if cursor >= self.blocks:
                raise DoesNotFit  # with a superblock in every group, a table that is larger than one has no place
            group, skip = divmod(cursor - self.shape.first_data_block, per)
            fixed = self.fixed(group)
            if skip < fixed:
                cursor += fixed - skip
                continue
            last = (cursor + count - 1 - self.shape.first_data_block) // per
            for g in range(group + 1, last + 1):
                if fixed := self.fixed(g):
                    cursor = self.group_first(g) + fixed
                    break
            else:
                return cursor

    def free_runs(self) -> Iterator[tuple[int, int]]:
        """Yield (start, count) in blocks of what is no metadata, in whole clusters, ascending."""
        ratio = self.shape.ratio
        at = self.shape.first_data_block
        for start, count in (*self.taken, (self.blocks, 0)):
            begin, end = -(-at // ratio) * ratio, start // ratio * ratio
            if end > begin:
                yield begin, end - begin
            at = start + count

    @property
    def end_of_metadata(self) -> int:
        """The block behind the last one of metadata."""
        start, count = self.taken[-1]
        return start + count

    def floor(self) -> int:
        """The least blocks that a volume of so many groups should have."""
        last = self.groups - 1
        own = self.fixed(last)
        if self.shape.flex == 1:
            own += 2 + self.table_blocks
        floor = max(self.group_first(last) + own + LEAST_IN_LAST_GROUP, self.end_of_metadata)
        return -(-floor // self.shape.ratio) * self.shape.ratio

    def shrink(self, blocks: int) -> None:
        """Cut free blocks off the last group; see :meth:`floor`."""
        self.free_blocks -= self.blocks - blocks
        self.blocks = blocks


def fitted(shape: Shape, blocks: int, per_group: int) -> Layout:
    """Return the layout of a volume of at most ``blocks`` blocks: a last group that is too short is left out.

    DoesNotFit.
    """
    blocks -= blocks % shape.ratio
    while True:
        if blocks <= shape.first_data_block:
            raise DoesNotFit
        groups = shape.groups_of(blocks)
        before = shape.first_data_block + (groups - 1) * shape.blocks_per_group
        try:
            layout = Layout(shape, blocks, per_group)
        except DoesNotFit:
            if groups == 1:
                raise
        else:
            if groups == 1 or blocks >= layout.floor() or layout.group_size(groups - 1) == shape.blocks_per_group:
                return layout
        blocks = before


@dataclass(slots=True, frozen=True)
class Inodes:
    """How many inodes a volume must have: ``count`` numbers (from 1 on), ``density`` a group (None: as few as do)."""

    count: int
    density: int | None = None

    def per_group(self, shape: Shape, groups: int) -> int | None:
        """Inodes a group in a volume of so many groups; None when that many are not possible."""
        step = shape.inode_step
        least = -(-max(-(-self.count // groups), 16) // step) * step
        if self.density is not None:
            return self.density if self.density >= least else None
        return least if least <= 8 * shape.block_size else None


def smallest(shape: Shape, need: int, inodes: Inodes) -> Layout:
    """Return the smallest layout with ``need`` free blocks (in whole clusters) and the inodes wanted.

    Beyond, it has a few clusters for each place where metadata interrupts the free space: a file that lies across has
    one extent more. DoesNotFit.
    """
    groups = max(1, -(-need // shape.blocks_per_group), -(-inodes.count // (inodes.density or 8 * shape.block_size)))
    limit = (1 << 48 if shape.wide else 1 << 32) - 1
    most = 64 * groups + 64  # what does not fit then has too much metadata in each group ever to fit
    while True:
        full = shape.first_data_block + groups * shape.blocks_per_group
        if full - shape.blocks_per_group > limit or groups > most:
            raise DoesNotFit
        per_group = inodes.per_group(shape, groups)
        if per_group is None:
            groups += 1
            continue
        try:
            layout = Layout(shape, full, per_group)
        except DoesNotFit:
            groups += 1
            continue
        wanted = need + _FOR_A_BREAK * shape.ratio * sum(1 for _ in layout.free_runs())
        if layout.free_blocks >= wanted:
            break
        groups += max(1, (wanted - layout.free_blocks) // shape.blocks_per_group)
    spare = (layout.free_blocks - wanted) // shape.ratio * shape.ratio
    blocks = max(full - spare, min(layout.floor(), full))
    return Layout(shape, blocks - blocks % shape.ratio, per_group)
