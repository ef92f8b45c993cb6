"""Which size, which inodes, which journal: what a rebuild decides before it writes."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from ext4lite.errors import Unsupported, VolumeFull
from ext4lite.extents import Extent
from ext4lite.features import REBUILD
from ext4lite.layout import constants as c
from ext4lite.rebuild.maps import clusters_of, map_blocks
from ext4lite.rebuild.plan import DoesNotFit, Inodes, Layout, Shape, fitted, smallest
from ext4lite.rebuild.relocate import Numbers
from ext4lite.rebuild.survey import Source, Survey

_DEFAULT_BYTES_PER_INODE = 16384


def require_known(source: Source) -> None:
    """Raise Unsupported, by name, for features whose structures would not be carried over."""
    sb = source.super
    if names := REBUILD.beyond(sb):
        raise Unsupported(f"a volume with {', '.join(names)} cannot be written afresh", where=source.where)
    if sb.compat & c.COMPAT_HAS_JOURNAL and not sb.raw.s_journal_inum:
        raise Unsupported("the volume's journal is on another device", where=source.where)


@dataclass(slots=True)
class Choice:
    """What was decided."""

    layout: Layout
    numbers: Numbers
    journal_blocks: int
    trim: bool
    """Whether free blocks at the end go when all is written."""


class Chooser:
    """Decides; errors name the least size."""

    def __init__(self, source: Source, found: Survey, *, keep_numbers: bool) -> None:
        self._source, self._found = source, found
        self._shape = Shape.of(source.super)
        self._must_keep = keep_numbers or bool(source.super.compat & c.COMPAT_STABLE_INODES)
        self._fixed = found.clusters + self._special_clusters()
        self.journal_before = self._journal_blocks()

    def _record_clusters(self, ino: int) -> int:
        record = self._source.volume.inode(ino)
        runs = self._source.volume.map(record)[0]
        return clusters_of(runs, self._shape.ratio) + map_blocks(record, runs, self._source.block_size)

    def _special_clusters(self) -> int:
        """Clusters of the volume's own inodes without the journal."""
        special = self._source.special
        total = 1 if special.resize else 0
        total += sum(self._record_clusters(n) for n in (special.orphans, *special.quotas) if n)
        return total + bool(self._source.super.incompat & c.INCOMPAT_MMP)

    def _journal_blocks(self) -> int:
        ino = self._source.special.journal
        if not ino:
            return 0
        return self._source.own_blocks(ino)

    def _need(self, journal: int) -> int:
        """Free blocks that the new volume must have."""
        ratio = self._shape.ratio
        need = self._fixed
        if journal:
            record = self._source.volume.inode(self._source.special.journal)
            runs = [Extent(0, 1, journal)]
            need += clusters_of(runs, ratio) + map_blocks(record, runs, self._source.block_size)
        return need * ratio

    def choose(self, size: int | None) -> Choice:
        """Decide for a volume of ``size`` bytes, None: the smallest. VolumeFull, Unsupported."""
        if size is None:
            layout, renumber = self._smallest(self.journal_before)
            return Choice(layout, self._numbers(renumber), self.journal_before, trim=True)
        blocks = size // self._shape.block_size
        if blocks > (1 << 48 if self._shape.wide else 1 << 32) - 1:
            raise Unsupported(f"a volume of {blocks} blocks needs the feature 64bit", where=self._source.where)
        for journal in dict.fromkeys((self.journal_before, self._least_journal())):
            for inodes, renumber in self._options(blocks):
                fitting = self._try(blocks, inodes)
                if fitting is not None and fitting.free_blocks >= self._need(journal):
                    return Choice(fitting, self._numbers(renumber), self._largest_journal(fitting), trim=False)
        raise self.too_small(size)

    def too_small(self, size: int) -> VolumeFull:
        """Return the error that names the least size."""
        least = self._smallest(self._least_journal())[0].blocks * self._shape.block_size
        what = f"{size} bytes are too few for what the volume holds: at least {least} are needed"
        return VolumeFull(what, where=self._source.where)

    def _least_journal(self) -> int:
        return min(self.journal_before, c.JBD2_MIN_BLOCKS)

    def _largest_journal(self, layout: Layout) -> int:
        """Return the journal's size: as before, or half of what is left for it."""
        if self._need(self.journal_before) <= layout.free_blocks:
            return self.journal_before
        least = self._least_journal()
        return max(least, min(self.journal_before, least + (layout.free_blocks - self._need(least)) // 2))

    def _try(self, blocks: int, inodes: Inodes) -> Layout | None:
        groups = self._shape.groups_of(blocks)
        while groups > 0:
            per_group = inodes.per_group(self._shape, groups)
            if per_group is None:
                return None
            try:
                layout = fitted(self._shape, blocks, per_group)
            except DoesNotFit:
                return None
            if layout.inodes >= inodes.count:
                return layout
            groups = layout.groups  # the last group was left out, and its inodes are missing
            blocks = layout.blocks
        return None

    def _options(self, blocks: int) -> list[tuple[Inodes, bool]]:
        """Return (inodes, whether they are renumbered) in the order of preference."""
        used = self._found.used
        density = self._density(blocks)
        options = [(Inodes(used[-1], density), False)]
        if not self._must_keep:
            options.append((Inodes(len(used), density), True))
        options.append((Inodes(used[-1]), False))
        if not self._must_keep:
            options.append((Inodes(len(used)), True))
        return options

    def _density(self, blocks: int) -> int:
        """Return the inodes a group: as before.

        A volume that grows and has hardly a free inode (compacted, perhaps) gets one for 16 KiB.
        """
        raw, shape = self._source.super.raw, self._shape
        before = raw.s_inodes_per_group
        free = raw.s_inodes_count - len(self._found.used)
        few = max(raw.s_inodes_count // 10, shape.inode_step * self._source.super.groups)
        if blocks <= self._source.super.blocks or free > few:
            return before
        wanted = shape.blocks_per_group * shape.block_size // _DEFAULT_BYTES_PER_INODE
        wanted = min(wanted, 8 * shape.block_size) // shape.inode_step * shape.inode_step
        return max(before, wanted)

    def _smallest(self, journal: int) -> tuple[Layout, bool]:
        used, need = self._found.used, self._need(journal)
        best: tuple[Layout, bool] | None = None
        for count, renumber in ((used[-1], False), (len(used), True)):
            if renumber and self._must_keep:
                continue
            try:
                layout = smallest(self._shape, need, Inodes(count))
            except DoesNotFit:
                continue
            if best is None or layout.blocks < best[0].blocks:
                best = layout, renumber
        if best is None:
            raise Unsupported("the volume's content needs more blocks than it can number", where=self._source.where)
        return best

    def _numbers(self, renumber: bool) -> Numbers:
        """Number the inodes: reserved ones and the first (lost+found) stay, the volume's own follow, then the tree."""
        if not renumber:
            return Numbers()
        source, used = self._source, self._found.used
        first = source.first_ino
        new = array("I", bytes(4 * len(used)))
        following = first
        for ino in range(1, first):
            new[self._found.index(ino)] = ino
        stays = [first] if self._found.index(first) >= 0 else []
        own = sorted(n for n in source.special.numbers() if n >= first)
        for numbers in (stays, own, self._found.order):
            for ino in numbers:
                i = self._found.index(ino)
                if not new[i]:
                    new[i] = following
                    following += 1
        return Numbers(used, new)
