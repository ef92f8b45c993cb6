"""Numbers of the ext4 and JBD2 formats that code needs without the structure definitions (nothing is imported here).

Names follow the kernel's format documentation (Documentation/filesystems/ext4).
"""

from __future__ import annotations

SUPERBLOCK_OFFSET = 1024
SUPERBLOCK_SIZE = 1024
MAGIC = 0xEF53

# s_state
STATE_VALID = 0x1
STATE_ERROR = 0x2
STATE_ORPHANS = 0x4

# s_flags
FLAG_SIGNED_HASH = 0x1
FLAG_UNSIGNED_HASH = 0x2

# s_encoding
ENCODING_UTF8_12_1 = 1

# s_default_mount_opts
DEFM_XATTR_USER = 0x4
DEFM_ACL = 0x8

# Reserved inode numbers
BAD_INO = 1
ROOT_INO = 2
RESIZE_INO = 7
JOURNAL_INO = 8
FIRST_INO = 11

# i_mode file types
S_IFMT = 0xF000
S_IFIFO = 0x1000
S_IFCHR = 0x2000
S_IFDIR = 0x4000
S_IFBLK = 0x6000
S_IFREG = 0x8000
S_IFLNK = 0xA000
S_IFSOCK = 0xC000

# i_flags
IMMUTABLE_FL = 0x10
APPEND_FL = 0x20
INDEX_FL = 0x1000
HUGE_FILE_FL = 0x40000
EXTENTS_FL = 0x80000
VERITY_FL = 0x100000
EA_INODE_FL = 0x200000
INLINE_DATA_FL = 0x10000000
CASEFOLD_FL = 0x40000000
ENCRYPT_FL = 0x800

# bg_flags
BG_INODE_UNINIT = 0x1
BG_BLOCK_UNINIT = 0x2
BG_INODE_ZEROED = 0x4

# Extents
EXTENT_MAGIC = 0xF30A
MAX_EXTENT_LEN = 32768
MAX_EXTENT_DEPTH = 5
UNWRITTEN_BIT = 0x8000

# Extended attributes
XATTR_MAGIC = 0xEA020000
XATTR_PREFIXES: dict[int, bytes] = {
    1: b"user.",
    2: b"system.posix_acl_access",
    3: b"system.posix_acl_default",
    4: b"trusted.",
    6: b"security.",
    7: b"system.",
    8: b"system.richacl",
    10: b"gnu.",
}
XATTR_INDEX_ACL_ACCESS = 2
XATTR_INDEX_ACL_DEFAULT = 3
XATTR_INDEX_SYSTEM = 7
XATTR_REFCOUNT_MAX = 1024

# Directories
DIR_TAIL_TYPE = 0xDE
FT_BY_MODE: dict[int, int] = {
    S_IFREG: 1,
    S_IFDIR: 2,
    S_IFCHR: 3,
    S_IFBLK: 4,
    S_IFIFO: 5,
    S_IFSOCK: 6,
    S_IFLNK: 7,
}
LINK_MAX = 65000

# Features: name by bit, as dumpe2fs prints them
COMPAT: dict[int, str] = {
    0x1: "dir_prealloc",
    0x2: "imagic_inodes",
    0x4: "has_journal",
    0x8: "ext_attr",
    0x10: "resize_inode",
    0x20: "dir_index",
    0x40: "lazy_bg",
    0x80: "exclude_inode",
    0x100: "snapshot_bitmap",
    0x200: "sparse_super2",
    0x400: "fast_commit",
    0x800: "stable_inodes",
    0x1000: "orphan_file",
}
INCOMPAT: dict[int, str] = {
    0x1: "compression",
    0x2: "filetype",
    0x4: "needs_recovery",
    0x8: "journal_dev",
    0x10: "meta_bg",
    0x40: "extent",
    0x80: "64bit",
    0x100: "mmp",
    0x200: "flex_bg",
    0x400: "ea_inode",
    0x1000: "dirdata",
    0x2000: "metadata_csum_seed",
    0x4000: "large_dir",
    0x8000: "inline_data",
    0x10000: "encrypt",
    0x20000: "casefold",
}
RO_COMPAT: dict[int, str] = {
    0x1: "sparse_super",
    0x2: "large_file",
    0x4: "btree_dir",
    0x8: "huge_file",
    0x10: "uninit_bg",
    0x20: "dir_nlink",
    0x40: "extra_isize",
    0x80: "has_snapshot",
    0x100: "quota",
    0x200: "bigalloc",
    0x400: "metadata_csum",
    0x800: "replica",
    0x1000: "read-only",
    0x2000: "project",
    0x4000: "shared_blocks",
    0x8000: "verity",
    0x10000: "orphan_present",
}

COMPAT_HAS_JOURNAL = 0x4
COMPAT_EXT_ATTR = 0x8
COMPAT_RESIZE_INODE = 0x10
COMPAT_DIR_INDEX = 0x20
COMPAT_SPARSE_SUPER2 = 0x200
COMPAT_FAST_COMMIT = 0x400
COMPAT_STABLE_INODES = 0x800
COMPAT_ORPHAN_FILE = 0x1000
INCOMPAT_FILETYPE = 0x2
INCOMPAT_RECOVER = 0x4
INCOMPAT_JOURNAL_DEV = 0x8
INCOMPAT_META_BG = 0x10
INCOMPAT_EXTENTS = 0x40
INCOMPAT_64BIT = 0x80
INCOMPAT_MMP = 0x100
INCOMPAT_FLEX_BG = 0x200
INCOMPAT_EA_INODE = 0x400
INCOMPAT_CSUM_SEED = 0x2000
INCOMPAT_LARGE_DIR = 0x4000
INCOMPAT_INLINE_DATA = 0x8000
INCOMPAT_ENCRYPT = 0x10000
INCOMPAT_CASEFOLD = 0x20000
RO_SPARSE_SUPER = 0x1
RO_LARGE_FILE = 0x2
RO_HUGE_FILE = 0x8
RO_GDT_CSUM = 0x10
RO_DIR_NLINK = 0x20
RO_EXTRA_ISIZE = 0x40
RO_QUOTA = 0x100
RO_BIGALLOC = 0x200
RO_METADATA_CSUM = 0x400
RO_PROJECT = 0x2000
RO_VERITY = 0x8000
RO_ORPHAN_PRESENT = 0x10000

# JBD2
JBD2_MAGIC = 0xC03B3998
JBD2_DESCRIPTOR = 1
JBD2_COMMIT = 2
JBD2_SUPERBLOCK_V1 = 3
JBD2_SUPERBLOCK_V2 = 4
JBD2_REVOKE = 5
JBD2_MIN_BLOCKS = 1024
JBD2_CRC32C = 4
JBD2_CRC32 = 1
JBD2_COMPAT_CHECKSUM = 0x1
JBD2_INCOMPAT_REVOKE = 0x1
JBD2_INCOMPAT_64BIT = 0x2
JBD2_INCOMPAT_ASYNC = 0x4
JBD2_INCOMPAT_CSUM_V2 = 0x8
JBD2_INCOMPAT_CSUM_V3 = 0x10
JBD2_INCOMPAT_FAST_COMMIT = 0x20
JBD2_DEFAULT_FC_BLOCKS = 256
JBD2_FLAG_ESCAPE = 0x1
JBD2_FLAG_SAME_UUID = 0x2
JBD2_FLAG_DELETED = 0x4
JBD2_FLAG_LAST = 0x8
FC_ADD_RANGE = 1
FC_DEL_RANGE = 2
FC_CREAT = 3
FC_LINK = 4
FC_UNLINK = 5
FC_INODE = 6
FC_PAD = 7
FC_TAIL = 8
FC_HEAD = 9
JBD2_INCOMPAT: dict[int, str] = {
    0x1: "revoke",
    0x2: "64bit",
    0x4: "async_commit",
    0x8: "csum_v2",
    0x10: "csum_v3",
    0x20: "fast_commit",
}


def feature_names(bits: int, table: dict[int, str], prefix: str) -> list[str]:
    """Return the names of the set ``bits``; an unknown bit becomes ``FEATURE_<prefix><number>``, as dumpe2fs says."""
    return [table.get(1 << n, f"FEATURE_{prefix}{n}") for n in range(32) if bits >> n & 1]
