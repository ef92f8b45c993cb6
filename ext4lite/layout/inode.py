"""The inode (source: Documentation/filesystems/ext4/inodes.rst); osd2 is Linux's."""

from __future__ import annotations

from construct import Bytes, Int16ul, Int32sl, Int32ul, Struct

INODE_SMALL = Struct(
    "i_mode" / Int16ul,
    "i_uid" / Int16ul,
    "i_size_lo" / Int32ul,
    "i_atime" / Int32sl,
    "i_ctime" / Int32sl,
    "i_mtime" / Int32sl,
    "i_dtime" / Int32ul,
    "i_gid" / Int16ul,
    "i_links_count" / Int16ul,
    "i_blocks_lo" / Int32ul,
    "i_flags" / Int32ul,
    "l_i_version" / Int32ul,
    "i_block" / Bytes(60),
    "i_generation" / Int32ul,
    "i_file_acl_lo" / Int32ul,
    "i_size_high" / Int32ul,
    "i_obso_faddr" / Int32ul,
    "l_i_blocks_high" / Int16ul,
    "l_i_file_acl_high" / Int16ul,
    "l_i_uid_high" / Int16ul,
    "l_i_gid_high" / Int16ul,
    "l_i_checksum_lo" / Int16ul,
    "l_i_reserved" / Int16ul,
)
"""The 128 bytes of ``struct ext4_inode`` that every image has. Times are signed seconds."""

INODE = Struct(
    *INODE_SMALL.subcons,
    "i_extra_isize" / Int16ul,
    "i_checksum_hi" / Int16ul,
    "i_ctime_extra" / Int32ul,
    "i_mtime_extra" / Int32ul,
    "i_atime_extra" / Int32ul,
    "i_crtime" / Int32sl,
    "i_crtime_extra" / Int32ul,
    "i_version_hi" / Int32ul,
    "i_projid" / Int32ul,
)
"""``struct ext4_inode`` with the extra fields, 160 bytes. What lies beyond 128 + ``i_extra_isize`` counts as zero."""
