"""Writes the new volume: each inode in the order of the survey, its blocks behind those of the one before."""

from __future__ import annotations

from array import array

from ext4lite.checksum import inode_seed
from ext4lite.device import Device
from ext4lite.errors import CorruptImage
from ext4lite.extents import Extent
from ext4lite.inode import InodeRecord, pack_record
from ext4lite.jbd2.log import FileBlocks, Log
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import SuperBlock, XattrHeader
from ext4lite.quota import BLOCK as QUOTA_BLOCK
from ext4lite.quota import QuotaFile
from ext4lite.rebuild import maps, special
from ext4lite.rebuild.choice import Choice
from ext4lite.rebuild.plain import PlainFile
from ext4lite.rebuild.relocate import (
    BLOCK_AT,
    attribute_block,
    blocks_of,
    directory_block,
    entries,
    inline_areas,
    inside_entries,
    renumber_attributes,
    set_blocks,
)
from ext4lite.rebuild.report import Progress
from ext4lite.rebuild.survey import Source, Survey
from ext4lite.rebuild.tables import Tables
from ext4lite.rebuild.target import Output, Space

_DIR = c.S_IFDIR >> 12
_FSCK = "run e2fsck -fy on it"
_PROGRESS_EVERY = 16 << 20
_AHEAD = 256
_AHEAD_BYTES = 8 << 20
Mapped = tuple[list[Extent], int]
"""An inode's runs, and how many blocks their map takes."""


class Engine:
    """One rebuild."""

    def __init__(
        self,
        source: Source,
        found: Survey,
        choice: Choice,
        output: Output,
        *,
        progress: Progress | None,
    ) -> None:
        self._source, self._found, self._choice, self._output = source, found, choice, output
        self._layout = choice.layout
        self._numbers = choice.numbers
        self._space = Space(choice.layout)
        self._volume = source.volume
        self._device = source.volume.device
        self._block_size = source.block_size
        self._ratio = choice.layout.shape.ratio
        self._seed = source.seed
        self._plain = source.plain
        self._inode_size = source.super.inode_size
        self._own = source.special.numbers()
        self._huge = bool(source.super.ro_compat & c.RO_HUGE_FILE)
        self._ea_inodes = bool(source.super.incompat & c.INCOMPAT_EA_INODE)
        self._quota = special.QuotaChanges() if source.special.quotas else None
        self._quota_runs: dict[int, list[Extent]] = {}
        self._shared: dict[int, tuple[int, int]] = {}
        """Attribute blocks with several users: (new block, users still to come) by old block."""
        self._directories = array("I", bytes(4 * choice.layout.groups))
        self._mmp = 0
        self._journal: tuple[int, ...] = ()
        self.extents = 0
        self.fragmented = 0
        self._progress = progress
        self._done = self._told = 0
        if progress is not None:
            output.copied = self._tell

    def run(self) -> None:
        """Write everything. OutOfSpace when the size was too optimistic."""
        found = self._found
        self._reserved()
        for directories in (True, False):
            self._tree(directories)
        if self._shared:
            number = next(iter(self._shared))
            what = f"attribute block {number} has fewer users than it says"
            raise CorruptImage(what, where=self._source.where, hint=_FSCK)
        self._write_quotas()
        end = self._space.close()
        if self._choice.trim:
            self._layout.shrink(max(self._layout.floor(), -(-end // self._ratio) * self._ratio))
        self._output.flush_records()
        tables = Tables(self._layout, self._source.super, self._output)
        totals = tables.write_groups(self._space.used, self._numbers.all(found.used), self._directories)
        tables.write_supers(self._super(totals.free_blocks, totals.free_inodes))
        self._output.flush()

    @property
    def used_blocks(self) -> int:
        """Blocks that inodes have in the new volume."""
        return self._space.count

    def _tell(self, count: int) -> None:
        self._done += count
        if self._progress is not None and self._done - self._told >= _PROGRESS_EVERY:
            self._told = self._done
            self._progress(self._done, max(self._found.data_bytes, self._done))

    # -- ordinary inodes --------------------------------------------------------------------------------------------

    def _copy(self, old: int, new: int, count: int) -> None:
        size = self._block_size
        self._output.copy(old * size, new * size, count * size)

    def _put(self, number: int, data: bytes) -> None:
        self._output.put(data, number * self._block_size)

    def _tree(self, directories: bool) -> None:
        """Write the tree's directories, or everything else in it.

        Some inodes ahead are looked at, so that the host reads their content, wherever it lies, while those before are
        written.
        """
        ahead: list[PlainFile | tuple[InodeRecord, Mapped]] = []
        places: list[tuple[int, int]] = []
        waiting = 0
        for ino, directory in zip(self._found.order, self._found.order_directories, strict=True):
            if directory != directories:
                continue
            file = None if directory else self._source.plain_file(ino)
            if file is not None:
                ahead.append(file)
                places.append((file.physical, file.count))
                waiting += file.count
            else:
                record = self._volume.inode(ino)
                mapped = self._volume.map(record)
                ahead.append((record, mapped))
                places += [(run.physical, run.count) for run in mapped[0]]
                waiting += sum(run.count for run in mapped[0])
            if len(ahead) >= _AHEAD or waiting * self._block_size >= _AHEAD_BYTES:
                self._all(ahead, places)
                ahead, places, waiting = [], [], 0
        self._all(ahead, places)

    def _all(self, ahead: list[PlainFile | tuple[InodeRecord, Mapped]], places: list[tuple[int, int]]) -> None:
        self._output.expect(sorted(places), self._block_size)
        for one in ahead:
            if isinstance(one, PlainFile):
                self._plain_file(one)
            else:
                self._inode(*one)

    def _plain_file(self, file: PlainFile) -> None:
        """Write a plain file: its run, and the record that says where it is now."""
        start = self._space.take_run(file.count)
        if self._plain is None or start < 0:  # the free space is interrupted here
            record = self._volume.inode(file.ino)
            self._inode(record, self._volume.map(record))
            return
        self._copy(file.physical, start, file.count)
        self.extents += 1
        new_ino = self._numbers(file.ino)
        self._output.put_record(self._plain.moved(file, new_ino, start), self._record_at(new_ino))

    def _inode(self, record: InodeRecord, mapped: Mapped) -> list[Extent]:
        """Write an inode with all its blocks, ``mapped`` so far; return its new runs."""
        fields, where = record.fields, f"{self._source.where}: inode {record.ino}"
        before = blocks_of(fields, self._block_size, self._huge) if self._quota or self._ea_inodes else 0
        new_ino = self._numbers(record.ino)
        seed = None if self._seed is None else inode_seed(self._seed, new_ino, fields.i_generation)
        runs, own_before = mapped
        directory = fields.i_mode >> 12 == _DIR
        out: list[Extent] = []
        clusters = 0
        if runs:
            if directory and self._numbers.changed:
                out = self._directory(record, runs, seed, where)
            else:
                out = maps.place(runs, self._space, self._ratio, self._copy)
            clusters = self._map(record, out, seed)
            clusters += maps.clusters_of(out, self._ratio)
            if record.ino not in self._own:
                self.extents += len(out)
                self.fragmented += maps.is_fragmented(out)
        elif fields.i_flags & c.EXTENTS_FL:
            clusters = self._map(record, out, seed)
        if record.file_acl:
            clusters += 1
        extra = 0
        if self._ea_inodes:  # i_blocks counts values in other inodes, too
            old = maps.clusters_of(runs, self._ratio) + own_before + bool(record.file_acl)
            extra = max(0, before // self._source.super.cluster_size - old)
        if record.file_acl:
            self._attribute_block(record, where)
        if self._numbers.changed:
            self._inside(record, directory, where)
        if runs or clusters or fields.i_flags & c.EXTENTS_FL:
            self._set_blocks(record, clusters + extra)
        if self._quota is not None and record.ino not in self._own:
            self._quota.add(record, blocks_of(fields, self._block_size, self._huge) - before)
        self._store(record, new_ino, directory)
        return out

    def _directory(self, record: InodeRecord, runs: list[Extent], seed: int | None, where: str) -> list[Extent]:
        """Write a directory's blocks with the new numbers."""
        blocks = self._source.directory_blocks(record, runs)
        indexed = bool(record.fields.i_flags & c.INDEX_FL)
        count = record.size // self._block_size

        def put(_: int, start: int, length: int) -> None:
            for i in range(length):
                logical, data = next(blocks)
                if logical < count:
                    data = directory_block(data, self._numbers, seed, indexed, where)
                self._put(start + i, data)

        return maps.place(runs, self._space, self._ratio, put)

    def _map(self, record: InodeRecord, runs: list[Extent], seed: int | None) -> int:
        """Write the map of an inode's new runs and point the record to it; return its own blocks."""
        if record.fields.i_flags & c.EXTENTS_FL:
            record.fields.i_block, own = maps.tree(runs, self._space, self._block_size, seed, self._put)
        else:
            record.fields.i_block, own = maps.block_map(runs, self._space, self._block_size, self._put)
        return own

    def _attribute_block(self, record: InodeRecord, where: str) -> None:
        """Write an inode's attribute block, once for all its users."""
        old = record.file_acl
        new, left = self._shared.get(old, (0, 0))
        if left:
            self._shared[old] = new, left - 1
            if left == 1:
                del self._shared[old]
        else:
            inside = f"{where}, attribute block {old}"
            data = self._volume.block(old, inside)
            head = XattrHeader.unpack(data)
            if head.h_magic != c.XATTR_MAGIC or head.h_blocks != 1:
                raise CorruptImage("attribute block has a wrong header", where=inside, hint=_FSCK)
            (new,) = self._space.take_each(1)
            self._put(new, attribute_block(data, new, self._numbers, self._seed, inside))
            if head.h_refcount > 1:
                self._shared[old] = new, head.h_refcount - 1
        record.fields.i_file_acl_lo = new & 0xFFFFFFFF
        if new >> 32 or self._layout.shape.wide:
            record.fields.l_i_file_acl_high = new >> 32

    def _inside(self, record: InodeRecord, directory: bool, where: str) -> None:
        """Change the inode numbers that lie in the record itself: inline directories, values in other inodes."""
        inline = directory and record.fields.i_flags & c.INLINE_DATA_FL
        if not inline and not self._ea_inodes:
            return
        raw = bytearray(record.raw)
        if inline:
            for start, end in inline_areas(record, where):
                for at, ino, _ in entries(record.raw, start, end, where):
                    raw[at : at + 4] = self._numbers(ino).to_bytes(4, "little")
            parent = int.from_bytes(raw[BLOCK_AT : BLOCK_AT + 4], "little")
            raw[BLOCK_AT : BLOCK_AT + 4] = self._numbers(parent).to_bytes(4, "little")
            record.fields.i_block = bytes(raw[BLOCK_AT : BLOCK_AT + 60])
        if self._ea_inodes:
            renumber_attributes(raw, inside_entries(record, where), self._numbers)
        record.raw = bytes(raw)

    def _set_blocks(self, record: InodeRecord, clusters: int) -> None:
        held = clusters * self._source.super.cluster_size
        where = f"{self._source.where}: inode {record.ino}"
        set_blocks(record.fields, held, self._block_size, self._huge, where)

    def _store(self, record: InodeRecord, new_ino: int, directory: bool) -> None:
        """Write a record under its new number."""
        record.ino = new_ino
        self._directories[(new_ino - 1) // self._layout.per_group] += directory
        self._output.put_record(pack_record(record, self._seed), self._record_at(new_ino))

    def _record_at(self, new_ino: int) -> int:
        """Return the byte of the image where an inode's record begins."""
        group, index = divmod(new_ino - 1, self._layout.per_group)
        return self._layout.tables[group] * self._block_size + index * self._inode_size

    # -- the volume's own -------------------------------------------------------------------------------------------

    def _reserved(self) -> None:
        """Write the inodes that are no part of the tree."""
        own = self._source.special
        if self._source.super.incompat & c.INCOMPAT_MMP:
            (self._mmp,) = self._space.take_each(1)
            where = f"{self._source.where}: block of multi-mount protection"
            self._put(self._mmp, self._volume.block(self._source.super.raw.s_mmp_block, where))
        numbers = {*range(1, self._source.first_ino), *own.numbers()} - {c.ROOT_INO}
        for ino in sorted(numbers, key=lambda n: (n >= self._source.first_ino, n)):
            record = self._volume.inode(ino)
            if ino == own.journal:
                self._write_journal(record)
            elif ino == own.resize:
                self._write_resize(record)
            elif ino == own.orphans:
                self._write_orphans(record)
            elif ino in own.quotas:
                mapped = self._volume.map(record)
                self._quota_runs[ino] = mapped[0]
                self._quota_runs[-ino] = self._inode(record, mapped)
            elif ino == c.BAD_INO:
                self._write_bad(record)
            elif any(record.raw):
                self._inode(record, self._volume.map(record))

    def _write_bad(self, record: InodeRecord) -> None:
        """A file has no bad blocks: the inode that lists them becomes empty."""
        if not any(record.raw):
            return
        record.fields.i_block = bytes(60)
        record.fields.i_size_lo = record.fields.i_size_high = 0
        self._set_blocks(record, 0)
        self._store(record, record.ino, False)

    def _fresh(self, record: InodeRecord, blocks: int) -> list[Extent]:
        """Give a volume's own inode new blocks, which are zeros so far."""
        new_ino = self._numbers(record.ino)
        seed = None if self._seed is None else inode_seed(self._seed, new_ino, record.fields.i_generation)
        runs = maps.place([Extent(0, 0, blocks)], self._space, self._ratio, lambda *_: None)
        clusters = maps.clusters_of(runs, self._ratio) + self._map(record, runs, seed)
        self._set_blocks(record, clusters)
        return runs

    def _write_journal(self, record: InodeRecord) -> None:
        where = f"{self._source.where}: journal inode {record.ino}"
        log = Log.open(FileBlocks(self._device, self._block_size, where), self._volume.map(record)[0], where)
        if log.super.s_start:
            raise CorruptImage("the journal is not empty", where=where, hint=_FSCK)
        blocks = self._choice.journal_blocks
        runs = self._fresh(record, blocks)
        self._put(runs[0].physical, special.journal_super(log, blocks))
        fields, size = record.fields, blocks * self._block_size
        fields.i_size_lo, fields.i_size_high = size & 0xFFFFFFFF, size >> 32
        pointers = [int.from_bytes(fields.i_block[i : i + 4], "little") for i in range(0, 60, 4)]
        self._journal = (*pointers, fields.i_size_high, fields.i_size_lo)
        self._store(record, self._numbers(record.ino), False)

    def _write_resize(self, record: InodeRecord) -> None:
        (first,) = self._space.take_each(1)
        record.fields.i_block, blocks, count = special.resize_blocks(self._layout, first)
        for number, data in blocks:
            self._put(number, data)
        record.fields.i_flags &= ~c.EXTENTS_FL
        self._set_blocks(record, count)
        self._store(record, record.ino, False)

    def _write_orphans(self, record: InodeRecord) -> None:
        new_ino, generation = self._numbers(record.ino), record.fields.i_generation
        runs = self._fresh(record, self._source.own_blocks(record.ino))
        for run in runs:
            for number in range(run.physical, run.physical + run.count):
                self._put(number, special.orphan_block(self._block_size, number, self._seed, new_ino, generation))
        self._store(record, new_ino, False)

    def _write_quotas(self) -> None:
        """Bring the quota files' counts to the new ``i_blocks``."""
        if self._quota is None:
            return
        for kind, ino in enumerate(self._source.special.quotas):
            if not ino or not self._quota.by_kind[kind]:
                continue
            where = f"{self._source.where}: quota file, inode {ino}"
            old, new = (_Bytes(self._quota_runs[n], self._block_size) for n in (ino, -ino))
            blocks = _QuotaBlocks(self._device, self._output, old, new, where)
            quota = QuotaFile(blocks, kind, where)
            for owner, space in self._quota.by_kind[kind].items():
                if space:
                    quota.correct(owner, space)
            blocks.flush()

    def _super(self, free_blocks: int, free_inodes: int) -> SuperBlock:
        """Return the superblock: the old one with what has changed."""
        old, layout, numbers = self._source.super, self._layout, self._numbers
        raw = SuperBlock.unpack(old.raw.pack())
        reserved = old.raw.s_r_blocks_count_lo | (old.raw.s_r_blocks_count_hi << 32 if layout.shape.wide else 0)
        reserved = reserved * layout.blocks // old.blocks
        raw.s_inodes_count = layout.inodes
        raw.s_inodes_per_group = layout.per_group
        raw.s_free_inodes_count = free_inodes
        raw.s_blocks_count_lo = layout.blocks & 0xFFFFFFFF
        raw.s_r_blocks_count_lo = reserved & 0xFFFFFFFF
        raw.s_free_blocks_count_lo = free_blocks & 0xFFFFFFFF
        if layout.shape.wide:
            raw.s_blocks_count_hi = layout.blocks >> 32
            raw.s_r_blocks_count_hi = reserved >> 32
            raw.s_free_blocks_count_hi = free_blocks >> 32
        raw.s_last_orphan = 0
        raw.s_feature_ro_compat &= ~c.RO_ORPHAN_PRESENT
        if layout.first_meta_bg is not None:
            raw.s_first_meta_bg = layout.first_meta_bg
        if layout.shape.descriptor_room:
            raw.s_reserved_gdt_blocks = layout.reserved
        if layout.shape.sparse2:
            raw.s_backup_bgs = layout.backups
        if self._mmp:
            raw.s_mmp_block = self._mmp
        if raw.s_overhead_blocks:
            raw.s_overhead_blocks = self._overhead() & 0xFFFFFFFF
        own = self._source.special
        if own.journal:
            raw.s_journal_inum = numbers(own.journal)
            if raw.s_jnl_backup_type:
                raw.s_jnl_blocks = self._journal
        if own.orphans:
            raw.s_orphan_file_inum = numbers(own.orphans)
        if own.quotas:
            raw.s_usr_quota_inum, raw.s_grp_quota_inum, raw.s_prj_quota_inum = map(numbers, own.quotas)
        if raw.s_lpf_ino and self._found.index(raw.s_lpf_ino) >= 0:
            raw.s_lpf_ino = numbers(raw.s_lpf_ino)
        return raw

    def _overhead(self) -> int:
        """Clusters that files can never have: metadata and the journal."""
        metadata = sum(count for _, count in self._layout.taken)
        return -(-(metadata + self._choice.journal_blocks) // self._ratio)


class _Bytes:
    """Where bytes of a file lie in the image."""

    def __init__(self, runs: list[Extent], block_size: int) -> None:
        self._runs, self._block_size = runs, block_size
        self.end = (runs[-1].logical + runs[-1].count) * block_size if runs else 0

    def at(self, offset: int) -> int | None:
        """Return the image's byte of a file's byte, None for a hole."""
        logical, rest = divmod(offset, self._block_size)
        for run in self._runs:
            if run.logical <= logical < run.logical + run.count:
                return (run.physical + logical - run.logical) * self._block_size + rest
        return None


class _QuotaBlocks:
    """A quota file's blocks: read from the old place, changed in the new one; see :class:`ext4lite.quota.Blocks`."""

    def __init__(self, device: Device, output: Output, old: _Bytes, new: _Bytes, where: str) -> None:
        self._device, self._output, self._where = device, output, where
        self._old, self._new = old, new
        self._changed: dict[int, bytes] = {}
        self.count = old.end // QUOTA_BLOCK

    def _at(self, place: _Bytes, number: int) -> int:
        at = place.at(number * QUOTA_BLOCK)
        if at is None:
            raise CorruptImage(f"has a hole at its block {number}", where=self._where, hint=_FSCK)
        return at

    def read(self, number: int) -> bytes:
        """See :meth:`ext4lite.quota.Blocks.read`."""
        found = self._changed.get(number)
        return self._device.read(QUOTA_BLOCK, self._at(self._old, number)) if found is None else found

    def write(self, number: int, data: bytes) -> None:
        """See :meth:`ext4lite.quota.Blocks.write`."""
        self._changed[number] = data

    def flush(self) -> None:
        """Write what has changed to the new image, each block once."""
        for number, data in sorted(self._changed.items()):
            self._output.put(data, self._at(self._new, number))

    def grow(self) -> None:
        """Never called: :meth:`ext4lite.quota.QuotaFile.correct` makes no entries."""
        raise CorruptImage("has no room", where=self._where, hint=_FSCK)
