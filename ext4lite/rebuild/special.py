"""The volume's own inodes, made afresh: an empty journal, the list of reserved descriptor blocks, an empty orphan file;
by how much quotas change (source: Documentation/filesystems/ext4/journal.rst, special_inodes.rst, orphan.rst).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from struct import pack

from ext4lite.checksum import crc32c, inode_seed
from ext4lite.errors import Unsupported
from ext4lite.indirect import DIRECT
from ext4lite.inode import InodeRecord
from ext4lite.jbd2.log import Log, super_checksum
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import JournalSuperBlock
from ext4lite.rebuild.plan import Layout

_ORPHAN_MAGIC = 0x0B10CA04


def journal_super(log: Log, blocks: int) -> bytes:
    """Return the first block of an empty journal of ``blocks`` blocks that goes on where ``log`` ends."""
    raw = log.read(0)
    sb = JournalSuperBlock.unpack(raw)
    sb.s_maxlen = blocks
    sb.s_start = sb.s_errno = 0
    sb.s_first = 1
    v2 = sb.h_blocktype == c.JBD2_SUPERBLOCK_V2
    if v2 and sb.s_feature_incompat & c.JBD2_INCOMPAT_FAST_COMMIT:
        wanted = sb.s_num_fc_blks or c.JBD2_DEFAULT_FC_BLOCKS
        if blocks - wanted < c.JBD2_MIN_BLOCKS // 2:
            sb.s_num_fc_blks = min(wanted, blocks // 4)
    head = sb.pack()
    if v2 and sb.s_feature_incompat & (c.JBD2_INCOMPAT_CSUM_V2 | c.JBD2_INCOMPAT_CSUM_V3):
        sb.s_checksum = super_checksum(head)
        head = sb.pack()
    if not v2:  # what follows s_errno is undefined in version 1
        head = head[:36] + raw[36 : len(head)]
    return head + bytes(len(raw) - len(head))


def resize_blocks(layout: Layout, first: int) -> tuple[bytes, list[tuple[int, bytes]], int]:
    """Return what the resize inode consists of: (``i_block``, blocks to write, how many blocks it has).

    Its double indirect block ``first`` lists the reserved descriptor blocks of group 0, and each of those the blocks at
    the same place in the groups with backups.
    """
    size = layout.shape.block_size
    per = size // 4
    table = [0] * per
    base = layout.super_block(0) + 1 + layout.behind_super
    copies = [g for g in range(1, layout.groups) if layout.has_super(g)]
    if len(copies) > per:
        raise Unsupported("the resize inode cannot list the backups of so many groups")
    out = []
    for i in range(layout.reserved):
        number = base + i
        table[(layout.behind_super + i) % per] = number
        backups = [number + g * layout.shape.blocks_per_group for g in copies]
        out.append((number, pack(f"<{len(copies)}I", *backups) + bytes(4 * (per - len(copies)))))
    out.append((first, pack(f"<{per}I", *table)))
    block = bytearray(60)
    block[4 * (DIRECT + 1) : 4 * (DIRECT + 2)] = first.to_bytes(4, "little")
    return bytes(block), out, 1 + layout.reserved * (1 + len(copies))


def orphan_block(block_size: int, number: int, seed: int | None, ino: int, generation: int) -> bytes:
    """Return an empty block of an orphan file that lies at block ``number``."""
    body = bytes(block_size - 8)
    total = 0
    if seed is not None:
        total = crc32c(crc32c(inode_seed(seed, ino, generation), number.to_bytes(8, "little")), body)
    return body + pack("<II", _ORPHAN_MAGIC, total)


@dataclass(slots=True)
class QuotaChanges:
    """By how many bytes the space of users, groups and projects changes."""

    by_kind: tuple[dict[int, int], dict[int, int], dict[int, int]] = field(default_factory=lambda: ({}, {}, {}))

    def add(self, record: InodeRecord, change: int) -> None:
        """Note a change of an inode's ``i_blocks``, in bytes."""
        if not change:
            return
        i = record.fields
        ids = (i.i_uid | i.l_i_uid_high << 16, i.i_gid | i.l_i_gid_high << 16, i.i_projid)
        for changes, ident in zip(self.by_kind, ids, strict=True):
            changes[ident] = changes.get(ident, 0) + change
