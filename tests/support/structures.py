"""Where each structure of an image lies, how its fields are named, and how its checksum is made right again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from struct import calcsize
from typing import Any

from ext4lite.checksum import (
    crc32c,
    group_desc_checksum,
    group_desc_crc16,
    inode_seed,
    superblock_checksum,
    xattr_block_checksum,
)
from ext4lite.inode import InodeRecord
from ext4lite.jbd2.log import FileBlocks, Log, super_checksum
from ext4lite.layout import _codecs as codecs
from ext4lite.layout import constants as c
from ext4lite.volume import Volume

Image = bytearray


@dataclass(frozen=True, slots=True)
class Field:
    """A number: where it lies from its structure's beginning, how long it is, and its bytes' order."""

    name: str
    at: int
    size: int
    order: Any = "little"


@dataclass(frozen=True, slots=True)
class Structure:
    """A piece of metadata. ``fix`` makes its checksum right in a changed image."""

    kind: str
    at: int
    size: int
    fields: tuple[Field, ...]
    fix: Callable[[Image], None] | None = None


def fields_of(codec: Any, base: int = 0) -> list[Field]:
    """Return the fields of a derived codec; bytes become words."""
    order = "big" if codec.STRUCT.format.startswith(">") else "little"
    out, at, names = [], base, iter(codec.__slots__)
    for count, code in re.findall(r"(\d*)([a-zA-Z])", codec.STRUCT.format):
        if code == "s":
            name = next(names)
            out += [Field(f"{name}[{i}]", at + i, min(4, int(count) - i), order) for i in range(0, int(count), 4)]
            at += int(count)
            continue
        name = next(names)
        for _ in range(int(count or 1)):
            out.append(Field(name, at, calcsize("=" + code), order))
            at += calcsize("=" + code)
    return out


def words(size: int, most: int = 64, order: str = "little") -> list[Field]:
    """Return the first and the last words of a piece that is nothing but numbers."""
    every = range(0, size - 3, 4)
    chosen = [*every[: most // 2], *every[-(most // 2) :]]
    return [Field(f"word {at // 4}", at, 4, order) for at in dict.fromkeys(chosen)]


class Locator:
    """Finds the structures of a sound image (one that needs recovery is looked at as it is on disk)."""

    def __init__(self, path: Path) -> None:
        self.found: list[Structure] = []
        with Volume.open(path, replay=False) as volume:
            self.v = volume
            self.size = volume.block_size
            self.seed = volume.super.seed if volume.super.metadata_csum else None
            self.numbers = sorted(self._numbers())
            self._locate()
        kinds = sorted({s.kind for s in self.found})
        self.by_kind = {kind: [s for s in self.found if s.kind == kind] for kind in kinds}

    def _numbers(self) -> set[int]:
        """Numbers worth pointing at: metadata, ends of ranges, special inodes."""
        v, g = self.v, self.v.group(0)
        out = {0, 1, 2, 3, 8, 11, 12, v.blocks - 1, v.blocks, v.blocks + 1, v.super.raw.s_inodes_count}
        out |= {g.bg_block_bitmap_lo, g.bg_inode_bitmap_lo, g.bg_inode_table_lo, v.super.raw.s_inodes_count + 1}
        for ino in (2, 8, 11, 12):
            out.add(ino)
            record = v.inode(ino)
            if record.type in (c.S_IFREG, c.S_IFDIR) and record.fields.i_links_count:
                out |= {e.physical for e in v.map(record)[0][:2]}
        return out

    def _add(
        self, kind: str, at: int, size: int, fields: list[Field], fix: Callable[[Image], None] | None = None
    ) -> None:
        self.found.append(Structure(kind, at, size, tuple(fields), fix))

    def _locate(self) -> None:
        v = self.v
        self._add("superblock", 1024, 1024, fields_of(codecs.SuperBlock), _fix_super)
        for group in range(v.super.groups):
            self._group(group)
        for ino in range(1, v.super.raw.s_inodes_count + 1):
            record = v.inode(ino)
            if record.fields.i_mode or record.fields.i_links_count or ino == c.ROOT_INO:
                self._inode(record)
        if v.super.incompat & c.INCOMPAT_MMP:
            self._mmp(int.from_bytes(v.super.raw.pack()[0x168:0x170], "little"))
        if v.super.compat & c.COMPAT_HAS_JOURNAL and v.super.raw.s_journal_inum:
            self._journal(v.super.raw.s_journal_inum)

    # -- groups -----------------------------------------------------------------------------------------------------

    def _group(self, group: int) -> None:
        v, size = self.v, self.size
        desc, at = v.group(group), v.desc_offset(group)
        known = [f for f in fields_of(codecs.GroupDesc) if f.at + f.size <= v.super.desc_size]
        self._add("group descriptor", at, v.super.desc_size, known, self._fix_desc(group))
        for kind, number, length in (
            ("block bitmap", desc.bg_block_bitmap_lo, v.super.raw.s_clusters_per_group // 8),
            ("inode bitmap", desc.bg_inode_bitmap_lo, v.super.raw.s_inodes_per_group // 8),
        ):
            fix = self._fix_bitmap(group, kind, number * size, length)
            self._add(kind, number * size, size, words(size), fix)

    def _fix_desc(self, group: int) -> Callable[[Image], None]:
        at, length = self.v.desc_offset(group), self.v.super.desc_size
        seed, uuid, old = self.seed, self.v.super.raw.s_uuid, self.v.super.ro_compat & c.RO_GDT_CSUM

        def fix(image: Image) -> None:
            raw = bytes(image[at : at + length])
            if seed is not None:
                image[at + 30 : at + 32] = group_desc_checksum(seed, group, raw).to_bytes(2, "little")
            elif old:
                image[at + 30 : at + 32] = group_desc_crc16(uuid, group, raw).to_bytes(2, "little")

        return fix

    def _fix_bitmap(self, group: int, kind: str, start: int, length: int) -> Callable[[Image], None]:
        at, seed, wide = self.v.desc_offset(group), self.seed, self.v.super.desc_size >= 64
        low, high = (0x18, 0x38) if kind == "block bitmap" else (0x1A, 0x3A)
        then = self._fix_desc(group)

        def fix(image: Image) -> None:
            if seed is not None:
                total = crc32c(seed, bytes(image[start : start + length])).to_bytes(4, "little")
                image[at + low : at + low + 2] = total[:2]
                if wide:
                    image[at + high : at + high + 2] = total[2:]
            then(image)

        return fix

    # -- inodes -----------------------------------------------------------------------------------------------------

    def _inode(self, record: InodeRecord) -> None:
        v, ino = self.v, record.ino
        group, index = divmod(ino - 1, v.super.raw.s_inodes_per_group)
        desc, size = v.group(group), v.super.inode_size
        table = desc.bg_inode_table_lo | desc.bg_inode_table_hi << 32
        at = table * self.size + index * size
        fix = self._fix_inode(ino, at, size)
        special = "special " if ino < c.FIRST_INO and ino != c.ROOT_INO else ""
        known = [f for f in fields_of(codecs.Inode) if f.at + f.size <= size]
        self._add(f"{special}inode", at, size, known, fix)
        if size > 128:
            area = 128 + record.extra_isize
            if record.raw[area : area + 4] == c.XATTR_MAGIC.to_bytes(4, "little"):
                fields = [Field("h_magic", area, 4), *_xattr_entries(record.raw, area + 4)]
                self._add("attributes in inode", at, size, fields, fix)
        if record.file_acl:
            self._xattr_block(record.file_acl)
        inline = record.fields.i_flags & c.INLINE_DATA_FL
        if inline and record.type == c.S_IFDIR:
            self._add("inline directory", at, size, [Field("parent", 40, 4), *_dirents(record.raw, 44, 100)], fix)
        if inline or record.type not in (c.S_IFREG, c.S_IFDIR, c.S_IFLNK):
            return
        if record.fields.i_flags & c.EXTENTS_FL:
            self._add("extent root", at, size, _extent_fields(record.raw, 40), fix)
            self._extent_nodes(record)
        elif not v._is_fast_symlink(record):
            self._pointers(record)
        if record.type == c.S_IFDIR:
            self._directory(record)
        elif ino == v.super.raw.s_orphan_file_inum and v.super.compat & c.COMPAT_ORPHAN_FILE:
            self._orphans(record)
        elif ino in (3, 4, v.super.raw.s_prj_quota_inum):
            for run in v.map(record)[0]:
                self._add("quota", run.physical * self.size, self.size, words(self.size))

    def _fix_inode(self, ino: int, at: int, size: int) -> Callable[[Image], None]:
        seed = self.seed

        def fix(image: Image) -> None:
            if seed is None:
                return
            raw = bytearray(image[at : at + size])
            high = size > 128 and int.from_bytes(raw[128:130], "little") >= 4
            raw[124:126] = bytes(2)
            if high:
                raw[130:132] = bytes(2)
            total = crc32c(inode_seed(seed, ino, int.from_bytes(raw[100:104], "little")), bytes(raw))
            raw[124:126] = (total & 0xFFFF).to_bytes(2, "little")
            if high:
                raw[130:132] = (total >> 16).to_bytes(2, "little")
            image[at : at + size] = raw

        return fix

    def _own_seed(self, record: InodeRecord) -> int | None:
        return None if self.seed is None else inode_seed(self.seed, record.ino, record.fields.i_generation)

    def _extent_nodes(self, record: InodeRecord) -> None:
        own = self._own_seed(record)
        pending = list(_children(record.fields.i_block))
        while pending:
            number = pending.pop()
            data = self.v.block(number)
            at = number * self.size
            self._add("extent node", at, self.size, _extent_fields(data, 0), self._fix_extent(at, own))
            pending += _children(data)

    def _fix_extent(self, at: int, own: int | None) -> Callable[[Image], None]:
        size = self.size

        def fix(image: Image) -> None:
            end = 12 + 12 * int.from_bytes(image[at + 4 : at + 6], "little")
            if own is not None and end + 4 <= size:
                image[at + end : at + end + 4] = crc32c(own, bytes(image[at : at + end])).to_bytes(4, "little")

        return fix

    def _pointers(self, record: InodeRecord) -> None:
        block = record.fields.i_block

        def descend(number: int, level: int) -> None:
            self._add("pointer block", number * self.size, self.size, words(self.size))
            if level > 1:
                data = self.v.block(number)
                for i in range(0, self.size, 4):
                    if below := int.from_bytes(data[i : i + 4], "little"):
                        descend(below, level - 1)

        for level in (1, 2, 3):
            at = 44 + 4 * level
            if number := int.from_bytes(block[at : at + 4], "little"):
                descend(number, level)

    def _xattr_block(self, number: int) -> None:
        at, size, seed = number * self.size, self.size, self.seed
        data = self.v.block(number)

        def fix(image: Image) -> None:
            if seed is not None:
                total = xattr_block_checksum(seed, number, bytes(image[at : at + size]))
                image[at + 16 : at + 20] = total.to_bytes(4, "little")

        fields = [*fields_of(codecs.XattrHeader)[:6], *_xattr_entries(data, 32)]
        self._add("attribute block", at, size, fields, fix)

    # -- directories ------------------------------------------------------------------------------------------------

    def _directory(self, record: InodeRecord) -> None:
        own, size = self._own_seed(record), self.size
        indexed = record.fields.i_flags & c.INDEX_FL
        for run in self.v.map(record)[0]:
            for i in range(run.count):
                at = (run.physical + i) * size
                data = self.v.block(run.physical + i)
                first = indexed and run.logical + i == 0
                inner = indexed and not first and data[:8] == b"\0\0\0\0" + size.to_bytes(2, "little") + b"\0\0"
                if first or inner:
                    head = 32 if first else 8
                    fields = [*_dirents(data, 0, 24 if first else 8)]
                    fields += fields_of(codecs.DxRootInfo, 24) if first else []
                    fields += [Field("limit", head, 2), Field("count", head + 2, 2), Field("block", head + 4, 4)]
                    count = int.from_bytes(data[head + 2 : head + 4], "little")
                    fields += [Field("dx", head + n, 4) for n in range(8, 8 * min(count, 20), 4)]
                    self._add("index node", at, size, fields, self._fix_index(at, head, own))
                else:
                    self._add("directory leaf", at, size, [*_dirents(data, 0, size)], self._fix_leaf(at, own))

    def _fix_leaf(self, at: int, own: int | None) -> Callable[[Image], None]:
        end = at + self.size - 12

        def fix(image: Image) -> None:
            if own is not None:
                image[end + 8 : end + 12] = crc32c(own, bytes(image[at:end])).to_bytes(4, "little")

        return fix

    def _fix_index(self, at: int, head: int, own: int | None) -> Callable[[Image], None]:
        size = self.size

        def fix(image: Image) -> None:
            limit = int.from_bytes(image[at + head : at + head + 2], "little")
            count = int.from_bytes(image[at + head + 2 : at + head + 4], "little")
            tail = head + 8 * limit
            if own is None or count > limit or tail + 8 > size:
                return
            covered = bytes(image[at : at + head + 8 * count]) + bytes(image[at + tail : at + tail + 4]) + bytes(4)
            image[at + tail + 4 : at + tail + 8] = crc32c(own, covered).to_bytes(4, "little")

        return fix

    # -- the rest ---------------------------------------------------------------------------------------------------

    def _orphans(self, record: InodeRecord) -> None:
        own, size = self._own_seed(record), self.size
        for run in self.v.map(record)[0]:
            for number in range(run.physical, run.physical + run.count):
                at = number * size

                def fix(image: Image, at: int = at, number: int = number) -> None:
                    if own is not None:
                        covered = number.to_bytes(8, "little") + bytes(image[at : at + size - 8])
                        image[at + size - 4 : at + size] = crc32c(own, covered).to_bytes(4, "little")

                self._add("orphan file", at, size, words(size), fix)

    def _mmp(self, number: int) -> None:
        at, seed = number * self.size, self.seed

        def fix(image: Image) -> None:
            if seed is not None:
                total = crc32c(seed, bytes(image[at : at + 1020]))
                image[at + 1020 : at + 1024] = total.to_bytes(4, "little")

        self._add("mmp", at, 1024, words(1024), fix)

    def _journal(self, ino: int) -> None:
        v, size = self.v, self.size
        log = Log.open(FileBlocks(v._fd, size, "journal"), v.map(v.inode(ino))[0], "journal")
        summed = bool(log.super.s_feature_incompat & (c.JBD2_INCOMPAT_CSUM_V2 | c.JBD2_INCOMPAT_CSUM_V3))
        at = log.physical(0) * size

        def fix_super(image: Image) -> None:
            if summed:
                image[at + 0xFC : at + 0x100] = super_checksum(bytes(image[at : at + 1024])).to_bytes(4, "big")

        fields = [f for f in fields_of(codecs.JournalSuperBlock) if f.at < 0x60 or f.name == "s_checksum"]
        self._add("journal superblock", at, 1024, fields, fix_super)
        kinds = {c.JBD2_DESCRIPTOR: "journal descriptor", c.JBD2_COMMIT: "journal commit", c.JBD2_REVOKE: "revocations"}
        for number in range(1, log.maxlen):
            data, at = log.read(number), log.physical(number) * size
            if int.from_bytes(data[:4], "big") == c.JBD2_MAGIC:
                kind = kinds.get(int.from_bytes(data[4:8], "big"), "journal block")
                self._add(kind, at, size, words(size, 40, "big"), self._fix_log(log, at, kind) if summed else None)
            elif int.from_bytes(data[:2], "little") == c.FC_HEAD:
                self._add("fast commit", at, size, [*_records(data)], _fix_fast(at, size))

    def _fix_log(self, log: Log, at: int, kind: str) -> Callable[[Image], None]:
        size, place = self.size, 16 if kind == "journal commit" else self.size - 4

        def fix(image: Image) -> None:
            total = log.block_checksum(bytes(image[at : at + size]), place)
            image[at + place : at + place + 4] = total.to_bytes(4, "big")

        return fix


def _fix_super(image: Image) -> None:
    image[2044:2048] = superblock_checksum(bytes(image[1024:2048])).to_bytes(4, "little")


def _children(data: bytes) -> Iterator[int]:
    count, depth = int.from_bytes(data[2:4], "little"), int.from_bytes(data[6:8], "little")
    for i in range(count if depth else 0):
        yield int.from_bytes(data[16 + 12 * i : 20 + 12 * i], "little")


def _extent_fields(data: bytes, base: int) -> list[Field]:
    out = fields_of(codecs.ExtentHeader, base)
    count, depth = int.from_bytes(data[base + 2 : base + 4], "little"), data[base + 6]
    for i in range(min(count, 30)):
        out += fields_of(codecs.ExtentIdx if depth else codecs.Extent, base + 12 + 12 * i)
    return out


def _dirents(data: bytes, at: int, end: int) -> Iterator[Field]:
    while at + 8 <= end:
        yield from fields_of(codecs.DirEntryHeader, at)
        yield Field("name", at + 8, 1)
        step = int.from_bytes(data[at + 4 : at + 6], "little")
        if step < 8:
            return
        at += step


def _xattr_entries(data: bytes, at: int) -> Iterator[Field]:
    while data[at : at + 4] != bytes(4) and at + 16 < len(data):
        yield from fields_of(codecs.XattrEntryHeader, at)
        at += 16 + (data[at] + 3 & ~3)


def _records(data: bytes) -> Iterator[Field]:
    at = 0
    while at + 4 <= len(data):
        tag, length = int.from_bytes(data[at : at + 2], "little"), int.from_bytes(data[at + 2 : at + 4], "little")
        if not 0 < tag <= c.FC_HEAD:
            return
        yield from (Field("fc_tag", at, 2), Field("fc_len", at + 2, 2))
        yield from (Field("value", at + 4 + i, 4) for i in range(0, min(length, 160), 4))
        at += 4 + length


def _fix_fast(at: int, size: int) -> Callable[[Image], None]:
    """The tail's checksum covers what came since the last tail, up to itself; only within one block here."""

    def fix(image: Image) -> None:
        place, begin = 0, 0
        while place + 4 <= size:
            tag = int.from_bytes(image[at + place : at + place + 2], "little")
            length = int.from_bytes(image[at + place + 2 : at + place + 4], "little")
            if not 0 < tag <= c.FC_HEAD or place + 4 + length > size:
                return
            if tag == c.FC_TAIL:
                total = crc32c(0, bytes(image[at + begin : at + place + 8]))
                image[at + place + 8 : at + place + 12] = total.to_bytes(4, "little")
                begin = place + 4 + length
            place += 4 + length

    return fix
