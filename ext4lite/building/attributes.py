"""Where the extended attributes of the inodes go: into the inode, and what is too large there into shared blocks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from ext4lite import xattrs
from ext4lite.building.inodes import Inodes
from ext4lite.checksum import xattr_block_checksum
from ext4lite.geometry import BLOCK, INODE_SIZE
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import XattrHeader

EXTRA_ISIZE = 32
_INODE_SPACE = INODE_SIZE - 128 - EXTRA_ISIZE - 4
_BLOCK_SPACE = BLOCK - XattrHeader.SIZE
_REMEMBERED = 1024
_NOTHING = b""


@dataclass(slots=True)
class _Shared:
    """A set that lies in blocks: how many inodes wait for one, and the last block with the inodes it has room for."""

    waiting: int = 0
    block: int = 0
    room: int = 0


@dataclass(slots=True)
class _Split:
    """Attributes as stored: bytes behind the inode's fields, and the rest with a digest that is the same for equals."""

    area: bytes
    digest: bytes
    outside: list[xattrs.RawEntry]


class AttributeBlocks:
    """The attribute blocks of a volume. ``count`` once, then ``place`` those of every inode that has some.

    ``seed`` is that of the volume's checksums, ``take`` gives a free block, ``put`` writes one's bytes.
    """

    def __init__(self, inodes: Inodes, seed: int, take: Callable[[], int], put: Callable[[bytes, int], None]) -> None:
        self._inodes = inodes
        self._seed = seed
        self._take = take
        self._put = put
        self._shared: dict[bytes, _Shared] = {}
        self._splits: dict[int, _Split] = {}  # of the pieces asked for lately

    def count(self) -> None:
        """Find out how many inodes share each set that lies in a block. Unsupported for what ext4 cannot hold."""
        for extra in self._inodes.extras():
            digest = self._split(extra).digest
            if digest:
                self._shared.setdefault(digest, _Shared()).waiting += 1

    def place(self, extra: int) -> tuple[bytes, int]:
        """Return (bytes behind the inode's fields, number of its attribute block or 0) for one more inode."""
        split = self._split(extra)
        return split.area, self._block(split) if split.digest else 0

    def _split(self, extra: int) -> _Split:
        split = self._splits.get(extra)
        if split is None:
            if len(self._splits) >= _REMEMBERED:
                self._splits.clear()
            split = self._splits[extra] = self._make_split(self._inodes.attributes(extra))
        return split

    @staticmethod
    def _make_split(attributes: dict[bytes, bytes]) -> _Split:
        if not attributes:
            return _Split(_NOTHING, _NOTHING, [])
        inside, outside = xattrs.split_for_inode(xattrs.to_entries(attributes), _INODE_SPACE, _BLOCK_SPACE)
        area = digest = _NOTHING
        if inside:
            area = c.XATTR_MAGIC.to_bytes(4, "little") + xattrs.pack_area(inside, _INODE_SPACE)[0]
        if outside:
            digest = hashlib.blake2b(xattrs.pack_block(outside, BLOCK, 0), digest_size=16).digest()
        return _Split(area, digest, outside)

    def _block(self, split: _Split) -> int:
        """Return the block of a set for one more inode; a block serves up to 1024 inodes."""
        shared = self._shared[split.digest]
        if not shared.room:
            shared.room = min(shared.waiting, c.XATTR_REFCOUNT_MAX)
            shared.block = self._take()
            raw = xattrs.pack_block(split.outside, BLOCK, shared.room)
            checksum = xattr_block_checksum(self._seed, shared.block, raw)
            at = XattrHeader.OFFSET_h_checksum
            self._put(raw[:at] + checksum.to_bytes(4, "little") + raw[at + 4 :], shared.block * BLOCK)
        shared.room -= 1
        shared.waiting -= 1
        block = shared.block
        if not shared.waiting:
            del self._shared[split.digest]
        return block
