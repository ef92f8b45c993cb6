"""The journal's structures, big-endian (source: Documentation/filesystems/ext4/journal.rst).

Fast commits alone are little-endian (source: the same, "Fast Commits").
"""

from __future__ import annotations

from construct import Array, Bytes, Int8ub, Int16ub, Int16ul, Int32ub, Int32ul, Int64ub, Struct

JOURNAL_HEADER = Struct(
    "h_magic" / Int32ub,
    "h_blocktype" / Int32ub,
    "h_sequence" / Int32ub,
)
"""``struct journal_header_s``: begins every block of the journal's own."""

JOURNAL_SUPERBLOCK = Struct(
    "h_magic" / Int32ub,
    "h_blocktype" / Int32ub,
    "h_sequence" / Int32ub,
    "s_blocksize" / Int32ub,
    "s_maxlen" / Int32ub,
    "s_first" / Int32ub,
    "s_sequence" / Int32ub,
    "s_start" / Int32ub,
    "s_errno" / Int32ub,
    "s_feature_compat" / Int32ub,
    "s_feature_incompat" / Int32ub,
    "s_feature_ro_compat" / Int32ub,
    "s_uuid" / Bytes(16),
    "s_nr_users" / Int32ub,
    "s_dynsuper" / Int32ub,
    "s_max_transaction" / Int32ub,
    "s_max_trans_data" / Int32ub,
    "s_checksum_type" / Int8ub,
    "s_padding2" / Bytes(3),
    "s_num_fc_blks" / Int32ub,
    "s_head" / Int32ub,
    "s_padding" / Bytes(160),
    "s_checksum" / Int32ub,
    "s_users" / Bytes(768),
)
"""``struct journal_superblock_s``, 1024 bytes at the journal's first block. Clean is ``s_start == 0``."""

JOURNAL_TAG3 = Struct(
    "t_blocknr" / Int32ub,
    "t_flags" / Int32ub,
    "t_blocknr_high" / Int32ub,
    "t_checksum" / Int32ub,
)
"""``struct journal_block_tag3_s``: the tag of a descriptor block with csum v3. A UUID of 16 bytes may follow."""

JOURNAL_TAG = Struct(
    "t_blocknr" / Int32ub,
    "t_checksum" / Int16ub,
    "t_flags" / Int16ub,
)
"""``struct journal_block_tag_s`` without its last field: ``t_blocknr_high`` follows with 64bit, then two bytes of
padding with csum v2, then perhaps a UUID."""

JOURNAL_REVOKE_HEADER = Struct(
    "h_magic" / Int32ub,
    "h_blocktype" / Int32ub,
    "h_sequence" / Int32ub,
    "r_count" / Int32ub,
)
"""``struct jbd2_journal_revoke_header_s``: ``r_count`` counts bytes in use, these 16 included."""

JOURNAL_COMMIT = Struct(
    "h_magic" / Int32ub,
    "h_blocktype" / Int32ub,
    "h_sequence" / Int32ub,
    "h_chksum_type" / Int8ub,
    "h_chksum_size" / Int8ub,
    "h_padding" / Bytes(2),
    "h_chksum" / Array(8, Int32ub),
    "h_commit_sec" / Int64ub,
    "h_commit_nsec" / Int32ub,
)
"""``struct commit_header``: ends a transaction."""

FC_TAG = Struct(
    "fc_tag" / Int16ul,
    "fc_len" / Int16ul,
)
"""``struct ext4_fc_tl``: begins every record of a fast commit; ``fc_len`` bytes follow."""

FC_HEAD = Struct("fc_features" / Int32ul, "fc_tid" / Int32ul)
"""``struct ext4_fc_head``: begins the fast commits of a transaction."""

FC_TAIL = Struct("fc_tid" / Int32ul, "fc_crc" / Int32ul)
"""``struct ext4_fc_tail``: ends one fast commit; the checksum covers everything since the last one up to ``fc_tid``."""

FC_ADD_RANGE = Struct("fc_ino" / Int32ul, "fc_ex" / Bytes(12))
"""``struct ext4_fc_add_range``: an inode's extent, in the form of the extent tree."""

FC_DEL_RANGE = Struct("fc_ino" / Int32ul, "fc_lblk" / Int32ul, "fc_len" / Int32ul)
"""``struct ext4_fc_del_range``: blocks that an inode lost."""

FC_DENTRY = Struct("fc_parent_ino" / Int32ul, "fc_ino" / Int32ul)
"""``struct ext4_fc_dentry_info``: a name that came or went; the name follows."""
