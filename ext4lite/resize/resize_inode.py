"""The resize inode: it keeps blocks behind the descriptors of every copy, so that there can be more descriptors.

Inode 7 has one block of pointers at the second level; each pointer names a kept block of the first group, which in turn
holds the numbers of the kept blocks at the same place of all copies (source:
Documentation/filesystems/ext4/special_inodes.rst, and e2fsck's check of it).
"""

from __future__ import annotations

from struct import Struct, pack

from ext4lite.errors import CorruptImage
from ext4lite.layout_volume import LayoutVolume
from ext4lite.resize.move import RESIZE_INO
from ext4lite.shape import Shape

_POINTER = Struct("<I")
_DIND_AT = 4 * 13


def settle(volume: LayoutVolume, old: Shape, new: Shape) -> None:
    """Have the resize inode keep what geometry ``new`` says, which the volume has taken already. CorruptImage."""
    v = volume
    record = v.inode(RESIZE_INO)
    where = v._at("the resize inode")
    number = _POINTER.unpack_from(record.fields.i_block, _DIND_AT)[0]
    if not record.fields.i_links_count or not number:
        raise CorruptImage("is empty", where=where, hint="run e2fsck -fy on it")
    per = v.block_size // 4
    pointers = v.cache.change(number, where)
    pointers[:] = bytes(v.block_size)
    same_copies = list(old.backups()) == list(new.backups())
    copies = list(new.backups())
    kept_before = range(old.first + 1 + old.gdt, old.first + 1 + old.gdt + old.reserved)
    for i in range(new.reserved):
        block = new.first + 1 + new.gdt + i
        _POINTER.pack_into(pointers, 4 * ((new.gdt + i) % per), block)
        if same_copies and block in kept_before:
            continue
        places = [block + group * new.per_group for group in copies]
        v.cache.create(block)[: 4 * len(places)] = pack(f"<{len(places)}I", *places)
    count = (1 + new.reserved * new.supers()) * (v.block_size // 512)
    record.fields.i_blocks_lo, record.fields.l_i_blocks_high = count & 0xFFFFFFFF, count >> 32
    v.put_inode(record)
