"""Directory blocks: reading entries, and writing whole directories, linear or hashed."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
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
_PART_BITS = 7
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


def linear_size(lengths: Iterable[int]) -> int:
    """Bytes that a directory's only block must have for names of these lengths."""
    return 2 * entry_size(2) + sum(entry_size(length) for length in lengths) + TAIL_SIZE


def pack_linear(ino: int, parent: int, entries: Sequence[DirEntry], block_size: int, seed: int) -> bytes:
    """Return the only block of a directory, with ``.`` and ``..`` before ``entries``, which must fit."""
    return pack_leaf([*_dots(ino, parent), *entries], block_size, seed)


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
    if linear_size(len(entry[0]) for entry in entries) <= block_size:
        return [pack_linear(ino, parent, entries, block_size, seed)], False
    hashed = HashedDirectory(
        ino,
        parent,
        ((key, entry[0]) for key, entry in enumerate(entries)),
        entries.__getitem__,
        block_size=block_size,
        seed=seed,
        hash_seed=hash_seed,
        unsigned=unsigned,
    )
    return list(hashed.blocks()), True


class HashedDirectory:
    """A directory with an index, laid out before its blocks are packed one by one: 16 bytes of memory a name.

    ``names`` gives a key and the name of each entry, ``entry`` the entry of a key (a number below 2^32); the other
    arguments and the errors are :func:`build`'s.
    """

    def __init__(
        self,
        ino: int,
        parent: int,
        names: Iterable[tuple[int, bytes]],
        entry: Callable[[int], DirEntry],
        *,
        block_size: int,
        seed: int,
        hash_seed: Sequence[int],
        unsigned: bool,
    ) -> None:
        self._ino, self._parent, self._entry = ino, parent, entry
        self._block_size, self._seed = block_size, seed
        self._order = array("I")
        self._firsts = array("I")  # of each leaf, its first hash
        self._starts = array("I")  # and where in the order it begins
        self._lay_out(names, effective_version(HALF_MD4, unsigned), hash_seed)
        leaves = len(self._firsts)
        self._root_limit = (block_size - DX_ROOT_AT - DxTail.SIZE) // _DX.size
        self._node_limit = (block_size - DX_NODE_AT - DxTail.SIZE) // _DX.size
        self._nodes = 0 if leaves <= self._root_limit else -(-leaves // self._node_limit)
        if self._nodes > self._root_limit:
            raise Unsupported(f"a directory of {len(self._order)} names is too large")
        self.count = 1 + self._nodes + leaves
        """How many blocks there are."""

    def blocks(self) -> Iterator[bytes]:
        """Yield the blocks in order: the root, the index nodes if there are any, full leaves."""
        size, seed, firsts = self._block_size, self._seed, self._firsts
        base = 1 + self._nodes
        index = [(first, base + i) for i, first in enumerate(firsts)]
        groups = [index[at : at + self._node_limit] for at in range(0, len(index), self._node_limit)]
        top = [(part[0][0], 1 + i) for i, part in enumerate(groups)] if self._nodes else index
        levels = 1 if self._nodes else 0
        yield _dx_root(self._ino, self._parent, top, levels=levels, limit=self._root_limit, block_size=size, seed=seed)
        for part in groups if self._nodes else ():
            yield _dx_node(part, self._node_limit, size, seed)
        order, entry = self._order, self._entry
        for start, end in pairwise([*self._starts, len(order)]):
            yield pack_leaf([entry(key) for key in order[start:end]], size, seed)

    def _lay_out(self, names: Iterable[tuple[int, bytes]], version: int, hash_seed: Sequence[int]) -> None:
        """Sort by hash and cut into leaves. Sorted is by parts, so that few Python objects exist at a time."""
        parts = [(array("Q"), array("I"), array("B")) for _ in range(1 << _PART_BITS)]
        for key, name in names:
            major, minor = name_hash(name, version, hash_seed)
            hashes, keys, lengths = parts[major >> (32 - _PART_BITS)]
            hashes.append(major << 32 | minor)
            keys.append(key)
            lengths.append(len(name))
        room, last_hash = 0, -1
        order, entry = self._order, self._entry
        for hashes, keys, lengths in parts:
            part = sorted(zip(hashes, keys, lengths, strict=True))
            if any(a[0] == b[0] for a, b in pairwise(part)):
                part.sort(key=lambda found: (found[0], entry(found[1])[0]))
            for both, key, length in part:
                size = entry_size(length)
                if size > room:
                    major = both >> 32
                    # Bit 0 of an index entry's hash says that names of the same hash began in the block before.
                    self._firsts.append(major | (major == last_hash))
                    self._starts.append(len(order))
                    room = self._block_size - TAIL_SIZE
                order.append(key)
                room -= size
                last_hash = both >> 32


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
