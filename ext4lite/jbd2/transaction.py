"""Writing through the journal: many small operations, one compound transaction, everything or nothing after a crash.

    journal = Journal.open(blocks, runs, where)      # an empty log; recover first
    with journal.begin() as h:                       # one operation: all of it or none of it
        bitmap = h.read(17)
        h.write(17, changed)
        h.revoke(4711)                               # a metadata block that is free now
        h.ordered(data_writer)                       # called before the transaction commits
    journal.commit()                                 # durable from here on (fsync)
    journal.close()                                  # everything in place, the log empty

What belongs to the volume and not to the journal: the superblock's RECOVER flag must be on disk (flushed) before the
first commit, and be cleared after :meth:`Journal.close` has returned. A freed block may be allocated again only after
the commit of the transaction that freed it (else a crash brings the old owner back, with somebody else's bytes).

Order on disk, each ``|`` a flush: ordered data, revokes, descriptors, blocks | commit block | … later, in place:
blocks | the log's new tail |.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from struct import Struct
from types import TracebackType

from ext4lite.errors import Ext4LiteError
from ext4lite.extents import Extent
from ext4lite.jbd2.log import HEADER, MAGIC_BYTES, Blocks, Log, next_sequence, write_back
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import JournalCommit, JournalRevokeHeader, JournalTag, JournalTag3

_TAG3 = JournalTag3.STRUCT
_TAG = JournalTag.STRUCT
_U32, _U64 = Struct(">I"), Struct(">Q")
_COMMIT_CSUM = JournalCommit.OFFSET_h_chksum
_UUID = 16


class TransactionTooLarge(Ext4LiteError):
    """One operation changes more blocks than a transaction of this journal may hold: do it in several steps."""


class Handle:
    """One operation on metadata. A context manager: an exception inside drops everything the handle did.

    Handles do not nest; :meth:`Journal.begin` refuses a second one.
    """

    __slots__ = ("_journal", "_ordered", "_revoked", "_written")

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._written: dict[int, bytes] = {}
        self._revoked: set[int] = set()
        self._ordered: list[Callable[[], None]] = []

    def read(self, block: int) -> bytes:
        """Return a block as it is for this operation."""
        found = self._written.get(block)
        return self._journal.read(block) if found is None else found

    def write(self, block: int, data: bytes) -> None:
        """Change a metadata block: ``data`` is the whole new block."""
        if len(data) != self._journal.block_size:
            raise ValueError(f"a block has {self._journal.block_size} bytes, not {len(data)}")
        self._written[block] = bytes(data)
        self._revoked.discard(block)

    def revoke(self, block: int) -> None:
        """Forget a metadata block that was freed: nothing older of it may ever be replayed over its next use.

        Allocate it as *data* again only after the transaction's commit (:meth:`Journal.revoked_pending` tells).
        """
        self._written.pop(block, None)
        self._revoked.add(block)

    def ordered(self, write: Callable[[], None]) -> None:
        """Have ``write`` called once before the commit, and what it wrote made durable: data of new blocks."""
        self._ordered.append(write)

    @property
    def changes(self) -> int:
        """Blocks changed and revoked so far; :attr:`Journal.most_changes` is the limit."""
        return len(self._written) + len(self._revoked)

    def stop(self) -> None:
        """End the operation: it becomes part of the running transaction. TransactionTooLarge (then it is dropped)."""
        self._journal._merge(self, self._written, self._revoked, self._ordered)

    def abort(self) -> None:
        """End the operation as if it had never begun."""
        self._journal._drop(self)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, t: type[BaseException] | None, v: BaseException | None, tb: TracebackType | None) -> None:
        if t is None:
            self.stop()
        else:
            self.abort()


class Journal:
    """The writer's side of a log that is empty or was just recovered. Not thread-safe. Made by :meth:`open`."""

    def __init__(
        self, log: Log, *, start: int, sequence: int, used: int | None = None, clock: Callable[[], int] = time.time_ns
    ) -> None:
        """``used``: so many blocks before ``start`` hold transactions that were replayed, but not flushed (recovery).

        They count as the log's until they are durable in their places.
        """
        self.log = log
        self.block_size = log.block_size
        self.sequence = sequence
        """Number of the running transaction."""
        self._blocks = log.blocks
        self._clock = clock
        self._head = start
        self._used = used or 0  # blocks of the log that hold transactions not yet checkpointed
        self._unflushed = used is not None  # something was written in place, and no flush has followed
        self._active = log.super.s_start != 0
        self._handle: Handle | None = None
        self._running: dict[int, bytes] = {}
        self._revoked: set[int] = set()
        self._ordered: list[Callable[[], None]] = []
        self._committed: dict[int, bytes] = {}
        self._room = log.last - log.first
        self.share = 4
        """One operation, and the running transaction, may take the log's ``share``-th part; a quarter as in the kernel.

        1 is for a single transaction that must be large, on a log that is empty.
        """

    @classmethod
    def open(
        cls, blocks: Blocks, runs: Sequence[Extent], where: str, *, clock: Callable[[], int] = time.time_ns
    ) -> Journal:
        """Open the journal in ``runs`` for writing. It must be empty (``s_start`` 0): recover it first.

        CorruptImage, Unsupported, HostError; ValueError when it is not empty.
        """
        log = Log.open(blocks, runs, where)
        if log.super.s_start:
            raise ValueError("the journal is not empty: recover it first")
        return cls(log, start=log.first, sequence=log.super.s_sequence or 1, clock=clock)

    # -- operations -------------------------------------------------------------------------------------------------

    @property
    def uncheckpointed(self) -> int:
        """Blocks that are committed and not in place yet; each is held in memory."""
        return len(self._committed)

    @property
    def most_changes(self) -> int:
        """Blocks that one operation may change and revoke: the log's share (see :attr:`share`)."""
        part = self._room // self.share - (self.share == 1)
        return max(1, part - self._overhead(part))

    def _overhead(self, changes: int) -> int:
        """Blocks that a transaction of so many changes takes beside its data, at most."""
        per_descriptor = (self.block_size - HEADER.size - self.log.tail - _UUID) // self.log.tag_size
        per_revoke = (self.block_size - JournalRevokeHeader.SIZE - self.log.tail) // (8 if self.log.wide else 4)
        return -(-changes // per_descriptor) - (-changes // per_revoke) + 1

    def begin(self) -> Handle:
        """Begin an operation. RuntimeError while another one is open."""
        if self._handle is not None:
            raise RuntimeError("an operation is under way")
        self._handle = Handle(self)
        return self._handle

    def read(self, block: int) -> bytes:
        """Return the newest content of a metadata block: from the running transaction, the log, or the volume."""
        for known in (self._running, self._committed):
            found = known.get(block)
            if found is not None:
                return found
        return self._blocks.read(block)

    def pending(self, block: int) -> bool:
        """Tell whether the newest content of a block is not in place yet."""
        return block in self._running or block in self._committed

    def revoked_pending(self, block: int) -> bool:
        """Tell whether a block was revoked in the running transaction, so that data must not be put into it yet."""
        return block in self._revoked

    def _merge(
        self, handle: Handle, written: dict[int, bytes], revoked: set[int], ordered: list[Callable[[], None]]
    ) -> None:
        self._drop(handle)
        if len(written) + len(revoked) > self.most_changes:
            what = f"an operation changes {len(written) + len(revoked)} blocks, at most {self.most_changes} fit"
            raise TransactionTooLarge(what, where=self.log.where)
        if len(self._running.keys() | written.keys()) + len(self._revoked | revoked) > self.most_changes:
            self.commit()
        self._running.update(written)
        self._revoked -= written.keys()
        for block in revoked:
            self._running.pop(block, None)
        self._revoked |= revoked
        self._ordered += ordered

    def _drop(self, handle: Handle) -> None:
        if self._handle is not handle:
            raise RuntimeError("the operation has ended already")
        self._handle = None

    # -- commit -----------------------------------------------------------------------------------------------------

    def commit(self) -> int:
        """Make everything so far durable; return the number of the last transaction that is.

        With nothing to do costs nothing but the flush of ordered data.
        """
        if self._handle is not None:
            raise RuntimeError("an operation is under way")
        need = len(self._running) + self._overhead(len(self._running) + len(self._revoked))
        if need > self._room - self._used - 1:
            self.checkpoint()  # before any data goes where old metadata lay
        ordered, self._ordered = self._ordered, []
        for write in ordered:
            write()
        if not self._running and not self._revoked:
            if ordered:
                self._blocks.flush()
            return (self.sequence - 1) & 0xFFFFFFFF
        self._activate()
        if self._revoked and not self.log.incompat & c.JBD2_INCOMPAT_REVOKE:
            self.log.set_incompat(c.JBD2_INCOMPAT_REVOKE)
            self.log.write_super(start=self.log.super.s_start, sequence=self.log.super.s_sequence)
        body = self._revoke_blocks() + self._descriptors()
        self._append(body)
        self._blocks.flush()  # ordered data, too, before the commit block says that they are there
        self._unflushed = False
        self._append([self._commit_block(body)])
        self._blocks.flush()
        self._committed.update(self._running)
        for block in self._revoked:
            self._committed.pop(block, None)
        self._running, self._revoked = {}, set()
        done = self.sequence
        self.sequence = next_sequence(done)
        return done

    def _activate(self) -> None:
        """Say in the superblock that the log is in use.

        The flush before the commit block makes it durable, too: until then the log is empty either way.
        """
        if not self._active:
            self.log.write_super(start=self._head, sequence=self.sequence)
            self._active = True

    def _append(self, blocks: list[bytes]) -> None:
        """Write blocks at the log's head, contiguous pieces at once."""
        done = 0
        while done < len(blocks):
            count = min(len(blocks) - done, self.log.last - self._head)
            self.log.write(self._head, b"".join(blocks[done : done + count]))
            self._head = self.log.after(self._head, count)
            done += count
        self._used += len(blocks)

    def _header(self, kind: int) -> bytes:
        return HEADER.pack(c.JBD2_MAGIC, kind, self.sequence)

    def _revoke_blocks(self) -> list[bytes]:
        """Return the revoke blocks of the running transaction."""
        record = _U64 if self.log.wide else _U32
        room = (self.block_size - JournalRevokeHeader.SIZE - self.log.tail) // record.size
        numbers = sorted(self._revoked)
        out = []
        for start in range(0, len(numbers), room):
            part = numbers[start : start + room]
            head = self._header(c.JBD2_REVOKE) + _U32.pack(JournalRevokeHeader.SIZE + len(part) * record.size)
            out.append(self.log.with_tail(head + b"".join([record.pack(n) for n in part])))
        return out

    def _descriptors(self) -> list[bytes]:
        """Return descriptor blocks, each followed by the blocks it names."""
        room = (self.block_size - HEADER.size - self.log.tail - _UUID) // self.log.tag_size
        numbers = sorted(self._running)
        out: list[bytes] = []
        for start in range(0, len(numbers), room):
            part = numbers[start : start + room]
            tags, stored = [self._header(c.JBD2_DESCRIPTOR)], []
            for i, number in enumerate(part):
                data = self._running[number]
                flags = c.JBD2_FLAG_SAME_UUID if i else 0
                if i == len(part) - 1:
                    flags |= c.JBD2_FLAG_LAST
                if data.startswith(MAGIC_BYTES):
                    flags |= c.JBD2_FLAG_ESCAPE
                    data = bytes(4) + data[4:]
                tags.append(self._tag(number, flags, data))
                if i == 0:
                    tags.append(
                        self.log.super.s_uuid if self.log.super.h_blocktype == c.JBD2_SUPERBLOCK_V2 else bytes(16)
                    )
                stored.append(data)
            out.append(self.log.with_tail(b"".join(tags)))
            out += stored
        return out

    def _tag(self, number: int, flags: int, stored: bytes) -> bytes:
        log = self.log
        checksum = log.data_checksum(self.sequence, stored) if log.csum else 0
        if log.csum == 3:
            return _TAG3.pack(number & 0xFFFFFFFF, flags, number >> 32 if log.wide else 0, checksum)
        tag = _TAG.pack(number & 0xFFFFFFFF, checksum, flags)
        if log.wide:
            tag += _U32.pack(number >> 32)
        return tag + bytes(log.tag_size - len(tag))

    def _commit_block(self, body: list[bytes]) -> bytes:
        seconds, nanoseconds = divmod(max(0, self._clock()), 1_000_000_000)
        head = JournalCommit(c.JBD2_MAGIC, c.JBD2_COMMIT, self.sequence)
        head.h_commit_sec, head.h_commit_nsec = seconds, nanoseconds
        data = head.pack() + bytes(self.block_size - JournalCommit.SIZE)
        if not self.log.csum:
            return data
        checksum = self.log.block_checksum(data, _COMMIT_CSUM)
        return data[:_COMMIT_CSUM] + checksum.to_bytes(4, "big") + data[_COMMIT_CSUM + 4 :]

    # -- checkpoint -------------------------------------------------------------------------------------------------

    def checkpoint(self) -> None:
        """Bring every committed block in place and give the log free. The running transaction stays as it is."""
        self._bring_in_place()
        if self._used:
            self.log.write_super(start=self._head, sequence=self.sequence)
            self._blocks.flush()
            self._used = 0

    def _bring_in_place(self) -> None:
        """Return when every committed block is durable in its place."""
        if self._committed or self._unflushed:
            write_back(self._blocks, self._committed)
            self._blocks.flush()
            self._committed, self._unflushed = {}, False

    def close(self) -> None:
        """Commit, checkpoint, and leave the log empty (``s_start`` 0). Nothing may be written afterwards."""
        self.commit()
        self._bring_in_place()
        if self._active:
            # One number is left out, so that no block of a transaction that was cut off is ever taken for a new one.
            self.log.write_super(start=0, sequence=next_sequence(self.sequence))
            self._blocks.flush()
            self._active = False
