"""Directory blocks: reading entries, and writing whole directories, linear or hashed."""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct

from ext4lite.checksum import crc32c
from ext4lite.errors import CorruptImage, Unsupported
from ext4lite.htree import HALF_MD4, effective_version, name_hash
from ext4lite.layout._codecs import DirEntryHeader, DirEntryTail, DxCountLimit, DxEntry, DxRootInfo, DxTail
from ext4lite.layout.constants import DIR_TAIL_TYPE

HEADER = DirEntryHeader.STRUCT
TAIL_SIZE = DirEntryTail.SIZE
DX_ROOT_AT = 32
DX_NODE_AT = 8
_DX = DxEntry.STRUCT
_U32X2 = Struct("<II")
_DOTS = (b".", b"..")
DirEntry = tuple[bytes, int, int]
"""(name, inode number, file type as in FT_BY_MODE)."""


def rec_len_to_disk(length: int, block_size: int) -> int:
    """``rec_len`` as stored: 65536 does not fit into 16 bits and is written as 65535 (64 KiB blocks).

    Also 0 is read as that.
    """
    return 65535 if length == 65536 and block_size == 65536 else length


def entry_size(name_len: int) -> int:
    """Bytes that an entry with a name of ``name_len`` bytes needs."""
    return 8 + name_len + 3 & ~3


def leaf_checksum_tail(block: bytes, seed: int) -> bytes:
    """Return the 12-byte tail for a leaf's bytes before it."""
    return DirEntryTail(0, TAIL_SIZE, 0, DIR_TAIL_TYPE, crc32c(seed, block)).pack()


def pack_leaf(entries: Sequence[DirEntry], block_size: int, seed: int) -> bytes:
    """Return one checksummed leaf with ``entries``, which must fit; the last one's ``rec_len`` takes the rest."""
    room = block_size - TAIL_SIZE
    parts = []
    last = len(entries) - 1
    at = 0
    for i, (name, ino, kind) in enumerate(entries):
        size = room - at if i == last else entry_size(len(name))
        parts.append(HEADER.pack(ino, size, len(name), kind) + name + bytes(size - 8 - len(name)))
        at += size
    body = b"".join(parts) if entries else HEADER.pack(0, room, 0, 0) + bytes(room - 8)
    return body + leaf_checksum_tail(body, seed)


def parse(data: bytes, inodes: int, where: str) -> list[DirEntry]:
    """Read the entries in use of a block (or of any area of entries), without ``.`` and ``..``.

    ``inodes`` is the volume's number of inodes. CorruptImage with ``where`` for an entry that leaves the area or cannot
    be a name.
    """
    out = []
    at, end = 0, len(data)
    last = end - HEADER.size
    unpack_from = HEADER.unpack_from
    while at <= last:
        ino, size, name_len, kind = unpack_from(data, at)
        if size & 3 or at + size > end or size < (8 + name_len if ino else 8):
            whole = size in (0, 65535) and at == 0 and end == 65536
            if not whole:
                raise CorruptImage(f"directory entry at byte {at} has length {size}", where=where)
            size = end
        if ino:
            name = data[at + 8 : at + 8 + name_len]
            if name_len > 2 or name not in _DOTS:
                if ino > inodes:
                    raise CorruptImage(f"directory entry {name!r} has inode number {ino} of {inodes}", where=where)
                if not name_len:
                    raise CorruptImage(f"directory entry at byte {at} has the name {name!r}", where=where)
                out.append((name, ino, kind))
        at += size
    if at < end:
        raise CorruptImage(f"directory entry at byte {at} is cut off", where=where)
    names = b"".join([entry[0] for entry in out])
    if b"/" in names or b"\0" in names:
        name = next(entry[0] for entry in out if b"/" in entry[0] or b"\0" in entry[0])
        raise CorruptImage(f"a directory entry has the name {name!r}", where=where)
    return out


def verify_block(data: bytes, seed: int, index_possible: bool, where: str) -> None:
    """Check the checksum of a directory block, which is a leaf, or in an indexed directory perhaps a root or inner
    node.
    """
    size = len(data)
    at = index_at(data) if index_possible else 0
    if at:
        _verify_dx(data, at, seed, where)
        return
    tail = DirEntryTail.unpack(data, size - TAIL_SIZE)
    if tail.det_reserved_zero1 or tail.det_rec_len != TAIL_SIZE or tail.det_reserved_ft != DIR_TAIL_TYPE:
        raise CorruptImage("directory block has no checksum", where=where)
    if crc32c(seed, data[: size - TAIL_SIZE]) != tail.det_checksum:
        raise CorruptImage("directory block checksum is wrong", where=where)


def index_at(data: bytes) -> int:
    """Return where the index begins in a block of an indexed directory (its root or an inner node), 0 for a leaf."""
    size = len(data)
    ino, first_len, name_len, _ = HEADER.unpack_from(data)
    if name_len <= 2:
        whole = first_len == size or (size == 65536 and first_len in (0, 65535))
        if ino == 0 and whole:
            return DX_NODE_AT
        if first_len == 12 and name_len == 1 and HEADER.unpack_from(data, 12)[1] == size - 12:
            return DX_ROOT_AT
    return 0


def _verify_dx(data: bytes, at: int, seed: int, where: str) -> None:
    head = DxCountLimit.unpack(data, at)
    tail_at = at + head.limit * _DX.size
    if head.count > head.limit or tail_at + DxTail.SIZE > len(data):
        raise CorruptImage(f"directory index says {head.count} of {head.limit} entries", where=where)
    tail = DxTail.unpack(data, tail_at)
    covered = data[: at + head.count * _DX.size] + data[tail_at : tail_at + 4] + bytes(4)
    if crc32c(seed, covered) != tail.dt_checksum:
        raise CorruptImage("directory index checksum is wrong", where=where)


def _dots(ino: int, parent: int) -> list[DirEntry]:
    return [(b".", ino, 2), (b"..", parent, 2)]


def build(
    ino: int,
    parent: int,
    entries: Sequence[DirEntry],
    *,
    block_size: int,
    seed: int,
    hash_seed: Sequence[int],
    unsigned: bool,
) -> tuple[list[bytes], bool]:
    """Return (blocks, indexed) of a directory: one linear block if the entries fit, else a hashed one with full leaves.

    ``seed`` is the inode's checksum seed. Raises Unsupported when the index would need a third level (over 20 million
    names).
    """
    linear = [*_dots(ino, parent), *entries]
    if sum(entry_size(len(e[0])) for e in linear) <= block_size - TAIL_SIZE:
        return [pack_leaf(linear, block_size, seed)], False
    version = effective_version(HALF_MD4, unsigned)
    hashed = sorted((name_hash(e[0], version, hash_seed), e) for e in entries)
    leaves: list[tuple[int, list[DirEntry]]] = []
    room, last_hash = 0, -1
    for (major, _), entry in hashed:
        size = entry_size(len(entry[0]))
        if size > room:
            # Bit 0 of an index entry's hash says that names of the same hash began in the block before.
            leaves.append((major | (major == last_hash), []))
            room = block_size - TAIL_SIZE
        leaves[-1][1].append(entry)
        room -= size
        last_hash = major
    packed = [pack_leaf(part, block_size, seed) for _, part in leaves]
    root_limit = (block_size - DX_ROOT_AT - DxTail.SIZE) // _DX.size
    node_limit = (block_size - DX_NODE_AT - DxTail.SIZE) // _DX.size
    if len(leaves) <= root_limit:
        index = [(first, 1 + i) for i, (first, _) in enumerate(leaves)]
        return [
            _dx_root(ino, parent, index, levels=0, limit=root_limit, block_size=block_size, seed=seed),
            *packed,
        ], True
    groups = [range(s, min(s + node_limit, len(leaves))) for s in range(0, len(leaves), node_limit)]
    if len(groups) > root_limit:
        raise Unsupported(f"a directory of {len(entries)} names is too large")
    base = 1 + len(groups)
    nodes = [_dx_node([(leaves[i][0], base + i) for i in part], node_limit, block_size, seed) for part in groups]
    index = [(leaves[part[0]][0], 1 + i) for i, part in enumerate(groups)]
    return [
        _dx_root(ino, parent, index, levels=1, limit=root_limit, block_size=block_size, seed=seed),
        *nodes,
        *packed,
    ], True


def _dx_root(
    ino: int, parent: int, index: list[tuple[int, int]], *, levels: int, limit: int, block_size: int, seed: int
) -> bytes:
    rest = rec_len_to_disk(block_size - 12, block_size)
    head = HEADER.pack(ino, 12, 1, 2) + b".\0\0\0" + HEADER.pack(parent, rest, 2, 2) + b"..\0\0"
    head += DxRootInfo(0, HALF_MD4, DxRootInfo.SIZE, levels, 0).pack()
    return _dx_block(head, index, limit, block_size, seed)


def _dx_node(index: list[tuple[int, int]], limit: int, block_size: int, seed: int) -> bytes:
    return _dx_block(HEADER.pack(0, rec_len_to_disk(block_size, block_size), 0, 0), index, limit, block_size, seed)


def _dx_block(head: bytes, index: list[tuple[int, int]], limit: int, block_size: int, seed: int) -> bytes:
    body = head + DxCountLimit(limit, len(index)).pack() + index[0][1].to_bytes(4, "little")
    body += b"".join(_DX.pack(*entry) for entry in index[1:])
    # Covered: the entries in use, the tail's reserved word and its checksum as zero.
    tail = _U32X2.pack(0, crc32c(seed, body + bytes(8)))
    body += bytes(len(head) + limit * _DX.size - len(body)) + tail
    return body + bytes(block_size - len(body))
