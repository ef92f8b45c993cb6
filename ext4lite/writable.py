"""A volume open for writing, below its files and names: operations, the transaction, inodes and their blocks.

An operation is all or nothing: :meth:`WritableBase._run` takes its changes back when it raises. What operations changed
gathers in one compound transaction, which :meth:`WritableBase.sync` and :meth:`WritableBase.close` make durable, and
which is also committed when it becomes large or when space that it freed is needed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TypeVar

from ext4lite.alloc import Allocator
from ext4lite.block_map import BlockMap
from ext4lite.blockdev import remove_record
from ext4lite.buffers import BlockCache
from ext4lite.checksum import crc32c, superblock_checksum
from ext4lite.device import Handle
from ext4lite.errors import (
    CorruptImage,
    FileTooLarge,
    HostError,
    NotFound,
    NotPermitted,
    Unsupported,
    VolumeFull,
)
from ext4lite.extent_tree import ExtentTree
from ext4lite.inode import KIND_OF_TYPE, InodeRecord, encode_time, pack_record
from ext4lite.interrupts import deferred
from ext4lite.jbd2.log import Blocks, write_back
from ext4lite.jbd2.transaction import Journal, TransactionTooLarge
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import Inode, SuperBlock
from ext4lite.super import Super
from ext4lite.volume import Volume

T = TypeVar("T")
_LONE_CHANGES = 4096  # blocks a transaction may hold without a journal
_GATHERED_BYTES = 16 << 20
"""Metadata of a transaction at which it is committed, and of commits at which they are brought in place: a large log
would let memory grow with it."""
_CTIME_END, _MTIME_END, _ATIME_END, _CRTIME_END = 8, 12, 16, 24  # i_extra_isize that covers the field


class WritableBase(Volume):
    """The machinery of :class:`ext4lite.writer.WritableVolume`. Not thread-safe."""

    _unchanging = False

    def __init__(
        self, image: Handle, sb: Super, where: str, *, blocks: Blocks, clock: Callable[[], int] = time.time_ns
    ) -> None:
        super().__init__(image, sb, where)
        self._window = sb.block_size  # of metadata, whole blocks are kept
        self._blocks = blocks
        self.clock = clock
        """Returns the time in nanoseconds since 1970."""
        self.journal: Journal | None = None
        self._unstored: dict[int, InodeRecord] = {}
        self._limit: tuple[Journal | None, int] = (None, _LONE_CHANGES)
        self.cache = BlockCache(self._read_newest, sb.block_size)
        self.alloc = self._allocator()
        self._verified: set[tuple[int, bool]] = set()
        self._maps: dict[int, ExtentTree | BlockMap] = {}
        self.flags_bind = True
        """Whether the flags immutable and append-only forbid what they forbid root; a caller may turn it off."""
        self._in_operation = False
        self._changed = False
        self._in_use = False
        self._broken = False
        self._half_done = False
        """An operation is under way, or could not be taken back: nothing more may be committed."""
        self._super_changed = False

    def _allocator(self) -> Allocator:
        """Return what hands out blocks and inodes; a subclass may have another one."""
        return Allocator(self)

    # -- opening and closing ----------------------------------------------------------------------------------------

    def start_journal(self) -> None:
        """Open the journal, which must be empty. CorruptImage, Unsupported."""
        if not self.super.compat & c.COMPAT_HAS_JOURNAL:
            return
        ino = self.super.raw.s_journal_inum
        if not ino:
            raise Unsupported("the volume's journal is on another device", where=self.where, hint="open it read-only")
        record = self.inode(ino)
        self.journal = Journal.open(self._blocks, self.map(record)[0], self._at(f"journal in inode {ino}"))

    def close(self) -> None:
        """Make everything durable, mark the volume clean, and release it. Harmless when called again."""
        if self._fd < 0:
            return
        with deferred():
            try:
                if not self._broken and not self._half_done:
                    self._finish()
            finally:
                remove_record(self.where)
                super().close()

    def _finish(self) -> None:
        self._release_all()
        self._commit()
        if not self._in_use:
            return
        if self.journal is not None:
            self.journal.close()
        else:
            self._blocks.flush()
        self._patch_super(in_use=False)

    def _release_all(self) -> None:
        """Let go of what is open; a subclass knows."""

    def abandon(self) -> None:
        """Release the volume as a killed process would: what was not committed is lost, the journal is not emptied."""
        self._broken = True
        self.close()

    def __enter__(self) -> WritableBase:
        return self

    def __exit__(self, t: type[BaseException] | None, v: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # -- operations and the transaction -----------------------------------------------------------------------------

    def _run(self, operation: Callable[[], T]) -> T:
        """Run one operation, all or nothing.

        When space or the journal runs short, the running transaction is committed, which frees both, and the operation
        is run once more. Operations inside an operation are part of it.
        """
        if self._in_operation:
            return operation()
        if self._broken or self._half_done or self._fd < 0:
            raise HostError("the volume is closed, or failed to write before", where=self.where)
        try:
            return self._attempt(operation)
        except VolumeFull:
            if not self.alloc.pending:
                raise
        except TransactionTooLarge:
            if not self.cache.dirty and not self.cache.revoked:
                raise
        self._commit()
        return self._attempt(operation)

    def together(self, operations: Callable[[], T]) -> T:
        """Do several operations as one: when ``operations`` raises, none of them was done; return what it returns.

        They must fit one transaction: TransactionTooLarge.
        """
        return self._run(operations)

    def _attempt(self, operation: Callable[[], T]) -> T:
        self._trim()
        self.cache.begin()
        self.alloc.begin()
        self._in_operation, self._changed, self._half_done = True, False, True
        raw = self.super.raw
        before = raw.s_last_orphan, raw.s_feature_ro_compat
        try:
            result = operation()
            self._store_inodes()
            size, most = self._size_of_transaction(), self._most_changes()
            if size > most:
                raise TransactionTooLarge("the operation changes too much at once", where=self.where)
            self._half_done = False
        except BaseException:
            with deferred():
                raw.s_last_orphan, raw.s_feature_ro_compat = before
                self._rollback()
                self._half_done = False
            raise
        finally:
            self._in_operation = False
        self.cache.end()
        if size * 2 > most or size * self.block_size > _GATHERED_BYTES:
            self._commit()
        return result

    def _trim(self) -> None:
        """Between operations: forget decoded things when there are many."""
        if len(self._records) > 8192:
            self._records.clear()
            self._maps.clear()

    def _size_of_transaction(self) -> int:
        return len(self.cache.dirty) + len(self.cache.revoked) + len(self.alloc.touched) + 1

    def _most_changes(self) -> int:
        if self._limit[0] is not self.journal:
            self._limit = self.journal, _LONE_CHANGES if self.journal is None else self.journal.most_changes
        return self._limit[1]

    def _rollback(self) -> None:
        changed = self._changed or self.cache.changed
        self._unstored.clear()
        self.cache.rollback()
        self.alloc.rollback()
        if changed:
            self._forget_all()

    def _forget_all(self) -> None:
        """Drop what was decoded from blocks."""
        self._records.clear()
        self._maps.clear()
        self._windows.clear()

    def sync(self) -> None:
        """Make everything done so far durable. HostError when that cannot be."""
        if self._broken or self._fd < 0:
            raise HostError("the volume is closed, or failed to write before", where=self.where)
        self._commit()
        if self.journal is None and self._in_use:
            self._blocks.flush()

    def super_changed(self) -> None:
        """Have the superblock, in which the caller changed something, committed with what else there is."""
        self._super_changed = True

    def _commit(self) -> None:
        if self.cache.dirty or self.cache.revoked or self._super_changed:
            with deferred():
                self._commit_now()

    def _commit_now(self) -> None:
        cache = self.cache
        try:
            self.mark_in_use()
            self.alloc.store()
            self._store_super()
            if self.journal is not None:
                with self.journal.begin() as handle:
                    for number, data in cache.dirty.items():
                        handle.write(number, bytes(data))
                    for number in cache.revoked:
                        handle.revoke(number)
                self.journal.commit()
                if self.journal.uncheckpointed * self.block_size > _GATHERED_BYTES:
                    self.journal.checkpoint()
            else:
                write_back(self._blocks, {n: bytes(d) for n, d in cache.dirty.items()})
        except BaseException:
            self._broken = True
            raise
        cache.committed()
        self.alloc.committed()

    def mark_in_use(self) -> None:
        """Before the first change: say on disk that the volume is not clean."""
        if self._in_use:
            return
        self._in_use = True
        self._patch_super(in_use=True)

    def _sealed_super(self, raw: SuperBlock) -> bytes:
        data = raw.pack()
        if self.super.metadata_csum:
            raw.s_checksum = superblock_checksum(data)
            data = raw.pack()
        return data

    def _patch_super(self, *, in_use: bool) -> None:
        """Say in the superblock on disk whether the volume is in use; durably, past the transaction.

        With a journal nothing but RECOVER and the checksum differ from what is there: recovery understands a superblock
        of which only one sector was written.
        """
        number, offset = divmod(c.SUPERBLOCK_OFFSET, self.block_size)
        block = bytearray(self.cache.get(number))
        raw = SuperBlock.unpack(block, offset)
        for one in (raw, self.super.raw):
            if self.journal is None:
                one.s_state = one.s_state & ~c.STATE_VALID | (0 if in_use else c.STATE_VALID)
            else:
                recover = c.INCOMPAT_RECOVER if in_use else 0
                one.s_feature_incompat = one.s_feature_incompat & ~c.INCOMPAT_RECOVER | recover
        block[offset : offset + c.SUPERBLOCK_SIZE] = self._sealed_super(raw)
        self._blocks.write(number, bytes(block))
        self._blocks.flush()
        self.cache.replace_clean(number, block)

    def _store_super(self) -> None:
        raw = self.super.raw
        free = self.alloc.free_blocks
        raw.s_free_blocks_count_lo, raw.s_free_blocks_count_hi = free & 0xFFFFFFFF, free >> 32
        raw.s_free_inodes_count = self.alloc.free_inodes
        seconds = max(0, self.clock()) // 1_000_000_000
        raw.s_wtime, raw.s_wtime_hi = seconds & 0xFFFFFFFF, seconds >> 32 & 0xFF
        number, offset = divmod(c.SUPERBLOCK_OFFSET, self.block_size)
        block = self.cache.change(number)
        block[offset : offset + c.SUPERBLOCK_SIZE] = self._sealed_super(raw)
        self._super_changed = False

    # -- blocks -----------------------------------------------------------------------------------------------------

    def _read_newest(self, number: int, where: str) -> bytes:
        """Read a block as the last commit left it."""
        if self.journal is not None:
            if not 0 <= number < self.blocks:
                raise CorruptImage(f"block {number} lies outside the volume of {self.blocks} blocks", where=where)
            return self.journal.read(number)
        return super().block(number, where)

    def block(self, number: int, where: str = "") -> bytes:
        """Return a metadata block as it is now."""
        return bytes(self.cache.get(number, where))

    def _metadata(self, offset: int, length: int, where: str) -> bytes:
        number, inside = divmod(offset, self.block_size)
        data = bytes(self.cache.get(number, where)[inside : inside + length])
        if len(data) != length:
            raise CorruptImage(f"byte {offset}: a record crosses blocks", where=where)
        return data

    def descriptor_place(self, group: int) -> tuple[int, int]:
        """Return (block, byte in it) of a group's descriptor."""
        table_block, index = divmod(group, self.block_size // self.super.desc_size)
        return c.SUPERBLOCK_OFFSET // self.block_size + 1 + table_block, index * self.super.desc_size

    def base_metadata(self, group: int) -> int:
        """Blocks at the beginning of a group that copies of superblock and descriptors take."""
        if not self.has_super(group):
            return 0
        per_block = self.block_size // self.super.desc_size
        tables = -(-self.super.groups // per_block)
        return 1 + tables + self.super.raw.s_reserved_gdt_blocks

    def verified_bitmap(self, group: int, *, blocks: bool) -> bytearray:
        """Return a group's bitmap for looking; CorruptImage if its checksum is wrong."""
        found = self.alloc.groups[group]
        number = found.block_bitmap if blocks else found.inode_bitmap
        data = self.cache.get(number, self._at(f"group {group}"))
        key = (group, blocks)
        if key not in self._verified:
            self._verified.add(key)
            if self._seed is not None and number not in self.cache.dirty:
                d = found.desc
                if blocks:
                    stored = d.bg_block_bitmap_csum_lo | d.bg_block_bitmap_csum_hi << 16
                    length = self.super.raw.s_clusters_per_group // 8
                else:
                    stored = d.bg_inode_bitmap_csum_lo | d.bg_inode_bitmap_csum_hi << 16
                    length = self._per_group // 8
                mask = 0xFFFFFFFF if self.super.desc_size >= 64 else 0xFFFF
                if crc32c(self._seed, bytes(data[:length])) & mask != stored & mask:
                    what = "block" if blocks else "inode"
                    raise CorruptImage(f"{what} bitmap checksum is wrong", where=self._at(f"group {group}"))
        return data

    def new_metadata_block(self, record: InodeRecord) -> int:
        """Take a block for an inode's own metadata. VolumeFull."""
        run = self.alloc.allocate(self.goal_of(record), 1)
        self.add_blocks(record, 1)
        return run.start

    def free_metadata_block(self, record: InodeRecord, number: int) -> None:
        """Give up a block of an inode's own metadata."""
        self.alloc.free(number, 1)
        self.cache.forget(number)
        self.add_blocks(record, -1)

    def goal_of(self, record: InodeRecord) -> int:
        """Return where blocks of an inode should lie when nothing else says: in its group."""
        return self.super.group_first((record.ino - 1) // self._per_group)

    # -- inodes -----------------------------------------------------------------------------------------------------

    def used_inodes(self, groups: int | None = None) -> Iterator[InodeRecord]:
        """See :meth:`ext4lite.volume.Volume.used_inodes`."""
        self.alloc.update_descriptors()
        return super().used_inodes(groups)

    def file_map(self, record: InodeRecord) -> ExtentTree | BlockMap:
        """Return the map of an inode's blocks, for changing."""
        found = self._maps.get(record.ino)
        if found is None or found.record is not record:
            made = ExtentTree if record.fields.i_flags & c.EXTENTS_FL else BlockMap
            found = self._maps[record.ino] = made(self, record)
        return found

    def changeable(self, ino: int) -> InodeRecord:
        """Return the record of an inode that users may change: in use (or open), and not the volume's own.

        NotFound, NotPermitted.
        """
        raw = self.super.raw
        own = (raw.s_journal_inum, raw.s_orphan_file_inum if self.super.compat & c.COMPAT_ORPHAN_FILE else 0)
        if (ino < self.alloc.first_ino and ino != c.ROOT_INO) or ino in own:
            raise NotPermitted("belongs to the volume itself", where=self._at(f"inode {ino}"))
        record = self.inode(ino)
        if record.fields.i_flags & c.EA_INODE_FL:
            raise NotPermitted("holds the value of an extended attribute", where=self._at(f"inode {ino}"))
        if record.type not in KIND_OF_TYPE or (not record.fields.i_links_count and not self._is_open(ino)):
            raise NotFound("is not in use", where=self._at(f"inode {ino}"))
        return record

    def require_no_flags(self, record: InodeRecord, flags: int) -> None:
        """Raise NotPermitted if an inode has one of the flags (immutable, append-only) and they bind."""
        if self.flags_bind and (found := record.fields.i_flags & flags):
            name = "immutable" if found & c.IMMUTABLE_FL else "append-only"
            raise NotPermitted(f"is {name} (a flag that chattr sets)", where=self._at(f"inode {record.ino}"))

    def _is_open(self, ino: int) -> bool:
        """Whether somebody has a file open; a subclass knows."""
        return False

    def put_inode(self, record: InodeRecord) -> None:
        """Have a changed record stored in its table, at the end of the operation under way."""
        self._changed = True
        self._unstored[record.ino] = record
        if not self._in_operation:
            self._store_inodes()

    def _store_inodes(self) -> None:
        """Store what :meth:`put_inode` was given, each once."""
        for record in self._unstored.values():
            self._store_inode(record)
        self._unstored.clear()

    def _store_inode(self, record: InodeRecord) -> None:
        group, index = divmod(record.ino - 1, self._per_group)
        block, offset = divmod(index * self._inode_size, self.block_size)
        record.raw = pack_record(record, self._seed)
        data = self.cache.change(self.alloc.groups[group].inode_table + block, self.where)
        data[offset : offset + self._inode_size] = record.raw

    def new_record(self, ino: int, mode: int, *, uid: int, gid: int, links: int) -> InodeRecord:
        """Return an empty record for a number just taken, times set to now; the caller stores it."""
        self._changed = True
        size = self._inode_size
        extra = 0
        if size > 128:
            extra = min(max(self.super.raw.s_want_extra_isize, 32) & ~3, size - 128)
        fields = Inode(i_mode=mode, i_links_count=links, i_extra_isize=extra)
        fields.i_uid, fields.l_i_uid_high = uid & 0xFFFF, uid >> 16
        fields.i_gid, fields.l_i_gid_high = gid & 0xFFFF, gid >> 16
        fields.i_generation = int.from_bytes(os.urandom(4), "little")
        record = self._records[ino] = InodeRecord(ino, bytes(size), fields, extra)
        self._maps.pop(ino, None)
        self._directories.pop(ino, None)
        now = self.clock()
        self.set_times(record, atime=now, mtime=now, ctime=now)
        if extra >= _CRTIME_END:
            fields.i_crtime, fields.i_crtime_extra = fields.i_mtime, fields.i_mtime_extra
        return record

    def set_times(
        self, record: InodeRecord, *, atime: int | None = None, mtime: int | None = None, ctime: int | None = None
    ) -> None:
        """Set times in nanoseconds since 1970, clamped to what the inode can hold."""
        f, extra = record.fields, record.extra_isize
        if mtime is not None and mtime == ctime and extra >= _ATIME_END:  # what most operations do
            f.i_mtime, f.i_mtime_extra = f.i_ctime, f.i_ctime_extra = encode_time(mtime, wide=True)
            if atime is not None:
                same = atime == mtime
                f.i_atime, f.i_atime_extra = (f.i_mtime, f.i_mtime_extra) if same else encode_time(atime, wide=True)
            return
        if atime is not None:
            f.i_atime, f.i_atime_extra = encode_time(atime, wide=extra >= _ATIME_END)
        if mtime is not None:
            f.i_mtime, f.i_mtime_extra = encode_time(mtime, wide=extra >= _MTIME_END)
        if ctime is not None:
            f.i_ctime, f.i_ctime_extra = encode_time(ctime, wide=extra >= _CTIME_END)

    def set_size(self, record: InodeRecord, size: int) -> None:
        """Set ``i_size``; notes the feature large_file where it is needed."""
        record.fields.i_size_lo, record.fields.i_size_high = size & 0xFFFFFFFF, size >> 32
        if size > 0x7FFFFFFF:
            self.super.raw.s_feature_ro_compat |= c.RO_LARGE_FILE

    def add_blocks(self, record: InodeRecord, count: int) -> None:
        """Change ``i_blocks`` by a number of blocks. FileTooLarge."""
        f = record.fields
        huge = bool(self.super.ro_compat & c.RO_HUGE_FILE)
        now = f.i_blocks_lo | (f.l_i_blocks_high << 32 if huge else 0)
        per = 1 if huge and f.i_flags & c.HUGE_FILE_FL else self.block_size // 512
        now += count * per
        if now < 0:
            raise CorruptImage("i_blocks is too small for the blocks it has", where=self._at(f"inode {record.ino}"))
        if now >> (48 if huge else 32):
            raise FileTooLarge("the file has too many blocks", where=self._at(f"inode {record.ino}"))
        f.i_blocks_lo = now & 0xFFFFFFFF
        if huge:
            f.l_i_blocks_high = now >> 32
