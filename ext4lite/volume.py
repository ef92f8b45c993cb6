"""The read side of a volume: names, inodes, data, attributes. Everything is checked.

What breaks the format is CorruptImage.

    with Volume.open("golden.ext4") as v:
        ino = v.lookup("/etc/hostname")
        if ino is not None:
            print(v.read(ino, 0, 4096))

Reads ext2, ext3 and ext4 images of any block size that mke2fs makes. A volume whose journal needs recovery is read as
it will be once recovered, without a byte being written.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Literal, overload

from ext4lite import directory, extents, indirect, xattrs
from ext4lite.blockdev import StrPath, open_device
from ext4lite.checksum import (
    crc32c,
    group_desc_checksum,
    group_desc_crc16,
    inode_seed,
    xattr_block_checksum,
)
from ext4lite.device import Handle, as_device
from ext4lite.errors import CorruptImage, Unsupported
from ext4lite.extents import Extent
from ext4lite.geometry import has_sparse_super
from ext4lite.inode import KIND_OF_TYPE, InodeRecord, Stat, checksum_ok, stat_of
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import GroupDesc, Inode, XattrHeader
from ext4lite.super import Super, read_super

if TYPE_CHECKING:
    from ext4lite.recover import Recovered

if TYPE_CHECKING:
    from ext4lite.writer import WritableVolume

__all__ = ["Extent", "Stat", "Volume"]

_WINDOW = 64 << 10
_WINDOWS_KEPT = 128
_RECORDS_KEPT = 16384
_CHUNK = 4 << 20
_MAX_EA_VALUE = 1 << 16
_INLINE_IN_INODE = 60
_ZEROS = bytes(1 << 20)
_FULL_EXTRA = Inode.SIZE - 128


class Volume:
    """An image open for reading, under a shared lock. Not thread-safe. Make it with :meth:`open`."""

    _unchanging = True
    """Whether nothing is written through this object."""

    def __init__(
        self, image: Handle, sb: Super, where: str, recovered: Recovered | None = None, *, verify: bool = True
    ) -> None:
        self.recovered = recovered
        """What the journal's replay brings, laid over the image; None for a volume that is read as it is."""
        self._overlay = recovered.overlay if recovered is not None else None
        self.super = sb
        self.where = where
        self.block_size = sb.block_size
        self.blocks = sb.blocks
        self.first_data_block = sb.first_data_block
        self.root = c.ROOT_INO
        self.device = as_device(image, where)
        """What the volume lies on."""
        self._fd = self.device.fd
        self._inodes = sb.raw.s_inodes_count
        self._per_group = sb.raw.s_inodes_per_group
        self._inode_size = sb.inode_size
        self._seed: int | None = sb.seed if sb.metadata_csum else None
        self.verify = verify
        """Whether checksums of metadata are verified where the volume has them."""
        self._verify_seed = self._seed if verify else None
        self._large_dir = bool(sb.incompat & c.INCOMPAT_LARGE_DIR)
        self._fold: Callable[[bytes], bytes] | None = None
        if sb.incompat & c.INCOMPAT_CASEFOLD and sb.raw.s_encoding == c.ENCODING_UTF8_12_1:
            from ext4lite.casefold import fold

            self._fold = fold
        self._uninit = bool(sb.ro_compat & (c.RO_METADATA_CSUM | c.RO_GDT_CSUM))
        self._huge_files = bool(sb.ro_compat & c.RO_HUGE_FILE)
        self._window = _WINDOW
        """Bytes (aligned to that) that :meth:`_metadata` gives at most."""
        self._windows: OrderedDict[int, bytes] = OrderedDict()
        self._kept_runs: tuple[InodeRecord, list[Extent]] | None = None
        self._descriptors: dict[int, GroupDesc] = {}
        self._records: dict[int, InodeRecord] = {}
        self._directories: OrderedDict[int, dict[bytes, int]] = OrderedDict()

    @overload
    @classmethod
    def open(
        cls, path: StrPath, *, mode: Literal["r"] = "r", dirty: bool = False, replay: bool = True, verify: bool = True
    ) -> Volume: ...

    @overload
    @classmethod
    def open(cls, path: StrPath, *, mode: Literal["rw"]) -> WritableVolume: ...

    @classmethod
    def open(
        cls,
        path: StrPath,
        *,
        mode: Literal["r", "rw"] = "r",
        dirty: bool = False,
        replay: bool = True,
        verify: bool = True,
    ) -> Volume:
        """Open an image and lock it: shared for reading, exclusively with ``mode="rw"`` (see ``ext4lite.writer``).

        A journal that needs recovery is replayed in memory; ``replay=False`` shows the image as it is on disk (its
        content may be inconsistent). ``dirty`` falls back to that where the journal is damaged. ``verify=False``
        takes no notice of checksums of the superblock, descriptors, inodes, extent and directory blocks and attributes
        (what they protect is still checked for making sense); the journal's own always count. A volume that is written
        to is always verified. Raises VolumeBusy, CorruptImage, Unsupported, HostError.
        """
        if mode == "rw":
            from ext4lite.writer import WritableVolume

            return WritableVolume.open_for_writing(path)
        if mode != "r":
            raise ValueError(f"mode is {mode!r}, neither 'r' nor 'rw'")
        where = os.fspath(path)
        image = open_device(path)
        try:
            if not replay:
                return cls(image, read_super(image, where, verify=verify), where, verify=verify)
            sb = read_super(image, where, torn=True, verify=verify)
            if not sb.needs_recovery:
                return cls(image, sb, where, verify=verify)
            from ext4lite.recover import look

            try:
                found = look(image, sb, where, verify=verify)
            except CorruptImage:
                if not dirty:
                    raise
                return cls(image, read_super(image, where, verify=verify), where, verify=verify)
            return cls(image, found.super, where, found, verify=verify)
        except BaseException:
            image.close()
            raise

    def refresh(self) -> None:
        """Forget everything that was read: the blocks below have changed."""
        self._windows.clear()
        self._kept_runs = None
        self._descriptors.clear()
        self._records.clear()
        self._directories.clear()

    def fileno(self) -> int:
        """Return the image's descriptor, which holds the lock."""
        return self._fd

    def host_bytes(self) -> int:
        """Bytes that the image takes on the host: less than its size when it is sparse."""
        return os.fstat(self._fd).st_blocks * 512

    def close(self) -> None:
        """Release file and lock. Harmless when called again."""
        if self._fd >= 0:
            self._fd = -1
            self.device.close()

    def __enter__(self) -> Volume:
        return self

    def __exit__(self, t: type[BaseException] | None, v: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # -- blocks -----------------------------------------------------------------------------------------------------

    def _pread(self, length: int, offset: int, where: str) -> bytes:
        data = self.device.read(length, offset)
        if len(data) != length:
            raise CorruptImage(f"the image ends before byte {offset + length}", where=where)
        return data if self._overlay is None else self._overlay.patch(data, offset)

    def block(self, number: int, where: str = "") -> bytes:
        """Return block ``number``; CorruptImage with ``where`` when it lies outside the volume."""
        if not 0 <= number < self.blocks:
            raise CorruptImage(
                f"block {number} lies outside the volume of {self.blocks} blocks", where=where or self.where
            )
        return self._pread(self.block_size, number * self.block_size, where or self.where)

    def _metadata(self, offset: int, length: int, where: str) -> bytes:
        """Read a small piece through a cache of aligned 64 KiB windows."""
        start = offset & ~(_WINDOW - 1)
        window = self._windows.get(start)
        if window is None:
            size = min(_WINDOW, self.blocks * self.block_size - start)
            if size <= 0:
                raise CorruptImage(f"byte {offset} lies outside the volume", where=where)
            window = self._windows[start] = self._pread(size, start, where)
            if len(self._windows) > _WINDOWS_KEPT:
                self._windows.popitem(last=False)
        piece = window[offset - start : offset - start + length]
        if len(piece) != length:
            raise CorruptImage(f"byte {offset} lies outside the volume", where=where)
        return piece

    # -- groups and inodes ------------------------------------------------------------------------------------------

    def _at(self, what: str) -> str:
        return f"{self.where}: {what}"

    def has_super(self, group: int) -> bool:
        """Tell whether a group begins with a copy of the superblock."""
        sb = self.super
        if sb.compat & c.COMPAT_SPARSE_SUPER2:
            return group == 0 or group in sb.raw.s_backup_bgs
        return has_sparse_super(group) if sb.ro_compat & c.RO_SPARSE_SUPER else True

    def desc_offset(self, group: int) -> int:
        """Return the byte of the image where a group's descriptor begins."""
        sb = self.super
        per_block = self.block_size // sb.desc_size
        table_block, index = divmod(group, per_block)
        super_block = c.SUPERBLOCK_OFFSET // self.block_size
        block = super_block + 1 + table_block
        if sb.incompat & c.INCOMPAT_META_BG and table_block >= sb.raw.s_first_meta_bg:
            first = table_block * per_block
            block = sb.group_first(first) + self.has_super(first)
            if first == 0 and self.first_data_block < super_block:
                block += 1  # bigalloc with blocks of 1 KiB: block 0 belongs to the group, too
        return block * self.block_size + index * sb.desc_size

    def group(self, group: int) -> GroupDesc:
        """Return a group's descriptor, its checksum verified and its pointers inside the volume."""
        found = self._descriptors.get(group)
        if found is not None:
            return found
        sb = self.super
        where = self._at(f"group {group}")
        raw = self._metadata(self.desc_offset(group), sb.desc_size, where)
        desc = GroupDesc.unpack(raw if sb.desc_size >= GroupDesc.SIZE else raw + bytes(GroupDesc.SIZE - len(raw)))
        if not self.verify:
            wanted = desc.bg_checksum
        elif self._seed is not None:
            wanted = group_desc_checksum(self._seed, group, raw)
        elif sb.ro_compat & c.RO_GDT_CSUM:
            wanted = group_desc_crc16(sb.raw.s_uuid, group, raw)
        else:
            wanted = desc.bg_checksum
        if wanted != desc.bg_checksum:
            raise CorruptImage("group descriptor checksum is wrong", where=where)
        table = desc.bg_inode_table_lo | desc.bg_inode_table_hi << 32
        table_blocks = -(-self._per_group * self._inode_size // self.block_size)
        if not (self.first_data_block < table and table + table_blocks <= self.blocks):
            raise CorruptImage(f"inode table at block {table} lies outside the volume", where=where)
        self._descriptors[group] = desc
        return desc

    def inode(self, ino: int) -> InodeRecord:
        """Return the record of an inode, its checksum verified. CorruptImage for a number outside the volume."""
        found = self._records.get(ino)
        if found is not None:
            return found
        where = f"{self.where}: inode {ino}"
        if not 0 < ino <= self._inodes:
            raise CorruptImage(f"there are only {self._inodes} inodes", where=where)
        group, index = divmod(ino - 1, self._per_group)
        desc = self.group(group)
        table = desc.bg_inode_table_lo | desc.bg_inode_table_hi << 32
        raw = self._metadata(table * self.block_size + index * self._inode_size, self._inode_size, where)
        return self._decode(ino, raw, where)

    def _decode(self, ino: int, raw: bytes, where: str) -> InodeRecord:
        extra = raw[128] | raw[129] << 8 if len(raw) > 128 else 0
        fields = Inode.unpack(raw if extra >= _FULL_EXTRA else raw[: 128 + extra] + bytes(Inode.SIZE))
        if fields.i_size_high and not self._large_dir and fields.i_mode & c.S_IFMT != c.S_IFREG:
            fields.i_size_high = 0  # i_dir_acl of old images (the kernel's ext4_isize)
        if extra & 3 or 128 + extra > len(raw):
            raise CorruptImage(f"extra size {extra} is impossible", where=where)
        if self._verify_seed is not None and not checksum_ok(raw, ino, self._verify_seed, fields, extra):
            raise CorruptImage("inode checksum is wrong", where=where)
        if len(self._records) >= _RECORDS_KEPT:
            self._records.clear()
        record = self._records[ino] = InodeRecord(ino, raw, fields, extra)
        return record

    def _live(self, ino: int) -> InodeRecord:
        record = self._records.get(ino) or self.inode(ino)
        if record.fields.i_mode & c.S_IFMT not in KIND_OF_TYPE or not record.fields.i_links_count:
            what = (
                "is not in use, but has a name"
                if not record.fields.i_links_count
                else f"has mode {record.fields.i_mode:#o}"
            )
            raise CorruptImage(what, where=self._at(f"inode {ino}"))
        return record

    def used_inodes(self, groups: int | None = None) -> Iterator[InodeRecord]:
        """Yield the records of all inodes with links, group after group, without looking at names.

        ``groups`` is the number of groups to look at, by default all.
        """
        for group in range(self.super.groups if groups is None else groups):
            desc = self.group(group)
            uninit = self._uninit
            if uninit and desc.bg_flags & c.BG_INODE_UNINIT:
                continue
            unused = desc.bg_itable_unused_lo | desc.bg_itable_unused_hi << 16 if uninit else 0
            table = (desc.bg_inode_table_lo | desc.bg_inode_table_hi << 32) * self.block_size
            for ino in self._touched_inodes(group, table, self._per_group - unused):
                if ino < c.FIRST_INO and ino not in (c.ROOT_INO, c.JOURNAL_INO):
                    continue
                record = self.inode(ino)
                if record.fields.i_links_count and record.type in KIND_OF_TYPE:
                    yield record

    def _touched_inodes(self, group: int, table: int, count: int) -> Iterator[int]:
        """Yield the numbers of those of a group's first ``count`` inodes whose records are not all zeros."""
        size = self._inode_size
        first = group * self._per_group + 1
        where = self._at(f"group {group}")
        untouched = bytes(size)
        at, end = table, table + count * size
        while at < end:
            # What is read is kept: records that are not zero come from there.
            length = min(end - at, self._window - at % self._window)
            window = self._metadata(at, length, where)
            if window != _ZEROS[:length]:
                number = first + (at - table) // size
                for inside in range(0, length, size):
                    if window[inside : inside + size] != untouched:
                        yield number + inside // size
            at += length

    def stat(self, ino: int) -> Stat:
        """Return what an inode says about itself. CorruptImage for an inode that is not in use."""
        return stat_of(self._live(ino), self.block_size, self._huge_files)

    # -- data -------------------------------------------------------------------------------------------------------

    def extents(self, ino: int) -> list[Extent]:
        """Return the runs of a file, directory or long symlink, ascending; holes are left out.

        Empty for inline data.
        """
        return self.map(self._live(ino))[0]

    def _inode_seed(self, record: InodeRecord) -> int | None:
        """Seed to verify the blocks of an inode with, None where nothing is to be verified."""
        seed = self._verify_seed
        return None if seed is None else inode_seed(seed, record.ino, record.fields.i_generation)

    def map(self, record: InodeRecord) -> tuple[list[Extent], int]:
        """Return (runs, number of tree or pointer blocks) of a record."""
        flags = record.fields.i_flags
        if flags & c.INLINE_DATA_FL:
            return [], 0
        where = self._at(f"inode {record.ino}")
        if flags & c.EXTENTS_FL:
            single = extents.single_run(record.fields.i_block, self)
            if single is not None:
                return [single], 0
            seed = self._inode_seed(record)
            runs, own = extents.read_tree(record.fields.i_block, self, seed, where)
        elif record.type not in (c.S_IFREG, c.S_IFDIR, c.S_IFLNK) or self._is_fast_symlink(record):
            return [], 0
        else:
            file_blocks = -(-record.size // self.block_size)
            runs, own = indirect.read_map(record.fields.i_block, self, self.block_size, file_blocks, where)
        if own + sum(run.count for run in runs) > self.blocks:
            raise CorruptImage("claims more blocks than the volume has", where=where)
        return runs, own

    def _runs(self, record: InodeRecord) -> list[Extent]:
        """Return the runs to read from. The last tree is kept: who reads a file in pieces asks again and again."""
        kept = self._kept_runs
        if kept is not None and kept[0] is record:
            return kept[1]
        runs, own = self.map(record)
        if own and self._unchanging and self._overlay is None:
            self._kept_runs = record, runs
        return runs

    def chunks(self, ino: int) -> Iterator[bytes]:
        """Yield the whole content of a regular file in pieces of up to 4 MiB; holes and unwritten extents are zeros."""
        return self._chunks(self._live(ino), 0, 1 << 63)

    def pieces(self, ino: int) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, data) of what a regular file holds, ascending, up to 4 MiB each; holes are left out."""
        record = self._live(ino)
        size, block_size = record.size, self.block_size
        if record.fields.i_flags & (c.INLINE_DATA_FL | c.ENCRYPT_FL):
            yield 0, b"".join(self._chunks(record, 0, block_size))
            return
        where = self._at(f"inode {ino}")
        for run in self.map(record)[0]:
            at, end = run.logical * block_size, min(size, (run.logical + run.count) * block_size)
            base = run.physical * block_size - at
            while at < end and not run.unwritten:
                got = min(_CHUNK, end - at)
                yield at, self._pread(got, base + at, where)
                at += got

    def read(self, ino: int, offset: int, length: int) -> bytes:
        """Return up to ``length`` bytes of a file from ``offset``; short at its end."""
        return b"".join(self._chunks(self._live(ino), offset, length))

    def _chunks(self, record: InodeRecord, offset: int, length: int) -> Iterator[bytes]:
        size = record.size
        end = min(size, offset + length)
        if offset >= end:
            return
        if record.fields.i_flags & c.ENCRYPT_FL:
            raise self._encrypted(record, "its content")
        if record.fields.i_flags & c.INLINE_DATA_FL:
            data = self._inline(record)[offset:end]
            yield data
            yield from _zeros(end - offset - len(data))  # mke2fs -d makes files like that of nothing but a hole
            return
        block_size = self.block_size
        where = f"{self.where}: inode {record.ino}"
        runs = self._runs(record)
        at = offset
        if len(runs) == 1 and end - at <= _CHUNK:
            run = runs[0]
            if run.logical == 0 and end <= run.count * block_size and not run.unwritten:
                yield self._pread(end - at, run.physical * block_size + at, where)  # most files, at once
                return
        for run in runs:
            start, stop = run.logical * block_size, (run.logical + run.count) * block_size
            if stop <= at:
                continue
            if start >= end:
                break
            if start > at:
                yield from _zeros(start - at)
                at = start
            stop = min(stop, end)
            if run.unwritten:
                yield from _zeros(stop - at)
                at = stop
                continue
            base = run.physical * block_size - start
            while at < stop:
                got = min(_CHUNK, stop - at)
                yield self._pread(got, base + at, where)
                at += got
        if at < end:
            yield from _zeros(end - at)

    def _inline(self, record: InodeRecord) -> bytes:
        """Return inline data: what ``i_block`` holds and, beyond, the attribute ``system.data``."""
        data = record.fields.i_block
        if record.size > _INLINE_IN_INODE or record.type == c.S_IFDIR:
            for index, name, value, _, _ in self._inode_area(record):
                if index == c.XATTR_INDEX_SYSTEM and name == b"data":
                    data += value
        return data

    def _is_fast_symlink(self, record: InodeRecord) -> bool:
        if record.type != c.S_IFLNK:
            return False
        i = record.fields
        if self.super.incompat & c.INCOMPAT_EA_INODE:
            # Blocks of attribute values of its own are counted, too, so that only the length tells
            # (ext4_inode_is_fast_symlink).
            return 0 < record.size < _INLINE_IN_INODE
        own = self.super.cluster_size // 512 if record.file_acl else 0
        return i.i_blocks_lo - own == 0

    def readlink(self, ino: int) -> bytes:
        """Return a symlink's target. CorruptImage for an impossible length or another kind of inode."""
        record = self._live(ino)
        where = self._at(f"inode {ino}")
        if record.type != c.S_IFLNK:
            raise CorruptImage("is not a symlink", where=where)
        size = record.size
        if record.fields.i_flags & c.ENCRYPT_FL:
            raise self._encrypted(record, "its target")
        if not 0 < size <= self.block_size:
            raise CorruptImage(f"symlink of {size} bytes", where=where)
        if self._is_fast_symlink(record) and not record.fields.i_flags & c.INLINE_DATA_FL:
            if size > _INLINE_IN_INODE:
                raise CorruptImage(f"symlink of {size} bytes without a block", where=where)
            target = record.fields.i_block[:size]
        else:
            target = b"".join(self._chunks(record, 0, size))
        if b"\0" in target:
            raise CorruptImage("symlink with a zero byte in its target", where=where)
        return target

    def _encrypted(self, record: InodeRecord, what: str) -> Unsupported:
        return Unsupported(f"is encrypted: {what} cannot be read", where=self._at(f"inode {record.ino}"))

    # -- names ------------------------------------------------------------------------------------------------------

    def iterdir(self, ino: int) -> list[directory.DirEntry]:
        """Return (name, inode number, file type) of a directory's entries in their order, without ``.`` and ``..``."""
        record = self._live(ino)
        where = self._at(f"directory inode {ino}")
        if record.type != c.S_IFDIR:
            raise CorruptImage("is not a directory", where=where)
        if record.fields.i_flags & c.ENCRYPT_FL:
            raise self._encrypted(record, "the names in it")
        if record.fields.i_flags & c.INLINE_DATA_FL:
            data = self._inline(record)
            return self._parse(data[4:_INLINE_IN_INODE], where) + self._parse(data[_INLINE_IN_INODE:], where)
        block_size, size = self.block_size, record.size
        count, rest = divmod(size, block_size)
        if rest or not count:
            raise CorruptImage(f"size of {size} bytes is not whole blocks", where=where)
        seed = self._inode_seed(record)
        index_possible = bool(record.fields.i_flags & c.INDEX_FL)
        out: list[directory.DirEntry] = []
        done = 0
        for run in self.map(record)[0]:
            if run.logical >= count:
                break
            if run.logical != done or run.unwritten:
                raise CorruptImage(f"has a hole at its block {done}", where=where)
            for i in range(min(run.count, count - run.logical)):
                inside = f"{where}, block {run.physical + i}"
                data = self.block(run.physical + i, inside)
                if seed is not None:
                    directory.verify_block(data, seed, index_possible, inside)
                out += self._parse(data, inside)
            done = run.logical + run.count
        if done < count:
            raise CorruptImage(f"has a hole at its block {done}", where=where)
        return out

    def iterdir_by_hash(self, ino: int) -> list[directory.DirEntry]:
        """Return what :meth:`iterdir` does in the order in which the kernel lists a directory.

        With dir_index that is the order of the names' hashes in a directory that has an index or a single block (the
        kernel's is_dx_dir): it does not depend on when names were added, so a listing can go on where it stopped. In
        others the names come as they lie. Unsupported for an unknown hash.
        """
        from ext4lite.htree import effective_version, name_hash

        raw = self.super.raw
        record = self._live(ino)
        version = raw.s_def_hash_version
        entries = self.iterdir(ino)
        if not self.super.compat & c.COMPAT_DIR_INDEX:
            return entries
        inline = bool(record.fields.i_flags & c.INLINE_DATA_FL)
        if record.fields.i_flags & c.INDEX_FL and not inline:
            first = self.map(record)[0][0]
            version = self.block(first.physical, self._at(f"directory inode {ino}"))[directory.DX_ROOT_AT - 4]
        elif not inline and record.size > self.block_size:
            return entries
        version = effective_version(version, bool(raw.s_flags & c.FLAG_UNSIGNED_HASH))
        try:
            if self._fold is not None and record.fields.i_flags & c.CASEFOLD_FL:
                fold = self._fold
                return sorted(entries, key=lambda e: name_hash(fold(e[0]), version, raw.s_hash_seed))
            return sorted(entries, key=lambda e: name_hash(e[0], version, raw.s_hash_seed))
        except ValueError as e:
            raise Unsupported(str(e), where=self._at(f"directory inode {ino}")) from e

    def _parse(self, data: bytes, where: str) -> list[directory.DirEntry]:
        return directory.parse(data, self._inodes, where)

    def lookup(self, path: str | bytes, start: int = c.ROOT_INO) -> int | None:
        """Return the inode number of a path (from directory ``start``), or None.

        Symlinks on the way are not followed. In directories with the casefold flag, case does not matter.
        """
        ino = start
        for part in os.fsencode(path).split(b"/"):
            if part in (b"", b"."):
                continue
            record = self.inode(ino)
            if record.type != c.S_IFDIR:
                return None
            fold = self._fold if record.fields.i_flags & c.CASEFOLD_FL else None
            names = self._directories.get(ino)
            if names is None:
                names = {fold(name) if fold else name: number for name, number, _ in self.iterdir(ino)}
                self._directories[ino] = names
                if len(self._directories) > _WINDOWS_KEPT:
                    self._directories.popitem(last=False)
            found = names.get(fold(part) if fold else part)
            if found is None:
                return None
            ino = found
        return ino

    def walk(self, start: int = c.ROOT_INO, path: bytes = b"") -> Iterator[tuple[bytes, int]]:
        """Yield (path, inode number) of everything below a directory, parents first; paths begin with ``/``.

        CorruptImage when a directory turns up twice (a loop, or a second name).
        """
        seen = {start}
        pending = [(path, start)]
        while pending:
            above, ino = pending.pop()
            below = []
            for name, child, _ in self.iterdir(ino):
                inside = above + b"/" + name
                yield inside, child
                if self._live(child).fields.i_mode & c.S_IFMT == c.S_IFDIR:
                    if child in seen:
                        where = self._at(f"directory inode {child}")
                        raise CorruptImage(f"has a second name, {inside!r}", where=where)
                    seen.add(child)
                    below.append((inside, child))
            pending += reversed(below)

    # -- attributes -------------------------------------------------------------------------------------------------

    def _inode_area(self, record: InodeRecord) -> list[tuple[int, bytes, bytes, int, int]]:
        at = 128 + record.extra_isize
        raw = record.raw
        if at + 4 > len(raw) or int.from_bytes(raw[at : at + 4], "little") != c.XATTR_MAGIC:
            return []
        return xattrs.parse_area(raw, at + 4, at + 4, self._at(f"inode {record.ino}"))

    def xattrs(self, ino: int) -> dict[bytes, bytes]:
        """Return full names and values (POSIX ACLs in the form of the system calls) of an inode's attributes."""
        record = self._live(ino)
        return self.xattrs_of(record)

    def xattrs_of(self, record: InodeRecord) -> dict[bytes, bytes]:
        """Return the attributes of a record; see :meth:`xattrs`."""
        found = self._inode_area(record) if self._inode_size > 128 else []
        block = record.file_acl
        if block:
            found = found + self._xattr_block(block, f"inode {record.ino}, attribute block {block}")
        out = {}
        for index, name, value, outside, size in found:
            if index == c.XATTR_INDEX_SYSTEM and name == b"data":
                continue  # inline data, not an attribute
            full = xattrs.join_name(index, name)
            if full is None or full in out:
                continue
            data = self._outside_value(outside, size, record.ino) if outside else value
            if index in (c.XATTR_INDEX_ACL_ACCESS, c.XATTR_INDEX_ACL_DEFAULT):
                data = xattrs.acl_from_disk(data, self._at(f"inode {record.ino}"))
            out[full] = data
        return out

    def _xattr_block(self, number: int, what: str) -> list[tuple[int, bytes, bytes, int, int]]:
        where = self._at(what)
        data = self.block(number, where)
        head = XattrHeader.unpack(data)
        if head.h_magic != c.XATTR_MAGIC or head.h_blocks != 1:
            raise CorruptImage("attribute block has a wrong header", where=where)
        seed = self._verify_seed
        if seed is not None and xattr_block_checksum(seed, number, data) != head.h_checksum:
            raise CorruptImage("attribute block checksum is wrong", where=where)
        return xattrs.parse_area(data, XattrHeader.SIZE, 0, where)

    def _outside_value(self, ino: int, size: int, user: int) -> bytes:
        """Return a value that has an inode of its own (ea_inode)."""
        where = self._at(f"inode {user}, attribute value in inode {ino}")
        record = self._live(ino)
        if not record.fields.i_flags & c.EA_INODE_FL or record.size != size or size > _MAX_EA_VALUE:
            raise CorruptImage(f"is not a value of {size} bytes", where=where)
        value = b"".join(self._chunks(record, 0, size))
        if self.verify and crc32c(self.super.seed, value) != record.fields.i_atime & 0xFFFFFFFF:
            # The oldest form (Lustre's) has a pointer to its one user instead (ext4_xattr_inode_get).
            back = record.fields.i_mtime & 0xFFFFFFFF, record.fields.i_generation
            if back != (user, self.inode(user).fields.i_generation):
                raise CorruptImage("attribute value hash is wrong", where=where)
        return value

    # -- bitmaps ----------------------------------------------------------------------------------------------------

    def bitmap_checksums_ok(self, group: int) -> bool:
        """Verify the checksums of a group's bitmaps (those that are on disk)."""
        if self._verify_seed is None:
            return True
        desc = self.group(group)
        where = self._at(f"group {group}")
        mask = 0xFFFFFFFF if self.super.desc_size >= GroupDesc.SIZE else 0xFFFF
        if not desc.bg_flags & c.BG_BLOCK_UNINIT:
            data = self.block(desc.bg_block_bitmap_lo | desc.bg_block_bitmap_hi << 32, where)
            wanted = desc.bg_block_bitmap_csum_lo | desc.bg_block_bitmap_csum_hi << 16
            if crc32c(self._verify_seed, data[: self.super.raw.s_clusters_per_group // 8]) & mask != wanted:
                return False
        if not desc.bg_flags & c.BG_INODE_UNINIT:
            data = self.block(desc.bg_inode_bitmap_lo | desc.bg_inode_bitmap_hi << 32, where)
            wanted = desc.bg_inode_bitmap_csum_lo | desc.bg_inode_bitmap_csum_hi << 16
            if crc32c(self._verify_seed, data[: self._per_group // 8]) & mask != wanted:
                return False
        return True


def _zeros(count: int) -> Iterator[bytes]:
    """Yield ``count`` zero bytes in pieces."""
    while count > len(_ZEROS):
        yield _ZEROS
        count -= len(_ZEROS)
    if count:
        yield _ZEROS[:count]
