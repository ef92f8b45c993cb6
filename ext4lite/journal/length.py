"""Making the journal longer or shorter."""

from __future__ import annotations

from ext4lite.blockdev import StrPath
from ext4lite.errors import Unsupported
from ext4lite.journal.blocks import Device, clear, cut_tail, extend, log_of, note, session
from ext4lite.layout import constants as c

_LEAST_LOG = 512
"""Blocks of the log proper, without fast commits."""


def change_length(fd: int, path: StrPath, blocks: int, *, device: Device | None = None) -> None:
    """Make the journal of a clean volume ``blocks`` long. VolumeFull, Unsupported, CorruptImage, HostError."""
    with session(fd, path, device) as v:
        log = log_of(v)
        fast = log.super.s_num_fc_blks or (c.JBD2_DEFAULT_FC_BLOCKS if log.fc_first < log.maxlen else 0)
        if blocks - fast < _LEAST_LOG:
            raise Unsupported(f"{fast} blocks of the journal are for fast commits", where=v.where)
        record = v.inode(v.super.raw.s_journal_inum)
        have = -(-record.size // v.block_size)
        if blocks > have:
            v.step(lambda: note(v, record, sum(e.count for e in extend(v, record, blocks - have))))
            v.close()
    with session(fd, path, device) as v:
        log = log_of(v)
        if log.maxlen != blocks:
            number = log.maxlen
            while number < blocks:
                count = min(log.contiguous(number), blocks - number)
                clear(v, log.physical(number), count)
                number += count
            log.super.s_maxlen = blocks
            log.write_super(start=0, sequence=log.super.s_sequence)
            v._blocks.flush()
    with session(fd, path, device) as v:
        cut_tail(v, blocks)
