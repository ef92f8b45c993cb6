"""The inode records of a new volume as they go to the disk, with the extent tree blocks that belong to them."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct

from ext4lite.building.attributes import EXTRA_ISIZE
from ext4lite.building.inodes import Inodes, Known
from ext4lite.checksum import crc32c, inode_seed
from ext4lite.extents import Extent, build_tree, root_of_one, split_long, tree_blocks_needed
from ext4lite.geometry import BLOCK, INODE_SIZE
from ext4lite.inode import encode_rdev, encode_time
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import Inode

_CSUM = Struct("<H")
_LOW, _HIGH = Inode.OFFSET_l_i_checksum_lo, Inode.OFFSET_i_checksum_hi
_BLANK = bytes(60)
_EMPTY_ROOT, _ = build_tree([], [], BLOCK, 0)
_HUGE_SECTORS = 1 << 32
_SECTORS = BLOCK // 512
_MAX_DIR_LINKS = c.LINK_MAX - 1
_WITH_EXTENTS = (c.S_IFREG, c.S_IFDIR)
_DEVICES = (c.S_IFCHR, c.S_IFBLK)


class Records:
    """Makes records of 256 bytes.

    ``seed`` is that of the volume's checksums, ``created_ns`` every inode's time of birth; ``take`` gives the numbers
    of so many free blocks and ``put`` writes bytes at a byte of the image.
    """

    def __init__(
        self,
        inodes: Inodes,
        *,
        seed: int,
        created_ns: int,
        take: Callable[[int], list[int]],
        put: Callable[[bytes, int], None],
    ) -> None:
        self._inodes = inodes
        self._seed = seed
        self._created = encode_time(created_ns, wide=True)
        self._take = take
        self._put = put

    def record(self, ino: int, known: Known, area: bytes, file_acl: int) -> bytes:
        """Return the record of an inode, whose extent tree blocks are written if there are any.

        ``area`` are the attributes in the inode, ``file_acl`` is the block with the others or 0.
        """
        seed = inode_seed(self._seed, ino, 0)
        extents: list[Extent] = []
        flags, block, tree = 0, _BLANK, 0
        kind = known.type
        if kind in _WITH_EXTENTS or (kind == c.S_IFLNK and known.body[2]):
            flags = c.EXTENTS_FL
            extents = self._inodes.extents(known.body)
            block, tree = self._extent_root(extents, seed)
        elif kind == c.S_IFLNK:
            target = self._inodes.target(known.body)
            block = target + bytes(60 - len(target))
        elif kind in _DEVICES:
            block = encode_rdev(known.body[1], known.body[2])
        if known.indexed:
            flags |= c.INDEX_FL
        blocks = (sum([e.count for e in extents]) + tree + bool(file_acl)) * _SECTORS
        if blocks >= _HUGE_SECTORS:
            flags |= c.HUGE_FILE_FL
            blocks //= _SECTORS
        links = 1 if known.links > _MAX_DIR_LINKS and kind == c.S_IFDIR else known.links
        return self._pack(known, area, file_acl, seed=seed, links=links, blocks=blocks, flags=flags, block=block)

    def _pack(
        self,
        known: Known,
        area: bytes,
        file_acl: int,
        *,
        seed: int,
        links: int,
        blocks: int,
        flags: int,
        block: bytes,
    ) -> bytes:
        atime, ctime, mtime = known.atime, known.ctime, known.mtime
        # By position, and not with the codec's constructor: that takes three times as long.
        raw = Inode.STRUCT.pack(
            known.mode,
            known.uid & 0xFFFF,
            known.size & 0xFFFFFFFF,
            atime[0],
            ctime[0],
            mtime[0],
            0,  # i_dtime
            known.gid & 0xFFFF,
            links,
            blocks & 0xFFFFFFFF,
            flags,
            0,  # l_i_version
            block,
            0,  # i_generation
            file_acl & 0xFFFFFFFF,
            known.size >> 32,
            0,  # i_obso_faddr
            blocks >> 32,
            file_acl >> 32,
            known.uid >> 16,
            known.gid >> 16,
            0,  # l_i_checksum_lo
            0,  # l_i_reserved
            EXTRA_ISIZE,
            0,  # i_checksum_hi
            ctime[1],
            mtime[1],
            atime[1],
            *self._created,
            0,  # i_version_hi
            0,  # i_projid
        )
        raw += area
        raw += bytes(INODE_SIZE - len(raw))
        checksum = crc32c(seed, raw)
        record = bytearray(raw)
        _CSUM.pack_into(record, _LOW, checksum & 0xFFFF)
        _CSUM.pack_into(record, _HIGH, checksum >> 16)
        return bytes(record)

    def _extent_root(self, extents: list[Extent], seed: int) -> tuple[bytes, int]:
        """Write the tree blocks; return ``i_block`` and how many blocks the tree takes."""
        if not extents:
            return _EMPTY_ROOT, 0
        extents = split_long(extents)
        if len(extents) == 1:
            return root_of_one(extents[0]), 0
        need = tree_blocks_needed(len(extents), BLOCK)
        root, blocks = build_tree(extents, self._take(need), BLOCK, seed)
        for number, content in blocks:
            self._put(content, number * BLOCK)
        return root, need
