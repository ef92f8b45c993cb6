"""What says where something lies, in inodes, directories and attributes: rewritten for the new volume."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from struct import Struct

from ext4lite import directory
from ext4lite.checksum import crc32c
from ext4lite.errors import CorruptImage, Unsupported
from ext4lite.inode import InodeRecord
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import DxCountLimit, DxEntry, Inode, XattrEntryHeader, XattrHeader

BLOCK_AT = 40  # of i_block
_U32 = Struct("<I")
_ENTRY = XattrEntryHeader.STRUCT
_INUM = 4  # of e_value_inum
_FSCK = "run e2fsck -fy on it"
_SECTORS_32 = 1 << 32
_SECTORS_48 = 1 << 48


class Numbers:
    """New inode numbers by old ones."""

    def __init__(self, old: array[int] | None = None, new: array[int] | None = None) -> None:
        self._old, self._new = old, new
        self.changed = old is not None

    def __call__(self, old: int) -> int:
        """Return the new number. CorruptImage for an inode that is not in use."""
        if self._old is None or self._new is None or not old:
            return old
        i = bisect_left(self._old, old)
        if i == len(self._old) or self._old[i] != old:
            raise CorruptImage(f"inode {old} has a name, but is not in use", hint="run e2fsck -fy on the volume")
        return self._new[i]

    def all(self, used: array[int]) -> array[int]:
        """Return the new numbers of the old ones in use, ascending."""
        return used if self._new is None else array("I", sorted(self._new))


@dataclass(slots=True)
class InsideEntry:
    """An attribute in an inode's record or in a block, by positions."""

    at: int
    value_at: int
    size: int
    inum: int
    is_inline_data: bool


def inside_entries(record: InodeRecord, where: str) -> list[InsideEntry]:
    """Return the attributes in an inode's record. CorruptImage."""
    at = 128 + record.extra_isize
    raw = record.raw
    if at + 4 > len(raw) or _U32.unpack_from(raw, at)[0] != c.XATTR_MAGIC:
        return []
    return list(_entries(raw, at + 4, at + 4, where))


def _entries(data: bytes | bytearray, at: int, base: int, where: str) -> Iterator[InsideEntry]:
    end = len(data)
    while at + 4 <= end and data[at : at + 4] != b"\0\0\0\0":
        if at + _ENTRY.size > end:
            raise CorruptImage("extended attribute entry is cut off", where=where)
        name_len, index, offset, inum, size, _ = _ENTRY.unpack_from(data, at)
        inline = index == c.XATTR_INDEX_SYSTEM and data[at + _ENTRY.size : at + _ENTRY.size + name_len] == b"data"
        if not inum and size and base + offset + size > end:
            raise CorruptImage("value of an extended attribute lies outside its area", where=where)
        yield InsideEntry(at, base + offset, 0 if inum else size, inum, inline)
        at += _ENTRY.size + (name_len + 3 & ~3)


def renumber_attributes(data: bytearray, entries: list[InsideEntry], numbers: Numbers) -> None:
    """Change the numbers of the inodes that hold values (ea_inode)."""
    for entry in entries:
        if entry.inum:
            _U32.pack_into(data, entry.at + _INUM, numbers(entry.inum))


def attribute_block(data: bytes, number: int, numbers: Numbers, seed: int | None, where: str) -> bytes:
    """Return an attribute block for its new place, block ``number``. CorruptImage."""
    block = bytearray(data)
    if numbers.changed:
        renumber_attributes(block, list(_entries(block, XattrHeader.SIZE, 0, where)), numbers)
    if seed is not None:
        at = XattrHeader.OFFSET_h_checksum
        block[at : at + 4] = bytes(4)
        _U32.pack_into(block, at, crc32c(crc32c(seed, number.to_bytes(8, "little")), bytes(block)))
    return bytes(block)


def entries(data: bytes | bytearray, start: int, end: int, where: str) -> Iterator[tuple[int, int, bool]]:
    """Yield (position, inode number, whether it is ``.`` or ``..``) of the entries in use. CorruptImage."""
    at = start
    unpack_from = directory.HEADER.unpack_from
    while at < end:
        if at + 8 > end:
            raise CorruptImage(f"directory entry at byte {at} is cut off", where=where, hint=_FSCK)
        ino, size, name_len, _ = unpack_from(data, at)
        if size in (0, 65535) and end - start == 65536:
            size = 65536
        if size < 8 + (name_len if ino else 0) or size & 3 or at + size > end:
            raise CorruptImage(f"directory entry at byte {at} has length {size}", where=where, hint=_FSCK)
        if ino:
            dots = data[at + 8] == 46 and (name_len == 1 or (name_len == 2 and data[at + 9] == 46))
            yield at, ino, dots
        at += size


def inline_areas(record: InodeRecord, where: str) -> list[tuple[int, int]]:
    """Return the (start, end) in the raw record of an inline directory's entries.

    They begin behind the parent's number in ``i_block``, and go on in the attribute ``system.data``.
    """
    areas = [(BLOCK_AT + 4, BLOCK_AT + 60)]
    for entry in inside_entries(record, where):
        if entry.is_inline_data and entry.size:
            areas.append((entry.value_at, entry.value_at + entry.size))
    return areas


def directory_block(data: bytes, numbers: Numbers, seed: int | None, indexed: bool, where: str) -> bytes:
    """Return a directory's block with the new numbers, sealed with the directory's new seed. CorruptImage."""
    block = bytearray(data)
    for at, ino, _ in entries(data, 0, len(data), where):
        _U32.pack_into(block, at, numbers(ino))
    if seed is None:
        return bytes(block)
    node = directory.index_at(data) if indexed else 0
    if node:
        head = DxCountLimit.unpack(data, node)
        tail = node + head.limit * DxEntry.SIZE
        covered = bytes(block[: node + head.count * DxEntry.SIZE] + block[tail : tail + 4]) + bytes(4)
        _U32.pack_into(block, tail + 4, crc32c(seed, covered))
    else:
        end = len(block) - directory.TAIL_SIZE
        block[end:] = directory.leaf_checksum_tail(bytes(block[:end]), seed)
    return bytes(block)


def set_blocks(fields: Inode, held: int, block_size: int, huge: bool, where: str) -> None:
    """Set ``i_blocks`` to ``held`` bytes: in units of 512 bytes, or of blocks with the flag huge_file.

    ``huge``: the volume has the feature huge_file. Unsupported when it is too much without.
    """
    sectors = held // 512
    fields.i_flags &= ~c.HUGE_FILE_FL
    if huge and sectors >= _SECTORS_48:
        fields.i_flags |= c.HUGE_FILE_FL
        sectors //= block_size // 512
    elif not huge and sectors >= _SECTORS_32:
        raise Unsupported("the file takes 2 TiB or more, which needs the feature huge_file", where=where)
    fields.i_blocks_lo = sectors & 0xFFFFFFFF
    if huge:
        fields.l_i_blocks_high = sectors >> 32


def blocks_of(fields: Inode, block_size: int, huge: bool) -> int:
    """Return ``i_blocks`` in bytes."""
    count = fields.i_blocks_lo
    if huge:
        count |= fields.l_i_blocks_high << 32
        if fields.i_flags & c.HUGE_FILE_FL:
            return count * block_size
    return count * 512
