"""What describes the whole new volume: bitmaps, group descriptors, superblocks."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from ext4lite.bitmap import fill
from ext4lite.checksum import crc32c, group_desc_checksum, group_desc_crc16, superblock_checksum
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import GroupDesc, SuperBlock
from ext4lite.rebuild.plan import Layout
from ext4lite.rebuild.target import Output
from ext4lite.super import Super

_SUM_AT = GroupDesc.OFFSET_bg_checksum


@dataclass(slots=True)
class Totals:
    """What the superblock says of the whole."""

    free_blocks: int = 0
    free_inodes: int = 0


class Tables:
    """Writes them, for a volume that keeps the features of ``old``."""

    def __init__(self, layout: Layout, old: Super, output: Output) -> None:
        self._layout = layout
        self._old = old
        self._output = output
        self._block_size = old.block_size
        self._ratio = layout.shape.ratio
        self._seed: int | None = old.seed if old.metadata_csum else None
        self._sums = bool(old.metadata_csum or old.ro_compat & c.RO_GDT_CSUM)

    def write_groups(self, used: list[tuple[int, int]], inodes: array[int], directories: array[int]) -> Totals:
        """Write bitmaps and descriptors.

        ``used`` are the runs (start, count) of blocks that inodes have, ``inodes`` the numbers in use, both ascending;
        ``directories`` says how many directories each group has.
        """
        layout, totals = self._layout, Totals()
        runs = _merged(layout.taken, used)
        pending: tuple[int, int] | None = None
        table = bytearray()
        at = 0
        for group in range(layout.groups):
            first, size = layout.group_first(group), layout.group_size(group)
            inside, pending = _within(runs, pending, first, first + size)
            desc = GroupDesc(
                bg_block_bitmap_lo=layout.block_bitmaps[group] & 0xFFFFFFFF,
                bg_block_bitmap_hi=layout.block_bitmaps[group] >> 32,
                bg_inode_bitmap_lo=layout.inode_bitmaps[group] & 0xFFFFFFFF,
                bg_inode_bitmap_hi=layout.inode_bitmaps[group] >> 32,
                bg_inode_table_lo=layout.tables[group] & 0xFFFFFFFF,
                bg_inode_table_hi=layout.tables[group] >> 32,
                bg_used_dirs_count_lo=directories[group] & 0xFFFF,
                bg_used_dirs_count_hi=directories[group] >> 16,
                bg_flags=c.BG_INODE_ZEROED if self._sums else 0,
            )
            totals.free_blocks += self._blocks_of_group(group, inside, desc) * self._ratio
            end = bisect_left(inodes, (group + 1) * layout.per_group + 1, at)
            totals.free_inodes += self._inodes_of_group(group, inodes[at:end], desc)
            at = end
            table += self._sealed(group, desc)
        self._write_descriptors(bytes(table))
        return totals

    def _blocks_of_group(self, group: int, inside: list[tuple[int, int]], desc: GroupDesc) -> int:
        """Write a group's block bitmap, unless it follows from its metadata; return its free clusters."""
        layout, ratio = self._layout, self._ratio
        first, size = layout.group_first(group), layout.group_size(group)
        clusters = -(-size // ratio)
        number = layout.block_bitmaps[group]
        if self._sums and ratio == 1 and group != layout.groups - 1 and sum(n for _, n in inside) == self._own(group):
            desc.bg_flags |= c.BG_BLOCK_UNINIT
            free = size - self._own(group)
        else:
            bits = bytearray(self._block_size)
            for start, count in inside:
                low, high = (start - first) // ratio, -(-(start + count - first) // ratio)
                fill(bits, low, high - low, used=True)
            fill(bits, clusters, 8 * self._block_size - clusters, used=True)
            free = 8 * self._block_size - int.from_bytes(bits, "little").bit_count()
            if self._seed is not None:
                total = crc32c(self._seed, bytes(bits[: self._old.raw.s_clusters_per_group // 8]))
                desc.bg_block_bitmap_csum_lo, desc.bg_block_bitmap_csum_hi = total & 0xFFFF, total >> 16
            self._output.put(bits, number * self._block_size)
        desc.bg_free_blocks_count_lo, desc.bg_free_blocks_count_hi = free & 0xFFFF, free >> 16
        return free

    def _own(self, group: int) -> int:
        """Blocks of a group that hold its own metadata."""
        layout = self._layout
        first, end = layout.group_first(group), layout.group_first(group) + layout.group_size(group)
        own = layout.fixed(group)
        own += first <= layout.block_bitmaps[group] < end
        own += first <= layout.inode_bitmaps[group] < end
        table = layout.tables[group]
        return own + max(0, min(end, table + layout.table_blocks) - max(first, table))

    def _inodes_of_group(self, group: int, inodes: array[int], desc: GroupDesc) -> int:
        """Write a group's inode bitmap, unless it is empty; return its free inodes."""
        per = self._layout.per_group
        free = per - len(inodes)
        if self._sums and not inodes:
            desc.bg_flags |= c.BG_INODE_UNINIT
            unused = per
        else:
            bits = bytearray(self._block_size)
            base = group * per + 1
            for ino in inodes:
                index = ino - base
                bits[index >> 3] |= 1 << (index & 7)
            fill(bits, per, 8 * self._block_size - per, used=True)
            unused = base + per - 1 - inodes[-1] if self._sums else 0
            if self._seed is not None:
                total = crc32c(self._seed, bytes(bits[: per // 8]))
                desc.bg_inode_bitmap_csum_lo, desc.bg_inode_bitmap_csum_hi = total & 0xFFFF, total >> 16
            self._output.put(bits, self._layout.inode_bitmaps[group] * self._block_size)
        desc.bg_free_inodes_count_lo, desc.bg_free_inodes_count_hi = free & 0xFFFF, free >> 16
        desc.bg_itable_unused_lo, desc.bg_itable_unused_hi = unused & 0xFFFF, unused >> 16
        return free

    def _sealed(self, group: int, desc: GroupDesc) -> bytes:
        """Return a descriptor of the volume's size, with its checksum."""
        size = self._old.desc_size
        raw = desc.pack()
        raw = raw[:size] + bytes(size - len(raw)) if size > len(raw) else raw[:size]
        if self._seed is not None:
            total = group_desc_checksum(self._seed, group, raw)
        elif self._sums:
            total = group_desc_crc16(self._old.raw.s_uuid, group, raw)
        else:
            return raw
        return raw[:_SUM_AT] + total.to_bytes(2, "little") + raw[_SUM_AT + 2 :]

    def _write_descriptors(self, table: bytes) -> None:
        """Write the descriptors behind the superblocks, and those of meta_bg."""
        layout, size = self._layout, self._block_size
        table += bytes(-len(table) % size)
        behind = layout.behind_super * size
        for group in range(layout.groups):
            if behind and layout.descriptors_behind(group):
                for at in range(0, behind, 1 << 20):
                    self._output.put(
                        table[at : min(at + (1 << 20), behind)], (layout.super_block(group) + 1) * size + at
                    )
            number = layout.descriptors_at(group)
            if number:
                at = group // (size // self._old.desc_size) * size
                self._output.put(table[at : at + size], number * size)

    def write_supers(self, raw: SuperBlock) -> None:
        """Write the superblock and its copies; checksums and group numbers are set here."""
        layout, size = self._layout, self._block_size
        for group in range(layout.groups):
            if not layout.has_super(group):
                continue
            raw.s_block_group_nr = group & 0xFFFF
            if self._old.metadata_csum:
                raw.s_checksum = superblock_checksum(raw.pack())
            at = c.SUPERBLOCK_OFFSET if group == 0 else layout.super_block(group) * size
            self._output.put(raw.pack(), at)
        raw.s_block_group_nr = 0


def _merged(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield both lists of runs in one ascending order."""
    from heapq import merge

    return merge(left, right)


def _within(
    runs: Iterator[tuple[int, int]], pending: tuple[int, int] | None, first: int, end: int
) -> tuple[list[tuple[int, int]], tuple[int, int] | None]:
    """Return the parts of the runs in blocks ``[first, end)``, and the rest of the run that goes beyond."""
    inside: list[tuple[int, int]] = []
    while True:
        run = pending if pending is not None else next(runs, None)
        pending = None
        if run is None:
            return inside, None
        start, count = run
        if start >= end:
            return inside, run
        got = min(start + count, end) - start
        inside.append((start, got))
        if got < count:
            return inside, (start + got, count - got)
