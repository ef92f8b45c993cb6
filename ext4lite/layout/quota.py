"""Quota files of format "vfsv1" (source: Documentation/filesystems/quota.rst; quotaio_v2.h and quotaio_tree.h of
e2fsprogs describe it): blocks of 1 KiB, a header, a tree of references four levels deep, leaves.
"""

from __future__ import annotations

from construct import Array, Int16ul, Int32ul, Int64ul, Struct

QUOTA_HEADER = Struct(
    "h_magic" / Int32ul,
    "h_version" / Int32ul,
    "i_block_grace" / Int32ul,
    "i_inode_grace" / Int32ul,
    "i_flags" / Int32ul,
    "i_blocks" / Int32ul,
    "i_free_block" / Int32ul,
    "i_free_entry" / Int32ul,
)
"""Begins block 0: the file's kind, grace times in seconds, blocks in use, first block of the list of free ones, first
leaf of the list of those with room."""

QUOTA_NODE = Struct("n_below" / Array(256, Int32ul))
"""A block of the tree: a reference for each value of one byte of the id, the highest byte first."""

QUOTA_LEAF = Struct(
    "l_next_free" / Int32ul,
    "l_prev_free" / Int32ul,
    "l_entries" / Int16ul,
    "l_pad1" / Int16ul,
    "l_pad2" / Int32ul,
)
"""Begins a leaf, before 14 entries: its neighbours in the list that it is in, and how many entries it has."""

QUOTA_ENTRY = Struct(
    "q_id" / Int32ul,
    "q_pad" / Int32ul,
    "q_inode_hard" / Int64ul,
    "q_inode_soft" / Int64ul,
    "q_inodes" / Int64ul,
    "q_block_hard" / Int64ul,
    "q_block_soft" / Int64ul,
    "q_space" / Int64ul,
    "q_block_time" / Int64ul,
    "q_inode_time" / Int64ul,
)
"""What an owner may have and has: limits of blocks in KiB, space in bytes. All zeros: no entry."""
