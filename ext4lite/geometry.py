"""Where things lie in a volume that ext4lite makes: groups, flex groups, metadata, free runs (the profile of ``mkfs``).

Blocks are 4 KiB, groups have 32768 of them, and the bitmaps and inode tables of 16 groups lie together at the beginning
of the first of them (flex_bg), so that data runs on through the other 15, interrupted only by the backup superblocks
(sparse_super).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ext4lite.errors import Unsupported

BLOCK = 4096
BLOCKS_PER_GROUP = 32768
INODE_SIZE = 256
INODES_PER_BLOCK = BLOCK // INODE_SIZE
DESC_SIZE = 64
FLEX = 16
MIN_SIZE = 4 << 20
MAX_SIZE = 16 << 40
MIN_JOURNAL_BLOCKS = 1024
MAX_DEFAULT_JOURNAL_BLOCKS = 16384
_GIB = 1 << 30


def is_power_of(value: int, base: int) -> bool:
    """Tell whether ``value`` is ``base`` to a power of at least 1."""
    while value > 1 and value % base == 0:
        value //= base
    return value == 1


def has_sparse_super(group: int) -> bool:
    """Tell whether a group holds a copy of superblock and descriptors under sparse_super.

    0, 1, and the powers of 3, 5 and 7.
    """
    return group <= 1 or any(is_power_of(group, base) for base in (3, 5, 7))


def default_journal_blocks(blocks: int) -> int:
    """Journal size in blocks: mke2fs's steps, but never above 64 MiB, since a volume here has a single user.

    0 when it is too small.
    """
    for limit, journal in ((2048, 0), (32768, 1024), (262144, 4096), (524288, 8192)):
        if blocks < limit:
            return journal
    return MAX_DEFAULT_JOURNAL_BLOCKS


def bytes_per_inode(size: int) -> int:
    """mke2fs's inode ratio by volume size: dense in small volumes, sparse in huge ones (32-bit inode numbers)."""
    if size < 512 << 20:
        return 4096
    if size < 4096 * _GIB:
        return 16384
    return 32768 if size < MAX_SIZE else 65536


@dataclass(slots=True, frozen=True)
class Geometry:
    """The plan of a volume; all counts in blocks unless said. Made by :func:`plan`."""

    blocks: int
    groups: int
    inodes_per_group: int
    itable_blocks: int
    gdt_blocks: int
    journal_blocks: int

    @property
    def inodes(self) -> int:
        """All inodes of the volume."""
        return self.inodes_per_group * self.groups

    def first_block(self, group: int) -> int:
        """First block of a group."""
        return group * BLOCKS_PER_GROUP

    def group_size(self, group: int) -> int:
        """Blocks in a group: the last one may be short."""
        return min(BLOCKS_PER_GROUP, self.blocks - group * BLOCKS_PER_GROUP)

    def super_blocks(self, group: int) -> int:
        """Blocks at the group's beginning that hold superblock and descriptors, 0 where there is no copy."""
        return 1 + self.gdt_blocks if has_sparse_super(group) else 0

    def flex_members(self, leader: int) -> int:
        """Groups whose metadata lies in flex leader ``leader`` (a multiple of 16)."""
        return min(FLEX, self.groups - leader)

    def meta_blocks(self, group: int) -> int:
        """Bitmap and inode table blocks that lie in ``group``: those of its whole flex group, or none."""
        return 0 if group % FLEX else self.flex_members(group) * (2 + self.itable_blocks)

    def _meta_start(self, group: int) -> tuple[int, int, int]:
        leader = group - group % FLEX
        return self.first_block(leader) + self.super_blocks(leader), group - leader, self.flex_members(leader)

    def block_bitmap(self, group: int) -> int:
        """Block number of the group's block bitmap."""
        start, index, _ = self._meta_start(group)
        return start + index

    def inode_bitmap(self, group: int) -> int:
        """Block number of the group's inode bitmap."""
        start, index, members = self._meta_start(group)
        return start + members + index

    def inode_table(self, group: int) -> int:
        """First block of the group's inode table."""
        start, index, members = self._meta_start(group)
        return start + 2 * members + index * self.itable_blocks

    def overhead(self, group: int) -> int:
        """Metadata blocks in a group; they lie at its beginning."""
        return self.super_blocks(group) + self.meta_blocks(group)

    def free_runs(self) -> Iterator[tuple[int, int]]:
        """Yield (start, count) of the blocks that are not metadata, ascending and joined across group borders."""
        start = end = 0
        for group in range(self.groups):
            first = self.first_block(group)
            taken = self.overhead(group)
            if taken or first != end:
                if end > start:
                    yield start, end - start
                start = first + taken
            end = first + self.group_size(group)
        if end > start:
            yield start, end - start


def plan(size: int, journal_size: int | None = None) -> Geometry:
    """Plan a volume of ``size`` bytes with a journal of ``journal_size`` bytes (None: by the volume's size, 0: none).

    A last group too short for its own metadata and 50 blocks more is left out, as mke2fs does.
    Raises Unsupported when the size is out of range or the journal does not fit.
    """
    if not MIN_SIZE <= size <= MAX_SIZE:
        raise Unsupported(f"a volume of {size} bytes cannot be made", hint="sizes go from 4M to 16T")
    blocks = size // BLOCK
    geometry = _plan_blocks(blocks, size)
    while geometry.groups > 1:
        last = geometry.groups - 1
        if geometry.group_size(last) >= geometry.overhead(last) + 50:
            break
        geometry = _plan_blocks(geometry.first_block(last), size)
    journal = default_journal_blocks(geometry.blocks) if journal_size is None else -(-journal_size // BLOCK)
    free = sum(geometry.group_size(g) - geometry.overhead(g) for g in range(geometry.groups))
    if journal and journal < MIN_JOURNAL_BLOCKS:
        raise Unsupported(f"a journal of {journal * BLOCK} bytes is too small", hint="at least 4M, or 0 for none")
    if journal > max(free - 128, 0):
        raise Unsupported(f"a journal of {journal * BLOCK} bytes does not fit", hint=f"{free * BLOCK} bytes are free")
    return Geometry(
        geometry.blocks,
        geometry.groups,
        geometry.inodes_per_group,
        geometry.itable_blocks,
        geometry.gdt_blocks,
        journal,
    )


def _plan_blocks(blocks: int, size: int) -> Geometry:
    groups = -(-blocks // BLOCKS_PER_GROUP)
    wanted = max(blocks * BLOCK // bytes_per_inode(size) // groups, INODES_PER_BLOCK)
    itable = min(-(-wanted // INODES_PER_BLOCK), BLOCKS_PER_GROUP // INODES_PER_BLOCK)
    return Geometry(blocks, groups, itable * INODES_PER_BLOCK, itable, -(-groups * DESC_SIZE // BLOCK), 0)
