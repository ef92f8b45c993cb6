"""A quota file: who holds how much, in the tree of format "vfsv1" (:mod:`ext4lite.layout.quota`).

With the feature ``quota`` three hidden files count bytes and inodes by user, group and project. This module knows the
tree; where its blocks lie, and what may be done with them, its users know: recovery (``jbd2/quota.py``) keeps the
counts true when it frees and takes what belongs to somebody, a rebuild (``rebuild/engine.py``) when inodes get another
number of blocks.
"""

from __future__ import annotations

from struct import pack_into, unpack_from
from typing import Protocol

from ext4lite.errors import CorruptImage, Unsupported
from ext4lite.layout._codecs import QuotaEntry, QuotaHeader, QuotaLeaf

BLOCK = 1024
"""Bytes of a block of the tree."""
_MAGICS = (0xD9C01F11, 0xD9C01927, 0xD9C03F14)
"""Of user, group and project files."""
_VERSION = 1
_ROOT = 1
_DEPTH = 4
_MOST = (1 << 64) - 1
_PLACES = [QuotaLeaf.SIZE + i * QuotaEntry.SIZE for i in range((BLOCK - QuotaLeaf.SIZE) // QuotaEntry.SIZE)]
"""Where in a leaf its entries lie."""


class Blocks(Protocol):
    """Where a file's blocks of 1 KiB lie."""

    @property
    def count(self) -> int:
        """How many there are."""

    def read(self, number: int) -> bytes:
        """Return a block. CorruptImage where there is a hole."""

    def write(self, number: int, data: bytes) -> None:
        """Change a block. CorruptImage where there is a hole."""

    def grow(self) -> None:
        """Add at least one at the end. VolumeFull, Unsupported."""


class QuotaFile:
    """One quota file, being changed; ``kind`` is 0 for users, 1 for groups, 2 for projects.

    Everything raises CorruptImage, opening also Unsupported (another format).
    """

    def __init__(self, blocks: Blocks, kind: int, where: str) -> None:
        self._blocks, self._where = blocks, where
        self._head = QuotaHeader.unpack(self._read(0))
        if self._head.h_magic != _MAGICS[kind]:
            raise CorruptImage(f"has magic {self._head.h_magic:#010x}", where=where)
        if self._head.h_version != _VERSION:
            raise Unsupported(f"has format {self._head.h_version}, not vfsv1", where=where)
        if not _ROOT < self._head.i_blocks <= blocks.count:
            raise CorruptImage(f"says that it has {self._head.i_blocks} of {blocks.count} blocks", where=where)

    def add(self, owner: int, space: int, inodes: int) -> None:
        """Add bytes and inodes to what an owner holds; an owner unknown so far gets an entry."""
        leaf = self._leaf_of(owner)
        self._change(self._enter(owner) if leaf is None else leaf, owner, space, inodes)

    def correct(self, owner: int, space: int) -> None:
        """Add bytes to what an owner holds, if it has an entry: one that has none was not counted so far either."""
        leaf = self._leaf_of(owner)
        if leaf is not None:
            self._change(leaf, owner, space, 0)

    def store(self) -> None:
        """Write the header: call it at the end."""
        self._blocks.write(0, self._head.pack() + self._read(0)[QuotaHeader.SIZE :])

    def _change(self, leaf: int, owner: int, space: int, inodes: int) -> None:
        """Usage does not become negative."""
        data = bytearray(self._read(leaf))
        for at in _PLACES:
            entry = QuotaEntry.unpack(data, at)
            if entry.q_id != owner or not any(data[at : at + QuotaEntry.SIZE]):
                continue
            entry.q_space = min(max(0, entry.q_space + space), _MOST)
            entry.q_inodes = min(max(0, entry.q_inodes + inodes), _MOST)
            self._put_entry(data, at, entry)
            self._blocks.write(leaf, bytes(data))
            return
        raise CorruptImage(f"block {leaf} has no entry of {owner}", where=self._where)

    @staticmethod
    def _put_entry(data: bytearray, at: int, entry: QuotaEntry) -> None:
        raw = entry.pack()
        if not any(raw):  # root without anything: zeros alone would be no entry
            entry.q_inode_time = 1
            raw = entry.pack()
        data[at : at + QuotaEntry.SIZE] = raw

    # -- the tree ---------------------------------------------------------------------------------------------------

    def _read(self, number: int) -> bytes:
        if not 0 <= number < self._blocks.count:
            raise CorruptImage(f"refers to block {number} of {self._blocks.count}", where=self._where)
        return self._blocks.read(number)

    def _new_block(self) -> int:
        """Take a block, from the list of free ones or at the file's end; it holds zeros."""
        head = self._head
        number = head.i_free_block
        if number:
            head.i_free_block = QuotaLeaf.unpack(self._read(number)).l_next_free
        else:
            number = head.i_blocks
            head.i_blocks += 1
            if number >= self._blocks.count:
                self._blocks.grow()
        self._blocks.write(number, bytes(BLOCK))
        return number

    @staticmethod
    def _place(owner: int, level: int) -> int:
        """Return the byte of a node where the reference for an owner lies."""
        return 4 * (owner >> 8 * (_DEPTH - 1 - level) & 0xFF)

    def _child(self, number: int, owner: int, level: int) -> int:
        below: int = unpack_from("<I", self._read(number), self._place(owner, level))[0]
        return below

    def _leaf_of(self, owner: int) -> int | None:
        number = _ROOT
        for level in range(_DEPTH):
            number = self._child(number, owner, level)
            if not number:
                return None
        return number

    def _enter(self, owner: int) -> int:
        """Make an entry for an owner, and the tree's nodes on the way to it; return its leaf."""
        head = self._head
        leaf = head.i_free_entry
        if not leaf:
            leaf = head.i_free_entry = self._new_block()
        data = bytearray(self._read(leaf))
        begin = QuotaLeaf.unpack(data)
        at = next((p for p in _PLACES if not any(data[p : p + QuotaEntry.SIZE])), None)
        if at is None or begin.l_prev_free:
            raise CorruptImage(f"block {leaf} is said to have room", where=self._where)
        begin.l_entries += 1
        if begin.l_entries >= len(_PLACES):  # full: out of the list of leaves with room
            head.i_free_entry, begin.l_next_free = begin.l_next_free, 0
            if head.i_free_entry:
                after = bytearray(self._read(head.i_free_entry))
                following = QuotaLeaf.unpack(after)
                following.l_prev_free = 0
                after[: QuotaLeaf.SIZE] = following.pack()
                self._blocks.write(head.i_free_entry, bytes(after))
        data[: QuotaLeaf.SIZE] = QuotaLeaf(
            l_next_free=begin.l_next_free, l_prev_free=0, l_entries=min(begin.l_entries, 0xFFFF)
        ).pack()
        self._put_entry(data, at, QuotaEntry(q_id=owner))
        self._blocks.write(leaf, bytes(data))
        self._link(owner, leaf)
        return leaf

    def _link(self, owner: int, leaf: int) -> None:
        number = _ROOT
        for level in range(_DEPTH):
            below = self._child(number, owner, level)
            if not below:
                below = leaf if level == _DEPTH - 1 else self._new_block()
                node = bytearray(self._read(number))
                pack_into("<I", node, self._place(owner, level), below)
                self._blocks.write(number, bytes(node))
            number = below
