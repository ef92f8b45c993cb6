"""A volume open for changing its layout: it owns more than files, and some of its blocks are closed to allocation."""

from __future__ import annotations

import os
from collections.abc import Callable

from ext4lite import bitmap
from ext4lite.alloc import Allocator, Group, Run
from ext4lite.blockdev import StrPath
from ext4lite.errors import VolumeFull
from ext4lite.jbd2.log import Blocks, FileBlocks
from ext4lite.jbd2.transaction import Journal, TransactionTooLarge
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import SuperBlock
from ext4lite.shape import Shape, require_resizable
from ext4lite.super import read_super
from ext4lite.writer import WritableVolume

_UNLIMITED = 1 << 30


class Confined(Allocator):
    """Finds space only outside of ``closed`` blocks, and inodes only in the first ``inode_groups`` groups."""

    def __init__(self, volume: LayoutVolume) -> None:
        super().__init__(volume)
        self.closed: list[tuple[int, int]] = []
        """[start, end) in blocks, ascending."""
        self.inode_groups = len(self.groups)
        self._hint = self._first

    def confine(self, closed: list[tuple[int, int]], inode_groups: int | None = None) -> None:
        """Close blocks, and (for inodes) all groups from ``inode_groups`` on."""
        self.closed = closed
        if inode_groups is not None:
            self.inode_groups = inode_groups
        for group in self.groups:
            group.busy = None
            group.longest = self._blocks_in(group.number)

    def _busy(self, group: Group) -> bytearray:
        known = group.busy is not None
        busy = super()._busy(group)
        if not known:
            start = self._first + group.number * self._per_group
            end = start + self._blocks_in(group.number)
            for low, high in self.closed:
                if low < end and high > start:
                    bit = max(low, start) - start
                    bitmap.fill(busy, bit, min(high, end) - start - bit, used=True)
        return busy

    def allocate(self, goal: int, want: int) -> Run:
        """See :meth:`Allocator.allocate`; a goal that is closed is replaced by the end of what was found last."""
        if any(low <= goal < high for low, high in self.closed):
            goal = self._hint
        run = super().allocate(goal, want)
        self._hint = run.start + run.count
        return run

    def allocate_whole(self, goal: int, count: int, within: int | None = None) -> int:
        """Take ``count`` blocks in one piece, in group ``within`` if it is given; return the first. VolumeFull."""
        if within is None:
            run = self._search(goal, count)
            start = run.start if run is not None and run.count == count else -1
        else:
            start = self._search_in(self.groups[within], count)
        if start < 0:
            raise VolumeFull(f"there are no {count} free blocks in one piece", where=self.volume.where)
        self._mark(start, count, used=True)
        return start

    def has_room_in(self, number: int, count: int) -> bool:
        """Tell whether a group has ``count`` free blocks in one piece."""
        return self._search_in(self.groups[number], count) >= 0

    def _search_in(self, group: Group, count: int) -> int:
        busy, end = self._busy(group), self._blocks_in(group.number)
        at = bitmap.next_clear(busy, 0, end)
        while at < end:
            stop = bitmap.next_set(busy, at, min(end, at + count))
            if stop - at == count:
                return self._first + group.number * self._per_group + at
            at = bitmap.next_clear(busy, stop, end)
        return -1

    def allocate_inode(self, parent: int, *, directory: bool) -> int:
        """See :meth:`Allocator.allocate_inode`."""
        everything = self.groups
        self.groups = everything[: self.inode_groups]
        try:
            return super().allocate_inode(parent, directory=directory)
        finally:
            self.groups = everything

    def set_bits(self, number: int, bit: int, count: int, *, used: bool) -> None:
        """Set or clear bits of a group's block bitmap, whatever they are; its free blocks follow."""
        group = self.groups[number]
        self._touch(group)
        bits = self._block_bitmap(group)
        before = bitmap.count_clear(bits, 8 * len(bits))
        bitmap.fill(bits, bit, count, used=used)
        self.count(group, bitmap.count_clear(bits, 8 * len(bits)) - before)
        group.blocks_changed, group.busy = True, None

    def touch(self, group: Group) -> None:
        """Have a group's descriptor written, in which the caller changed something."""
        self._touch(group)

    def count(self, group: Group, change: int) -> None:
        """Change the number of a group's free blocks."""
        self._touch(group)
        group.free += change
        self.free_blocks += change
        self._check_counts(group)

    def keep_groups(self, count: int) -> None:
        """Forget all groups but the first ``count``; what is free there is free no more."""
        del self.groups[count:]
        self.touched = {number for number in self.touched if number < count}
        self.pending = {number for number in self.pending if number < count}
        self.inode_groups = count
        self.free_blocks = sum(group.free for group in self.groups)
        self.free_inodes = sum(group.free_inodes for group in self.groups)

    def initialise(self, number: int) -> None:
        """Give a group a bitmap on disk."""
        self._touch(self.groups[number])
        self._block_bitmap(self.groups[number])


class LayoutVolume(WritableVolume):
    """A volume whose geometry changes. ``alloc`` is a :class:`Confined`."""

    alloc: Confined

    def _allocator(self) -> Confined:
        return Confined(self)

    @classmethod
    def open_locked(
        cls,
        fd: int,
        path: StrPath,
        *,
        journaled: bool = True,
        device: Callable[[Blocks], Blocks] | None = None,
        clean: bool = True,
    ) -> LayoutVolume:
        """Open the volume whose file is open and locked at ``fd``, which closing it leaves alone.

        It must be clean, unless ``clean`` is False.
        Not ``journaled``: nobody else will ever see the file half changed, so changes go in place at once, in
        transactions of any size. CorruptImage, Unsupported, HostError.
        """
        where = os.fspath(path)
        sb = read_super(fd, where)
        if clean:
            sb.require_clean()
        require_resizable(sb)
        blocks: Blocks = FileBlocks(fd, sb.block_size, where)
        own = os.dup(fd)
        try:
            volume = cls(own, sb, where, blocks=blocks if device is None else device(blocks))
            if journaled:
                volume.start_journal()
        except BaseException:
            os.close(own)
            raise
        return volume

    def _most_changes(self) -> int:
        return _UNLIMITED if self.journal is None else super()._most_changes()

    @property
    def in_operation(self) -> bool:
        """Whether what is done now belongs to one transaction."""
        return self._in_operation

    def begin_at_once(self) -> None:
        """From here on everything belongs to one transaction, which :meth:`commit_at_once` commits.

        The log is empty then, so that the transaction may fill it.
        """
        self._commit()
        self.mark_in_use()
        if self.journal is not None:
            self.journal.checkpoint()
            self.journal.share = 1
        self.alloc.begin()
        self._in_operation = True

    def begin_unmarked(self) -> None:
        """Begin changes that :meth:`store_all` gathers in the cache for the caller to write."""
        self.alloc.begin()
        self._in_operation = True

    def store_all(self) -> None:
        """Put inodes, descriptors and superblock, too, into the cache's dirty blocks."""
        self._store_inodes()
        self.alloc.store()
        self._store_super()

    def adopt_journal(self, journal: Journal) -> None:
        """Go on with a journal that was just made, and which holds all that the cache had."""
        self.super.compat |= c.COMPAT_HAS_JOURNAL
        self.journal, self._in_use, self._in_operation = journal, True, False

    def commit_at_once(self) -> None:
        """Commit what was done since :meth:`begin_at_once` and bring it in place. TransactionTooLarge."""
        self.store_all()
        need = len(self.cache.dirty) + len(self.cache.revoked)
        if self.journal is not None and need > self.journal.most_changes:
            raise TransactionTooLarge(f"{need} blocks change, more than the journal holds", where=self.where)
        self._in_operation = False
        self.super_changed()
        self._commit()
        if self.journal is not None:
            self.journal.checkpoint()
        else:
            self._blocks.flush()

    def give_up(self) -> None:
        """Forget what no transaction has committed; what was is brought in place, and the volume left clean."""
        self._in_operation = False
        self._super_changed = False
        self._unstored.clear()
        for number in [*self.cache.dirty, c.SUPERBLOCK_OFFSET // self.block_size]:
            self.cache.dirty.pop(number, None)
            self.cache.drop(number)
        self.cache.revoked.clear()
        self.alloc.touched.clear()
        self._files.clear()
        self.close()

    def write_through(self) -> None:
        """Commit, and bring everything in place."""
        self._commit()
        if self.journal is not None:
            self.journal.checkpoint()

    def newest(self, start: int, count: int) -> bytes:
        """Return blocks as they are now, also those that no transaction has committed yet."""
        data = bytearray(self._blocks.read(start, count))
        size = self.block_size
        for i in range(count):
            changed = self.cache.dirty.get(start + i)
            if changed is not None:
                data[i * size : (i + 1) * size] = changed
            elif self.journal is not None and self.journal.pending(start + i):
                data[i * size : (i + 1) * size] = self.journal.read(start + i)
        return bytes(data)

    def write_raw(self, start: int, data: bytes) -> None:
        """Write blocks that nothing refers to yet."""
        self._blocks.write(start, data)

    def let_go(self, number: int) -> None:
        """Forget a metadata block that is free now."""
        if number in self.cache.dirty or (self.journal is not None and self.journal.pending(number)):
            self.cache.forget(number)
        else:
            self.cache.drop(number)

    def step(self, operation: Callable[[], None]) -> None:
        """Run an operation, all or nothing; what it changed in inodes is in their tables afterwards."""
        self._run(operation)
        self._store_inodes()

    def write_superblock_copies(self) -> None:
        """Write the copies of the superblock; no flush."""
        size = self.block_size
        for group in range(1, self.super.groups):
            if self.has_super(group):
                copy = SuperBlock.unpack(self.super.raw.pack())
                copy.s_feature_incompat &= ~c.INCOMPAT_RECOVER
                copy.s_block_group_nr = group & 0xFFFF
                head = self._sealed_super(copy)
                self.write_raw(self.super.group_first(group), head + bytes(size - len(head)))

    def take_shape(self, shape: Shape) -> None:
        """Have all counts and bounds follow a geometry, in memory and in the superblock to be written."""
        sb, raw = self.super, self.super.raw
        reserved_for_root = raw.s_r_blocks_count_lo | raw.s_r_blocks_count_hi << 32
        reserved_for_root = reserved_for_root * shape.blocks // max(1, sb.blocks)
        raw.s_r_blocks_count_lo, raw.s_r_blocks_count_hi = reserved_for_root & 0xFFFFFFFF, reserved_for_root >> 32
        raw.s_blocks_count_lo, raw.s_blocks_count_hi = shape.blocks & 0xFFFFFFFF, shape.blocks >> 32
        raw.s_inodes_count, raw.s_reserved_gdt_blocks = shape.inodes, shape.reserved
        sb.blocks = self.blocks = shape.blocks
        sb.groups, self._inodes = shape.groups, shape.inodes
        if raw.s_overhead_blocks:
            own = self.map(self.inode(raw.s_journal_inum))[0] if raw.s_journal_inum else []
            raw.s_overhead_blocks = shape.overhead() + sum(run.count for run in own) & 0xFFFFFFFF
