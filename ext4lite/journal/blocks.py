"""A volume open for changing its journal, and the journal's inode and blocks in it."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from struct import Struct

from ext4lite import hostfs
from ext4lite.blockdev import StrPath
from ext4lite.errors import CorruptImage, VolumeFull
from ext4lite.extents import Extent
from ext4lite.inode import InodeRecord
from ext4lite.jbd2.log import Blocks, Log
from ext4lite.layout_volume import LayoutVolume

Device = Callable[[Blocks], Blocks]
_WORDS = Struct("<15I")
_ZERO_STEP = 1 << 20


def open_volume(fd: int, path: StrPath, device: Device | None, *, journaled: bool = True) -> LayoutVolume:
    """Open the volume whose file is open and locked at ``fd``; see :meth:`LayoutVolume.open_locked`."""
    return LayoutVolume.open_locked(fd, path, journaled=journaled, device=device)


@contextlib.contextmanager
def session(fd: int, path: StrPath, device: Device | None) -> Iterator[LayoutVolume]:
    """Open the volume; what the block leaves uncommitted when it fails is forgotten."""
    volume = open_volume(fd, path, device)
    try:
        yield volume
        volume.close()
    finally:
        if volume._fd >= 0:
            volume.give_up()


def note(volume: LayoutVolume, record: InodeRecord, change: int) -> None:
    """Keep the copy of the journal's inode in the superblock; ``change`` is the number of blocks it has more."""
    raw = volume.super.raw
    fields = record.fields
    raw.s_jnl_backup_type = 1
    raw.s_jnl_blocks = (*_WORDS.unpack(fields.i_block), fields.i_size_high, fields.i_size_lo)
    if raw.s_overhead_blocks:
        raw.s_overhead_blocks = raw.s_overhead_blocks + change & 0xFFFFFFFF
    volume.super_changed()


def extend(volume: LayoutVolume, record: InodeRecord, blocks: int) -> list[Extent]:
    """Give the journal's inode more blocks at its end, in as few pieces as there are; return them. VolumeFull."""
    v = volume
    fmap = v.file_map(record)
    have = v.map(record)[0]
    at = have[-1].logical + have[-1].count if have else 0
    goal = have[-1].physical + have[-1].count if have else v.super.group_first(v.super.groups // 2)
    out, left = [], blocks
    if v.alloc.free_blocks < blocks:
        raise VolumeFull(f"{blocks * v.block_size} bytes for the journal are not free", where=v.where)
    while left:
        run = v.alloc.allocate(goal, left)
        v.add_blocks(record, run.count)
        fmap.insert(Extent(at, run.start, run.count))
        out.append(Extent(at, run.start, run.count))
        at, left, goal = at + run.count, left - run.count, run.start + run.count
    v.set_size(record, at * v.block_size)
    v.put_inode(record)
    return out


def own_nodes(volume: LayoutVolume, record: InodeRecord) -> list[int]:
    """Return the blocks of an inode's tree or block map."""
    out: list[int] = []

    def meet(number: int) -> bool:
        out.append(number)
        return False

    volume.file_map(record).move_nodes(meet)
    return out


def clear(volume: LayoutVolume, start: int, count: int) -> None:
    """Turn blocks that nothing refers to into zeros, lest an old log in them is ever taken for a new one."""
    v, size = volume, volume.block_size
    if stat.S_ISREG(os.fstat(v._fd).st_mode) and hostfs.punch(v._fd, start * size, count * size):
        return
    step = max(1, _ZERO_STEP // size)
    for at in range(start, start + count, step):
        v.write_raw(at, bytes(min(step, start + count - at) * size))


def log_of(volume: LayoutVolume) -> Log:
    """Return the log of a volume that has a journal. CorruptImage."""
    if volume.journal is None:
        raise CorruptImage("the volume has no journal", where=volume.where)
    return volume.journal.log


def cut_tail(volume: LayoutVolume, blocks: int) -> None:
    """Give back what the journal's inode has beyond ``blocks`` blocks."""
    v = volume
    ino = v.super.raw.s_journal_inum

    def cut() -> None:
        record = v.inode(ino)
        have = -(-record.size // v.block_size)
        if have <= blocks:
            return
        freed = v.file_map(record).remove(blocks, have)
        for run in freed:
            v.alloc.free(run.start, run.count)
            v.add_blocks(record, -run.count)
        v.set_size(record, blocks * v.block_size)
        v.put_inode(record)
        note(v, record, -sum(run.count for run in freed))

    v.step(cut)
