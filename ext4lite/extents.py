"""Extents: the runs of blocks a file consists of, as a tree in ``i_block`` and in blocks of its own."""

from __future__ import annotations

from dataclasses import dataclass
from struct import iter_unpack

from ext4lite.checksum import crc32c
from ext4lite.layout._codecs import Extent as ExtentCodec
from ext4lite.layout._codecs import ExtentHeader, ExtentIdx
from ext4lite.layout.constants import EXTENT_MAGIC, MAX_EXTENT_LEN

HEADER = ExtentHeader.STRUCT
ENTRY = ExtentCodec.STRUCT
INDEX = ExtentIdx.STRUCT
ROOT_MAX = 4


@dataclass(slots=True)
class Extent:
    """``count`` blocks of a file from its block ``logical`` on, at block ``physical`` of the volume; unwritten ones read as zeros."""

    logical: int
    physical: int
    count: int
    unwritten: bool = False


def entries_per_block(block_size: int) -> int:
    """Entries in a tree block: what is left beside the header, where the checksum's tail always still fits."""
    return (block_size - HEADER.size) // ENTRY.size


def split_long(extents: list[Extent]) -> list[Extent]:
    """Cut extents to at most 32768 blocks, the most an entry can say."""
    if all(e.count <= MAX_EXTENT_LEN for e in extents):
        return extents
    out = []
    for e in extents:
        for skip in range(0, e.count, MAX_EXTENT_LEN):
            out.append(Extent(e.logical + skip, e.physical + skip, min(MAX_EXTENT_LEN, e.count - skip), e.unwritten))
    return out


def tree_blocks_needed(count: int, block_size: int) -> int:
    """Blocks that the tree of ``count`` extents takes beside ``i_block``."""
    per, total = entries_per_block(block_size), 0
    while count > ROOT_MAX:
        count = -(-count // per)
        total += count
    return total


def build_tree(
    extents: list[Extent], blocks: list[int], block_size: int, seed: int
) -> tuple[bytes, list[tuple[int, bytes]]]:
    """Build the tree of ``extents`` (ascending, each at most 32768 blocks long).

    ``blocks`` are the numbers of the tree's own blocks (:func:`tree_blocks_needed` of them), ``seed`` the inode's checksum
    seed. Returns the 60 bytes of ``i_block`` and (number, content) of each tree block.
    """
    per = entries_per_block(block_size)
    unused = iter(blocks)
    entries = [
        ENTRY.pack(
            e.logical, e.count + (MAX_EXTENT_LEN if e.unwritten else 0), e.physical >> 32, e.physical & 0xFFFFFFFF
        )
        for e in extents
    ]
    firsts = [e.logical for e in extents]
    out: list[tuple[int, bytes]] = []
    depth = 0
    while len(entries) > ROOT_MAX:
        above, above_firsts = [], []
        for start in range(0, len(entries), per):
            part = entries[start : start + per]
            number = next(unused)
            body = HEADER.pack(EXTENT_MAGIC, len(part), per, depth, 0) + b"".join(part)
            body += bytes(HEADER.size + per * ENTRY.size - len(body))
            body += crc32c(seed, body).to_bytes(4, "little")
            out.append((number, body + bytes(block_size - len(body))))
            above.append(INDEX.pack(firsts[start], number & 0xFFFFFFFF, number >> 32, 0))
            above_firsts.append(firsts[start])
        entries, firsts, depth = above, above_firsts, depth + 1
    root = HEADER.pack(EXTENT_MAGIC, len(entries), ROOT_MAX, depth, 0) + b"".join(entries)
    return root + bytes(60 - len(root)), out


def iter_raw(data: bytes, count: int) -> list[tuple[int, int, int, int]]:
    """Return the first ``count`` leaf entries behind the header at the beginning of ``data``, as stored."""
    return list(iter_unpack(ENTRY.format, data[HEADER.size : HEADER.size + count * ENTRY.size]))
