"""Free space: block groups, and finding blocks and inodes in them near where they are wanted.

Blocks freed by the running transaction are not handed out before it is safe: until then the old file could still come
back after a crash. A group's ``busy`` bitmap says what may not be taken; it is the bitmap on disk and those blocks.

Uninitialised groups (``BLOCK_UNINIT``, ``INODE_UNINIT``) are free space like any other; their bitmaps are made when
they are first used (source: Documentation/filesystems/ext4/group_descr.rst).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ext4lite import bitmap
from ext4lite.checksum import crc32c, group_desc_checksum, group_desc_crc16
from ext4lite.errors import CorruptImage, VolumeFull
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import GroupDesc

if TYPE_CHECKING:
    from ext4lite.writable import WritableBase

_WINDOWS = 64
_SNAPSHOT = tuple[int, int, int, int, int, bytearray | None, int, bool, bool, bool]


class Group:
    """One block group: its descriptor decoded, its counts, and what is known about its free space."""

    __slots__ = (
        "block_bitmap",
        "blocks_changed",
        "busy",
        "desc",
        "dirs",
        "dirty",
        "flags",
        "free",
        "free_inodes",
        "inode_bitmap",
        "inode_table",
        "inodes_changed",
        "longest",
        "number",
        "unused",
    )

    def __init__(self, number: int, desc: GroupDesc, *, longest: int) -> None:
        self.number = number
        self.desc = desc
        self.block_bitmap = desc.bg_block_bitmap_lo | desc.bg_block_bitmap_hi << 32
        self.inode_bitmap = desc.bg_inode_bitmap_lo | desc.bg_inode_bitmap_hi << 32
        self.inode_table = desc.bg_inode_table_lo | desc.bg_inode_table_hi << 32
        self.free = desc.bg_free_blocks_count_lo | desc.bg_free_blocks_count_hi << 16
        self.free_inodes = desc.bg_free_inodes_count_lo | desc.bg_free_inodes_count_hi << 16
        self.dirs = desc.bg_used_dirs_count_lo | desc.bg_used_dirs_count_hi << 16
        self.unused = desc.bg_itable_unused_lo | desc.bg_itable_unused_hi << 16
        self.flags = desc.bg_flags
        self.busy: bytearray | None = None
        self.longest = longest
        """No free run is longer than this."""
        self.dirty = self.blocks_changed = self.inodes_changed = False

    def snapshot(self) -> _SNAPSHOT:
        """Return what an operation may change."""
        return (
            self.free,
            self.free_inodes,
            self.dirs,
            self.unused,
            self.flags,
            None if self.busy is None else bytearray(self.busy),
            self.longest,
            self.dirty,
            self.blocks_changed,
            self.inodes_changed,
        )

    def restore(self, old: _SNAPSHOT) -> None:
        """Go back to a snapshot."""
        self.free, self.free_inodes, self.dirs, self.unused, self.flags = old[:5]
        self.busy, self.longest, self.dirty, self.blocks_changed, self.inodes_changed = old[5:]


@dataclass(slots=True)
class Run:
    """``count`` blocks of the volume from ``start`` on."""

    start: int
    count: int


class Allocator:
    """All groups of a writable volume. Changes belong to the operation under way (see ``buffers``)."""

    def __init__(self, volume: WritableBase) -> None:
        self.volume = volume
        sb = volume.super
        self._first = sb.first_data_block
        self._per_group = sb.raw.s_blocks_per_group
        self._inodes_per_group = sb.raw.s_inodes_per_group
        self.first_ino = sb.raw.s_first_ino if sb.raw.s_rev_level else c.FIRST_INO
        self._has_checksums = bool(sb.ro_compat & (c.RO_METADATA_CSUM | c.RO_GDT_CSUM))
        self.groups = [Group(n, volume.group(n), longest=self._blocks_in(n)) for n in range(sb.groups)]
        self.free_blocks = sum(g.free for g in self.groups)
        self.free_inodes = sum(g.free_inodes for g in self.groups)
        self.pending: set[int] = set()
        """Groups with blocks that become available when the running transaction is safe."""
        self.touched: set[int] = set()
        """Groups that the running transaction may have changed."""
        self._windows: OrderedDict[int, Run] = OrderedDict()
        """Free blocks kept, in memory only, for files that grow: by inode number."""
        self._undo: dict[int, _SNAPSHOT] = {}
        self._undo_windows: OrderedDict[int, Run] = OrderedDict()
        self._undo_totals = (0, 0)
        self._undo_pending: set[int] = set()

    # -- operations -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin an operation."""
        self._undo = {}
        self._undo_totals = (self.free_blocks, self.free_inodes)
        self._undo_pending = set(self.pending)
        self._undo_windows = self._windows.copy()

    def rollback(self) -> None:
        """Take back what the operation did in memory."""
        for number, old in self._undo.items():
            self.groups[number].restore(old)
            if not self.groups[number].dirty:
                self.touched.discard(number)
        self._undo = {}
        self.free_blocks, self.free_inodes = self._undo_totals
        self.pending = self._undo_pending
        self._windows = self._undo_windows

    def committed(self) -> None:
        """The running transaction is safe: what it freed can be used."""
        for number in self.pending:
            group = self.groups[number]
            group.busy = None
            group.longest = self._blocks_in(number)
        self.pending = set()

    def _touch(self, group: Group) -> None:
        self._remember(group)
        self.touched.add(group.number)
        group.dirty = True

    def _remember(self, group: Group) -> None:
        if group.number not in self._undo:
            self._undo[group.number] = group.snapshot()

    def _check_counts(self, group: Group) -> None:
        """Refuse counts that are not those of the bitmaps: they would not fit their fields."""
        if not (
            0 <= group.free <= self._per_group
            and 0 <= group.free_inodes <= self._inodes_per_group
            and 0 <= group.dirs <= self._inodes_per_group
        ):
            raise CorruptImage("counts of free blocks, inodes or directories are wrong", where=self._at(group))

    def reseal(self) -> None:
        """Have all descriptors written again: what their checksums begin with is about to change."""
        for group in self.groups:
            group.dirty = True
        self.touched.update(range(len(self.groups)))

    def dirty_groups(self) -> list[Group]:
        """Groups whose descriptors have to be written."""
        return [g for g in (self.groups[n] for n in sorted(self.touched)) if g.dirty]

    def update_descriptors(self) -> None:
        """Make the decoded descriptors say what groups are now."""
        for group in self.dirty_groups():
            desc = group.desc
            desc.bg_free_blocks_count_lo, desc.bg_free_blocks_count_hi = group.free & 0xFFFF, group.free >> 16
            desc.bg_free_inodes_count_lo = group.free_inodes & 0xFFFF
            desc.bg_free_inodes_count_hi = group.free_inodes >> 16
            desc.bg_used_dirs_count_lo, desc.bg_used_dirs_count_hi = group.dirs & 0xFFFF, group.dirs >> 16
            if self._has_checksums:
                desc.bg_itable_unused_lo, desc.bg_itable_unused_hi = group.unused & 0xFFFF, group.unused >> 16
            desc.bg_flags = group.flags

    def store(self) -> None:
        """Write counts, flags and checksums of changed groups into their descriptor blocks."""
        v = self.volume
        sb = v.super
        self.update_descriptors()
        for group in self.dirty_groups():
            desc = group.desc
            if sb.metadata_csum:
                if group.blocks_changed:
                    total = crc32c(sb.seed, bytes(v.cache.get(group.block_bitmap))[: self._per_group // 8])
                    desc.bg_block_bitmap_csum_lo, desc.bg_block_bitmap_csum_hi = total & 0xFFFF, total >> 16
                if group.inodes_changed:
                    total = crc32c(sb.seed, bytes(v.cache.get(group.inode_bitmap))[: self._inodes_per_group // 8])
                    desc.bg_inode_bitmap_csum_lo, desc.bg_inode_bitmap_csum_hi = total & 0xFFFF, total >> 16
            size = sb.desc_size
            at, offset = v.descriptor_place(group.number)
            block = v.cache.change(at)
            raw = bytearray(block[offset : offset + size])
            packed = desc.pack()[:size]
            raw[: len(packed)] = packed
            if sb.metadata_csum:
                desc.bg_checksum = group_desc_checksum(sb.seed, group.number, bytes(raw))
            elif sb.ro_compat & c.RO_GDT_CSUM:
                desc.bg_checksum = group_desc_crc16(sb.raw.s_uuid, group.number, bytes(raw))
            raw[30:32] = desc.bg_checksum.to_bytes(2, "little")
            block[offset : offset + size] = raw
            group.dirty = group.blocks_changed = group.inodes_changed = False
        self.touched.clear()

    # -- bitmaps ----------------------------------------------------------------------------------------------------

    def _blocks_in(self, number: int) -> int:
        return min(self._per_group, self.volume.blocks - self._first - number * self._per_group)

    def _at(self, group: Group) -> str:
        return f"{self.volume.where}: group {group.number}"

    def _block_bitmap(self, group: Group) -> bytearray:
        """Return the block bitmap for changing; make it when the group is uninitialised."""
        where = self._at(group)
        if group.flags & c.BG_BLOCK_UNINIT and self._has_checksums:
            bits = self.volume.cache.create(group.block_bitmap)
            bits[:] = self._fresh_bitmap(group)
            group.flags &= ~c.BG_BLOCK_UNINIT
            group.dirty = group.blocks_changed = True
            return bits
        return self.volume.cache.change(group.block_bitmap, where)

    def _fresh_bitmap(self, group: Group) -> bytearray:
        """The bitmap of an uninitialised group: its own metadata, and what lies behind the volume's end."""
        v = self.volume
        bits = bytearray(v.block_size)
        count = self._blocks_in(group.number)
        start = self._first + group.number * self._per_group
        bitmap.fill(bits, 0, v.base_metadata(group.number), used=True)
        table = -(-self._inodes_per_group * v.super.inode_size // v.block_size)
        for first, length in ((group.block_bitmap, 1), (group.inode_bitmap, 1), (group.inode_table, table)):
            low, high = max(first, start), min(first + length, start + count)
            if low < high:
                bitmap.fill(bits, low - start, high - low, used=True)
        bitmap.fill(bits, count, 8 * v.block_size - count, used=True)
        return bits

    def _busy(self, group: Group) -> bytearray:
        """Return what may not be taken, for looking only."""
        if group.busy is None:
            if group.flags & c.BG_BLOCK_UNINIT and self._has_checksums:
                group.busy = self._fresh_bitmap(group)
            else:
                group.busy = bytearray(self.volume.verified_bitmap(group.number, blocks=True))
            for window in self._windows.values():
                number, bit = divmod(window.start - self._first, self._per_group)
                if number == group.number:
                    bitmap.fill(group.busy, bit, window.count, used=True)
        return group.busy

    # -- blocks -----------------------------------------------------------------------------------------------------

    def allocate(self, goal: int, want: int) -> Run:
        """Take up to ``want`` blocks in one piece, as near after ``goal`` as they come; at least one, or VolumeFull."""
        run = self._search(goal, want)
        while run is None:
            if not self._windows:
                raise VolumeFull("no free blocks are left", where=self.volume.where)
            for owner in list(self._windows):
                self.drop_window(owner)
            run = self._search(goal, want)
        self._mark(run.start, run.count, used=True)
        return run

    def allocate_growing(self, owner: int, goal: int, want: int, ahead: int) -> Run:
        """Take blocks as :meth:`allocate` for a file that grows, and keep up to ``ahead`` more behind them for it.

        So files that grow by turns do not lie block by block between each other. What is kept is free space on disk and
        in all counts; it is given up when the file ends (:meth:`drop_window`), with many others, or with the last free
        blocks.
        """
        window = self._windows.pop(owner, None)
        if window is not None and window.start == goal:
            count = min(want, window.count)
            if count < window.count:
                self._windows[owner] = Run(goal + count, window.count - count)
            self._mark(goal, count, used=True)
            return Run(goal, count)
        if window is not None:
            self._give_up(window)
        if ahead <= 0 or self.free_blocks < 16 * (want + ahead):
            return self.allocate(goal, want)
        found = self._search(goal, want + ahead)
        if found is None:
            return self.allocate(goal, want)
        run = Run(found.start, min(want, found.count))
        self._mark(run.start, run.count, used=True)
        if found.count > run.count:
            group, bit = self._place(run.start + run.count)
            bitmap.fill(self._busy(group), bit, found.count - run.count, used=True)
            self._windows[owner] = Run(run.start + run.count, found.count - run.count)
            if len(self._windows) > _WINDOWS:
                self.drop_window(next(iter(self._windows)))
        return run

    def drop_window(self, owner: int) -> None:
        """Give up what is kept for a file."""
        window = self._windows.pop(owner, None)
        if window is not None:
            self._give_up(window)

    def _give_up(self, window: Run) -> None:
        group, bit = self._place(window.start)
        self._remember(group)
        if group.busy is not None:
            bitmap.fill(group.busy, bit, window.count, used=False)
        group.longest = self._blocks_in(group.number)

    def _place(self, block: int) -> tuple[Group, int]:
        """Return the group of a block, and its bit there."""
        number, bit = divmod(block - self._first, self._per_group)
        return self.groups[number], bit

    def _search(self, goal: int, want: int) -> Run | None:
        if not self._first <= goal < self.volume.blocks:
            goal = self._first
        home, bit = divmod(goal - self._first, self._per_group)
        groups = len(self.groups)
        first = self.groups[home]
        end = self._blocks_in(home)
        if first.free:
            stop = bitmap.next_set(self._busy(first), bit, min(end, bit + want))
            if stop - bit >= min(want, 8):
                return Run(goal, stop - bit)
        best: Run | None = None
        for k in range(groups + 1):  # the goal's own group again at the end, for what lies before the goal
            group = self.groups[(home + k) % groups]
            if not group.free or (best is not None and group.longest <= best.count):
                continue
            busy = self._busy(group)
            start = self._first + group.number * self._per_group
            end = self._blocks_in(group.number)
            at = bitmap.next_clear(busy, bit if k == 0 else 0, end)
            longest = 0
            while at < end:
                stop = bitmap.next_set(busy, at, min(end, at + want))
                if stop - at >= want:
                    return Run(start + at, want)
                longest = max(longest, stop - at)
                if best is None or stop - at > best.count:
                    best = Run(start + at, stop - at)
                at = bitmap.next_clear(busy, stop, end)
            if k:
                group.longest = longest
        return best

    def _mark(self, start: int, count: int, *, used: bool) -> None:
        if start < self._first or start + count > self.volume.blocks or count <= 0:
            raise CorruptImage(f"blocks {start}+{count} lie outside the volume", where=self.volume.where)
        while count:
            number, bit = divmod(start - self._first, self._per_group)
            group = self.groups[number]
            part = min(count, self._per_group - bit)
            busy = self._busy(group)
            self._touch(group)
            bits = self._block_bitmap(group)
            if not bitmap.all_are(bits, bit, part, used=not used):
                state = "in use" if used else "free"
                raise CorruptImage(f"some of blocks {start}+{part} are {state} already", where=self._at(group))
            bitmap.fill(bits, bit, part, used=used)
            if used:
                bitmap.fill(busy, bit, part, used=True)
            else:
                self.pending.add(number)
            change = -part if used else part
            group.free += change
            self.free_blocks += change
            self._check_counts(group)
            group.blocks_changed = True
            start += part
            count -= part

    def free(self, start: int, count: int) -> None:
        """Give blocks back. CorruptImage when some of them are free already."""
        self._mark(start, count, used=False)

    # -- inodes -----------------------------------------------------------------------------------------------------

    def allocate_inode(self, parent: int, *, directory: bool) -> int:
        """Take a free inode number near its parent; VolumeFull.

        Directories right below the root are spread over the groups, so that trees do not crowd.
        """
        start = (parent - 1) // self._inodes_per_group
        if directory:
            start = self._group_of_directory(parent, start)
        groups = len(self.groups)
        for k in range(groups):
            group = self.groups[(start + k) % groups]
            if not group.free_inodes:
                continue
            uninit = bool(group.flags & c.BG_INODE_UNINIT) and self._has_checksums
            bits = (
                bytearray(self.volume.block_size) if uninit else self.volume.verified_bitmap(group.number, blocks=False)
            )
            bit = bitmap.next_clear(bits, self.first_ino - 1 if not group.number else 0, self._inodes_per_group)
            if bit < self._inodes_per_group:
                self._take_inode(group, bit, directory)
                return group.number * self._inodes_per_group + bit + 1
        raise VolumeFull("no free inodes are left", where=self.volume.where)

    def _group_of_directory(self, parent: int, start: int) -> int:
        groups = self.groups
        if parent != c.ROOT_INO:
            group = groups[start]
            if group.free_inodes * 4 >= self.free_inodes // len(groups) and group.free * 4 >= self.free_blocks // len(
                groups
            ):
                return start
        fit = [g for g in groups if g.free_inodes and g.free * len(groups) >= self.free_blocks // 2]
        best = min(fit, key=lambda g: (g.dirs, -g.free), default=None)
        return start if best is None else best.number

    def _take_inode(self, group: Group, bit: int, directory: bool) -> None:
        cache = self.volume.cache
        self._touch(group)
        self._busy(group)
        if group.flags & c.BG_BLOCK_UNINIT:
            # as the kernel does: a group with inodes in use has a real block bitmap
            self._block_bitmap(group)
        if self._has_checksums:
            first = self._inodes_per_group - group.unused
            if bit >= first:
                self._clear_inodes(group, first, bit)
                group.unused = self._inodes_per_group - bit - 1
        if group.flags & c.BG_INODE_UNINIT and self._has_checksums:
            bits = cache.create(group.inode_bitmap)
            bitmap.fill(bits, self._inodes_per_group, 8 * len(bits) - self._inodes_per_group, used=True)
            group.flags &= ~c.BG_INODE_UNINIT
        else:
            bits = cache.change(group.inode_bitmap, self._at(group))
        bitmap.fill(bits, bit, 1, used=True)
        group.free_inodes -= 1
        self.free_inodes -= 1
        group.dirs += directory
        self._check_counts(group)
        group.inodes_changed = True

    def _clear_inodes(self, group: Group, first: int, last: int) -> None:
        """Zero the records from the first never used up to ``last``: an uninitialised table may hold anything."""
        size = self.volume.super.inode_size
        for bit in range(first, last + 1):
            block, offset = divmod(bit * size, self.volume.block_size)
            data = self.volume.cache.change(group.inode_table + block)
            data[offset : offset + size] = bytes(size)

    def free_inode(self, ino: int, *, directory: bool) -> None:
        """Give an inode number back. CorruptImage when it is free already."""
        number, bit = divmod(ino - 1, self._inodes_per_group)
        group = self.groups[number]
        self._touch(group)
        bits = self.volume.cache.change(group.inode_bitmap, self._at(group))
        if group.flags & c.BG_INODE_UNINIT or not bits[bit >> 3] >> (bit & 7) & 1:
            raise CorruptImage(f"inode {ino} is free already", where=self._at(group))
        bitmap.fill(bits, bit, 1, used=False)
        group.free_inodes += 1
        self.free_inodes += 1
        if directory:
            group.dirs -= 1
        self._check_counts(group)
        group.inodes_changed = True
