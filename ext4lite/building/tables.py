"""Bitmaps, group descriptors and superblocks of a new volume."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import Struct

from ext4lite.building.attributes import EXTRA_ISIZE
from ext4lite.building.inode_tables import GroupInodes
from ext4lite.checksum import crc32c, group_desc_checksum, superblock_checksum
from ext4lite.features import PROFILE
from ext4lite.geometry import BLOCK, BLOCKS_PER_GROUP, DESC_SIZE, FLEX, INODE_SIZE, Geometry, has_sparse_super
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import GroupDesc, SuperBlock

_CSUM = Struct("<H")


@dataclass(slots=True, frozen=True)
class Identity:
    """What a volume says about itself: ``time`` in seconds, ``label`` of at most 16 bytes."""

    uuid: bytes
    label: bytes
    time: int
    hash_seed: tuple[int, ...]


class Tables:
    """Writes what describes the groups. ``put`` writes bytes at a byte of the image.

    ``journal_backup`` is what the superblock keeps of the journal's inode (17 words, zeros without journal).
    """

    def __init__(
        self,
        geometry: Geometry,
        identity: Identity,
        *,
        seed: int,
        journal_backup: tuple[int, ...],
        put: Callable[[bytes, int], None],
    ) -> None:
        self._geometry = geometry
        self._identity = identity
        self._seed = seed
        self._journal_backup = journal_backup
        self._put = put

    def write(self, inodes: dict[int, GroupInodes], log: Sequence[Sequence[int]]) -> None:
        """Write bitmaps, descriptors and superblocks, with their copies.

        ``inodes`` says which groups have inodes, ``log`` are runs of blocks (start, count, 1 taken or 0 freed).
        """
        geo = self._geometry
        per = geo.inodes_per_group
        bitmaps = self._block_bitmaps(log)
        free_blocks_total = free_inodes_total = 0
        descriptors = []
        last = geo.groups - 1
        for group in range(geo.groups):
            size = geo.group_size(group)
            flags = c.BG_INODE_ZEROED
            block_checksum = inode_checksum = 0
            bitmap = bitmaps.get(group)
            if bitmap is None and group != last and group % FLEX:
                flags |= c.BG_BLOCK_UNINIT
                free_blocks = size - geo.overhead(group)
            else:
                raw, free_blocks = self._block_bitmap(group, bitmap)
                block_checksum = crc32c(self._seed, raw)
                self._put(raw, geo.block_bitmap(group) * BLOCK)
            taken = inodes.get(group)
            if taken is None:
                flags |= c.BG_INODE_UNINIT
                free_inodes = unused = per
            else:
                raw, free_inodes, unused = taken.bitmap, taken.free, taken.unused
                inode_checksum = crc32c(self._seed, raw[: per // 8])
                self._put(raw, geo.inode_bitmap(group) * BLOCK)
            free_blocks_total += free_blocks
            free_inodes_total += free_inodes
            descriptors.append(
                self._descriptor(
                    group,
                    flags=flags,
                    free_blocks=free_blocks,
                    free_inodes=free_inodes,
                    unused=unused,
                    directories=0 if taken is None else taken.directories,
                    block_checksum=block_checksum,
                    inode_checksum=inode_checksum,
                )
            )
        self._write_superblocks(b"".join(descriptors), free_blocks_total, free_inodes_total)

    def _block_bitmaps(self, log: Sequence[Sequence[int]]) -> dict[int, bytearray]:
        """Return the bitmaps of the groups with taken blocks, without the groups' own metadata."""
        bitmaps: dict[int, bytearray] = {}
        for start, count, used in log:
            at, end = start, start + count
            while at < end:
                group, bit = divmod(at, BLOCKS_PER_GROUP)
                run = min(end - at, BLOCKS_PER_GROUP - bit)
                _set_bits(bitmaps.setdefault(group, bytearray(BLOCK)), bit, run, bool(used))
                at += run
        return {group: bitmap for group, bitmap in bitmaps.items() if any(bitmap)}

    def _block_bitmap(self, group: int, bitmap: bytearray | None) -> tuple[bytes, int]:
        """Return the full bitmap of a group, its metadata and the padding marked, and the number of free blocks."""
        bitmap = bytearray(BLOCK) if bitmap is None else bitmap
        size = self._geometry.group_size(group)
        _set_bits(bitmap, 0, self._geometry.overhead(group), True)
        _set_bits(bitmap, size, BLOCKS_PER_GROUP - size, True)
        return bytes(bitmap), BLOCKS_PER_GROUP - int.from_bytes(bitmap, "little").bit_count()

    def _descriptor(
        self,
        group: int,
        *,
        flags: int,
        free_blocks: int,
        free_inodes: int,
        unused: int,
        directories: int,
        block_checksum: int,
        inode_checksum: int,
    ) -> bytes:
        geo = self._geometry
        block_bitmap, inode_bitmap, table = geo.block_bitmap(group), geo.inode_bitmap(group), geo.inode_table(group)
        raw = GroupDesc(
            bg_block_bitmap_lo=block_bitmap & 0xFFFFFFFF,
            bg_inode_bitmap_lo=inode_bitmap & 0xFFFFFFFF,
            bg_inode_table_lo=table & 0xFFFFFFFF,
            bg_free_blocks_count_lo=free_blocks & 0xFFFF,
            bg_free_inodes_count_lo=free_inodes & 0xFFFF,
            bg_used_dirs_count_lo=directories & 0xFFFF,
            bg_flags=flags,
            bg_block_bitmap_csum_lo=block_checksum & 0xFFFF,
            bg_inode_bitmap_csum_lo=inode_checksum & 0xFFFF,
            bg_itable_unused_lo=unused & 0xFFFF,
            bg_block_bitmap_hi=block_bitmap >> 32,
            bg_inode_bitmap_hi=inode_bitmap >> 32,
            bg_inode_table_hi=table >> 32,
            bg_free_blocks_count_hi=free_blocks >> 16,
            bg_free_inodes_count_hi=free_inodes >> 16,
            bg_used_dirs_count_hi=directories >> 16,
            bg_itable_unused_hi=unused >> 16,
            bg_block_bitmap_csum_hi=block_checksum >> 16,
            bg_inode_bitmap_csum_hi=inode_checksum >> 16,
        ).pack()
        checksum = group_desc_checksum(self._seed, group, raw)
        return raw[: GroupDesc.OFFSET_bg_checksum] + _CSUM.pack(checksum) + raw[GroupDesc.OFFSET_bg_checksum + 2 :]

    def _write_superblocks(self, table: bytes, free_blocks: int, free_inodes: int) -> None:
        geo = self._geometry
        overhead = sum(geo.overhead(g) for g in range(geo.groups)) + geo.journal_blocks
        journal = bool(geo.journal_blocks)
        sb = SuperBlock(
            s_inodes_count=geo.inodes,
            s_blocks_count_lo=geo.blocks & 0xFFFFFFFF,
            s_blocks_count_hi=geo.blocks >> 32,
            s_free_blocks_count_lo=free_blocks & 0xFFFFFFFF,
            s_free_blocks_count_hi=free_blocks >> 32,
            s_free_inodes_count=free_inodes,
            s_log_block_size=2,
            s_log_cluster_size=2,
            s_blocks_per_group=BLOCKS_PER_GROUP,
            s_clusters_per_group=BLOCKS_PER_GROUP,
            s_inodes_per_group=geo.inodes_per_group,
            s_wtime=self._identity.time & 0xFFFFFFFF,
            s_wtime_hi=self._identity.time >> 32 & 0xFF,
            s_mkfs_time=self._identity.time & 0xFFFFFFFF,
            s_mkfs_time_hi=self._identity.time >> 32 & 0xFF,
            s_lastcheck=self._identity.time & 0xFFFFFFFF,
            s_lastcheck_hi=self._identity.time >> 32 & 0xFF,
            s_max_mnt_count=0xFFFF,
            s_magic=c.MAGIC,
            s_state=c.STATE_VALID,
            s_errors=1,
            s_rev_level=1,
            s_first_ino=c.FIRST_INO,
            s_inode_size=INODE_SIZE,
            s_feature_compat=PROFILE.compat | (c.COMPAT_HAS_JOURNAL if journal else 0),
            s_feature_incompat=PROFILE.incompat,
            s_feature_ro_compat=PROFILE.ro_compat,
            s_uuid=self._identity.uuid,
            s_volume_name=self._identity.label,
            s_journal_inum=c.JOURNAL_INO if journal else 0,
            s_hash_seed=self._identity.hash_seed,
            s_def_hash_version=1,
            s_jnl_backup_type=1 if journal else 0,
            s_jnl_blocks=self._journal_backup,
            s_desc_size=DESC_SIZE,
            s_default_mount_opts=c.DEFM_XATTR_USER | c.DEFM_ACL,
            s_min_extra_isize=EXTRA_ISIZE,
            s_want_extra_isize=EXTRA_ISIZE,
            s_flags=c.FLAG_SIGNED_HASH,
            s_log_groups_per_flex=FLEX.bit_length() - 1,
            s_checksum_type=1,
            s_checksum_seed=self._seed,
            s_overhead_blocks=overhead & 0xFFFFFFFF,
        )
        for group in range(geo.groups):
            if not has_sparse_super(group):
                continue
            sb.s_block_group_nr = group & 0xFFFF
            sb.s_checksum = superblock_checksum(sb.pack())
            head = sb.pack()
            if group == 0:
                head = bytes(c.SUPERBLOCK_OFFSET) + head
            padding = BLOCK * (1 + geo.gdt_blocks) - BLOCK - len(table)
            self._put(head + bytes(BLOCK - len(head)) + table + bytes(padding), geo.first_block(group) * BLOCK)


def _set_bits(bitmap: bytearray, first: int, count: int, value: bool) -> None:
    """Set or clear ``count`` bits from bit ``first`` on."""
    if count <= 0:
        return
    last = first + count
    head, tail = -(-first // 8), last // 8
    head = min(head, tail)  # all within one byte
    mask = 0xFF if value else 0
    if tail > head:
        bitmap[head:tail] = bytes([mask]) * (tail - head)
    edges = list(range(first, min(head * 8, last))) + list(range(max(tail * 8, first), last))
    for bit in edges:
        if value:
            bitmap[bit >> 3] |= 1 << (bit & 7)
        else:
            bitmap[bit >> 3] &= ~(1 << (bit & 7)) & 0xFF
