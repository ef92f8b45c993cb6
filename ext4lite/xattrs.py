"""Extended attributes: names with their on-disk prefixes, POSIX ACLs, and the two places where attributes lie.

Small sets lie in the inode behind its extra fields, the rest in one block that equal sets share; values too large for
either in inodes of their own, where the volume has the feature ea_inode. Entries are kept
sorted by (prefix index, name length, name) and values fill the area from its end downwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from struct import Struct, error, iter_unpack
from typing import TypeVar

from ext4lite.errors import CorruptImage, Unsupported
from ext4lite.layout._codecs import XattrEntryHeader, XattrHeader
from ext4lite.layout.constants import (
    XATTR_INDEX_ACL_ACCESS,
    XATTR_INDEX_ACL_DEFAULT,
    XATTR_MAGIC,
    XATTR_PREFIXES,
)

_M = 0xFFFFFFFF
_INDEX_BY_LENGTH = sorted(XATTR_PREFIXES.items(), key=lambda item: -len(item[1]))
_ACL_INDICES = (XATTR_INDEX_ACL_ACCESS, XATTR_INDEX_ACL_DEFAULT)
_ACL_NAMED_TAGS = (0x02, 0x08)  # ACL_USER, ACL_GROUP: the entries that carry an id
_U32 = Struct("<I")
_ACL_USER_ENTRY = Struct("<HHI")
_ACL_SHORT = Struct("<HH")
_ENTRY = XattrEntryHeader.STRUCT
INLINE_DATA_NAME = b"system.data"


@dataclass(frozen=True, slots=True)
class Outside:
    """A value in an inode of its own (ea_inode): its number, the value's bytes and the hash that inode keeps."""

    ino: int
    size: int
    hash: int


RawEntry = tuple[int, bytes, bytes]
"""(prefix index, name without prefix, value as stored)."""
StoredEntry = tuple[int, bytes, bytes | Outside]
"""As RawEntry; the value may be outside."""
AnyEntry = TypeVar("AnyEntry", RawEntry, StoredEntry)


def split_name(name: bytes) -> tuple[int, bytes]:
    """Return (prefix index, rest) of a full name such as ``b"trusted.overlay.opaque"``.

    Unsupported for an unknown prefix.
    """
    for index, prefix in _INDEX_BY_LENGTH:
        if prefix.endswith(b"."):
            if name.startswith(prefix) and len(name) > len(prefix):
                return index, name[len(prefix) :]
        elif name == prefix:
            return index, b""
    raise Unsupported(f"extended attribute {name!r} is in no namespace of ext4")


def join_name(index: int, rest: bytes) -> bytes | None:
    """Return the full name, or None for a prefix index that the kernel does not show."""
    prefix = XATTR_PREFIXES.get(index)
    return None if prefix is None else prefix + rest


def acl_to_disk(value: bytes) -> bytes:
    """Turn a POSIX ACL from its system call form (version 2, ids everywhere) to ext4's (version 1, ids only where
    needed).
    """
    if len(value) < 4 or (len(value) - 4) % 8 or _U32.unpack_from(value)[0] != 2:
        raise Unsupported("a POSIX ACL is malformed")
    out = [_U32.pack(1)]
    for tag, perm, ident in iter_unpack("<HHI", value[4:]):
        out.append(_ACL_USER_ENTRY.pack(tag, perm, ident) if tag in _ACL_NAMED_TAGS else _ACL_SHORT.pack(tag, perm))
    return b"".join(out)


def acl_from_disk(value: bytes, where: str = "") -> bytes:
    """Turn a POSIX ACL from ext4's form to that of the system calls; CorruptImage when malformed."""
    if not value:
        return value
    if len(value) < 4 or _U32.unpack_from(value)[0] != 1:
        raise CorruptImage("a POSIX ACL has an unknown version", where=where)
    out, at = [_U32.pack(2)], 4
    try:
        while at < len(value):
            tag, perm = _ACL_SHORT.unpack_from(value, at)
            ident = _M
            at += 4
            if tag in _ACL_NAMED_TAGS:
                (ident,) = _U32.unpack_from(value, at)
                at += 4
            out.append(_ACL_USER_ENTRY.pack(tag, perm, ident))
    except error as e:
        raise CorruptImage("a POSIX ACL is cut short", where=where) from e
    return b"".join(out)


def to_entries(attributes: dict[bytes, bytes]) -> list[RawEntry]:
    """Turn full names and values into sorted entries as stored; Unsupported for what ext4 cannot hold."""
    out = []
    for name, value in attributes.items():
        index, rest = split_name(name)
        if len(rest) > 255:
            raise Unsupported(f"extended attribute name of {len(rest)} bytes is too long")
        out.append((index, rest, acl_to_disk(value) if index in _ACL_INDICES else bytes(value)))
    out.sort(key=lambda e: (e[0], len(e[1]), e[1]))
    return out


def _pad4(n: int) -> int:
    return (n + 3) & ~3


def space_needed(entries: Iterable[StoredEntry]) -> int:
    """Bytes that entries and values take in either place, with the four zero bytes that end the entries."""
    return 4 + sum(_ENTRY.size + _pad4(len(name)) + _pad4(_size_here(value)) for _, name, value in entries)


def _size_here(value: bytes | Outside) -> int:
    """Bytes of a value among its entries."""
    return 0 if isinstance(value, Outside) else len(value)


def entry_hash(name: bytes, value: bytes, *, signed: bool = False) -> int:
    """Hash of an entry in a block: name bytes (unsigned now, signed in old images), then the padded value's words."""
    result = 0
    for byte in name:
        result = (result << 5 & _M | result >> 27) ^ (byte - 256 & _M if signed and byte > 127 else byte)
    padded = value + bytes(-len(value) % 4)
    for (word,) in iter_unpack("<I", padded):
        result = (result << 16 & _M | result >> 16) ^ word
    return result


def pack_area(
    entries: Sequence[StoredEntry], size: int, first: int = 0, hashed: bool = False
) -> tuple[bytes, list[int]]:
    """Lay entries out in an area of ``size`` bytes whose value offsets count from ``first`` bytes before it.

    Returns the area and the entry hashes (zeros unless ``hashed``: in the inode no hash is the safest; an outside
    value's entry always has one, which the kernel verifies: it is that of the value's hash as four bytes). The entries
    must fit (:func:`space_needed`).
    """
    area = bytearray(size)
    at, end, hashes = 0, size, []
    for index, name, value in entries:
        offset = inum = 0
        if isinstance(value, Outside):
            inum, length = value.ino, value.size
            hashes.append(entry_hash(name, _U32.pack(value.hash)))
        else:
            length = len(value)
            if value:
                end -= _pad4(length)
                area[end : end + length] = value
                offset = end + first
            hashes.append(entry_hash(name, value) if hashed else 0)
        _ENTRY.pack_into(area, at, len(name), index, offset, inum, length, hashes[-1])
        area[at + _ENTRY.size : at + _ENTRY.size + len(name)] = name
        at += _ENTRY.size + _pad4(len(name))
    return bytes(area), hashes


def pack_block(entries: Sequence[StoredEntry], block_size: int, refcount: int) -> bytes:
    """Return an attribute block without its checksum."""
    area, hashes = pack_area(entries, block_size - XattrHeader.SIZE, XattrHeader.SIZE, hashed=True)
    total = 0
    for value in hashes:
        if not value:
            total = 0
            break
        total = (total << 16 & _M | total >> 16) ^ value
    return XattrHeader(XATTR_MAGIC, refcount, 1, total).pack() + area


def split_for_inode(
    entries: list[AnyEntry], inode_space: int, block_space: int
) -> tuple[list[AnyEntry], list[AnyEntry]]:
    """Share entries between inode and block: all in the inode if they fit, else all in the block.

    Else the small ones in the inode.

    Both spaces are bytes for :func:`space_needed`. Raises Unsupported when they do not fit at all.
    """
    if space_needed(entries) <= inode_space:
        return entries, []
    if space_needed(entries) <= block_space:
        return [], entries
    inside: list[AnyEntry] = []
    for entry in sorted(entries, key=lambda e: _size_here(e[2])):
        if space_needed([*inside, entry]) <= inode_space:
            inside.append(entry)
    chosen = {(e[0], e[1]) for e in inside}
    rest = [e for e in entries if (e[0], e[1]) not in chosen]
    if space_needed(rest) > block_space:
        raise Unsupported(f"extended attributes of {space_needed(entries)} bytes do not fit into an inode and a block")
    return [e for e in entries if (e[0], e[1]) in chosen], rest


def parse_area(data: bytes, start: int, base: int, where: str) -> list[tuple[int, bytes, bytes, int, int]]:
    """Read the entries at ``start`` of ``data``; value offsets count from ``base``.

    Returns (prefix index, name, value, inode number of an outside value or 0, its size). CorruptImage with ``where``
    for anything that leaves the area.
    """
    out = []
    at, end = start, len(data)
    names_end_min = end
    while True:
        if at + 4 > end:
            raise CorruptImage("extended attribute entries run past their area", where=where)
        if data[at : at + 4] == b"\0\0\0\0":
            break
        if at + _ENTRY.size > end:
            raise CorruptImage("extended attribute entry is cut off", where=where)
        name_len, index, offset, inum, size, _ = _ENTRY.unpack_from(data, at)
        name_at = at + _ENTRY.size
        at = name_at + _pad4(name_len)
        if at > end:
            raise CorruptImage("extended attribute name runs past its area", where=where)
        name = data[name_at : name_at + name_len]
        if b"\0" in name:
            raise CorruptImage(f"extended attribute has the name {name!r}", where=where)
        if inum:
            out.append((index, name, b"", inum, size))
            continue
        low = base + offset
        if size and (low < start or low + size > end):
            raise CorruptImage(f"value of extended attribute {name!r} lies outside its area", where=where)
        if size:
            names_end_min = min(names_end_min, low)
        out.append((index, name, data[low : low + size] if size else b"", 0, size))
    if at > names_end_min:
        raise CorruptImage("extended attribute names and values overlap", where=where)
    return out
