"""The extent tree (source: Documentation/filesystems/ext4/ifork.rst)."""

from __future__ import annotations

from construct import Int16ul, Int32ul, Struct

EXTENT_HEADER = Struct(
    "eh_magic" / Int16ul,
    "eh_entries" / Int16ul,
    "eh_max" / Int16ul,
    "eh_depth" / Int16ul,
    "eh_generation" / Int32ul,
)
"""``struct ext4_extent_header``: begins ``i_block`` and every block of an extent tree."""

EXTENT_IDX = Struct(
    "ei_block" / Int32ul,
    "ei_leaf_lo" / Int32ul,
    "ei_leaf_hi" / Int16ul,
    "ei_unused" / Int16ul,
)
"""``struct ext4_extent_idx``: an entry of an inner node."""

EXTENT = Struct(
    "ee_block" / Int32ul,
    "ee_len" / Int16ul,
    "ee_start_hi" / Int16ul,
    "ee_start_lo" / Int32ul,
)
"""``struct ext4_extent``: ``ee_len`` above 32768 means unwritten, of length ``ee_len - 32768``."""

EXTENT_TAIL = Struct(
    "et_checksum" / Int32ul,
)
"""``struct ext4_extent_tail``: follows ``eh_max`` entries in a tree block."""
