"""Bringing a volume back after a crash: its journal replayed, its orphans settled, its superblock clean.

Two ways: :func:`look` does it in memory, for reading; :func:`recover` does it in place.

In place, all can be repeated after another crash at any moment. ``|`` is a flush, and there are no more of them:

1. the blocks of the log go to their places (RECOVER stays set);
2. fast commits, orphans and the superblock's counts become transactions of their own, in the log behind what was
   replayed | their commit blocks | they go to their places |
3. the log is empty, its numbers go on |
4. RECOVER is cleared: one bit and the checksum, nothing else, so that even a superblock cut in half between its sectors
   is understood |.

The log's beginning stays until what was replayed is durable in its place. Where 2 has nothing to do, one flush follows
1. The counts are part of 1 if the log has the superblock anyway, and so can repair one that was cut in half.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from struct import pack
from typing import Any

from ext4lite.blockdev import StrPath, open_device, remove_record
from ext4lite.checksum import superblock_checksum
from ext4lite.device import Handle
from ext4lite.errors import CorruptImage, Unsupported
from ext4lite.inode import InodeRecord
from ext4lite.jbd2 import fastcommit, orphans
from ext4lite.jbd2.log import Blocks, FileBlocks, Log, Overlay, write_back
from ext4lite.jbd2.patch import counts, put_super
from ext4lite.jbd2.recovery import Replay, replay
from ext4lite.jbd2.transaction import Journal, TransactionTooLarge
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import Inode, SuperBlock
from ext4lite.super import Super, parse_super, read_super
from ext4lite.volume import Volume

Progress = Callable[[int], object]
_BATCH = 16 << 20  # bytes of the log in memory at a time
_ERRORS = slice(0x194, 0x200)  # s_error_count to the end of s_last_error_func: noted outside the journal


@dataclass(slots=True)
class Recovered:
    """A volume as its journal says that it is; nothing is written."""

    super: Super
    """The superblock as it will be: RECOVER is cleared."""
    overlay: Overlay
    log: Log
    replay: Replay
    fast: list[fastcommit.Record]
    """Records of fast commits; :func:`look` has applied them, if there are any."""


@dataclass(slots=True)
class RecoveryResult:
    """What :func:`recover` found and did. All counts are 0 where nothing was to be done (``recovered`` is False)."""

    path: str
    recovered: bool
    transactions: int = 0
    first_transaction: int = 0
    next_transaction: int = 0
    blocks: int = 0
    """Blocks of the volume that were written from the log."""
    revoked: int = 0
    fast_commits: int = 0
    orphans_deleted: int = 0
    orphans_truncated: int = 0
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain data for JSON."""
        return asdict(self)


def look(image: Handle, sb: Super, where: str, *, verify: bool = True) -> Recovered:
    """Find out how the volume is once its journal is replayed; memory grows with the journal only.

    ``sb`` may be torn (:func:`~ext4lite.super.read_super`). CorruptImage, Unsupported, HostError.
    """
    found = _replayed(FileBlocks(image, sb.block_size, where), image, sb, where, verify=verify)
    if found.fast:
        fastcommit.apply(
            Volume(image, found.super, where, found, verify=verify), found.overlay, found.fast, int(time.time())
        )
        found.super = parse_super(_raw_super(found.overlay).pack(), sb.file_size, where, verify=verify)
    return found


def _replayed(
    blocks: Blocks, image: Handle, sb: Super, where: str, *, verify: bool = True, progress: Progress = lambda _: None
) -> Recovered:
    """Replay the log into an overlay, without fast commits."""
    log = open_log(image, sb, where, verify=verify)
    log.blocks = blocks
    brought = replay(log, volume_blocks=sb.file_size // sb.block_size, progress=progress)
    fast = fastcommit.scan(log, brought.end)
    overlay = Overlay(blocks, brought.blocks)
    raw = _raw_super(overlay)
    old = _raw_super(blocks)
    if raw.pack()[_ERRORS] != old.pack()[_ERRORS] and superblock_checksum(old.pack()) == old.s_checksum:
        data = raw.pack()
        raw = SuperBlock.unpack(data[: _ERRORS.start] + old.pack()[_ERRORS] + data[_ERRORS.stop :])
        put_super(overlay, raw)
    if raw.s_magic != c.MAGIC or raw.s_log_block_size != sb.raw.s_log_block_size:
        raise CorruptImage("the journal holds an impossible superblock", where=where)
    # The superblock must be whole by now: from the journal, or because nothing of it but RECOVER is in doubt.
    data, sums = raw.pack(), set()
    for flag in (c.INCOMPAT_RECOVER, 0):
        raw.s_feature_incompat = raw.s_feature_incompat & ~c.INCOMPAT_RECOVER | flag
        sums.add(superblock_checksum(raw.pack()))
    if raw.s_checksum not in sums and verify:
        parse_super(data, sb.file_size, where)
    raw.s_state |= old.s_state & c.STATE_ERROR
    if log.super.s_errno:
        raw.s_state |= c.STATE_ERROR
    put_super(overlay, raw)
    found = parse_super(_raw_super(overlay).pack(), sb.file_size, where, verify=verify)
    return Recovered(found, overlay, log, brought, fast)


def open_log(image: Handle, sb: Super, where: str, *, verify: bool = True) -> Log:
    """Open the journal of a volume. CorruptImage, Unsupported (an external journal), HostError."""
    ino = sb.raw.s_journal_inum
    if not sb.compat & c.COMPAT_HAS_JOURNAL:
        raise CorruptImage("the journal is to be replayed, but there is none", where=where)
    if not ino:
        raise Unsupported("the volume's journal is on another device", where=where)
    # With uninit_bg alone descriptors are sealed with the UUID: when that changes, superblock and descriptors go to
    # their places together, and a crash may have let only one of them through. The journal has both.
    volume = Volume(image, sb, where, verify=verify and sb.metadata_csum)
    record = volume.inode(ino)
    inside = f"{where}: journal inode {ino}"
    if record.type != c.S_IFREG or not record.fields.i_links_count:
        found = _backed_up(sb)
        if found is None:
            raise CorruptImage("is not a regular file", where=inside)
        record = found
    return Log.open(FileBlocks(image, sb.block_size, where), volume.map(record)[0], inside)


def _backed_up(sb: Super) -> InodeRecord | None:
    """Return the journal's inode as the superblock keeps it (as e2fsck does), or None.

    A journal that is being made holds the transaction that writes its own inode: see ``ext4lite.journal``.
    """
    raw = sb.raw
    if raw.s_jnl_backup_type != 1 or not any(raw.s_jnl_blocks):
        return None
    block = pack("<15I", *raw.s_jnl_blocks[:15])
    fields = Inode(i_mode=c.S_IFREG | 0o600, i_links_count=1, i_block=block)
    fields.i_size_high, fields.i_size_lo = raw.s_jnl_blocks[15:17]
    fields.i_flags = c.EXTENTS_FL if block[:2] == c.EXTENT_MAGIC.to_bytes(2, "little") else 0
    return InodeRecord(raw.s_journal_inum, bytes(sb.inode_size), fields, 0)


def _raw_super(blocks: Blocks) -> SuperBlock:
    block, at = divmod(c.SUPERBLOCK_OFFSET, blocks.block_size)
    return SuperBlock.unpack(blocks.read(block), at)


def recover(
    path: StrPath,
    *,
    command: str = "",
    device: Callable[[Blocks], Blocks] = lambda blocks: blocks,
    progress: Progress = lambda _: None,
) -> RecoveryResult:
    """Replay a volume's journal in place, settle its orphans and leave it clean.

    A clean volume is left alone; so is one that was not closed cleanly without a journal (NeedsRecovery, which points
    at e2fsck). May be killed at any time and called again. ``device`` may put blocks between the image and all that is
    written to it; ``progress`` is called with bytes of the log as they are read, and again as they are
    written. Raises VolumeBusy, NeedsRecovery, CorruptImage, Unsupported, HostError.
    """
    where = os.fspath(path)
    image = open_device(path, write=True, command=command)
    try:
        result = recover_locked(image, where, device=device, progress=progress)
        read_super(image, where).require_clean()
    finally:
        remove_record(path)
        image.close()
    return result


def recover_locked(
    image: Handle,
    where: str,
    *,
    device: Callable[[Blocks], Blocks] = lambda blocks: blocks,
    progress: Progress = lambda _: None,
) -> RecoveryResult:
    """Do the work of :func:`recover` on an image that is open for writing and holds the exclusive lock."""
    begin = time.perf_counter()
    sb = read_super(image, where, torn=True)
    if not sb.needs_recovery:
        return RecoveryResult(where, False)
    blocks = device(FileBlocks(image, sb.block_size, where))
    result = _in_place(blocks, image, sb, where, progress)
    result.seconds = time.perf_counter() - begin
    return result


def _in_place(blocks: Blocks, image: Handle, sb: Super, where: str, progress: Progress) -> RecoveryResult:
    found = _replayed(blocks, image, sb, where, progress=progress)
    log, brought = found.log, found.replay
    volume = Volume(image, found.super, where, found)
    result = RecoveryResult(
        where,
        True,
        transactions=brought.transactions,
        first_transaction=brought.first,
        blocks=len(brought.blocks),
        revoked=brought.revoked,
        fast_commits=len(found.fast),
    )
    # 1. Everything in the log goes to its place. The superblock says RECOVER until the very end, and is not touched if
    # the log does not have it: nobody could repair it if it were cut in half.
    overlay = found.overlay
    number = c.SUPERBLOCK_OFFSET // blocks.block_size
    final = number in overlay.base and not found.fast and not orphans.present(volume)
    if final:
        _set_counts(overlay, volume)
    if number in overlay.base:
        _set_recover(overlay, True)
    else:
        overlay.dirty.pop(number, None)
    for batch in brought.blocks.batches(_BATCH):
        write_back(blocks, {n: data for n, data in batch.items() if n not in overlay.dirty})
        progress(len(batch) * blocks.block_size)
    write_back(blocks, overlay.dirty)
    # 2. The rest becomes transactions.
    settled = Overlay(blocks, {})
    found.overlay = settled
    volume = Volume(image, found.super, where, found)
    used = log.length(log.super.s_start, brought.head) if brought.transactions else 0
    if not log.super.s_start:
        log.write_super(start=brought.head, sequence=brought.end)
    journal = Journal(log, start=brought.head, sequence=brought.end, used=used)
    written: dict[int, bytes] = {}

    def step() -> None:
        """Hand what has changed since the last time to the journal."""
        try:
            with journal.begin() as h:
                for number, data in settled.dirty.items():
                    if written.get(number) is not data:
                        h.write(number, data)
                        written[number] = data
        except TransactionTooLarge as e:
            what = "an orphan or the fast commits change more blocks than the journal can hold"
            raise Unsupported(what, where=where, hint="run e2fsck -fy on it") from e

    now = int(time.time())
    if found.fast:
        fastcommit.apply(volume, settled, found.fast, now)
        step()
        journal.commit()
    done = orphans.process(volume, settled, now, step)
    result.orphans_deleted, result.orphans_truncated = done.deleted, done.truncated
    if not final and _set_counts(settled, volume):
        step()
    journal.commit()
    # 3. Numbers go on behind whatever was cut off, also when no transaction was written.
    log.super.s_errno = 0  # the superblock knows of it now
    journal.close()
    # 4.
    _set_recover(settled, False)
    blocks.write(number, settled.read(number))
    blocks.flush()
    result.next_transaction = log.super.s_sequence
    return result


def _set_counts(overlay: Overlay, volume: Volume) -> bool:
    """Bring the superblock's counts up to date, and what it says of orphans and errors; return whether that changed it.

    Orphans must be settled: ``volume`` is what lies below ``overlay``, with it.
    """
    raw = _raw_super(overlay)
    before = raw.pack()
    free, raw.s_free_inodes_count = counts(volume)
    raw.s_free_blocks_count_lo = free & 0xFFFFFFFF
    if volume.super.incompat & c.INCOMPAT_64BIT:
        raw.s_free_blocks_count_hi = free >> 32
    raw.s_state = raw.s_state & ~c.STATE_ORPHANS | volume.super.raw.s_state & c.STATE_ERROR
    if raw.pack() == before:
        return False
    put_super(overlay, raw)
    return True


def _set_recover(overlay: Overlay, value: bool) -> None:
    """Set or clear the superblock's RECOVER flag, and nothing else."""
    raw = _raw_super(overlay)
    raw.s_feature_incompat &= ~c.INCOMPAT_RECOVER
    if value:
        raw.s_feature_incompat |= c.INCOMPAT_RECOVER
    put_super(overlay, raw)
