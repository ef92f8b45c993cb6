"""Block group descriptors (source: Documentation/filesystems/ext4/group_descr.rst)."""

from __future__ import annotations

from construct import Int16ul, Int32ul, Struct

GROUP_DESC_32 = Struct(
    "bg_block_bitmap_lo" / Int32ul,
    "bg_inode_bitmap_lo" / Int32ul,
    "bg_inode_table_lo" / Int32ul,
    "bg_free_blocks_count_lo" / Int16ul,
    "bg_free_inodes_count_lo" / Int16ul,
    "bg_used_dirs_count_lo" / Int16ul,
    "bg_flags" / Int16ul,
    "bg_exclude_bitmap_lo" / Int32ul,
    "bg_block_bitmap_csum_lo" / Int16ul,
    "bg_inode_bitmap_csum_lo" / Int16ul,
    "bg_itable_unused_lo" / Int16ul,
    "bg_checksum" / Int16ul,
)
"""The first 32 bytes of ``struct ext4_group_desc``: all there is without the 64bit feature."""

GROUP_DESC = Struct(
    *GROUP_DESC_32.subcons,
    "bg_block_bitmap_hi" / Int32ul,
    "bg_inode_bitmap_hi" / Int32ul,
    "bg_inode_table_hi" / Int32ul,
    "bg_free_blocks_count_hi" / Int16ul,
    "bg_free_inodes_count_hi" / Int16ul,
    "bg_used_dirs_count_hi" / Int16ul,
    "bg_itable_unused_hi" / Int16ul,
    "bg_exclude_bitmap_hi" / Int32ul,
    "bg_block_bitmap_csum_hi" / Int16ul,
    "bg_inode_bitmap_csum_hi" / Int16ul,
    "bg_reserved" / Int32ul,
)
"""``struct ext4_group_desc`` of 64 bytes.

The size on disk is ``s_desc_size`` with 64bit, else 32; more bytes than 64 are padding.
"""
