"""Directories, linear and hashed (source: Documentation/filesystems/ext4/directory.rst)."""

from __future__ import annotations

from construct import Array, Bytes, Int8ul, Int16ul, Int32ul, Struct, this

DIR_ENTRY_HEADER = Struct(
    "inode" / Int32ul,
    "rec_len" / Int16ul,
    "name_len" / Int8ul,
    "file_type" / Int8ul,
)
"""The fixed part of ``struct ext4_dir_entry_2``.

Without filetype, ``file_type`` is the name length's high byte (always 0).
"""

DIR_ENTRY = Struct(*DIR_ENTRY_HEADER.subcons, "name" / Bytes(this.name_len))
"""``struct ext4_dir_entry_2`` with its name; ``rec_len`` (a multiple of 4) leads to the next."""

DIR_ENTRY_TAIL = Struct(
    "det_reserved_zero1" / Int32ul,
    "det_rec_len" / Int16ul,
    "det_reserved_zero2" / Int8ul,
    "det_reserved_ft" / Int8ul,
    "det_checksum" / Int32ul,
)
"""``struct ext4_dir_entry_tail``: the fake last entry that holds a leaf's checksum (metadata_csum)."""

DX_ROOT_INFO = Struct(
    "reserved_zero" / Int32ul,
    "hash_version" / Int8ul,
    "info_length" / Int8ul,
    "indirect_levels" / Int8ul,
    "unused_flags" / Int8ul,
)
"""``struct dx_root_info``: at byte 24 of an indexed directory's first block, behind ``.`` and ``..``."""

DX_COUNTLIMIT = Struct(
    "limit" / Int16ul,
    "count" / Int16ul,
)
"""``struct dx_countlimit``: lies in the hash slot of the first entry."""

DX_ENTRY = Struct(
    "hash" / Int32ul,
    "block" / Int32ul,
)
"""``struct dx_entry``: names whose hash is at least ``hash`` are at or under directory block ``block``."""

DX_TAIL = Struct(
    "dt_reserved" / Int32ul,
    "dt_checksum" / Int32ul,
)
"""``struct dx_tail``: follows ``limit`` entries (metadata_csum)."""

DX_ROOT = Struct(
    "dot" / Struct(*DIR_ENTRY_HEADER.subcons, "name" / Bytes(4)),
    "dotdot" / Struct(*DIR_ENTRY_HEADER.subcons, "name" / Bytes(4)),
    "dx_root_info" / DX_ROOT_INFO,
    "countlimit" / DX_COUNTLIMIT,
    "block" / Int32ul,
    "entries" / Array(this.countlimit.count - 1, DX_ENTRY),
)
"""``struct dx_root``: the first block of an indexed directory (read as linear, two entries that fill it)."""

DX_NODE = Struct(
    "fake" / DIR_ENTRY_HEADER,
    "countlimit" / DX_COUNTLIMIT,
    "block" / Int32ul,
    "entries" / Array(this.countlimit.count - 1, DX_ENTRY),
)
"""``struct dx_node``: an inner block of the index, disguised as one empty directory entry."""
