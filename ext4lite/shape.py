"""The geometry of an existing volume, and what it becomes with another number of blocks.

Block size, blocks and inodes a group, and the size of descriptors stay; groups come and go at the end. Tables of
descriptors lie at the beginning of every group that has a copy of the superblock, and grow into the blocks that the
resize inode keeps for them (source: Documentation/filesystems/ext4/blockgroup.rst, special_inodes.rst).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ext4lite.errors import Unsupported
from ext4lite.features import LAYOUT
from ext4lite.geometry import has_sparse_super
from ext4lite.layout import constants as c
from ext4lite.super import Super

LEAST_IN_LAST_GROUP = 50
"""Blocks that a last group must have beside its metadata, as in mke2fs and resize2fs; a shorter one is left out."""


def require_resizable(sb: Super) -> None:
    """Raise Unsupported, naming the features, unless the layout of such a volume can be changed."""
    if names := LAYOUT.beyond(sb):
        raise Unsupported(f"the layout of a volume with {', '.join(names)} cannot be changed", where=sb.where)
    if sb.compat & c.COMPAT_HAS_JOURNAL and not sb.raw.s_journal_inum:
        raise Unsupported("the volume's journal is on another device", where=sb.where)


def has_stable_inodes(sb: Super) -> bool:
    """Tell whether inodes must keep their numbers."""
    return bool(sb.compat & c.COMPAT_STABLE_INODES)


def has_resize_inode(sb: Super) -> bool:
    """Tell whether inode 7 keeps blocks for descriptors to come."""
    return bool(sb.compat & c.COMPAT_RESIZE_INODE)


@dataclass(slots=True, frozen=True)
class Shape:
    """Geometry of a volume; counts in blocks unless the name says otherwise."""

    blocks: int
    groups: int
    first: int
    per_group: int
    block_size: int
    desc_size: int
    inodes_per_group: int
    table: int
    """Blocks of a group's inode table."""
    gdt: int
    """Blocks of descriptors behind each copy of the superblock."""
    reserved: int
    """Blocks kept behind them (resize_inode)."""
    flex: int
    """Groups whose bitmaps and tables lie together; 1 when each has its own."""
    sparse: bool
    movable: bool
    """Whether bitmaps and tables may lie outside their group (flex_bg)."""

    @property
    def inodes(self) -> int:
        """All inodes of the volume."""
        return self.groups * self.inodes_per_group

    @property
    def size(self) -> int:
        """Bytes of the volume."""
        return self.blocks * self.block_size

    def start(self, group: int) -> int:
        """First block of a group."""
        return self.first + group * self.per_group

    def end(self, group: int) -> int:
        """Block behind a group's last."""
        return min(self.start(group) + self.per_group, self.blocks)

    def has_super(self, group: int) -> bool:
        """Tell whether a group begins with a copy of the superblock."""
        return has_sparse_super(group) if self.sparse else True

    def base(self, group: int) -> int:
        """Blocks at a group's beginning that superblock and descriptors take, with those kept for more of them."""
        return 1 + self.gdt + self.reserved if self.has_super(group) else 0

    def backups(self) -> Iterator[int]:
        """Yield the groups, but the first, that begin with a copy of the superblock."""
        return (group for group in range(1, self.groups) if self.has_super(group))

    def supers(self) -> int:
        """Return how many copies of the superblock there are, the first included."""
        return 1 + sum(1 for _ in self.backups())

    def overhead(self) -> int:
        """Return the blocks of all metadata but the journal, as the kernel counts them."""
        return self.first + self.supers() * (1 + self.gdt + self.reserved) + self.groups * (2 + self.table)


def shape_of(sb: Super) -> Shape:
    """Return the geometry of a volume."""
    raw = sb.raw
    per_block = sb.block_size // sb.desc_size
    flex = bool(sb.incompat & c.INCOMPAT_FLEX_BG)
    return Shape(
        sb.blocks,
        sb.groups,
        sb.first_data_block,
        raw.s_blocks_per_group,
        sb.block_size,
        sb.desc_size,
        raw.s_inodes_per_group,
        -(-raw.s_inodes_per_group * sb.inode_size // sb.block_size),
        -(-sb.groups // per_block),
        raw.s_reserved_gdt_blocks,
        1 << min(raw.s_log_groups_per_flex, 31) if flex else 1,
        bool(sb.ro_compat & c.RO_SPARSE_SUPER),
        flex,
    )


def reshaped(old: Shape, blocks: int, *, keeps_room: bool) -> Shape:
    """Return the geometry with ``blocks`` blocks, or a few less: a last group that would be too short is left out.

    ``keeps_room`` (resize_inode): blocks kept for descriptors become descriptors and the other way round.
    """
    per_block = old.block_size // old.desc_size
    while True:
        groups = max(1, -(-(blocks - old.first) // old.per_group))
        gdt = -(-groups // per_block)
        reserved = old.reserved
        if keeps_room:
            reserved = max(0, min(old.reserved + old.gdt - gdt, old.block_size // 4))
        new = replace(old, blocks=blocks, groups=groups, gdt=gdt, reserved=reserved)
        last = groups - 1
        rest = (blocks - old.first) % old.per_group
        if groups == 1 or not rest or rest >= new.base(last) + 2 + new.table + LEAST_IN_LAST_GROUP:
            return new
        blocks -= rest


def require_possible(new: Shape, *, wide: bool, where: str) -> None:
    """Raise Unsupported for a geometry that ext4 cannot have. ``wide``: block numbers have 64 bits."""
    if not wide and new.blocks > 0xFFFFFFFF:
        what = f"without the feature 64bit a volume has at most {0xFFFFFFFF * new.block_size} bytes"
        raise Unsupported(what, where=where)
    if new.inodes > 0xFFFFFFFF:
        most = 0xFFFFFFFF // new.inodes_per_group * new.per_group * new.block_size
        what = "the volume would have more inodes than numbers for them"
        raise Unsupported(what, where=where, hint=f"with {new.inodes_per_group} a group at most {most} bytes")
    inside = 0 if new.movable else 2 + new.table
    if 1 + new.gdt + new.reserved + inside + LEAST_IN_LAST_GROUP > new.per_group:
        raise Unsupported("the descriptors of so many groups do not fit into a group", where=where)
