"""Removing the journal."""

from __future__ import annotations

import os

from ext4lite import bitmap
from ext4lite.blockdev import StrPath
from ext4lite.jbd2.log import write_back
from ext4lite.journal.blocks import Device, own_nodes
from ext4lite.layout import constants as c
from ext4lite.layout_volume import LayoutVolume
from ext4lite.shape import shape_of
from ext4lite.super import Super, read_super
from ext4lite.volume import Volume


def unfinished(fd: int, sb: Super) -> bool:
    """Tell whether somebody was killed while removing the journal of the volume at ``fd``."""
    if sb.compat & c.COMPAT_HAS_JOURNAL or sb.needs_recovery:
        return False
    record = Volume(fd, sb, sb.where).inode(c.JOURNAL_INO)
    return record.type == c.S_IFREG and record.fields.i_links_count > 0


class Removal:
    """Removing a journal; see the package's text."""

    def __init__(self, fd: int, path: StrPath, device: Device | None) -> None:
        self.fd, self.path, self.device = fd, path, device

    def run(self) -> None:
        """Remove it, or go on."""
        sb = read_super(self.fd, os.fspath(self.path))
        ino = sb.raw.s_journal_inum or c.JOURNAL_INO
        v = LayoutVolume.open_locked(self.fd, self.path, journaled=False, device=self.device, clean=False)
        try:
            if sb.compat & c.COMPAT_HAS_JOURNAL:
                self._turn_off(v)
            if not v.super.raw.s_state & c.STATE_VALID:
                self._free(v, ino)
            self._forget(v, ino)
            v.write_superblock_copies()
        finally:
            v.abandon()

    def _put_super(self, v: LayoutVolume) -> None:
        """Write the superblock in place, durably."""
        number, offset = divmod(c.SUPERBLOCK_OFFSET, v.block_size)
        block = bytearray(v._blocks.read(number))
        block[offset : offset + c.SUPERBLOCK_SIZE] = v._sealed_super(v.super.raw)
        v.write_raw(number, bytes(block))
        v._blocks.flush()

    def _turn_off(self, v: LayoutVolume) -> None:
        raw = v.super.raw
        if raw.s_overhead_blocks:
            own = sum(run.count for run in v.map(v.inode(raw.s_journal_inum))[0])
            raw.s_overhead_blocks = max(0, raw.s_overhead_blocks - own)
        raw.s_feature_compat &= ~c.COMPAT_HAS_JOURNAL & ~c.COMPAT_FAST_COMMIT
        raw.s_journal_inum, raw.s_jnl_backup_type, raw.s_jnl_blocks = 0, 0, (0,) * 17
        raw.s_state &= ~c.STATE_VALID
        v.super.compat = raw.s_feature_compat
        self._put_super(v)

    def _free(self, v: LayoutVolume, ino: int) -> None:
        """Free the journal's blocks; counts follow from the bitmaps, so that it can be done again."""
        alloc, raw = v.alloc, v.super.raw
        v.begin_unmarked()
        record = v.inode(ino)
        runs = v.map(record)[0]
        shape = shape_of(v.super)
        pieces = [(run.physical, run.count) for run in runs] + [(number, 1) for number in own_nodes(v, record)]
        for start, count in pieces:
            at, end = start, start + count
            while at < end:
                number = (at - shape.first) // shape.per_group
                part = min(end, shape.end(number)) - at
                alloc.set_bits(number, at - shape.start(number), part, used=False)
                at += part
        for number in alloc.touched:
            group = alloc.groups[number]
            free = bitmap.count_clear(v.cache.get(group.block_bitmap), 8 * v.block_size)
            alloc.count(group, free - group.free)
        v.store_all()
        number = c.SUPERBLOCK_OFFSET // v.block_size
        write_back(v._blocks, {n: bytes(d) for n, d in v.cache.dirty.items() if n != number})
        v._blocks.flush()
        raw.s_state |= c.STATE_VALID
        self._put_super(v)

    def _forget(self, v: LayoutVolume, ino: int) -> None:
        """Clear the journal's inode."""
        group, index = divmod(ino - 1, v.super.raw.s_inodes_per_group)
        block, offset = divmod(index * v.super.inode_size, v.block_size)
        number = v.alloc.groups[group].inode_table + block
        data = bytearray(v._blocks.read(number))
        data[offset : offset + v.super.inode_size] = bytes(v.super.inode_size)
        v.write_raw(number, bytes(data))
        v._blocks.flush()
