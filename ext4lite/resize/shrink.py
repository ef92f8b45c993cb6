"""Shrinking a volume in place: everything moves below the new end, step by step; then one transaction cuts it off."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ext4lite.alloc import Group
from ext4lite.errors import VolumeFull
from ext4lite.layout import constants as c
from ext4lite.layout_volume import LayoutVolume
from ext4lite.resize import resize_inode
from ext4lite.resize.move import Mover, Renumberer
from ext4lite.shape import LEAST_IN_LAST_GROUP, Shape, has_resize_inode, reshaped


class Shrinkage:
    """One shrinking of a volume. ``progress`` is called with each number of bytes moved."""

    def __init__(
        self, volume: LayoutVolume, old: Shape, new: Shape, progress: Callable[[int], None] | None = None
    ) -> None:
        self.v, self.old, self.new = volume, old, new
        self.mover = Mover(volume, old, [(new.blocks, old.blocks)], progress)
        self.renumberer = Renumberer(volume, new.groups)
        self._sums = bool(volume.super.ro_compat & (c.RO_METADATA_CSUM | c.RO_GDT_CSUM))
        self._left = False
        """Whether something finds its place only in what the groups that go leave behind."""

    def make_room(self) -> None:
        """Move everything below the new end. VolumeFull, TransactionTooLarge, JournalInTheWay, Unsupported."""
        v, new = self.v, self.new
        self.mover.require_journal_elsewhere()
        v.alloc.confine(self.mover.ranges, new.groups)
        self.renumberer.run()
        try:
            self.mover.run(new.groups)
        except VolumeFull:
            if next(self._tables(), None) is None or (v.journal is not None and not self._sums):
                raise
            self._left = True
            self._give_up_tables()
        v.write_through()

    def _tables(self) -> Iterator[tuple[int, int]]:
        """Yield (start, count) of inode tables of groups that go, as far as they lie below the new end."""
        new = self.new
        for group in self.v.alloc.groups[new.groups :]:
            if group.inode_table < new.blocks:
                yield group.inode_table, min(new.table, new.blocks - group.inode_table)

    def _free_bitmaps(self) -> None:
        """Free bitmaps of groups that go, when no transaction writes them any more."""
        v, new = self.v, self.new
        for group in v.alloc.groups[new.groups :]:
            for number in (group.block_bitmap, group.inode_bitmap):
                if number < new.blocks:
                    self._free(number, 1)
                    v.let_go(number)

    def _free(self, start: int, count: int) -> None:
        """Free blocks at once: the running transaction may use them again."""
        new, end = self.new, start + count
        while start < end:
            number = (start - new.first) // new.per_group
            part = min(end, new.end(number)) - start
            self.v.alloc.set_bits(number, start - new.start(number), part, used=False)
            start += part

    def _give_up_tables(self) -> None:
        """Mark the tables of groups that go as never used, so that it does not matter what is written to them.

        Without ZEROED they may hold anything: e2fsck does not look, and the kernel clears them before it uses them.
        """
        v, alloc, new = self.v, self.v.alloc, self.new
        for group in alloc.groups[new.groups :]:
            if group.inode_table >= new.blocks:
                continue

            def give_up(group: Group = group) -> None:
                alloc.touch(group)
                group.flags = group.flags & ~c.BG_INODE_ZEROED | c.BG_INODE_UNINIT
                group.unused = new.inodes_per_group
                group.desc.bg_inode_bitmap_csum_lo = group.desc.bg_inode_bitmap_csum_hi = 0

            v.step(give_up)

    def cut(self) -> None:
        """Take the new geometry, in which there is place for everything now. VolumeFull, TransactionTooLarge."""
        v, old, new = self.v, self.old, self.new
        v.begin_at_once()
        alloc = v.alloc
        last = new.groups - 1
        alloc.initialise(last)
        for start, count in self._tables():
            self._free(start, count)
        if self._left:
            alloc.confine(self.mover.ranges, new.groups)
            self.mover.run(new.groups)
        alloc.confine([])
        self._free_bitmaps()
        size = new.end(last) - new.start(last)
        alloc.set_bits(last, size, 8 * v.block_size - size, used=True)
        alloc.keep_groups(new.groups)
        given_up = old.base(0) - new.base(0)
        for number in (0, *new.backups()) if given_up else ():
            group = alloc.groups[number]
            if group.flags & c.BG_BLOCK_UNINIT and self._sums:
                alloc.count(group, given_up)
            else:
                alloc.set_bits(number, new.base(number), given_up, used=False)
        v.take_shape(new)
        table = c.SUPERBLOCK_OFFSET // v.block_size + 1
        for number in range(table + new.gdt, table + old.gdt):
            v.cache.forget(number)
        if has_resize_inode(v.super):
            resize_inode.settle(v, old, new)
        v.commit_at_once()


def smallest(volume: LayoutVolume, shape: Shape, *, slack: int = 0) -> Shape:
    """Return the smallest geometry that holds what a volume holds, with ``slack`` blocks left.

    What is moved may come to lie in more pieces than before, whose maps need a few blocks more.
    """
    alloc = volume.alloc
    keeps = has_resize_inode(volume.super)
    used = shape.blocks - alloc.free_blocks
    content = used - shape.overhead() + slack
    inodes = shape.inodes - alloc.free_inodes
    groups = max(-(-inodes // shape.inodes_per_group), -(-(content + shape.first) // shape.per_group), 1)
    groups = min(groups, shape.groups)
    while groups < shape.groups:
        whole = reshaped(shape, shape.first + groups * shape.per_group, keeps_room=keeps)
        if whole.groups == groups and whole.blocks - whole.overhead() >= content:
            break
        groups += 1
    whole = reshaped(shape, min(shape.first + groups * shape.per_group, shape.blocks), keeps_room=keeps)
    last = whole.groups - 1
    least = whole.start(last) + (whole.base(last) + 2 + whole.table + LEAST_IN_LAST_GROUP if last else 0)
    wanted = max(content + whole.overhead(), least)
    found = reshaped(shape, min(wanted, whole.blocks), keeps_room=keeps)
    return found if found.groups == whole.groups and found.blocks <= shape.blocks else whole
