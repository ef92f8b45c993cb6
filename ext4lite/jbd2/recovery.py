"""Reading a log after a crash: what it holds, and how the volume looks once it is replayed. Nothing is written here.

The rules are those of Documentation/filesystems/ext4/journal.rst and of the kernel's three passes (scan, revoke,
replay), which end up at the same place for the same log:

- A transaction counts when its commit block is there, with the expected number and (csum v2, v3) the right checksum.
- A descriptor or revoke block with a wrong checksum is damage if a commit block follows that is not older than the one
  before; else it is what a former life of the journal left behind, and the log ends before it.
- A commit block with a wrong checksum is damage, or stale (older than the one before), or with async_commit simply a
  commit that did not get through.
- A block is replayed unless a revocation of its own or a later transaction names it; numbers wrap.
- Fast commits belong to the transaction that would have come next.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter

from ext4lite.checksum import crc32c
from ext4lite.errors import CorruptImage
from ext4lite.jbd2.log import HEADER, MAGIC_BYTES, Log, later_or_same, next_sequence
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import JournalCommit, JournalRevokeHeader, JournalTag, JournalTag3

_TAG3 = JournalTag3.STRUCT
_TAG = JournalTag.STRUCT
_COMMIT_CSUM = JournalCommit.OFFSET_h_chksum
_ALL = 0xFFFFFFFF
_REVERSED = bytes(int(f"{n:08b}"[::-1], 2) for n in range(256))
_READ_AHEAD = 1 << 20


def crc32_be(register: int, data: bytes) -> int:
    """Continue the big-endian CRC-32 of ``register`` over ``data``: the checksum of commit blocks before csum v2.

    zlib has the mirrored one, so bits are mirrored on the way in and out.
    """
    mirrored = _mirror(register) ^ _ALL
    return _mirror(zlib.crc32(data.translate(_REVERSED), mirrored) ^ _ALL)


def _mirror(value: int) -> int:
    return int.from_bytes(value.to_bytes(4, "little").translate(_REVERSED), "big")


@dataclass(slots=True)
class Tag:
    """A block that a transaction changed: ``number`` in the volume, ``at`` in the journal."""

    number: int
    at: int
    flags: int
    checksum: int


@dataclass(slots=True)
class Transaction:
    """One transaction as it lies in the log."""

    sequence: int
    tags: list[Tag] = field(default_factory=list)
    revokes: list[tuple[int, bytes]] = field(default_factory=list)
    """(block of the journal, content) of each revoke block."""
    bad: list[int] = field(default_factory=list)
    """Descriptor and revoke blocks whose checksum is wrong."""
    seconds: int = 0


@dataclass(slots=True)
class Scan:
    """What a log holds: committed transactions, oldest first, the number that comes next and where it would begin."""

    transactions: list[Transaction]
    end: int
    head: int


class LoggedBlocks(Mapping[int, bytes]):
    """The newest content of each block that a log brings; it is read from the log when it is asked for."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._at: dict[int, int] = {}

    def note(self, tag: Tag) -> None:
        """Let the copy that ``tag`` describes be the newest of its block."""
        self._at[tag.number] = tag.at << 1 | (tag.flags & c.JBD2_FLAG_ESCAPE)

    def __getitem__(self, number: int) -> bytes:
        at = self._at[number]
        data = self._log.read(at >> 1)
        return MAGIC_BYTES + data[4:] if at & 1 else data

    def batches(self, most: int) -> Iterator[dict[int, bytes | memoryview]]:
        """Yield every block once, in the order in which the log has them: those in ``most`` bytes of it at a time."""
        log, size = self._log, self._log.block_size
        out: dict[int, bytes | memoryview] = {}
        view = memoryview(b"")
        start = end = left = 0  # of what ``view`` holds, in blocks of the log
        for number, place in sorted(self._at.items(), key=itemgetter(1)):
            at = place >> 1
            if not start <= at < end:
                if left <= 0:
                    if out:
                        yield out
                    out, left = {}, max(1, most // size)
                count = max(1, min(_READ_AHEAD // size, log.last - at, log.contiguous(at)))
                view = memoryview(log.blocks.read(log.physical(at), count))
                start, end, left = at, at + count, left - count
            data = view[(at - start) * size : (at + 1 - start) * size]
            out[number] = MAGIC_BYTES + bytes(data[4:]) if place & 1 else data
        if out:
            yield out

    def __contains__(self, number: object) -> bool:
        return number in self._at

    def __iter__(self) -> Iterator[int]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)


@dataclass(slots=True)
class Replay:
    """What replaying brings: the newest content of each block, and figures."""

    blocks: LoggedBlocks
    transactions: int
    first: int
    end: int
    """Number of the transaction that comes next (the one fast commits belong to)."""
    head: int
    """Block of the journal where it would begin."""
    revoked: int
    """Blocks that were not replayed because they had been revoked."""


class _Reader:
    """Blocks of the log, read ahead where they are contiguous."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._ahead = max(1, _READ_AHEAD // log.block_size)
        self._start, self._data = 0, b""

    def read(self, number: int) -> bytes:
        size = self._log.block_size
        at = (number - self._start) * size
        if not 0 <= at < len(self._data):
            count = min(self._ahead, self._log.last - number, self._log.contiguous(number))
            self._data = self._log.blocks.read(self._log.physical(number), max(1, count))
            self._start, at = number, 0
        return self._data[at : at + size]


def tags_of(log: Log, data: bytes, at: int) -> list[Tag]:
    """Return the tags of a descriptor block; the blocks they name follow from block ``at`` of the journal on."""
    out = []
    offset, end, size = HEADER.size, log.block_size - log.tail, log.tag_size
    while offset + size <= end:
        if log.csum == 3:
            number, flags, high, checksum = _TAG3.unpack_from(data, offset)
        else:
            number, checksum, flags = _TAG.unpack_from(data, offset)
            high = int.from_bytes(data[offset + 8 : offset + 12], "big") if log.wide else 0
        if log.wide:
            number |= high << 32
        out.append(Tag(number, at, flags, checksum))
        at = log.after(at)
        offset += size if flags & c.JBD2_FLAG_SAME_UUID else size + 16
        if flags & c.JBD2_FLAG_LAST:
            break
    return out


def scan(log: Log) -> Scan:
    """Walk the log from its beginning to the last whole transaction.

    CorruptImage for damage that is neither an interrupted commit nor stale.
    """
    sb = log.super
    expected, at = sb.s_sequence, sb.s_start
    done = Scan([], expected, at or log.first)
    if not at:
        return done
    reader = _Reader(log)
    current = Transaction(expected)
    failed: int | None = None  # async_commit: the first commit that did not get through
    crc = _ALL
    last_seconds = 0
    left = log.last - log.first
    while left > 0:
        data = reader.read(at)
        here, at, left = at, log.after(at), left - 1
        magic, kind, sequence = HEADER.unpack_from(data)
        if magic != c.JBD2_MAGIC or sequence != expected:
            break
        if kind == c.JBD2_DESCRIPTOR:
            if not log.tail_ok(data):
                current.bad.append(here)
            tags = tags_of(log, data, at)
            if log.commit_crc and failed is None and len(tags) <= left:
                crc = crc32_be(crc, data)
                for tag in tags:
                    crc = crc32_be(crc, reader.read(tag.at))
            current.tags += tags
            left -= len(tags)
            if left > 0:
                at = log.after(at, len(tags))
        elif kind == c.JBD2_REVOKE:
            if not log.tail_ok(data):
                current.bad.append(here)
            current.revokes.append((here, data))
        elif kind == c.JBD2_COMMIT:
            commit = JournalCommit.unpack(data)
            stale = commit.h_commit_sec < last_seconds
            if current.bad and stale:
                break
            if current.bad:
                raise _damage(log, f"block {current.bad[0]} of transaction {expected} has a wrong checksum")
            good = _commit_ok(log, commit, data, crc)
            if not good and stale:
                break
            if not good and not log.incompat & c.JBD2_INCOMPAT_ASYNC:
                raise _damage(log, f"the commit block {here} of transaction {expected} has a wrong checksum")
            if failed is not None and log.commit_crc:
                raise _damage(log, f"transaction {failed} is damaged, but later ones are there")
            if not good and failed is None:
                failed = expected
            if failed is None:
                current.seconds = commit.h_commit_sec
                done.transactions.append(current)
                done.end, done.head = next_sequence(expected), at
            crc = _ALL
            last_seconds = commit.h_commit_sec
            expected = next_sequence(expected)
            current = Transaction(expected)
        else:
            break
    return done


def _commit_ok(log: Log, commit: JournalCommit, data: bytes, crc: int) -> bool:
    """Tell whether a commit block's checksum is right, or none is needed."""
    if log.commit_crc:
        found = (commit.h_chksum_type, commit.h_chksum_size, commit.h_chksum[0])
        return found in ((c.JBD2_CRC32, 4, crc), (0, 0, 0))
    if not log.csum:
        return True
    if log.block_checksum(data, _COMMIT_CSUM) == commit.h_chksum[0]:
        return True
    # Some kernels left old bytes behind the header and computed the checksum as if they were zeros.
    bare = data[: JournalCommit.SIZE] + bytes(len(data) - JournalCommit.SIZE)
    return log.block_checksum(bare, _COMMIT_CSUM) == commit.h_chksum[0]


def _damage(log: Log, what: str) -> CorruptImage:
    return CorruptImage(f"the journal is damaged: {what}", where=log.where, hint="e2fsck -fy can save the rest")


def revocations(log: Log, found: Scan) -> dict[int, int]:
    """Return for each revoked block the last transaction that revokes it. CorruptImage for an impossible record."""
    out: dict[int, int] = {}
    size = 8 if log.wide else 4
    for transaction in found.transactions:
        for here, data in transaction.revokes:
            used = JournalRevokeHeader.unpack(data).r_count
            if used > log.block_size - log.tail:
                raise _damage(log, f"revoke block {here} says {used} bytes")
            for offset in range(JournalRevokeHeader.SIZE, used - size + 1, size):
                # Transactions come in order, so a later one is always a later revocation.
                out[int.from_bytes(data[offset : offset + size], "big")] = transaction.sequence
    return out


def replay(log: Log, *, volume_blocks: int, progress: Callable[[int], object] = lambda _: None) -> Replay:
    """Return the blocks that a log brings to a volume of ``volume_blocks`` blocks.

    ``progress`` is called with the bytes of each transaction that was read.

    Memory is bounded by the number of the journal's blocks, not by their size. CorruptImage for damage, a block outside
    the volume or one of the journal's own.
    """
    found = scan(log)
    revoked = revocations(log, found)
    own = [(start, start + count) for start, count in log.own_blocks()]
    blocks = LoggedBlocks(log)
    hits = 0
    reader = _Reader(log)
    mask = 0xFFFF if log.csum == 2 else _ALL
    for transaction in found.transactions:
        sequence = transaction.sequence
        prefix = crc32c(log.seed, sequence.to_bytes(4, "big"))
        for tag in transaction.tags:
            number = tag.number
            by = revoked.get(number) if revoked else None
            if by is not None and later_or_same(by, sequence):
                hits += 1
                continue
            if log.csum and crc32c(prefix, reader.read(tag.at)) & mask != tag.checksum:
                raise _damage(log, f"the copy of block {number} in transaction {sequence} has a wrong checksum")
            if not 0 <= number < volume_blocks:
                raise _damage(log, f"transaction {sequence} changes block {number}, outside the volume")
            for start, end in own:
                if start <= number < end:
                    raise _damage(log, f"transaction {sequence} changes block {number}, which is the journal's")
            blocks.note(tag)
        progress(len(transaction.tags) * log.block_size)
        transaction.tags = []  # a log of 1 GiB has a quarter of a million
    return Replay(blocks, len(found.transactions), log.super.s_sequence, found.end, found.head, hits)
