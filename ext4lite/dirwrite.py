"""Changing directories: adding, replacing and removing names, linear and hashed.

Names are kept in memory as long as their directory is in use, with the block that each lies in; the blocks on disk are
changed in place. A directory becomes hashed when its first block is full; a full leaf is split at the middle of its
hashes, and index blocks split and grow a level when they are full (source:
Documentation/filesystems/ext4/directory.rst).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from struct import Struct
from typing import TYPE_CHECKING

from ext4lite.checksum import crc32c, inode_seed
from ext4lite.directory import DX_NODE_AT, DX_ROOT_AT, HEADER, TAIL_SIZE, entry_size, rec_len_to_disk, verify_block
from ext4lite.errors import CorruptImage, Unsupported, VolumeFull
from ext4lite.extents import Extent
from ext4lite.htree import TEA_UNSIGNED, effective_version, name_hash
from ext4lite.inode import InodeRecord
from ext4lite.layout import constants as c

if TYPE_CHECKING:
    from ext4lite.dirnames import NamesOnDisk
    from ext4lite.writable import WritableBase

_U16X2 = Struct("<HH")
_U32 = Struct("<I")
_U32X2 = Struct("<II")
_BLOCKS_AHEAD = 16
_DX_TAIL = 8
_INFO_AT = 24
_BLOCK_MASK = 0x0FFFFFFF
_MAX_NAME_SPACE = entry_size(255)


@dataclass(slots=True)
class Name:
    """A directory entry: the inode it names, its file type, and the block of the directory it lies in."""

    ino: int
    kind: int
    block: int


@dataclass(slots=True)
class DirState:
    """What is in memory about one directory."""

    parent: int
    names: dict[bytes, Name] | NamesOnDisk
    blocks: list[int]
    """Block of the volume for each block of the directory."""
    room: dict[int, int] = field(default_factory=dict)
    """Upper bound of the largest gap of a block, where it is known (linear directories)."""
    starts: dict[int, int] = field(default_factory=dict)
    """Byte of the entry that was put into a block last: the next one probably has its place there."""
    hashed: tuple[bytes, int] = (b"", 0)
    """The name hashed last, and its hash."""


@dataclass(slots=True)
class _Step:
    block: int
    index: int
    count: int


class DirWriter:
    """One directory, for changing. ``state`` is shared by all who use the directory; it is dropped with a failure."""

    def __init__(self, volume: WritableBase, record: InodeRecord, state: DirState) -> None:
        self.volume = volume
        self.record = record
        self.state = state
        self.block_size = volume.block_size
        sb = volume.super
        self.seed = inode_seed(sb.seed, record.ino, record.fields.i_generation) if sb.metadata_csum else None
        self.end = self.block_size - TAIL_SIZE if self.seed is not None else self.block_size
        self.where = f"{volume.where}: directory inode {record.ino}"
        self._typed = bool(sb.incompat & c.INCOMPAT_FILETYPE)

    @property
    def indexed(self) -> bool:
        """Whether the directory has a hash index."""
        return bool(self.record.fields.i_flags & c.INDEX_FL)

    # -- blocks -----------------------------------------------------------------------------------------------------

    def _read(self, block: int) -> bytearray:
        number = self.state.blocks[block]
        cache = self.volume.cache
        data = cache.get(number, self.where)
        if self.seed is not None and number not in cache.dirty:
            verify_block(bytes(data), self.seed, self.indexed, f"{self.where}, block {number}")
        return data

    def _change(self, block: int) -> bytearray:
        self._read(block)
        return self.volume.cache.change(self.state.blocks[block])

    def _grow(self) -> int:
        """Add a block of zeros at the end; return its number in the directory. VolumeFull."""
        v, blocks = self.volume, self.state.blocks
        goal = blocks[-1] + 1 if blocks else v.goal_of(self.record)
        run = v.alloc.allocate_growing(self.record.ino, goal, 1, min(len(blocks), _BLOCKS_AHEAD))
        v.file_map(self.record).insert(Extent(len(blocks), run.start, 1))
        v.add_blocks(self.record, 1)
        v.cache.create(run.start)
        blocks.append(run.start)
        v.set_size(self.record, len(blocks) * self.block_size)
        return len(blocks) - 1

    def _seal_leaf(self, data: bytearray) -> None:
        if self.seed is not None:
            tail = self.block_size - TAIL_SIZE
            data[tail : tail + 8] = HEADER.pack(0, TAIL_SIZE, 0, c.DIR_TAIL_TYPE)
            _U32.pack_into(data, tail + 8, crc32c(self.seed, bytes(data[:tail])))

    def _put(self, data: bytearray, at: int, ino: int, length: int, name: bytes, *, kind: int) -> None:
        HEADER.pack_into(data, at, ino, rec_len_to_disk(length, self.block_size), len(name), kind if self._typed else 0)
        data[at + 8 : at + 8 + len(name)] = name

    def _entries(self, data: bytearray, block: int) -> list[tuple[int, int, int, int, int]]:
        """Return (offset, inode number, length, name length, type) of all entries of a leaf, also of empty ones."""
        out = []
        at, end = 0, self.end
        unpack = HEADER.unpack_from
        while at < end:
            ino, length, name_len, kind = unpack(data, at)
            if length in (0, 65535) and self.block_size == 65536:
                length = 65536
            if length < 8 or length & 3 or at + length > end or (ino and length < 8 + name_len):
                raise CorruptImage(f"block {block}: entry at byte {at} has length {length}", where=self.where)
            out.append((at, ino, length, name_len, kind))
            at += length
        return out

    # -- public operations ------------------------------------------------------------------------------------------

    def initialise(self) -> None:
        """Give a new directory its first block with ``.`` and ``..``."""
        self._grow()
        data = self.volume.cache.change(self.state.blocks[0])
        self._put(data, 0, self.record.ino, 12, b".", kind=2)
        self._put(data, 12, self.state.parent, self.end - 12, b"..", kind=2)
        self._seal_leaf(data)

    def add(self, name: bytes, ino: int, kind: int) -> None:
        """Add a name that is not there yet. VolumeFull also when the index cannot grow any more."""
        block = self._add_indexed(name, ino, kind) if self.indexed else self._add_linear(name, ino, kind)
        self.state.names[name] = Name(ino, kind, block)

    def remove(self, name: bytes) -> None:
        """Remove a name that is there."""
        block = self.state.names[name].block
        data = self._change(block)
        at, before = self._find(data, block, name)
        length = self._length(data, at)
        if before >= 0:
            whole = at + length - before
            data[before + 4 : before + 6] = rec_len_to_disk(whole, self.block_size).to_bytes(2, "little")
            data[at : at + 8 + len(name)] = bytes(8 + len(name))
        else:
            data[at : at + 4] = bytes(4)
        self._seal_leaf(data)
        self.state.room.pop(block, None)
        self.state.starts.pop(block, None)
        del self.state.names[name]

    def _length(self, data: bytearray, at: int) -> int:
        length: int = HEADER.unpack_from(data, at)[1]
        return 65536 if length in (0, 65535) and self.block_size == 65536 else length

    def _find(self, data: bytearray, block: int, name: bytes) -> tuple[int, int]:
        """Return the offsets of a name's entry in its leaf and of the entry before it (-1 for none)."""
        at, before = self._look(data, block, name)
        if at < 0:
            raise CorruptImage(f"block {block} has lost the name {name!r}", where=self.where)
        return at, before

    def _look(self, data: bytearray, block: int, name: bytes) -> tuple[int, int]:
        """As :meth:`_find`; -1 for a name that is not there."""
        at, before, wanted = 0, -1, len(name)
        end, unpack = self.end, HEADER.unpack_from
        while at < end:
            ino, length, name_len, _ = unpack(data, at)
            if length in (0, 65535) and self.block_size == 65536:
                length = 65536
            if length < 8 or length & 3 or at + length > end:
                raise CorruptImage(f"block {block}: entry at byte {at} has length {length}", where=self.where)
            if name_len == wanted and ino and data[at + 8 : at + 8 + wanted] == name:
                return at, before
            before = at
            at += length
        return -1, before

    def replace(self, name: bytes, ino: int, kind: int) -> None:
        """Let a name that is there name another inode."""
        found = self.state.names[name]
        data = self._change(found.block)
        at, _ = self._find(data, found.block, name)
        self._put(data, at, ino, self._length(data, at), name, kind=kind)
        self._seal_leaf(data)
        self.state.names[name] = Name(ino, kind, found.block)

    def set_parent(self, ino: int) -> None:
        """Let ``..`` name another directory."""
        data = self._change(0)
        first = HEADER.unpack_from(data, 0)[1]
        if first != 12 or data[20:22] != b"..":
            raise CorruptImage('has no ".." where it belongs', where=self.where)
        _U32.pack_into(data, 12, ino)
        if self.indexed:
            self._seal_index(data, 0)
        else:
            self._seal_leaf(data)
        self.state.parent = ino

    def set_self(self) -> None:
        """Let ``.`` name the directory's inode, whose number has changed."""
        data = self._change(0)
        if HEADER.unpack_from(data, 0)[1] != 12 or data[8:10] != b".\0":
            raise CorruptImage('has no "." where it belongs', where=self.where)
        _U32.pack_into(data, 0, self.record.ino)
        if self.indexed:
            self._seal_index(data, 0)
        else:
            self._seal_leaf(data)

    # -- linear -----------------------------------------------------------------------------------------------------

    def _insert(self, data: bytearray, block: int, name: bytes, ino: int, kind: int) -> bool:
        """Put a name into a leaf if it has room; note the largest gap seen otherwise."""
        start = self.state.starts.pop(block, 0)
        return self._insert_from(start, data, block, (name, ino, kind)) or (
            start > 0 and self._insert_from(0, data, block, (name, ino, kind))
        )

    def _insert_from(self, start: int, data: bytearray, block: int, entry: tuple[bytes, int, int]) -> bool:
        """Look for room from the entry at byte ``start`` on."""
        name, ino, kind = entry
        need = entry_size(len(name))
        widest, at = 0, start
        end, unpack = self.end, HEADER.unpack_from
        while at < end:  # the hot loop of large directories
            old, length, name_len, _ = unpack(data, at)
            if length in (0, 65535) and self.block_size == 65536:
                length = 65536
            if length < 8 or length & 3 or at + length > end:
                raise CorruptImage(f"block {block}: entry at byte {at} has length {length}", where=self.where)
            used = name_len + 11 & ~3 if old else 0
            gap = length - used
            if gap >= need:
                data = self.volume.cache.change(self.state.blocks[block])
                if used:
                    data[at + 4 : at + 6] = rec_len_to_disk(used, self.block_size).to_bytes(2, "little")
                self._put(data, at + used, ino, gap, name, kind=kind)
                self._seal_leaf(data)
                self.state.starts[block] = at + used
                return True
            widest = max(widest, gap)
            at += length
        if not start:
            self.state.room[block] = widest
        return False

    def _add_linear(self, name: bytes, ino: int, kind: int) -> int:
        need = entry_size(len(name))
        room = self.state.room
        for block in range(len(self.state.blocks)):
            if room.get(block, _MAX_NAME_SPACE) >= need and self._insert(self._read(block), block, name, ino, kind):
                return block
        if len(self.state.blocks) == 1 and self._can_index():
            self._make_index()
            return self._add_indexed(name, ino, kind)
        block = self._grow()
        data = self.volume.cache.change(self.state.blocks[block])
        self._put(data, 0, ino, self.end, name, kind=kind)
        self._seal_leaf(data)
        return block

    # -- hashed -----------------------------------------------------------------------------------------------------

    def _can_index(self) -> bool:
        sb = self.volume.super
        return bool(sb.compat & c.COMPAT_DIR_INDEX) and sb.raw.s_def_hash_version <= TEA_UNSIGNED

    def _hash(self, name: bytes, version: int) -> int:
        sb = self.volume.super.raw
        try:
            return name_hash(name, effective_version(version, bool(sb.s_flags & c.FLAG_UNSIGNED_HASH)), sb.s_hash_seed)[
                0
            ]
        except ValueError:
            raise Unsupported(f"directory hash version {version} is unknown", where=self.where) from None

    def _hash_once(self, name: bytes, version: int) -> int:
        """As :meth:`_hash`; an operation that looks a name up and then adds it hashes it once."""
        known = self.state.hashed
        if known[0] != name:
            known = self.state.hashed = name, self._hash(name, version)
        return known[1]

    @staticmethod
    def _index_at(block: int) -> int:
        return DX_NODE_AT if block else DX_ROOT_AT

    def _limit(self, block: int) -> int:
        return (self.block_size - self._index_at(block) - (_DX_TAIL if self.seed is not None else 0)) // 8

    def _seal_index(self, data: bytearray, block: int) -> None:
        if self.seed is not None:
            at = self._index_at(block)
            limit, count = _U16X2.unpack_from(data, at)
            tail = at + 8 * limit
            covered = bytes(data[: at + 8 * count]) + bytes(data[tail : tail + 4]) + bytes(4)
            _U32.pack_into(data, tail + 4, crc32c(self.seed, covered))

    def _set_index(self, data: bytearray, block: int, entries: list[tuple[int, int]]) -> None:
        """Replace the entries of an index block; the first one's hash gives way to limit and count."""
        at, limit = self._index_at(block), self._limit(block)
        body = _U16X2.pack(limit, len(entries)) + _U32.pack(entries[0][1])
        body += b"".join(_U32X2.pack(*entry) for entry in entries[1:])
        data[at : at + 8 * limit] = body + bytes(8 * limit - len(body))
        self._seal_index(data, block)

    def _get_index(self, data: bytearray, block: int) -> list[tuple[int, int]]:
        at = self._index_at(block)
        limit, count = _U16X2.unpack_from(data, at)
        if limit != self._limit(block) or not 0 < count <= limit:
            raise CorruptImage(f"index block {block}: {count} of {limit} entries", where=self.where)
        out = [(h, b & _BLOCK_MASK) for h, b in _U32X2.iter_unpack(bytes(data[at : at + 8 * count]))]
        out[0] = (0, out[0][1])
        return out

    def _make_index(self) -> None:
        """Turn a directory of one block into a hashed one with one leaf."""
        leaf = self._grow()
        root = self.volume.cache.change(self.state.blocks[0])
        entries = [
            (bytes(root[at + 8 : at + 8 + name_len]), ino, kind)
            for at, ino, _, name_len, kind in self._entries(root, 0)
            if ino
        ]
        self._pack(leaf, [e for e in entries if e[0] not in (b".", b"..")])
        root[:] = bytes(self.block_size)
        self._put(root, 0, self.record.ino, 12, b".", kind=2)
        self._put(root, 12, self.state.parent, self.block_size - 12, b"..", kind=2)
        root[_INFO_AT + 4] = min(self.volume.super.raw.s_def_hash_version, TEA_UNSIGNED) % 3
        root[_INFO_AT + 5] = 8
        self.record.fields.i_flags |= c.INDEX_FL
        self._set_index(root, 0, [(0, leaf)])
        self.state.room.clear()
        self.state.starts.clear()

    def _pack(self, block: int, entries: list[tuple[bytes, int, int]]) -> None:
        """Fill a leaf with entries, without gaps, and remember that they are in it."""
        data = self.volume.cache.change(self.state.blocks[block])
        data[:] = bytes(self.block_size)
        self.state.starts.pop(block, None)
        at, names = 0, self.state.names
        for i, (name, ino, kind) in enumerate(entries):
            length = self.end - at if i == len(entries) - 1 else entry_size(len(name))
            self._put(data, at, ino, length, name, kind=kind)
            at += length
            known = names.get(name)
            if known is not None:
                known.block = block
        if not entries:
            self._put(data, 0, 0, self.end, b"", kind=0)
        self._seal_leaf(data)

    def _root(self) -> tuple[bytearray, int, int]:
        """Return the root with its hash version and number of levels below it."""
        data = self._read(0)
        version, length, levels = data[_INFO_AT + 4 : _INFO_AT + 7]
        if data[4:6] != b"\x0c\0" or length != 8 or levels > self._most_levels():
            raise CorruptImage("index root is wrong", where=self.where)
        return data, version, levels

    def verify_root(self) -> None:
        """Raise CorruptImage unless the first block is an index's root."""
        self._root()

    def _most_levels(self) -> int:
        return 2 if self.volume.super.incompat & c.INCOMPAT_LARGE_DIR else 1

    def _probe(self, value: int) -> tuple[list[_Step], int]:
        """Go down the index to the leaf for a hash."""
        data, _, levels = self._root()
        block, steps = 0, []
        for level in range(levels + 1):
            at = self._index_at(block)
            limit, count = _U16X2.unpack_from(data, at)
            if limit != self._limit(block) or not 0 < count <= limit:
                raise CorruptImage(f"index block {block}: {count} of {limit} entries", where=self.where)
            low, high = 1, count
            while low < high:
                middle = (low + high) // 2
                if _U32.unpack_from(data, at + 8 * middle)[0] > value:
                    high = middle
                else:
                    low = middle + 1
            steps.append(_Step(block, low - 1, count))
            block = _U32.unpack_from(data, at + 8 * (low - 1) + 4)[0] & _BLOCK_MASK
            if not 0 < block < len(self.state.blocks) or any(block == s.block for s in steps):
                raise CorruptImage(f"index points to block {block}", where=self.where)
            if level < levels:
                data = self._read(block)
        return steps, block

    def _add_indexed(self, name: bytes, ino: int, kind: int) -> int:
        version = self._root()[1]
        value = self._hash_once(name, version)
        steps, block = self._probe(value)
        if self._insert(self._read(block), block, name, ino, kind):
            return block
        return self._split(steps, block, version, (name, ino, kind))

    def find_by_hash(self, name: bytes) -> Name | None:
        """Look a name up in a hashed directory, as a reader without memory does; None if it is not there."""
        value = self._hash_once(name, self._root()[1])
        steps, block = self._probe(value)
        while True:
            data = self._read(block)
            at, _ = self._look(data, block, name)
            if at >= 0:
                ino, _, _, kind = HEADER.unpack_from(data, at)
                return Name(ino, kind if self._typed else 0, block)
            following = self._next_leaf(steps, value)
            if following is None:
                return None
            block = following

    def _next_leaf(self, steps: list[_Step], value: int) -> int | None:
        """Return the next leaf if names of this hash go on in it, and move ``steps`` there."""
        level = len(steps) - 1
        while steps[level].index + 1 >= steps[level].count:
            if not level:
                return None
            level -= 1
        step = steps[level]
        data = self._read(step.block)
        at = self._index_at(step.block) + 8 * (step.index + 1)
        if _U32.unpack_from(data, at)[0] & ~1 != value:
            return None
        step.index += 1
        block: int = _U32.unpack_from(data, at + 4)[0] & _BLOCK_MASK
        for below in range(level + 1, len(steps)):
            inside = self._get_index(self._read(block), block)
            steps[below] = _Step(block, 0, len(inside))
            block = inside[0][1]
        if not 0 < block < len(self.state.blocks):
            raise CorruptImage(f"index points to block {block}", where=self.where)
        return block

    def has_names(self) -> bool:
        """Tell whether there is any name but ``.`` and ``..``."""
        parse = self.volume._parse
        return any(parse(bytes(self._read(block)), self.where) for block in range(len(self.state.blocks)))

    def _split(self, steps: list[_Step], block: int, version: int, entry: tuple[bytes, int, int]) -> int:
        """Move the upper half of a full leaf to a new one and put ``entry`` where it belongs."""
        data = self._read(block)
        hashed = [
            (self._hash(name, version), (name, ino, kind))
            for name, ino, kind in (
                (bytes(data[at + 8 : at + 8 + name_len]), ino, kind)
                for at, ino, _, name_len, kind in self._entries(data, block)
                if ino
            )
        ]
        hashed.append((self._hash(entry[0], version), entry))
        hashed.sort(key=lambda e: e[0])
        total = sum(entry_size(len(e[1][0])) for e in hashed)
        cut, size = 0, 0
        while cut < len(hashed) - 1:
            step = entry_size(len(hashed[cut][1][0]))
            if cut and size + step > total // 2:
                break
            size += step
            cut += 1
        border = hashed[cut][0]
        # Bit 0 says that names of the same hash are in the block before, too.
        border |= hashed[cut - 1][0] == border
        right = self._grow()
        self._pack(block, [e[1] for e in hashed[:cut]])
        self._pack(right, [e[1] for e in hashed[cut:]])
        self._insert_index(steps, len(steps) - 1, (border, right))
        return block if any(e[1] is entry for e in hashed[:cut]) else right

    def _new_index(self, entries: list[tuple[int, int]]) -> int:
        block = self._grow()
        data = self.volume.cache.change(self.state.blocks[block])
        HEADER.pack_into(data, 0, 0, rec_len_to_disk(self.block_size, self.block_size), 0, 0)
        self._set_index(data, block, entries)
        return block

    def _insert_index(self, steps: list[_Step], level: int, entry: tuple[int, int]) -> None:
        """Add an entry behind the one taken at ``level``, splitting full index blocks and deepening the root."""
        step = steps[level]
        entries = self._get_index(self._read(step.block), step.block)
        entries.insert(step.index + 1, entry)
        if len(entries) <= self._limit(step.block):
            self._set_index(self.volume.cache.change(self.state.blocks[step.block]), step.block, entries)
            return
        if level == 0:
            if len(steps) > self._most_levels():
                raise VolumeFull("the directory's index is full", where=self.where)
            node = self._new_index(entries)
            root = self.volume.cache.change(self.state.blocks[0])
            root[_INFO_AT + 6] += 1
            self._set_index(root, 0, [(0, node)])
            return
        half = len(entries) // 2
        node = self._new_index(entries[half:])
        self._set_index(self.volume.cache.change(self.state.blocks[step.block]), step.block, entries[:half])
        self._insert_index(steps, level - 1, (entries[half][0], node))
