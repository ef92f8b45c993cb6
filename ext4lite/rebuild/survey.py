"""What is in the old volume, in which order it shall lie in the new one, and how much room it takes.

Memory grows by a few bytes an inode: numbers are kept in arrays, and everything else is read again when it is written.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from ext4lite import directory
from ext4lite.bitmap import next_set
from ext4lite.checksum import crc32c, inode_seed
from ext4lite.errors import CorruptImage
from ext4lite.extents import Extent
from ext4lite.inode import InodeRecord
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import GroupDesc
from ext4lite.rebuild.maps import Demand
from ext4lite.rebuild.plain import Plain, PlainFile
from ext4lite.rebuild.relocate import entries, inline_areas
from ext4lite.volume import Volume

_FSCK = "run e2fsck -fy on it"
_REFRESH = 4096  # groups whose descriptors may be kept in memory
_DIR, _FILE = c.S_IFDIR >> 12, c.S_IFREG >> 12
_NLINK_MANY = 1


@dataclass(slots=True)
class Special:
    """The volume's own inodes, 0 where there is none."""

    journal: int
    resize: int
    orphans: int
    quotas: list[int]

    def numbers(self) -> frozenset[int]:
        """All of them."""
        return frozenset(n for n in (self.journal, self.resize, self.orphans, *self.quotas) if n)


@dataclass(slots=True)
class Survey:
    """What was found."""

    used: array[int]
    """Numbers of the inodes in use, ascending, the reserved ones included."""
    kinds: bytearray
    """File type (mode >> 12) of each of ``used``."""
    order: array[int] = field(default_factory=lambda: array("I"))
    """Numbers of all inodes with a name (and of attribute values) in the tree's order: a directory, what is in it, the
    directories below it."""
    order_directories: bytearray = field(default_factory=bytearray)
    """1 for each of ``order`` that is a directory, 0 for the others."""
    directories: int = 0
    clusters: int = 0
    """What all inodes in ``order`` and the reserved ones need, without the volume's special ones."""
    data_bytes: int = 0
    extents: int = 0
    fragmented: int = 0

    def kind(self, ino: int) -> int:
        """File type of an inode in use."""
        return self.kinds[self.index(ino)]

    def index(self, ino: int) -> int:
        """Position of a number in ``used``, -1 if it is not in use."""
        i = bisect_left(self.used, ino)
        return i if i < len(self.used) and self.used[i] == ino else -1


class Source:
    """The old volume, as a rebuild reads it."""

    def __init__(self, volume: Volume) -> None:
        self.volume = volume
        self.where = volume.where
        sb = volume.super
        raw = sb.raw
        self.super = sb
        self.block_size = sb.block_size
        self.seed: int | None = sb.seed if sb.metadata_csum else None
        self.plain = Plain(sb) if Plain.possible(sb) else None
        self.first_ino = c.FIRST_INO if raw.s_rev_level == 0 else raw.s_first_ino
        self.sums_groups = bool(sb.metadata_csum or sb.ro_compat & c.RO_GDT_CSUM)
        quota = bool(sb.ro_compat & c.RO_QUOTA)
        self.special = Special(
            journal=raw.s_journal_inum if sb.compat & c.COMPAT_HAS_JOURNAL else 0,
            resize=c.RESIZE_INO if sb.compat & c.COMPAT_RESIZE_INODE else 0,
            orphans=raw.s_orphan_file_inum if sb.compat & c.COMPAT_ORPHAN_FILE else 0,
            quotas=[raw.s_usr_quota_inum, raw.s_grp_quota_inum, raw.s_prj_quota_inum] if quota else [],
        )

    def plain_file(self, ino: int) -> PlainFile | None:
        """Return what an inode in use is if it is a plain file, whose long way can be spared, else None."""
        if self.plain is None:
            return None
        sb, volume = self.super, self.volume
        group, index = divmod(ino - 1, sb.raw.s_inodes_per_group)
        desc = volume.group(group)
        table = desc.bg_inode_table_lo | desc.bg_inode_table_hi << 32
        offset = table * self.block_size + index * sb.inode_size
        return self.plain.file(ino, volume._metadata(offset, sb.inode_size, self.where))

    def own_blocks(self, ino: int) -> int:
        """Return how many blocks one of the volume's own inodes has: without a hole, as many as its size says.

        CorruptImage.
        """
        record = self.volume.inode(ino)
        count = 0
        for run in self.volume.map(record)[0]:
            if run.logical != count:
                break
            count += run.count
        if record.fields.i_mode >> 12 != c.S_IFREG >> 12 or -(-record.size // self.block_size) != count or not count:
            what = f"has {count} blocks and a size of {record.size} bytes"
            raise CorruptImage(what, where=f"{self.where}: inode {ino}, the volume's own", hint=_FSCK)
        return count

    def used_inodes(self) -> array[int]:
        """Return the numbers of the inodes in use, by the bitmaps. CorruptImage."""
        volume, per = self.volume, self.super.raw.s_inodes_per_group
        out = array("I", range(1, self.first_ino))
        mask = 0xFFFFFFFF if self.super.desc_size >= GroupDesc.SIZE else 0xFFFF
        for group in range(self.super.groups):
            if group % _REFRESH == 0:
                volume.refresh()
            desc = volume.group(group)
            if self.sums_groups and desc.bg_flags & c.BG_INODE_UNINIT:
                continue
            where = f"{self.where}: inode bitmap of group {group}"
            data = volume.block(desc.bg_inode_bitmap_lo | desc.bg_inode_bitmap_hi << 32, where)
            if self.seed is not None:
                wanted = desc.bg_inode_bitmap_csum_lo | desc.bg_inode_bitmap_csum_hi << 16
                if crc32c(self.seed, data[: per // 8]) & mask != wanted:
                    raise CorruptImage("its checksum is wrong", where=where, hint=_FSCK)
            bits = bytearray(data)
            base = group * per + 1
            at = next_set(bits, 0, per)
            while at < per:
                if base + at >= self.first_ino:
                    out.append(base + at)
                at = next_set(bits, at + 1, per)
        return out

    def directory_blocks(self, record: InodeRecord, runs: list[Extent]) -> Iterator[tuple[int, bytes]]:
        """Yield (file block, content) of a directory's blocks, their checksums verified. CorruptImage."""
        where = f"{self.where}: directory inode {record.ino}"
        count, rest = divmod(record.size, self.block_size)
        if rest or not count:
            raise CorruptImage(f"size of {record.size} bytes is not whole blocks", where=where, hint=_FSCK)
        seed = None if self.seed is None else inode_seed(self.seed, record.ino, record.fields.i_generation)
        index_possible = bool(record.fields.i_flags & c.INDEX_FL)
        done = 0
        for run in runs:
            if run.logical != done or run.unwritten:
                break
            for i in range(run.count):
                inside = f"{where}, block {run.physical + i}"
                data = self.volume.block(run.physical + i, inside)
                if seed is not None and run.logical + i < count:
                    directory.verify_block(data, seed, index_possible, inside)
                yield run.logical + i, data
            done += run.count
        if done < count:
            raise CorruptImage(f"has a hole at its block {done}", where=where, hint=_FSCK)

    def children(self, record: InodeRecord, runs: list[Extent]) -> Iterator[int]:
        """Yield the inode numbers of a directory's entries without ``.`` and ``..``. CorruptImage."""
        where = f"{self.where}: directory inode {record.ino}"
        if record.fields.i_flags & c.INLINE_DATA_FL:
            for start, end in inline_areas(record, where):
                for _, ino, _ in entries(record.raw, start, end, where):
                    yield ino
            return
        for logical, data in self.directory_blocks(record, runs):
            for _, ino, dots in entries(data, 0, len(data), f"{where}, its block {logical}"):
                if not dots:
                    yield ino


def explore(source: Source) -> Survey:
    """Look at every inode and walk the tree.

    CorruptImage for what e2fsck would have to repair: names of inodes that are not in use, inodes without a name, wrong
    link counts, more blocks than the volume has.
    """
    found = Survey(source.used_inodes(), bytearray())
    found.kinds = bytearray(len(found.used))
    links = array("H", bytes(2 * len(found.used)))
    demand = Demand(source)
    values = _look_at_inodes(source, found, links, demand)
    _walk(source, found, links)
    found.order.extend(values)
    found.order_directories.extend(bytes(len(values)))
    found.clusters = demand.clusters
    found.data_bytes, found.extents, found.fragmented = demand.data_bytes, demand.extents, demand.fragmented
    return found


def _look_at_inodes(source: Source, found: Survey, links: array[int], demand: Demand) -> array[int]:
    """Note kind, links and needs of each inode in use; return the numbers of those that hold attribute values."""
    volume, special = source.volume, source.special.numbers()
    values = array("I")
    first = max((source.first_ino, *special))
    for i, ino in enumerate(found.used):
        file = source.plain_file(ino) if ino > first else None
        if file is not None and file.links:
            found.kinds[i] = _FILE
            links[i] = file.links
            demand.add_run(file.count)
            continue
        record = volume.inode(ino)
        fields = record.fields
        found.kinds[i] = fields.i_mode >> 12
        links[i] = fields.i_links_count
        if ino in special or ino == c.BAD_INO:
            continue
        if ino >= source.first_ino and not fields.i_links_count:
            what = "is in use, but has no links"
            raise CorruptImage(what, where=f"{source.where}: inode {ino}", hint=_FSCK)
        if fields.i_flags & c.EA_INODE_FL:
            values.append(ino)
        if found.kinds[i] == _DIR:
            found.directories += 1
        demand.add(record)
    return values


def _walk(source: Source, found: Survey, links: array[int]) -> None:
    """Put the inodes into the tree's order, and compare links with names."""
    volume = source.volume
    many = bool(source.super.ro_compat & c.RO_DIR_NLINK)
    names = array("I", bytes(4 * len(found.used)))
    root = found.index(c.ROOT_INO)
    names[root] = 2
    if found.kinds[root] != _DIR:
        raise CorruptImage("the root is not a directory", where=source.where, hint=_FSCK)
    found.order.append(c.ROOT_INO)
    found.order_directories.append(1)
    pending = [c.ROOT_INO]
    while pending:
        parent = pending.pop()
        record = volume.inode(parent)
        runs = volume.map(record)[0]
        below = []
        for ino in sorted(source.children(record, runs)):
            i = found.index(ino)
            if i < 0 or ino < source.first_ino:
                where = f"{source.where}: directory inode {parent}"
                raise CorruptImage(f"has a name for inode {ino}, which is not in use", where=where, hint=_FSCK)
            if not names[i]:
                found.order.append(ino)
                found.order_directories.append(found.kinds[i] == _DIR)
            if found.kinds[i] == _DIR:
                if names[i]:
                    raise CorruptImage("has a second name", where=f"{source.where}: directory inode {ino}", hint=_FSCK)
                names[i] = 2
                names[found.index(parent)] += 1
                below.append(ino)
            else:
                names[i] += 1
        pending += reversed(below)
    exempt = source.special.numbers()
    for i, ino in enumerate(found.used):
        if ino in exempt or (ino < source.first_ino and ino != c.ROOT_INO):
            continue
        if names[i] != links[i] and not (many and found.kinds[i] == _DIR and links[i] == _NLINK_MANY):
            if not names[i] and volume.inode(ino).fields.i_flags & c.EA_INODE_FL:
                continue
            what = f"has {links[i]} links and {names[i]} names (a directory: with those of what is in it)"
            raise CorruptImage(what, where=f"{source.where}: inode {ino}", hint=_FSCK)
