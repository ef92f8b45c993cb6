"""What ``ext4lite journal`` does: showing, making, resizing, removing, each on a locked and recovered volume."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ext4lite.blockdev import StrPath, lock_exclusive, open_image, remove_record
from ext4lite.errors import Unsupported
from ext4lite.geometry import MIN_JOURNAL_BLOCKS, default_journal_blocks
from ext4lite.journal.blocks import Device
from ext4lite.journal.creation import Creation
from ext4lite.journal.length import change_length
from ext4lite.journal.removal import Removal, unfinished
from ext4lite.layout import constants as c
from ext4lite.shape import require_resizable
from ext4lite.super import Super, read_super
from ext4lite.volume import Volume

_MOST_BLOCKS = 10_240_000


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
            Removal(fd, path, device).run()
        Creation(fd, path, device).run(_blocks_of(sb, size))
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
        Removal(fd, path, device).run()
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
