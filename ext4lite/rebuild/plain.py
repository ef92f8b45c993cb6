"""What most inodes are: regular files of one written run, in a volume with checksums and nothing uncommon.

They are looked at and moved by the few bytes of their record that matter, in a third of the time that all its fields
would take. Whatever is in doubt, damage too, is no plain file: the long way knows it, or says what is wrong with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct

from ext4lite.checksum import crc32c
from ext4lite.extents import ROOT_MAX
from ext4lite.inode import HIGH_COVERED
from ext4lite.layout import constants as c
from ext4lite.super import Super

_RECORD = Struct("<H24xHII4xHHHHIIHHI36xII8xHH4xH2xHH")
"""Of an inode: mode, links, blocks, flags; its extent tree's root with one entry; generation, attribute block; upper
halves of blocks and attribute block; checksum, extra size, upper half of the checksum."""
_ROOT = Struct("<HHHHIIHHI36x")
_ROOT_AT = 40
_BLOCKS_AT, _BLOCKS_HIGH_AT = 28, 116
_SUM_AT, _SUM_HIGH_AT = 124, 130
_U16, _U32, _U32X2 = Struct("<H"), Struct("<I"), Struct("<II")
_UNCOMMON = c.INLINE_DATA_FL | c.EA_INODE_FL | c.HUGE_FILE_FL
_MOST = c.MAX_EXTENT_LEN - 1
_NOTHING = b"\0\0"


@dataclass(slots=True)
class PlainFile:
    """A regular file whose blocks are one run, ``count`` of them from ``physical`` on."""

    ino: int
    raw: bytes
    links: int
    generation: int
    logical: int
    physical: int
    count: int


class Plain:
    """Knows the plain files of a volume; see :meth:`possible`."""

    def __init__(self, sb: Super) -> None:
        self._seed = sb.seed
        self._first, self._blocks = sb.first_data_block, sb.blocks
        self._sectors = sb.block_size // 512
        self._huge = bool(sb.ro_compat & c.RO_HUGE_FILE)

    @staticmethod
    def possible(sb: Super) -> bool:
        """Tell whether a volume can have plain files: it has checksums, room for them, and no clusters and quotas."""
        uncommon = sb.ro_compat & (c.RO_QUOTA | c.RO_BIGALLOC) or sb.incompat & c.INCOMPAT_EA_INODE
        return bool(sb.metadata_csum and sb.inode_size > 128 and not uncommon)

    def file(self, ino: int, raw: bytes) -> PlainFile | None:
        """Return what the record ``raw`` of an inode says; None if it is no plain file, or its checksum is wrong."""
        (
            mode, links, _, flags,
            magic, entries, room, depth, _, logical, count, high, low,
            generation, acl, _, acl_high, checksum, extra, checksum_high,
        ) = _RECORD.unpack_from(raw)  # fmt: skip
        physical = low | high << 32
        if (
            mode & c.S_IFMT != c.S_IFREG
            or not flags & c.EXTENTS_FL
            or flags & _UNCOMMON
            or acl
            or acl_high
            or (magic, entries, room, depth) != (c.EXTENT_MAGIC, 1, ROOT_MAX, 0)
            or not 0 < count <= _MOST
            or logical + count > 0xFFFFFFFF
            or not self._first <= physical <= self._blocks - count
            or extra < HIGH_COVERED
            or extra & 3
            or 128 + extra > len(raw)
        ):
            return None
        blank = b"".join(
            (
                _U32X2.pack(ino, generation),
                raw[:_SUM_AT],
                _NOTHING,
                raw[_SUM_AT + 2 : _SUM_HIGH_AT],
                _NOTHING,
                raw[_SUM_HIGH_AT + 2 :],
            )
        )
        if crc32c(self._seed, blank) != checksum | checksum_high << 16:
            return None
        return PlainFile(ino, raw, links, generation, logical, physical, count)

    def moved(self, file: PlainFile, ino: int, physical: int) -> bytearray:
        """Return the record of ``file`` as inode ``ino``, with its blocks from ``physical`` on."""
        data = bytearray(file.raw)
        _U32.pack_into(data, _BLOCKS_AT, file.count * self._sectors)
        if self._huge:
            _U16.pack_into(data, _BLOCKS_HIGH_AT, 0)
        root = (c.EXTENT_MAGIC, 1, ROOT_MAX, 0, 0, file.logical, file.count, physical >> 32, physical & 0xFFFFFFFF)
        _ROOT.pack_into(data, _ROOT_AT, *root)
        data[_SUM_AT : _SUM_AT + 2] = data[_SUM_HIGH_AT : _SUM_HIGH_AT + 2] = _NOTHING
        total = crc32c(self._seed, _U32X2.pack(ino, file.generation) + data)
        _U16.pack_into(data, _SUM_AT, total & 0xFFFF)
        _U16.pack_into(data, _SUM_HIGH_AT, total >> 16)
        return data
