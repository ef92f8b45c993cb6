"""What a rebuild must keep of each inode, byte for byte, and what of a superblock."""

from __future__ import annotations

from typing import Any

from ext4lite.layout import constants as c
from ext4lite.layout._codecs import Inode, SuperBlock
from ext4lite.rebuild.maps import joined
from ext4lite.volume import Volume

_MAY_CHANGE = {
    "s_inodes_count", "s_inodes_per_group", "s_free_inodes_count", "s_blocks_count_lo", "s_blocks_count_hi",
    "s_r_blocks_count_lo", "s_r_blocks_count_hi", "s_free_blocks_count_lo", "s_free_blocks_count_hi", "s_checksum",
    "s_reserved_gdt_blocks", "s_jnl_blocks", "s_overhead_blocks", "s_mmp_block", "s_first_meta_bg", "s_backup_bgs",
    "s_orphan_file_inum", "s_prj_quota_inum", "s_lpf_ino",
}  # fmt: skip


def kept_of_super(volume: Volume) -> dict[str, Any]:
    """Return the superblock's fields that a rebuild leaves alone."""
    raw = SuperBlock.unpack(volume.super.raw.pack())
    return {name: getattr(raw, name) for name in SuperBlock.__slots__ if name not in _MAY_CHANGE}


def kept_of_inodes(volume: Volume) -> dict[bytes, tuple[Any, ...]]:
    """Return by path what a rebuild leaves alone: record without pointers, which blocks there are, attributes."""
    return {path: _kept(volume, ino) for path, ino in [(b"", c.ROOT_INO), *volume.walk()]}


def _kept(volume: Volume, ino: int) -> tuple[Any, ...]:
    record = volume.inode(ino)
    runs, own = volume.map(record)
    fields = Inode.unpack(record.fields.pack())
    fields.i_file_acl_lo = fields.l_i_file_acl_high = 0
    fields.l_i_checksum_lo = fields.i_checksum_hi = 0
    inline = fields.i_flags & c.INLINE_DATA_FL
    if runs or own or fields.i_flags & c.EXTENTS_FL or (inline and record.type == c.S_IFDIR):
        fields.i_block = bytes(60)  # pointers, or an inline directory with inode numbers
        fields.i_blocks_lo = fields.l_i_blocks_high = 0  # e2fsck is their judge
    # Behind the fields lie attributes, which may have numbers of inodes in them.
    logical = [(r.logical, r.count, r.unwritten) for r in joined(runs)]
    names = sorted(entry[0] for entry in volume.iterdir(ino)) if record.type == c.S_IFDIR else []
    return fields.pack(), logical, volume.xattrs(ino), names
