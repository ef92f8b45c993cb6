"""The journal's structures, big-endian (source: Documentation/filesystems/ext4/journal.rst)."""

from __future__ import annotations

from construct import Bytes, Int8ub, Int32ub, Struct

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
