"""Moving the journal to other blocks."""

from __future__ import annotations

import contextlib

from ext4lite.block_map import BlockMap
from ext4lite.blockdev import StrPath
from ext4lite.errors import CorruptImage, VolumeFull
from ext4lite.extents import ENTRY, HEADER, ROOT_MAX, Extent
from ext4lite.geometry import MIN_JOURNAL_BLOCKS
from ext4lite.inode import InodeRecord, pack_record
from ext4lite.journal.blocks import Device, clear, cut_tail, extend, log_of, note, open_volume, session
from ext4lite.journal.length import change_length
from ext4lite.layout import constants as c
from ext4lite.layout_volume import LayoutVolume


def move(
    fd: int,
    path: StrPath,
    away: list[tuple[int, int]],
    *,
    device: Device | None = None,
) -> bool:
    """Move the journal of a clean volume out of ``away`` ([start, end) in blocks, ascending); tell whether it could be.

    It may be shorter afterwards when there is no place for all of it in few pieces. What is not possible leaves the
    journal where it was: maps that do not fit into the inode cannot be changed in one write.
    """
    with session(fd, path, device) as v:
        length = log_of(v).maxlen
        cut_tail(v, length)
    with session(fd, path, device) as v:
        record = v.inode(v.super.raw.s_journal_inum)
        own = v.map(record)[0]
        if not any(low < run.physical + run.count and run.physical < high for run in own for low, high in away):
            return True
        if isinstance(v.file_map(record), BlockMap):
            return False
        shorter = sum(run.count for run in own[: ROOT_MAX // 2])
        if len(own) <= ROOT_MAX // 2:
            v.alloc.confine(away)
            try:
                v.step(lambda: _take_place(v, record, own, length))
            except VolumeFull:
                return False
            v.close()
            shorter = 0
    if shorter:  # with more pieces the new ones would not fit into the inode beside the old ones
        if shorter < MIN_JOURNAL_BLOCKS:
            return False
        change_length(fd, path, shorter, device=device)
        return move(fd, path, away, device=device)
    _swap(fd, path, length, device)
    with session(fd, path, device) as v:
        cut_tail(v, length)
    return True


def _take_place(volume: LayoutVolume, record: InodeRecord, own: list[Extent], blocks: int) -> None:
    pieces = extend(volume, record, blocks)
    entries = sum(-(-run.count // c.MAX_EXTENT_LEN) for run in [*own, *pieces])
    if entries > ROOT_MAX or HEADER.unpack_from(record.fields.i_block)[3]:
        raise VolumeFull("the free space is in too many pieces for the journal", where=volume.where)
    note(volume, record, blocks)


def _split(runs: list[Extent], blocks: int) -> tuple[list[Extent], list[Extent]]:
    """Return what of a file lies from its block ``blocks`` on, and what before it."""
    behind, before = [], []
    for run in runs:
        cut = min(max(blocks - run.logical, 0), run.count)
        if cut:
            before.append(Extent(run.logical, run.physical, cut))
        if cut < run.count:
            behind.append(Extent(run.logical + cut, run.physical + cut, run.count - cut))
    return behind, before


def _swap(fd: int, path: StrPath, blocks: int, device: Device | None) -> None:
    """Have the journal's inode name the blocks behind its first ``blocks`` ones first: one write of its record."""
    with contextlib.closing(open_volume(fd, path, device, journaled=False)) as v:
        ino = v.super.raw.s_journal_inum
        record = v.inode(ino)
        new, old = _split(v.map(record)[0], blocks)
        entries, at = [], 0
        for run in (*new, *old):
            entries.append(ENTRY.pack(at, run.count, run.physical >> 32, run.physical & 0xFFFFFFFF))
            at += run.count
        if sum(run.count for run in new) != blocks or len(entries) > ROOT_MAX:
            raise CorruptImage("the journal's blocks are not those expected", where=v.where)
        for run in new:
            clear(v, run.physical, run.count)
        v.write_raw(new[0].physical, v._blocks.read(old[0].physical))
        v._blocks.flush()
        root = HEADER.pack(c.EXTENT_MAGIC, len(entries), ROOT_MAX, 0, 0) + b"".join(entries)
        record.fields.i_block = root + bytes(60 - len(root))
        group, index = divmod(ino - 1, v.super.raw.s_inodes_per_group)
        block, offset = divmod(index * v.super.inode_size, v.block_size)
        number = v.alloc.groups[group].inode_table + block
        data = bytearray(v._blocks.read(number))
        seed = v.super.seed if v.super.metadata_csum else None
        data[offset : offset + v.super.inode_size] = pack_record(record, seed)
        v.write_raw(number, bytes(data))
        v._blocks.flush()
