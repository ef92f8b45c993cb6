"""Fast commits: what changed since the last full commit, in a few records behind the log.

Source: Documentation/filesystems/ext4/journal.rst, "Fast Commits". Records are little-endian and say what became of
inodes, their ranges of blocks, and names. :func:`scan` finds those that count, :func:`apply` makes them true: it keeps
a model of the inodes and directories concerned and at the end writes each of them once. Bitmaps follow from what
inodes held before and hold after.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ext4lite.checksum import crc32c, inode_seed
from ext4lite.directory import TAIL_SIZE, build, entry_size, pack_leaf
from ext4lite.errors import CorruptImage, Unsupported
from ext4lite.extents import ENTRY, Extent
from ext4lite.inode import InodeRecord
from ext4lite.jbd2.log import Log, Overlay
from ext4lite.jbd2.patch import Patch, Run, merged, without
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import FcAddRange, FcDelRange, FcDentry, FcHead, FcTag, FcTail, Inode
from ext4lite.volume import Volume

_TAG = FcTag.STRUCT
_DIRECTORY = 2  # file type of a directory's entry
_I_BLOCK = 40
_I_GENERATION = 100
_NAMES = (c.FC_CREAT, c.FC_LINK, c.FC_UNLINK)
_LEAST = {
    c.FC_ADD_RANGE: FcAddRange.SIZE,
    c.FC_DEL_RANGE: FcDelRange.SIZE,
    c.FC_CREAT: FcDentry.SIZE + 1,
    c.FC_LINK: FcDentry.SIZE + 1,
    c.FC_UNLINK: FcDentry.SIZE + 1,
    c.FC_INODE: 4 + 128,
    c.FC_PAD: 0,
    c.FC_TAIL: FcTail.SIZE,
    c.FC_HEAD: FcHead.SIZE,
}
"""Bytes that a record's value has at least."""


@dataclass(slots=True)
class Record:
    """One record of a fast commit."""

    tag: int
    value: bytes


def scan(log: Log, expected: int) -> list[Record]:
    """Return the records of the whole fast commits that belong to transaction ``expected``, the one after the log.

    What follows the last good tail did not get through. Unsupported for a head with unknown features.
    """
    if not log.incompat & c.JBD2_INCOMPAT_FAST_COMMIT or not log.super.s_start:
        return []
    good: list[Record] = []
    pending: list[Record] = []
    crc = 0
    size = log.block_size
    for number in range(log.fc_first, log.maxlen):
        data = log.read(number)
        at = 0
        if number == log.fc_first and int.from_bytes(data[:2], "little") != c.FC_HEAD:
            return []
        while at < size - _TAG.size:
            tag, length = _TAG.unpack_from(data, at)
            value = data[at + _TAG.size : at + _TAG.size + length]
            if tag not in _LEAST or len(value) < max(length, _LEAST[tag]):
                return good
            end = at + _TAG.size + (4 if tag == c.FC_TAIL else length)
            crc = crc32c(crc, data[at:end])
            if tag == c.FC_HEAD:
                head = FcHead.unpack(value)
                if head.fc_tid != expected:
                    return good
                if head.fc_features:
                    raise Unsupported(f"fast commits with features {head.fc_features:#x} are unknown", where=log.where)
            elif tag == c.FC_TAIL:
                tail = FcTail.unpack(value)
                if tail.fc_tid != expected or tail.fc_crc != crc:
                    return good
                good += pending
                pending, crc = [], 0
            elif tag != c.FC_PAD:
                pending.append(Record(tag, value))
            at += _TAG.size + length
    return good


@dataclass(slots=True)
class _State:
    """An inode concerned: its record, its runs, and the clusters it held before."""

    record: InodeRecord
    runs: list[Extent]
    own: list[int]
    before: list[Run]
    links: int
    known: bool = True
    """Whether the volume or a record says what it is."""
    reused: bool = False
    """Whether the number belongs to a new file, so that what the volume says of the old one is void."""


@dataclass(slots=True)
class _Directory:
    """A directory whose names changed."""

    parent: int
    names: dict[bytes, tuple[int, int]] = field(default_factory=dict)


def apply(volume: Volume, overlay: Overlay, records: list[Record], now: int) -> None:
    """Apply records to a volume, in memory. CorruptImage for what cannot be."""
    model = _Model(volume, overlay, now)
    for record in records:
        model.take(record)
    model.finish()


class _Model:
    def __init__(self, volume: Volume, overlay: Overlay, now: int) -> None:
        self.volume = volume
        self.overlay = overlay
        self.patch = Patch(volume, overlay, now)
        self.states: dict[int, _State] = {}
        self.directories: dict[int, _Directory] = {}
        self.inline: dict[int, list[tuple[int, bytes, int]]] = {}
        """Names (tag, name, inode) that came and went in a directory inside its inode, since its record was seen last.

        The record has them, unless the directory outgrew its inode meanwhile.
        """

    def _at(self, ino: int) -> str:
        return f"{self.volume.where}: fast commit, inode {ino}"

    def _state(self, ino: int) -> _State:
        found = self.states.get(ino)
        if found is not None:
            return found
        sb = self.volume.super
        if not 0 < ino <= sb.raw.s_inodes_count:
            raise CorruptImage("there is no such inode", where=self._at(ino))
        if ino == sb.raw.s_journal_inum or (ino < sb.raw.s_first_ino and ino != c.ROOT_INO):
            raise CorruptImage("is reserved", where=self._at(ino))
        if not self.patch.inode_in_use(ino):
            blank = InodeRecord(ino, bytes(sb.inode_size), Inode.unpack(bytes(Inode.SIZE)), 0)
            found = _State(blank, [], [], [], 0, known=False)
        else:
            record = self.volume.inode(ino)
            runs, own = self.patch.whole_map(record)
            held = self.patch.clusters([*((r.physical, r.count) for r in runs), *((n, 1) for n in own)])
            found = _State(record, runs, own, held, record.fields.i_links_count)
        self.states[ino] = found
        return found

    def _directory(self, ino: int) -> _Directory | None:
        """Return a directory's names; None where they lie in the inode itself, so that its record has them already."""
        found = self.directories.get(ino)
        if found is not None:
            return found
        state = self._state(ino)
        if not state.known or state.record.type != c.S_IFDIR:
            raise CorruptImage("is not a directory", where=self._at(ino))
        if state.record.fields.i_flags & c.INLINE_DATA_FL:
            return None
        if state.reused or not state.runs:
            raise CorruptImage("is a directory without blocks", where=self._at(ino))
        first = min(state.runs, key=lambda r: r.logical)
        parent = int.from_bytes(self.overlay.read(first.physical)[12:16], "little")
        names = {name: (child, kind) for name, child, kind in self.volume.iterdir(ino)}
        found = self.directories[ino] = _Directory(parent, names)
        return found

    # -- records ----------------------------------------------------------------------------------------------------

    def take(self, record: Record) -> None:
        """Apply one record to the model."""
        value = record.value
        if record.tag == c.FC_INODE:
            self._inode(int.from_bytes(value[:4], "little"), value[4:])
        elif record.tag == c.FC_ADD_RANGE:
            add = FcAddRange.unpack(value)
            logical, length, high, low = ENTRY.unpack(add.fc_ex)
            unwritten = length > c.MAX_EXTENT_LEN
            length -= c.MAX_EXTENT_LEN if unwritten else 0
            self._range(add.fc_ino, logical, length, Extent(logical, low | high << 32, length, unwritten))
        elif record.tag == c.FC_DEL_RANGE:
            cut = FcDelRange.unpack(value)
            self._range(cut.fc_ino, cut.fc_lblk, cut.fc_len, None)
        elif record.tag in _NAMES:
            entry = FcDentry.unpack(value)
            self._name(record.tag, entry.fc_parent_ino, entry.fc_ino, value[FcDentry.SIZE :])

    def _inode(self, ino: int, raw: bytes) -> None:
        """Take an inode's record as it is now; its map comes in records of its own."""
        state = self._state(ino)
        size = self.volume.super.inode_size
        if len(raw) > size:
            raise CorruptImage(f"a record of {len(raw)} bytes", where=self._at(ino))
        old = state.record.raw
        whole = raw[:_I_BLOCK] + old[_I_BLOCK:_I_GENERATION] + raw[_I_GENERATION:] + old[len(raw) :]
        flags = int.from_bytes(raw[32:36], "little")
        kind = int.from_bytes(raw[:2], "little") & c.S_IFMT
        if flags & c.INLINE_DATA_FL or (not flags & c.EXTENTS_FL and kind not in (c.S_IFREG, c.S_IFDIR)):
            whole = whole[:_I_BLOCK] + raw[_I_BLOCK:_I_GENERATION] + whole[_I_GENERATION:]
        extra = whole[128] | whole[129] << 8 if size > 128 else 0
        if extra & 3 or 128 + extra > size:
            raise CorruptImage(f"extra size {extra} is impossible", where=self._at(ino))
        fields = Inode.unpack(whole[: 128 + extra] + bytes(Inode.SIZE))
        recent = self.inline.pop(ino, [])
        was = state.record
        if was.type == c.S_IFDIR and was.fields.i_flags & c.INLINE_DATA_FL and not flags & c.INLINE_DATA_FL:
            self._outgrown(was, recent)
        if fields.i_generation != state.record.fields.i_generation:
            state.runs, state.reused = [], True
            self.directories.pop(ino, None)
        state.record = InodeRecord(ino, whole, fields, extra)
        state.links, state.known = fields.i_links_count, True

    def _inline_names(self, record: InodeRecord) -> dict[bytes, tuple[int, int]]:
        data = self.volume._inline(record)
        entries = [e for part in (data[4:60], data[60:]) for e in self.volume._parse(part, self._at(record.ino))]
        return {name: (child, kind) for name, child, kind in entries}

    def _require_inline_names(self) -> None:
        """Refuse what would be lost: names in a directory inside its inode whose record does not have them."""
        for ino, recent in self.inline.items():
            names = self._inline_names(self._state(ino).record)
            last = {name: (tag, child) for tag, name, child in recent}
            for name, (tag, child) in last.items():
                if (names.get(name, (0, 0))[0] == child) == (tag == c.FC_UNLINK):
                    what = "fast commits change names in a directory that lies inside its inode (inline_data)"
                    raise Unsupported(what, where=self._at(ino), hint="run e2fsck -fy on it")

    def _outgrown(self, was: InodeRecord, recent: list[tuple[int, bytes, int]]) -> None:
        """A directory does not fit into its inode any more: its names begin with those that were there."""
        if was.size < 4:
            raise CorruptImage("is a directory without a parent", where=self._at(was.ino))
        names = self._inline_names(was)
        for tag, name, child in recent:
            if tag == c.FC_UNLINK:
                names.pop(name, None)
            else:
                names[name] = child, c.FT_BY_MODE.get(self._state(child).record.type, 0)
        self.directories[was.ino] = _Directory(int.from_bytes(was.fields.i_block[:4], "little"), names)

    def _range(self, ino: int, logical: int, count: int, new: Extent | None) -> None:
        """Replace the file's blocks ``logical`` … by a new run, or by a hole."""
        state = self._state(ino)
        if not count or logical + count > 1 << 32:
            raise CorruptImage(f"a range of {count} blocks at file block {logical}", where=self._at(ino))
        if not state.record.fields.i_flags & c.EXTENTS_FL:
            raise CorruptImage("has no extents", where=self._at(ino))
        v = self.volume
        if new is not None and not v.first_data_block <= new.physical <= v.blocks - count:
            raise CorruptImage(f"blocks {new.physical}+{count} lie outside the volume", where=self._at(ino))
        end = logical + count
        out: list[Extent] = [] if new is None else [new]
        for r in state.runs:
            if r.logical < logical:
                out.append(Extent(r.logical, r.physical, min(r.count, logical - r.logical), r.unwritten))
            if r.logical + r.count > end:
                skip = max(0, end - r.logical)
                out.append(Extent(r.logical + skip, r.physical + skip, r.count - skip, r.unwritten))
        state.runs = sorted(out, key=lambda r: r.logical)

    def _name(self, tag: int, parent: int, ino: int, name: bytes) -> None:
        """A name came or went. It may be so already: a full commit may have had it."""
        state = self._state(ino)
        if len(name) > 255 or b"/" in name or b"\0" in name or name in (b".", b".."):
            raise CorruptImage(f"an impossible name {name!r}", where=self._at(ino))
        if not state.known:
            if tag == c.FC_UNLINK:
                return
            raise CorruptImage("has a name, but nobody says what it is", where=self._at(ino))
        inside = self._directory(parent)
        if inside is None:
            self.inline.setdefault(parent, []).append((tag, name, ino))
        if tag == c.FC_UNLINK:
            if inside is not None and inside.names.get(name, (0, 0))[0] == ino:
                del inside.names[name]
                state.links = 0 if state.record.type == c.S_IFDIR else max(0, state.links - 1)
                if not state.links:
                    state.runs, state.reused = [], True
                    self.directories.pop(ino, None)
            return
        if tag == c.FC_CREAT:
            if state.record.type == c.S_IFDIR and not state.record.fields.i_flags & c.INLINE_DATA_FL:
                self.directories[ino] = _Directory(parent)
        elif inside is not None and inside.names.get(name, (0, 0))[0] != ino:
            state.links += 1
        if inside is not None:
            kind = c.FT_BY_MODE.get(state.record.type, 0)
            inside.names[name] = (ino, kind if self.volume.super.incompat & c.INCOMPAT_FILETYPE else 0)

    # -- writing ----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Write every inode and directory of the model, then the bitmaps."""
        self._require_inline_names()
        patch = self.patch
        states = [s for s in self.states.values() if s.known]
        before = merged(run for s in states for run in s.before)
        wanted = merged(run for s in states if s.links for run in patch.clusters((r.physical, r.count) for r in s.runs))
        # First take what records name, so that nothing else is put there.
        patch.mark(without(wanted, before), used=True, strict=False)
        after: list[Run] = []
        for s in states:
            ino = s.record.ino
            directory = s.record.type == c.S_IFDIR
            patch.mark_inode(ino, used=True, directory=directory)
            if not s.links:
                if s.record.fields.i_flags & c.EXTENTS_FL:
                    patch.set_map(s.record, [], [])
                patch.delete(s.record)
                continue
            if ino in self.directories:
                self._write_directory(s, self.directories[ino])
            held = []
            if s.record.fields.i_flags & c.EXTENTS_FL:
                s.own = patch.set_map(s.record, s.runs, s.own)
                held = patch.clusters([*((r.physical, r.count) for r in s.runs), *((n, 1) for n in s.own)])
                s.record.fields.i_blocks_lo = s.record.fields.l_i_blocks_high = 0
                attributes = 1 if s.record.file_acl else 0
                patch.add_sectors(s.record, sum(count for _, count in held) + attributes)
            else:
                held = s.before
            after += held
            s.record.fields.i_links_count = s.links
            patch.put_inode(s.record)
        # A file with a block map loses its blocks when it is deleted, not here.
        before = merged(run for s in states if s.links or s.record.fields.i_flags & c.EXTENTS_FL for run in s.before)
        patch.mark(without(before, merged(after)), used=False, strict=False)
        patch.finish()

    def _is_directory(self, ino: int) -> bool:
        state = self.states.get(ino)
        return (self.volume.inode(ino) if state is None else state.record).type == c.S_IFDIR

    def _write_directory(self, state: _State, directory: _Directory) -> None:
        """Write a directory anew, into the blocks that it has and more if they do not do."""
        v = self.volume
        size = v.block_size
        record = state.record
        seed = 0 if self.patch.seed is None else inode_seed(self.patch.seed, record.ino, record.fields.i_generation)
        entries = [(name, ino, kind) for name, (ino, kind) in directory.names.items()]
        if v.super.metadata_csum:
            unsigned = bool(v.super.raw.s_flags & c.FLAG_UNSIGNED_HASH)
            blocks, indexed = build(
                record.ino,
                directory.parent,
                entries,
                block_size=size,
                seed=seed,
                hash_seed=v.super.raw.s_hash_seed,
                unsigned=unsigned,
            )
        else:
            blocks, indexed = self._linear(record.ino, directory.parent, entries), False
        flags = record.fields.i_flags & ~c.INDEX_FL
        record.fields.i_flags = flags | (c.INDEX_FL if indexed and v.super.compat & c.COMPAT_DIR_INDEX else 0)
        there = [r.physical + i for r in sorted(state.runs, key=lambda r: r.logical) for i in range(r.count)]
        while len(there) < len(blocks):
            inside = len(there) % self.patch.ratio
            # With bigalloc, what is left of the last cluster comes first.
            first = there[-1] + 1 if inside else self.patch.allocate(there[-1] if there else 0)
            there += range(first, first + self.patch.ratio - inside)
        state.runs = []
        for i, data in enumerate(blocks):
            self.overlay.write(there[i], data)
            last = state.runs[-1] if state.runs else None
            if last is not None and last.physical + last.count == there[i]:
                last.count += 1
            else:
                state.runs.append(Extent(i, there[i], 1))
        record.fields.i_size_lo, record.fields.i_size_high = len(blocks) * size, 0
        # Its record need not have been logged when a directory in it came or went (the kernel gets it wrong then).
        filetype = v.super.incompat & c.INCOMPAT_FILETYPE
        inner = sum(kind == _DIRECTORY if filetype else self._is_directory(ino) for _, ino, kind in entries)
        state.links = 2 + inner if 2 + inner < c.LINK_MAX or not v.super.ro_compat & c.RO_DIR_NLINK else 1

    def _linear(self, ino: int, parent: int, entries: list[tuple[bytes, int, int]]) -> list[bytes]:
        """Return the blocks of a directory without an index (a place for a checksum at a block's end does no harm)."""
        kind = 2 if self.volume.super.incompat & c.INCOMPAT_FILETYPE else 0
        size = self.volume.block_size
        leaves: list[list[tuple[bytes, int, int]]] = [[]]
        room = size - TAIL_SIZE
        for entry in [(b".", ino, kind), (b"..", parent, kind), *entries]:
            need = entry_size(len(entry[0]))
            if need > room:
                leaves.append([])
                room = size - TAIL_SIZE
            leaves[-1].append(entry)
            room -= need
        return [pack_leaf(leaf, size, 0) for leaf in leaves]
