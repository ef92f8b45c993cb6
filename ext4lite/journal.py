"""The journal as a thing that can be shown, made, resized, moved and removed, in place.

Whatever is killed, the volume stays consistent, and the same call goes on from there:

- **Made**: free blocks get a log that holds one transaction, which writes the journal's inode and marks its blocks. One
  write of the superblock turns the journal on, with RECOVER; what follows is recovery.
- **Larger**: more blocks for its inode (a transaction like any other), then a new length in its superblock.
- **Smaller**: the length first, then blocks are given back.
- **Moved**: new blocks behind the old ones; then the inode's one record is written with both in the other order, while
  the log is empty; then the old ones are given back.
- **Removed**: one write of the superblock turns it off and marks the volume as not closed cleanly, until its blocks are
  free.

Source: Documentation/filesystems/ext4/journal.rst, tune2fs(8).
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from struct import Struct
from typing import Any

from ext4lite import bitmap, hostfs
from ext4lite.block_map import BlockMap
from ext4lite.blockdev import StrPath, lock_exclusive, open_image, remove_record
from ext4lite.checksum import superblock_checksum
from ext4lite.errors import CorruptImage, Unsupported, VolumeFull
from ext4lite.extents import ENTRY, HEADER, ROOT_MAX, Extent
from ext4lite.geometry import MIN_JOURNAL_BLOCKS, default_journal_blocks
from ext4lite.inode import InodeRecord, pack_record
from ext4lite.jbd2.log import Blocks, Log, super_checksum, write_back
from ext4lite.jbd2.transaction import Journal
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import JournalSuperBlock
from ext4lite.layout_volume import LayoutVolume
from ext4lite.shape import require_resizable, shape_of
from ext4lite.super import Super, read_super
from ext4lite.volume import Volume

Device = Callable[[Blocks], Blocks]
_WORDS = Struct("<15I")
_MOST_BLOCKS = 10_240_000
_LEAST_LOG = 512
"""Blocks of the log proper, without fast commits."""
_ZERO_STEP = 1 << 20
_SECTOR = 512
_KBYTES_WRITTEN = 0x178  # byte of s_kbytes_written in the superblock


@dataclass(slots=True)
class JournalInfo:
    """What a volume's journal is; ``size`` in bytes, 0 for a volume without one."""

    path: str
    size: int
    blocks: int = 0
    inode: int = 0
    uuid: str = ""
    features: tuple[str, ...] = ()
    sequence: int = 0
    """Number of the next transaction."""
    empty: bool = True
    fast_commit_blocks: int = 0
    pieces: int = 0
    """In how many pieces it lies in the volume."""

    def as_dict(self) -> dict[str, Any]:
        """Return the facts as plain data for JSON."""
        return asdict(self)


# -- looking ----------------------------------------------------------------------------------------------------------


def show(path: StrPath) -> JournalInfo:
    """Return what a volume's journal is. CorruptImage, Unsupported (an external one), VolumeBusy, HostError."""
    where = os.fspath(path)
    with Volume.open(path, replay=False) as volume:
        sb = volume.super
        if not sb.compat & c.COMPAT_HAS_JOURNAL:
            return JournalInfo(where, 0)
        from ext4lite.recover import open_log

        log = open_log(volume._fd, sb, where)
        raw = log.super
        names = c.feature_names(log.incompat, c.JBD2_INCOMPAT, "I")
        names += ["checksum"] if log.compat & c.JBD2_COMPAT_CHECKSUM else []
        return JournalInfo(
            where,
            log.maxlen * log.block_size,
            log.maxlen,
            sb.raw.s_journal_inum,
            _uuid_text(raw.s_uuid),
            tuple(names),
            raw.s_sequence,
            raw.s_start == 0,
            raw.s_num_fc_blks,
            len(log.own_blocks()),
        )


def _uuid_text(raw: bytes) -> str:
    from uuid import UUID

    return str(UUID(bytes=raw)) if any(raw) else ""


# -- changing ---------------------------------------------------------------------------------------------------------


def create(path: StrPath, size: int | None = None, *, command: str = "", device: Device | None = None) -> JournalInfo:
    """Give a volume a journal of ``size`` bytes, by default as large as mkfs makes it.

    Unsupported (it has one, impossible sizes, features), VolumeFull, VolumeBusy, NeedsRecovery, CorruptImage,
    HostError.
    """
    with _locked(path, command) as fd:
        sb = _ready(fd, path)
        if sb.compat & c.COMPAT_HAS_JOURNAL:
            raise Unsupported("the volume has a journal already", where=sb.where, hint="--resize changes its size")
        if unfinished(fd, sb):
            _Removal(fd, path, device).run()
        _Creation(fd, path, device).run(_blocks_of(sb, size))
    return show(path)


def resize(path: StrPath, size: int | None = None, *, command: str = "", device: Device | None = None) -> JournalInfo:
    """Give a volume's journal another size in bytes, by default that of mkfs. Errors as of :func:`create`."""
    with _locked(path, command) as fd:
        sb = _ready(fd, path)
        _require_journal(sb)
        change_length(fd, path, _blocks_of(sb, size), device=device)
    return show(path)


def remove(path: StrPath, *, command: str = "", device: Device | None = None) -> JournalInfo:
    """Take a volume's journal away. One that was killed at it goes on. Errors as of :func:`create`."""
    with _locked(path, command) as fd:
        sb = read_super(fd, os.fspath(path), torn=True)
        if not unfinished(fd, sb):
            sb = _ready(fd, path)
            _require_journal(sb)
        _Removal(fd, path, device).run()
    return show(path)


@contextlib.contextmanager
def _locked(path: StrPath, command: str) -> Iterator[int]:
    fd = open_image(path, write=True)
    try:
        lock_exclusive(fd, path, command)
        try:
            yield fd
        finally:
            remove_record(path)
    finally:
        os.close(fd)


def _ready(fd: int, path: StrPath) -> Super:
    """Return the superblock of a volume that may be changed and is recovered."""
    where = os.fspath(path)
    sb = read_super(fd, where, torn=True)
    require_resizable(sb)
    if sb.needs_recovery:
        from ext4lite.recover import recover_locked

        recover_locked(fd, where)
        sb = read_super(fd, where)
    if not unfinished(fd, sb):
        sb.require_clean()
    return sb


def _require_journal(sb: Super) -> None:
    if not sb.compat & c.COMPAT_HAS_JOURNAL:
        raise Unsupported("the volume has no journal", where=sb.where, hint="--create makes one")
    if not sb.raw.s_journal_inum:
        raise Unsupported("the volume's journal is on another device", where=sb.where)


def _blocks_of(sb: Super, size: int | None) -> int:
    """Return the blocks of a journal of ``size`` bytes. Unsupported."""
    blocks = default_journal_blocks(sb.blocks) if size is None else size // sb.block_size
    if size is None and not blocks:
        raise Unsupported("the volume is too small for a journal", where=sb.where)
    if not MIN_JOURNAL_BLOCKS <= blocks <= _MOST_BLOCKS or blocks > sb.blocks // 2:
        most = min(_MOST_BLOCKS, sb.blocks // 2) * sb.block_size
        what = f"a journal of {blocks * sb.block_size} bytes cannot be made"
        hint = f"from {MIN_JOURNAL_BLOCKS * sb.block_size} to {most} here"
        raise Unsupported(what, where=sb.where, hint=hint)
    return blocks


def _open(fd: int, path: StrPath, device: Device | None, *, journaled: bool = True) -> LayoutVolume:
    return LayoutVolume.open_locked(fd, path, journaled=journaled, device=device)


@contextlib.contextmanager
def _session(fd: int, path: StrPath, device: Device | None) -> Iterator[LayoutVolume]:
    """Open the volume; what the block leaves uncommitted when it fails is forgotten."""
    volume = _open(fd, path, device)
    try:
        yield volume
        volume.close()
    finally:
        if volume._fd >= 0:
            volume.give_up()


def _note(volume: LayoutVolume, record: InodeRecord, change: int) -> None:
    """Keep the copy of the journal's inode in the superblock; ``change`` is the number of blocks it has more."""
    raw = volume.super.raw
    fields = record.fields
    raw.s_jnl_backup_type = 1
    raw.s_jnl_blocks = (*_WORDS.unpack(fields.i_block), fields.i_size_high, fields.i_size_lo)
    if raw.s_overhead_blocks:
        raw.s_overhead_blocks = raw.s_overhead_blocks + change & 0xFFFFFFFF
    volume.super_changed()


def _extend(volume: LayoutVolume, record: InodeRecord, blocks: int) -> list[Extent]:
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


def _own_nodes(volume: LayoutVolume, record: InodeRecord) -> list[int]:
    """Return the blocks of an inode's tree or block map."""
    out: list[int] = []

    def meet(number: int) -> bool:
        out.append(number)
        return False

    volume.file_map(record).move_nodes(meet)
    return out


def _clear(volume: LayoutVolume, start: int, count: int) -> None:
    """Turn blocks that nothing refers to into zeros, lest an old log in them is ever taken for a new one."""
    v, size = volume, volume.block_size
    if stat.S_ISREG(os.fstat(v._fd).st_mode) and hostfs.punch(v._fd, start * size, count * size):
        return
    step = max(1, _ZERO_STEP // size)
    for at in range(start, start + count, step):
        v.write_raw(at, bytes(min(step, start + count - at) * size))


# -- making -----------------------------------------------------------------------------------------------------------


class _Creation:
    """Making a journal; see the module's text."""

    def __init__(self, fd: int, path: StrPath, device: Device | None) -> None:
        self.v = _open(fd, path, device, journaled=False)

    def run(self, blocks: int) -> None:
        v = self.v
        try:
            log = self._prepare(blocks)
            journal = Journal(log, start=log.first, sequence=log.super.s_sequence)
            journal.share = 1
            with journal.begin() as handle:
                for number, data in v.cache.dirty.items():
                    handle.write(number, bytes(data))
            journal.commit()
            number = c.SUPERBLOCK_OFFSET // v.block_size
            block = bytearray(v._blocks.read(number))
            at = c.SUPERBLOCK_OFFSET % v.block_size
            new = bytes(v.cache.get(number)[at : at + c.SUPERBLOCK_SIZE])
            old = bytes(block[at : at + c.SUPERBLOCK_SIZE])
            block[at : at + c.SUPERBLOCK_SIZE] = _in_one_sector(old, new, sums=v.super.metadata_csum)
            v.write_raw(number, bytes(block))  # from here on there is a journal
            v._blocks.flush()
        except BaseException:
            v.abandon()
            raise
        v.cache.committed()
        v.alloc.committed()
        v.adopt_journal(journal)
        v.write_superblock_copies()
        v.close()

    def _prepare(self, blocks: int) -> Log:
        """Put all changes into the cache, and write an empty log."""
        v = self.v
        raw = v.super.raw
        v.begin_unmarked()
        record = v.new_record(c.JOURNAL_INO, c.S_IFREG | 0o600, uid=0, gid=0, links=1)
        record.fields.i_generation = 0  # the superblock's copy of the inode has none
        v._give_map(record)
        pieces = _extend(v, record, blocks)
        for piece in pieces:
            _clear(v, piece.physical, piece.count)
        raw.s_feature_compat |= c.COMPAT_HAS_JOURNAL
        raw.s_feature_incompat |= c.INCOMPAT_RECOVER
        raw.s_journal_inum, raw.s_journal_dev, raw.s_journal_uuid = c.JOURNAL_INO, 0, bytes(16)
        _note(v, record, blocks)
        v.store_all()
        for number in _own_nodes(v, record):  # the log is found through them
            v.write_raw(number, bytes(v.cache.get(number)))
        first = pieces[0].physical
        v.write_raw(first, _empty_log(v.super, blocks))
        return Log.open(v._blocks, pieces, v._at("the new journal"))


def _in_one_sector(old: bytes, new: bytes, *, sums: bool) -> bytes:
    """Return a superblock with the first sector of ``new`` and the second of ``old``: written whole or not at all.

    So that the checksum, which is in the second, is right, the number of kilobytes ever written is made to fit. The log
    has the true superblock, which recovery brings. (crc32c is linear: each bit of a field changes it in one way.)
    """
    mixed = bytearray(new[:_SECTOR] + old[_SECTOR:])
    if not sums:
        return bytes(mixed)
    at = _KBYTES_WRITTEN
    mixed[at : at + 4] = bytes(4)
    base = superblock_checksum(bytes(mixed))
    rows = []
    for bit in range(32):
        mixed[at : at + 4] = (1 << bit).to_bytes(4, "little")
        rows.append((superblock_checksum(bytes(mixed)) ^ base, 1 << bit))
    wanted, value = base ^ int.from_bytes(old[-4:], "little"), 0
    for bit in range(31, -1, -1):  # elimination: one row for each leading bit
        row = next(r for r in rows if r[0].bit_length() == bit + 1)
        rows = [(r[0] ^ row[0], r[1] ^ row[1]) if r[0] >> bit & 1 else r for r in rows if r is not row]
        if wanted >> bit & 1:
            wanted, value = wanted ^ row[0], value ^ row[1]
    mixed[at : at + 4] = value.to_bytes(4, "little")
    return bytes(mixed)


def _empty_log(sb: Super, blocks: int) -> bytes:
    """Return the first block of an empty journal with what suits the volume."""
    head = JournalSuperBlock(
        h_magic=c.JBD2_MAGIC,
        h_blocktype=c.JBD2_SUPERBLOCK_V2,
        s_blocksize=sb.block_size,
        s_maxlen=blocks,
        s_first=1,
        s_sequence=1,
        s_uuid=sb.raw.s_uuid,
        s_nr_users=1,
    )
    if sb.incompat & c.INCOMPAT_64BIT:
        head.s_feature_incompat |= c.JBD2_INCOMPAT_64BIT
    if sb.compat & c.COMPAT_FAST_COMMIT:
        head.s_num_fc_blks = c.JBD2_DEFAULT_FC_BLOCKS
    if sb.metadata_csum:
        head.s_feature_incompat |= c.JBD2_INCOMPAT_CSUM_V3
        head.s_checksum_type = c.JBD2_CRC32C
        head.s_checksum = super_checksum(head.pack())
    return head.pack() + bytes(sb.block_size - JournalSuperBlock.SIZE)


# -- length -----------------------------------------------------------------------------------------------------------


def change_length(fd: int, path: StrPath, blocks: int, *, device: Device | None = None) -> None:
    """Make the journal of a clean volume ``blocks`` long. VolumeFull, Unsupported, CorruptImage, HostError."""
    with _session(fd, path, device) as v:
        log = _log_of(v)
        fast = log.super.s_num_fc_blks or (c.JBD2_DEFAULT_FC_BLOCKS if log.fc_first < log.maxlen else 0)
        if blocks - fast < _LEAST_LOG:
            raise Unsupported(f"{fast} blocks of the journal are for fast commits", where=v.where)
        record = v.inode(v.super.raw.s_journal_inum)
        have = -(-record.size // v.block_size)
        if blocks > have:
            v.step(lambda: _note(v, record, sum(e.count for e in _extend(v, record, blocks - have))))
            v.close()
    with _session(fd, path, device) as v:
        log = _log_of(v)
        if log.maxlen != blocks:
            number = log.maxlen
            while number < blocks:
                count = min(log.contiguous(number), blocks - number)
                _clear(v, log.physical(number), count)
                number += count
            log.super.s_maxlen = blocks
            log.write_super(start=0, sequence=log.super.s_sequence)
            v._blocks.flush()
    with _session(fd, path, device) as v:
        _cut_tail(v, blocks)


def _log_of(volume: LayoutVolume) -> Log:
    if volume.journal is None:
        raise CorruptImage("the volume has no journal", where=volume.where)
    return volume.journal.log


def _cut_tail(volume: LayoutVolume, blocks: int) -> None:
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
        _note(v, record, -sum(run.count for run in freed))

    v.step(cut)


# -- moving -----------------------------------------------------------------------------------------------------------


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
    with _session(fd, path, device) as v:
        length = _log_of(v).maxlen
        _cut_tail(v, length)
    with _session(fd, path, device) as v:
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
    with _session(fd, path, device) as v:
        _cut_tail(v, length)
    return True


def _take_place(volume: LayoutVolume, record: InodeRecord, own: list[Extent], blocks: int) -> None:
    pieces = _extend(volume, record, blocks)
    entries = sum(-(-run.count // c.MAX_EXTENT_LEN) for run in [*own, *pieces])
    if entries > ROOT_MAX or HEADER.unpack_from(record.fields.i_block)[3]:
        raise VolumeFull("the free space is in too many pieces for the journal", where=volume.where)
    _note(volume, record, blocks)


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
    with contextlib.closing(_open(fd, path, device, journaled=False)) as v:
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
            _clear(v, run.physical, run.count)
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


# -- removing ---------------------------------------------------------------------------------------------------------


def unfinished(fd: int, sb: Super) -> bool:
    """Tell whether somebody was killed while removing the journal of the volume at ``fd``."""
    if sb.compat & c.COMPAT_HAS_JOURNAL or sb.needs_recovery:
        return False
    record = Volume(fd, sb, sb.where).inode(c.JOURNAL_INO)
    return record.type == c.S_IFREG and record.fields.i_links_count > 0


class _Removal:
    """Removing a journal; see the module's text."""

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
        pieces = [(run.physical, run.count) for run in runs] + [(number, 1) for number in _own_nodes(v, record)]
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
