"""Extended attributes (source: Documentation/filesystems/ext4/attributes.rst)."""

from __future__ import annotations

from construct import Array, Bytes, Int8ul, Int16ul, Int32ul, Struct, this

XATTR_IBODY_HEADER = Struct(
    "h_magic" / Int32ul,
)
"""``struct ext4_xattr_ibody_header``: begins the attributes behind the inode's extra fields."""

XATTR_HEADER = Struct(
    "h_magic" / Int32ul,
    "h_refcount" / Int32ul,
    "h_blocks" / Int32ul,
    "h_hash" / Int32ul,
    "h_checksum" / Int32ul,
    "h_reserved" / Array(3, Int32ul),
)
"""``struct ext4_xattr_header``: begins an attribute block."""

XATTR_ENTRY_HEADER = Struct(
    "e_name_len" / Int8ul,
    "e_name_index" / Int8ul,
    "e_value_offs" / Int16ul,
    "e_value_inum" / Int32ul,
    "e_value_size" / Int32ul,
    "e_hash" / Int32ul,
)
"""The fixed part of ``struct ext4_xattr_entry``.

Offsets count from the block's start, in the inode from its first entry.
"""

XATTR_ENTRY = Struct(*XATTR_ENTRY_HEADER.subcons, "e_name" / Bytes(this.e_name_len))
"""``struct ext4_xattr_entry`` with its name (the prefix is ``e_name_index``); padded to a multiple of 4."""
