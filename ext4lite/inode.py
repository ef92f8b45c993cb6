"""Inodes: the record on disk, its checksum, and what it says in plain terms."""

from __future__ import annotations

from dataclasses import dataclass, field
from struct import Struct
from typing import Literal

from ext4lite.checksum import crc32c, inode_seed
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import Inode as InodeCodec

Kind = Literal["file", "dir", "symlink", "char", "block", "fifo", "socket"]

KIND_OF_TYPE: dict[int, Kind] = {
    c.S_IFREG: "file",
    c.S_IFDIR: "dir",
    c.S_IFLNK: "symlink",
    c.S_IFCHR: "char",
    c.S_IFBLK: "block",
    c.S_IFIFO: "fifo",
    c.S_IFSOCK: "socket",
}

_NS = 1_000_000_000
_U32X2 = Struct("<II")
_LOW = InodeCodec.OFFSET_l_i_checksum_lo
_HIGH = InodeCodec.OFFSET_i_checksum_hi
HIGH_COVERED = _HIGH + 2 - 128  # i_extra_isize from which the checksum has a high half


@dataclass(slots=True)
class InodeRecord:
    """An inode as read: number, whole record, decoded fields (those beyond ``extra_isize`` are zero)."""

    ino: int
    raw: bytes
    fields: InodeCodec
    extra_isize: int

    @property
    def size(self) -> int:
        """``i_size`` in bytes."""
        return self.fields.i_size_lo | self.fields.i_size_high << 32

    @property
    def type(self) -> int:
        """The file type bits of the mode."""
        return self.fields.i_mode & c.S_IFMT

    @property
    def file_acl(self) -> int:
        """Number of the attribute block, 0 for none."""
        return self.fields.i_file_acl_lo | self.fields.l_i_file_acl_high << 32


@dataclass(slots=True)
class Stat:
    """What ``stat`` says about an inode. Times in nanoseconds since 1970; ``mode`` is the 12 permission bits."""

    ino: int
    kind: Kind
    mode: int
    uid: int
    gid: int
    nlink: int
    size: int
    blocks512: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    crtime_ns: int
    rdev: tuple[int, int]
    flags: int
    generation: int
    xattrs: dict[bytes, bytes] = field(default_factory=dict)


def checksum_ok(record: bytes, ino: int, seed: int, stored: InodeCodec, extra_isize: int) -> bool:
    """Tell whether a whole inode record has the right crc32c; one of zeros is valid (an inode never used)."""
    if len(record) > 128 and extra_isize >= HIGH_COVERED:
        identity = _U32X2.pack(ino, stored.i_generation)
        blank = b"".join((identity, record[:_LOW], b"\0\0", record[_LOW + 2 : _HIGH], b"\0\0", record[_HIGH + 2 :]))
        wanted = stored.l_i_checksum_lo | stored.i_checksum_hi << 16
        computed = crc32c(seed, blank)
    else:
        blank = record[:_LOW] + b"\0\0" + record[_LOW + 2 :]
        wanted = stored.l_i_checksum_lo
        computed = crc32c(inode_seed(seed, ino, stored.i_generation), blank) & 0xFFFF
    return computed == wanted or not any(record)


def decode_time(low: int, extra: int) -> int:
    """Nanoseconds of signed seconds and the extra word: its lower 2 bits are the epoch, the others nanoseconds."""
    return (low + ((extra & 3) << 32)) * _NS + (extra >> 2)


def encode_time(ns: int, *, wide: bool) -> tuple[int, int]:
    """Return (low, extra word) of a time in nanoseconds, clamped to what the inode can hold.

    ``wide``: the inode has the extra word, and so nanoseconds and years up to 2446; else whole seconds up to 2038.
    """
    seconds, rest = divmod(ns, _NS)
    most = (3 << 32) + 0x7FFFFFFF if wide else 0x7FFFFFFF
    if seconds > most:
        seconds, rest = most, 0
    elif seconds < -0x80000000:
        seconds, rest = -0x80000000, 0
    low = (seconds + 0x80000000 & 0xFFFFFFFF) - 0x80000000
    return low, (seconds - low >> 32 & 3 | rest << 2) if wide else 0


def encode_rdev(major: int, minor: int) -> bytes:
    """Return the 60 bytes of ``i_block`` for a device: the old form where it fits, else the new one."""
    if major < 256 and minor < 256:
        return _U32X2.pack(major << 8 | minor, 0) + bytes(52)
    return _U32X2.pack(0, minor & 0xFF | major << 8 | (minor & ~0xFF) << 12) + bytes(52)


def pack_record(record: InodeRecord, seed: int | None) -> bytes:
    """Return the whole record for the disk, checksummed if ``seed`` is given; what lies behind the fields stays."""
    fields, raw = record.fields, record.raw
    known = min(len(raw), 128 + record.extra_isize, InodeCodec.SIZE)
    if seed is None:
        return fields.pack()[:known] + raw[known:]
    high = len(raw) > 128 and record.extra_isize >= HIGH_COVERED
    fields.l_i_checksum_lo = 0
    if high:
        fields.i_checksum_hi = 0
    data = bytearray(fields.pack()[:known] + raw[known:])
    total = crc32c(inode_seed(seed, record.ino, fields.i_generation), bytes(data))
    fields.l_i_checksum_lo = total & 0xFFFF
    data[_LOW : _LOW + 2] = (total & 0xFFFF).to_bytes(2, "little")
    if high:
        fields.i_checksum_hi = total >> 16
        data[_HIGH : _HIGH + 2] = (total >> 16).to_bytes(2, "little")
    return bytes(data)


def decode_rdev(block: bytes) -> tuple[int, int]:
    """Return (major, minor): the old form in the first word, or the new one in the second."""
    old, new = _U32X2.unpack_from(block)
    if old:
        return old >> 8 & 0xFF, old & 0xFF
    return new >> 8 & 0xFFF, new & 0xFF | new >> 12 & 0xFFF00


def stat_of(record: InodeRecord, block_size: int, huge_files: bool) -> Stat:
    """Decode a record whose type is valid. ``huge_files``: the volume has the huge_file feature."""
    i = record.fields
    kind = KIND_OF_TYPE[i.i_mode & c.S_IFMT]
    blocks = i.i_blocks_lo
    if huge_files:
        blocks |= i.l_i_blocks_high << 32
        if i.i_flags & c.HUGE_FILE_FL:
            blocks *= block_size // 512
    return Stat(
        ino=record.ino,
        kind=kind,
        mode=i.i_mode & 0o7777,
        uid=i.i_uid | i.l_i_uid_high << 16,
        gid=i.i_gid | i.l_i_gid_high << 16,
        nlink=i.i_links_count,
        size=i.i_size_lo | i.i_size_high << 32,
        blocks512=blocks,
        atime_ns=decode_time(i.i_atime, i.i_atime_extra),
        mtime_ns=decode_time(i.i_mtime, i.i_mtime_extra),
        ctime_ns=decode_time(i.i_ctime, i.i_ctime_extra),
        crtime_ns=decode_time(i.i_crtime, i.i_crtime_extra),
        rdev=decode_rdev(i.i_block) if kind in ("char", "block") else (0, 0),
        flags=i.i_flags,
        generation=i.i_generation,
    )
