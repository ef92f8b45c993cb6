"""Make a whole volume in one sequential pass: file data as it comes, everything else behind it when all is known.

The image grows in a nameless file (or a temporary one beside its target) that :meth:`ImageBuilder.finish` puts into
place, so a failed run leaves nothing. File data goes to consecutive blocks (extents of up to 32768 blocks, interrupted
only by backup superblocks and flex group metadata); directories, long symlinks, attribute blocks and extent tree blocks
follow, each directory in one piece. Nothing depends on clock, process or hash order: same calls, same bytes.

    with ImageBuilder("golden.ext4", size=16 << 30, uuid=uuid, timestamp=0) as b:
        etc = b.add_dir(b.root, b"etc", Meta(mode=0o755))
        with b.add_file(etc, b"hostname", Meta(mode=0o644)) as f:
            f.write(b"box\n")
        b.finish()
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import uuid as uuids
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from struct import Struct
from types import TracebackType
from typing import Literal

from ext4lite import directory, hostfs, xattrs
from ext4lite.blockdev import check_target, replacing, target_path
from ext4lite.checksum import (
    crc32c,
    fs_seed,
    group_desc_checksum,
    inode_seed,
    superblock_checksum,
    xattr_block_checksum,
)
from ext4lite.errors import Ext4LiteError, HostError, Unsupported, VolumeFull
from ext4lite.extents import Extent, build_tree, split_long, tree_blocks_needed
from ext4lite.features import PROFILE
from ext4lite.geometry import BLOCK, BLOCKS_PER_GROUP, DESC_SIZE, FLEX, INODE_SIZE, Geometry, has_sparse_super, plan
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import GroupDesc, Inode, JournalSuperBlock, SuperBlock, XattrHeader

Kind = Literal["file", "dir", "symlink", "char", "block", "fifo", "socket"]
Buffer = bytes | bytearray | memoryview

_TYPE_OF_KIND: dict[Kind, int] = {
    "file": c.S_IFREG,
    "dir": c.S_IFDIR,
    "symlink": c.S_IFLNK,
    "char": c.S_IFCHR,
    "block": c.S_IFBLK,
    "fifo": c.S_IFIFO,
    "socket": c.S_IFSOCK,
}
_KIND_OF_TYPE = {number: kind for kind, number in _TYPE_OF_KIND.items()}

_HOLE = 64 << 10
_ZEROS = bytes(_HOLE)
_BUFFER = 2 << 20
_WRITEBACK = 16 << 20  # smaller steps give the host's file more extents, and clones of it take longer
_EXTRA_ISIZE = 32
_XATTR_AREA_AT = 128 + _EXTRA_ISIZE
_INODE_XATTR_SPACE = INODE_SIZE - _XATTR_AREA_AT - 4
_BLOCK_XATTR_SPACE = BLOCK - XattrHeader.SIZE
_FAST_SYMLINK_MAX = 59
_LOST_FOUND_BLOCKS = 4
_NS = 1_000_000_000
_CSUM = Struct("<H")
_HUGE_SECTORS = 1 << 32


@dataclass(slots=True)
class Meta:
    """What an inode says about itself. Times are nanoseconds since 1970; None for atime and ctime means the mtime."""

    mode: int = 0o755
    """The 12 permission bits (setuid, setgid and sticky among them)."""
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    """Full names (``b"trusted.overlay.opaque"``) and values as the system calls give them."""
    atime_ns: int | None = None
    ctime_ns: int | None = None


@dataclass(slots=True)
class _Node:
    ino: int
    type: int
    meta: Meta
    parent: int = 0
    nlink: int = 1
    size: int = 0
    extents: list[Extent] = field(default_factory=list)
    children: dict[bytes, int] | None = None
    target: bytes = b""
    rdev: tuple[int, int] = (0, 0)
    indexed: bool = False


class _Space:
    """Hands out free blocks in ascending order, and remembers what was taken and given back."""

    def __init__(self, geometry: Geometry, where: str) -> None:
        self._where = where
        self._runs = geometry.free_runs()
        self._pending: deque[tuple[int, int]] = deque()
        self._cursor = self._end = 0
        self.freed: list[tuple[int, int]] = []
        self.log: list[list[int]] = []

    def take(self, count: int) -> list[tuple[int, int]]:
        """Return runs (start, count) of ``count`` blocks together.

        VolumeFull if that many are not left (those that were are taken then: the image is lost anyway).
        """
        out = []
        while count:
            if self._cursor == self._end:
                self._next_run()
            got = min(count, self._end - self._cursor)
            out.append((self._cursor, got))
            self._mark(self._cursor, got, 1)
            self._cursor += got
            count -= got
        return out

    def take_contiguous(self, count: int) -> list[tuple[int, int]]:
        """Like :meth:`take` before anything else is taken, but from the first run that holds all.

        Smaller runs stay for others.
        """
        skipped: list[tuple[int, int]] = []
        for start, length in self._runs:
            if length >= count:
                self._mark(start, count, 1)
                self._pending.extend(skipped)
                if length > count:
                    self._pending.append((start + count, length - count))
                return [(start, count)]
            skipped.append((start, length))
        self._pending.extend(skipped)
        return self.take(count)

    def give_back(self, start: int, count: int) -> None:
        """Free a run; it is used again only when all else is taken."""
        self._mark(start, count, 0)
        if start + count == self._cursor:
            self._cursor = start
        else:
            self.freed.append((start, count))

    def free(self) -> int:
        """Count the blocks that :meth:`take` can still give."""
        self._pending.extend(self._runs)
        runs = [*self._pending, *self.freed]
        return self._end - self._cursor + sum(count for _, count in runs)

    def _mark(self, start: int, count: int, used: int) -> None:
        last = self.log[-1] if self.log else None
        if last is not None and last[2] == used and last[0] + last[1] == start:
            last[1] += count
        else:
            self.log.append([start, count, used])

    def _next_run(self) -> None:
        if self._pending:
            start, count = self._pending.popleft()
        else:
            run = next(self._runs, None)
            if run is None and self.freed:
                self.freed.sort(reverse=True)
                run = self.freed.pop()
            if run is None:
                raise VolumeFull("no free blocks are left", where=self._where, hint="make the volume larger")
            start, count = run
        self._cursor, self._end = start, start + count


class FileSink:
    """Takes a new file's bytes. Only one is open at a time. As a context manager it closes itself."""

    __slots__ = ("_builder", "_node", "_open", "_pending", "_tail", "ino")

    def __init__(self, builder: ImageBuilder, node: _Node) -> None:
        self._builder, self._node = builder, node
        self.ino = node.ino
        self._pending = bytearray()
        self._tail = 0  # bytes used in the last block
        self._open = True

    def write(self, data: Buffer) -> None:
        """Append bytes; runs of zeros that fill aligned 64 KiB pieces become holes. VolumeFull, HostError."""
        if not self._open:
            raise ValueError("write to a closed FileSink")
        size = len(data)
        pending = self._pending
        if len(pending) + size < _HOLE:
            pending += data
            return
        view = memoryview(data)
        at = 0
        if pending:
            at = _HOLE - len(pending)
            pending += view[:at]
            self._piece(pending)
            self._pending = pending = bytearray()
        start = at
        while at + _HOLE <= size:
            if view[at : at + _HOLE] == _ZEROS:
                if at > start:
                    self._append(view[start:at])
                self._node.size += _HOLE
                start = at + _HOLE
            at += _HOLE
        if at > start:
            self._append(view[start:at])
        pending += view[at:]

    def skip(self, count: int) -> None:
        """Append ``count`` zero bytes without work for those that become holes. VolumeFull, HostError."""
        head = min(count, -len(self._pending) % _HOLE)
        if head:
            self.write(bytes(head))
        rest = count - head
        if rest <= 0:
            return
        self._node.size += rest - rest % _HOLE
        self.write(bytes(rest % _HOLE))

    def close(self) -> None:
        """End the file. Harmless when called again."""
        if not self._open:
            return
        self._open = False
        self._builder._sink = None
        if self._pending:
            self._append(self._pending)
        if self._tail:
            self._builder._pad(BLOCK - self._tail)

    def __enter__(self) -> FileSink:
        return self

    def __exit__(self, t: type[BaseException] | None, v: BaseException | None, tb: TracebackType | None) -> None:
        if t is None:
            self.close()
        else:
            self._open = False
            self._builder._sink = None
            if self._tail:
                self._builder._pad(BLOCK - self._tail)

    def _piece(self, piece: bytearray) -> None:
        if piece == _ZEROS:
            self._node.size += _HOLE
        else:
            self._append(piece)

    def _append(self, data: Buffer) -> None:
        """Write bytes at the file's end, which lies in its last block or at a block's beginning."""
        builder, node, size, at = self._builder, self._node, len(data), 0
        if self._tail:
            at = min(size, BLOCK - self._tail)
            builder._put(data[:at])
            self._tail = (self._tail + at) % BLOCK
            node.size += at
        rest = size - at
        if not rest:
            return
        logical = node.size // BLOCK
        for start, count in builder._space.take(-(-rest // BLOCK)):
            length = min(rest, count * BLOCK)
            builder._put(data if length == size else memoryview(data)[at : at + length], start * BLOCK)
            _add_extent(node.extents, logical, start, count)
            logical += count
            at += length
            rest -= length
            node.size += length
        self._tail = node.size % BLOCK


def _add_extent(extents: list[Extent], logical: int, start: int, count: int) -> None:
    if extents:
        last = extents[-1]
        if last.logical + last.count == logical and last.physical + last.count == start:
            last.count += count
            return
    extents.append(Extent(logical, start, count))


class ImageBuilder:
    """Builds one image; see the module's text. Use as a context manager: without :meth:`finish` nothing is left.

    ``size`` in bytes (4 MiB to 16 TiB); ``uuid`` None makes a random one; ``label`` at most 16 bytes; ``journal_size``
    in bytes, None for the default by size and 0 for none; ``timestamp`` in seconds for the volume's own times, None for
    now. An existing target is refused unless ``force``. ``durable`` False leaves out the fsyncs. Raises Unsupported
    (size), HostError, later VolumeFull.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        size: int,
        uuid: uuids.UUID | None = None,
        label: str = "",
        journal_size: int | None = None,
        timestamp: int | None = None,
        force: bool = False,
        durable: bool = True,
    ) -> None:
        self.path = target_path(path)
        self.uuid = uuid or uuids.uuid4()
        self.root = c.ROOT_INO
        self.geometry = plan(size, journal_size)
        self._file_size = size
        self._label = os.fsencode(label)
        if len(self._label) > 16:
            raise Unsupported(f"label {label!r} is longer than 16 bytes")
        self._time = int(time.time()) if timestamp is None else timestamp
        self._durable = durable
        self._seed = fs_seed(self.uuid.bytes)
        digest = hashlib.sha256(b"ext4lite directory hash seed" + self.uuid.bytes).digest()
        self._hash_seed = tuple(int.from_bytes(digest[i : i + 4], "little") for i in range(0, 16, 4))
        self._space = _Space(self.geometry, str(self.path))
        self._nodes: dict[int, _Node] = {}
        self._next_ino = c.FIRST_INO
        self._sink: FileSink | None = None
        self._buffer = bytearray()
        self._buffer_at = 0
        self._unsent = self._unsent_end = 0  # written, but not yet on its way to the disk
        self._done = False
        self._replace = check_target(self.path, force=force) or force
        self._file = hostfs.NewFile(self.path)
        self._fd = self._file.fd
        try:
            self._set_size()
            journal = self.geometry.journal_blocks
            self._journal_runs = self._space.take_contiguous(journal) if journal else []
            now = self._time * _NS
            root = _Node(c.ROOT_INO, c.S_IFDIR, Meta(0o755, mtime_ns=now), c.ROOT_INO, 2, children={})
            self._nodes[c.ROOT_INO] = root
            self.add_dir(c.ROOT_INO, b"lost+found", Meta(0o700, mtime_ns=now))
        except BaseException:
            self.abort()
            raise

    # -- the namespace ----------------------------------------------------------------------------------------------

    def add_dir(self, parent: int, name: bytes, meta: Meta) -> int:
        """Make a directory and return its inode number. FileExistsError when the name is taken."""
        node = self._new(parent, name, c.S_IFDIR, meta)
        node.children = {}
        node.nlink = 2
        self._nodes[parent].nlink += 1
        return node.ino

    def add_file(self, parent: int, name: bytes, meta: Meta, size_hint: int = -1) -> FileSink:
        """Make a regular file and return the sink for its bytes (``size_hint`` is only a hint).

        The sink before must be closed.
        """
        if self._sink is not None:
            raise ValueError("another FileSink is still open")
        self._sink = FileSink(self, self._new(parent, name, c.S_IFREG, meta))
        return self._sink

    def add_symlink(self, parent: int, name: bytes, target: bytes, meta: Meta) -> int:
        """Make a symlink and return its inode number. Unsupported unless the target has 1 to 4095 bytes."""
        if not 0 < len(target) < BLOCK:
            raise Unsupported(f"symlink {name!r} has a target of {len(target)} bytes")
        node = self._new(parent, name, c.S_IFLNK, meta)
        node.target = bytes(target)
        node.size = len(target)
        return node.ino

    def add_node(  # noqa: PLR0917 (as in the published interface)
        self, parent: int, name: bytes, meta: Meta, kind: Kind, major: int = 0, minor: int = 0
    ) -> int:
        """Make a device (``char`` or ``block`` with its numbers), ``fifo`` or ``socket``; return its inode number."""
        if kind not in ("char", "block", "fifo", "socket"):
            raise ValueError(f"add_node does not make a {kind}")
        node = self._new(parent, name, _TYPE_OF_KIND[kind], meta)
        if kind in ("char", "block"):
            if not (0 <= major < 1 << 12 and 0 <= minor < 1 << 20):
                raise Unsupported(f"device number {major}:{minor} is out of range")
            node.rdev = (major, minor)
        return node.ino

    def add_link(self, parent: int, name: bytes, ino: int) -> None:
        """Make another name for a non-directory. Unsupported beyond 65,000 links."""
        node = self._nodes[ino]
        if node.type == c.S_IFDIR:
            raise ValueError("a directory has only one name")
        if node.nlink >= c.LINK_MAX:
            raise Unsupported(f"{name!r} would be link {node.nlink + 1} of an inode", hint=f"ext4 allows {c.LINK_MAX}")
        self._enter(parent, name, ino)
        node.nlink += 1

    def lookup(self, parent: int, name: bytes) -> int | None:
        """Return the inode number of a name, or None."""
        return self._dir(parent).get(name)

    def kind(self, ino: int) -> Kind:
        """Return what an inode is."""
        return _KIND_OF_TYPE[self._nodes[ino].type]

    def meta(self, ino: int) -> Meta:
        """Return what was given for an inode (change it with :meth:`set_meta`)."""
        return self._nodes[ino].meta

    def set_meta(self, ino: int, meta: Meta) -> None:
        """Replace what an inode says about itself."""
        self._nodes[ino].meta = meta

    def children(self, parent: int) -> Iterator[tuple[bytes, int]]:
        """Yield (name, inode number) of a directory as it is now (a copy: removing while iterating is fine)."""
        return iter(list(self._dir(parent).items()))

    def remove(self, parent: int, name: bytes, recursive: bool = True) -> None:
        """Remove a name, and the inode when it was its last.

        FileNotFoundError; OSError for a filled directory if not ``recursive``.
        """
        names = self._dir(parent)
        if name not in names:
            raise FileNotFoundError(name)
        if names[name] == c.FIRST_INO:
            raise ValueError("lost+found stays")
        node = self._nodes[names[name]]
        if node.children is not None:
            if node.children and not recursive:
                raise OSError(f"directory {name!r} is not empty")
            for child in list(node.children):
                self.remove(node.ino, child)
            self._nodes[parent].nlink -= 1
            node.nlink = 0
        else:
            node.nlink -= 1
        del names[name]
        if not node.nlink:
            if self._sink is not None and self._sink.ino == node.ino:
                self._sink.close()
            for e in reversed(node.extents):
                self._drop_from_buffer(e)
                self._space.give_back(e.physical, e.count)
            del self._nodes[node.ino]

    @property
    def fd(self) -> int:
        """The descriptor of the file that becomes the image."""
        return self._fd

    @property
    def free_blocks(self) -> int:
        """Blocks that are not taken yet.

        Directories, long symlinks and attribute blocks take theirs in :meth:`finish`.
        """
        return self._space.free()

    def _dir(self, ino: int) -> dict[bytes, int]:
        children = self._nodes[ino].children
        if children is None:
            raise NotADirectoryError(f"inode {ino}")
        return children

    def _enter(self, parent: int, name: bytes, ino: int) -> None:
        if not 0 < len(name) < 256 or name in (b".", b"..") or b"/" in name or b"\0" in name:
            raise Unsupported(f"{name!r} cannot be a file name")
        names = self._dir(parent)
        if name in names:
            raise FileExistsError(name)
        names[bytes(name)] = ino

    def _new(self, parent: int, name: bytes, kind: int, meta: Meta) -> _Node:
        if self._done:
            raise ValueError("the image is finished")
        ino = self._next_ino
        if ino > self.geometry.inodes:
            raise VolumeFull("no free inodes are left", where=str(self.path), hint="make the volume larger")
        self._enter(parent, name, ino)
        self._next_ino += 1
        node = self._nodes[ino] = _Node(ino, kind, meta, parent)
        return node

    # -- bytes ------------------------------------------------------------------------------------------------------

    def _set_size(self) -> None:
        """Give the file its size at once: a host file system that cannot hold it says so now."""
        try:
            os.ftruncate(self._fd, self._file_size)
        except OSError as e:
            raise HostError.from_os(e, str(self.path)) from e

    def _put(self, data: Buffer, offset: int = -1) -> None:
        """Buffer bytes for byte ``offset`` of the image (-1: right behind the last ones)."""
        end = self._buffer_at + len(self._buffer)
        if offset not in (-1, end):
            self._flush()
            self._buffer_at = end = offset
        if len(data) >= _BUFFER:
            self._flush()
            self._pwrite(data, end)
            self._buffer_at = end + len(data)
            return
        self._buffer += data
        if len(self._buffer) >= _BUFFER:
            self._flush()

    def _pad(self, count: int) -> None:
        self._put(bytes(count))

    def _flush(self) -> None:
        if self._buffer:
            self._pwrite(self._buffer, self._buffer_at)
            self._buffer_at += len(self._buffer)
            self._buffer = bytearray()

    def _pwrite(self, data: Buffer, offset: int) -> None:
        view = memoryview(data)
        if offset != self._unsent_end:
            self._unsent = offset
        self._unsent_end = offset + len(view)
        while view:
            try:
                done = os.pwrite(self._fd, view, offset)
            except OSError as e:
                raise HostError.from_os(e, str(self.path)) from e
            view = view[done:]
            offset += done
        if self._durable and self._unsent_end - self._unsent >= _WRITEBACK:
            hostfs.start_writeback(self._fd, self._unsent, self._unsent_end - self._unsent)
            self._unsent = self._unsent_end

    def _drop_from_buffer(self, e: Extent) -> None:
        """Forget buffered bytes of a removed run when they are the last, so that the next file may take their place."""
        start, end = e.physical * BLOCK, (e.physical + e.count) * BLOCK
        buffer_end = self._buffer_at + len(self._buffer)
        if end == buffer_end:
            if start >= self._buffer_at:
                del self._buffer[start - self._buffer_at :]
            else:
                self._buffer = bytearray()
                self._buffer_at = start

    # -- the end ----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Write everything that is not file data, make it durable and put the image in its place.

        VolumeFull, HostError.
        """
        if self._done:
            raise ValueError("the image is finished")
        if self._sink is not None:
            raise ValueError("a FileSink is still open")
        try:
            self._write_directories()
            self._write_tables(self._write_inodes(self._inode_records()))
            self._flush()
            self._punch_freed()
            try:
                with replacing(self.path) if self._replace else contextlib.nullcontext():
                    self._file.publish(durable=self._durable, replace=self._replace)
            except FileExistsError as e:
                raise HostError("the target exists", where=str(self.path), hint="--force replaces it") from e
            except OSError as e:
                raise HostError.from_os(e, str(self.path)) from e
        except BaseException:
            self.abort()
            raise
        self._done = True

    def abort(self) -> None:
        """Remove the unfinished image. Harmless when finished."""
        if not self._done:
            self._done = True
            self._file.discard()

    def __enter__(self) -> ImageBuilder:
        return self

    def __exit__(self, t: type[BaseException] | None, v: BaseException | None, tb: TracebackType | None) -> None:
        self.abort()

    def _write_blocks(self, node: _Node, blocks: list[bytes]) -> None:
        done = 0
        for start, count in self._space.take(len(blocks)):
            self._put(b"".join(blocks[done : done + count]), start * BLOCK)
            _add_extent(node.extents, done, start, count)
            done += count
        node.size = len(blocks) * BLOCK if node.type == c.S_IFDIR else node.size

    def _write_directories(self) -> None:
        nodes = self._nodes
        for node in nodes.values():
            if node.children is None:
                continue
            seed = inode_seed(self._seed, node.ino, 0)
            blocks, node.indexed = directory.build(
                node.ino,
                node.parent,
                [(name, ino, c.FT_BY_MODE[nodes[ino].type]) for name, ino in node.children.items()],
                block_size=BLOCK,
                seed=seed,
                hash_seed=self._hash_seed,
                unsigned=False,
            )
            if node.ino == c.FIRST_INO and not node.children:
                blocks += [directory.pack_leaf([], BLOCK, seed)] * (_LOST_FOUND_BLOCKS - 1)
            self._write_blocks(node, blocks)

    def _inode_records(self) -> Iterator[tuple[int, bytes]]:
        """Write long symlinks, attribute blocks and extent trees; yield (inode number, 256-byte record), ascending."""
        shared = self._plan_xattr_blocks()
        journal = self._journal_inode() if self._journal_runs else b""
        for node in self._nodes.values():  # in the order of their numbers, since none is used again
            if node.ino == c.FIRST_INO and journal:
                yield c.JOURNAL_INO, journal
            if node.type == c.S_IFLNK and len(node.target) > _FAST_SYMLINK_MAX:
                self._write_blocks(node, [node.target + bytes(BLOCK - len(node.target))])
            area = b""
            file_acl = 0
            if node.meta.xattrs:
                inside, key = shared[node.ino]
                if inside:
                    area = c.XATTR_MAGIC.to_bytes(4, "little") + xattrs.pack_area(inside, _INODE_XATTR_SPACE)[0]
                file_acl = self._xattr_block(key) if key else 0
            yield node.ino, self._inode(node, area, file_acl)

    def _plan_xattr_blocks(self) -> dict[int, tuple[list[xattrs.RawEntry], tuple[xattrs.RawEntry, ...]]]:
        """Decide which attributes lie in a block, and count how many inodes share each set."""
        out = {}
        self._xattr_users: dict[tuple[xattrs.RawEntry, ...], int] = {}
        self._xattr_open: dict[tuple[xattrs.RawEntry, ...], tuple[int, int]] = {}
        for node in self._nodes.values():
            if node.meta.xattrs:
                entries = xattrs.to_entries(node.meta.xattrs)
                inside, outside = xattrs.split_for_inode(entries, _INODE_XATTR_SPACE, _BLOCK_XATTR_SPACE)
                key = tuple(outside)
                out[node.ino] = inside, key
                if key:
                    self._xattr_users[key] = self._xattr_users.get(key, 0) + 1
        return out

    def _xattr_block(self, key: tuple[xattrs.RawEntry, ...]) -> int:
        """Return the block of a set for one more inode; a block serves up to 1024 inodes."""
        block, left = self._xattr_open.get(key, (0, 0))
        if not left:
            left = min(self._xattr_users[key], c.XATTR_REFCOUNT_MAX)
            self._xattr_users[key] -= left
            ((block, _),) = self._space.take(1)
            raw = xattrs.pack_block(list(key), BLOCK, left)
            checksum = xattr_block_checksum(self._seed, block, raw)
            at = XattrHeader.OFFSET_h_checksum
            self._put(raw[:at] + checksum.to_bytes(4, "little") + raw[at + 4 :], block * BLOCK)
        self._xattr_open[key] = block, left - 1
        return block

    def _extent_root(self, extents: list[Extent], seed: int) -> tuple[bytes, int]:
        """Write the tree blocks; return ``i_block`` and how many blocks the tree takes."""
        extents = split_long(extents)
        need = tree_blocks_needed(len(extents), BLOCK)
        numbers = [s + i for s, n in self._space.take(need) for i in range(n)]
        root, blocks = build_tree(extents, numbers, BLOCK, seed)
        for number, content in blocks:
            self._put(content, number * BLOCK)
        return root, need

    def _inode(self, node: _Node, area: bytes, file_acl: int) -> bytes:
        meta, ino = node.meta, node.ino
        seed = inode_seed(self._seed, ino, 0)
        flags, block, tree = 0, bytes(60), 0
        if node.type in (c.S_IFREG, c.S_IFDIR) or node.extents:
            flags = c.EXTENTS_FL
            block, tree = self._extent_root(node.extents, seed)
        elif node.type == c.S_IFLNK:
            block = node.target + bytes(60 - len(node.target))
        elif node.type in (c.S_IFCHR, c.S_IFBLK):
            block = encode_rdev(*node.rdev) + bytes(52)
        if node.indexed:
            flags |= c.INDEX_FL
        blocks = (sum(e.count for e in node.extents) + tree + bool(file_acl)) * (BLOCK // 512)
        if blocks >= _HUGE_SECTORS:
            flags |= c.HUGE_FILE_FL
            blocks //= BLOCK // 512
        mtime, mtime_extra = encode_time(meta.mtime_ns)
        atime, atime_extra = (mtime, mtime_extra) if meta.atime_ns is None else encode_time(meta.atime_ns)
        ctime, ctime_extra = (mtime, mtime_extra) if meta.ctime_ns is None else encode_time(meta.ctime_ns)
        crtime, crtime_extra = encode_time(self._time * _NS)
        nlink = 1 if node.type == c.S_IFDIR and node.nlink > c.LINK_MAX - 1 else node.nlink
        raw = Inode(
            i_mode=node.type | meta.mode & 0o7777,
            i_uid=meta.uid & 0xFFFF,
            i_size_lo=node.size & 0xFFFFFFFF,
            i_atime=atime,
            i_ctime=ctime,
            i_mtime=mtime,
            i_gid=meta.gid & 0xFFFF,
            i_links_count=nlink,
            i_blocks_lo=blocks & 0xFFFFFFFF,
            i_flags=flags,
            i_block=block,
            i_file_acl_lo=file_acl & 0xFFFFFFFF,
            i_size_high=node.size >> 32,
            l_i_blocks_high=blocks >> 32,
            l_i_file_acl_high=file_acl >> 32,
            l_i_uid_high=meta.uid >> 16,
            l_i_gid_high=meta.gid >> 16,
            i_extra_isize=_EXTRA_ISIZE,
            i_ctime_extra=ctime_extra,
            i_mtime_extra=mtime_extra,
            i_atime_extra=atime_extra,
            i_crtime=crtime,
            i_crtime_extra=crtime_extra,
        ).pack()
        return _seal_inode(raw + area, seed)

    def _journal_inode(self) -> bytes:
        """Write the journal's superblock; return its inode (and keep what the superblock backs up of it)."""
        blocks = self.geometry.journal_blocks
        node = _Node(c.JOURNAL_INO, c.S_IFREG, Meta(0o600, mtime_ns=self._time * _NS), size=blocks * BLOCK)
        done = 0
        for start, count in self._journal_runs:
            _add_extent(node.extents, done, start, count)
            done += count
        head = JournalSuperBlock(
            h_magic=c.JBD2_MAGIC,
            h_blocktype=c.JBD2_SUPERBLOCK_V2,
            s_blocksize=BLOCK,
            s_maxlen=blocks,
            s_first=1,
            s_sequence=1,
            s_uuid=self.uuid.bytes,
            s_feature_incompat=0x2 | 0x10,  # 64bit, csum_v3
            s_nr_users=1,
            s_checksum_type=c.JBD2_CRC32C,
        )
        head.s_checksum = crc32c(0xFFFFFFFF, head.pack())
        self._put(head.pack() + bytes(BLOCK - JournalSuperBlock.SIZE), self._journal_runs[0][0] * BLOCK)
        raw = self._inode(node, b"", 0)
        self._journal_backup = (*Struct("<15I").unpack(raw[40:100]), node.size >> 32, node.size & 0xFFFFFFFF)
        return raw

    def _write_tables(self, inodes: dict[int, tuple[bytes, int, int]]) -> None:
        """Write bitmaps, descriptors and superblocks, with their copies; ``inodes`` is :meth:`_write_inodes`'s."""
        geo = self.geometry
        per = geo.inodes_per_group
        directories: dict[int, int] = {}
        for node in self._nodes.values():
            if node.children is not None:
                group = (node.ino - 1) // per
                directories[group] = directories.get(group, 0) + 1
        bitmaps = self._block_bitmaps()
        free_blocks_total = free_inodes_total = 0
        descriptors = []
        last = geo.groups - 1
        for group in range(geo.groups):
            size = geo.group_size(group)
            flags = c.BG_INODE_ZEROED
            block_checksum = inode_checksum = 0
            bitmap = bitmaps.get(group)
            if bitmap is None and group != last and group % FLEX:
                flags |= c.BG_BLOCK_UNINIT
                free_blocks = size - geo.overhead(group)
            else:
                raw, free_blocks = self._block_bitmap(group, bitmap)
                block_checksum = crc32c(self._seed, raw)
                self._put(raw, geo.block_bitmap(group) * BLOCK)
            taken = inodes.get(group)
            if taken is None:
                flags |= c.BG_INODE_UNINIT
                free_inodes = unused = per
            else:
                raw, free_inodes, unused = taken
                inode_checksum = crc32c(self._seed, raw[: per // 8])
                self._put(raw, geo.inode_bitmap(group) * BLOCK)
            free_blocks_total += free_blocks
            free_inodes_total += free_inodes
            descriptors.append(
                self._descriptor(
                    group,
                    flags=flags,
                    free_blocks=free_blocks,
                    free_inodes=free_inodes,
                    unused=unused,
                    directories=directories.get(group, 0),
                    block_checksum=block_checksum,
                    inode_checksum=inode_checksum,
                )
            )
        self._write_superblocks(b"".join(descriptors), free_blocks_total, free_inodes_total)

    def _write_inodes(self, records: Iterator[tuple[int, bytes]]) -> dict[int, tuple[bytes, int, int]]:
        """Write the inode tables as far as they are used.

        ``records`` are (inode number, record), ascending. Returns what :func:`_inode_bitmap` says of each group used.
        """
        geo = self.geometry
        bitmaps: dict[int, tuple[bytes, int, int]] = {}
        current, table = 0, bytearray((c.FIRST_INO - 1) * INODE_SIZE)
        used = list(range(c.FIRST_INO - 1))

        def end_group() -> None:
            bitmaps[current] = _inode_bitmap(used, geo.inodes_per_group)
            self._put(table + bytes(-len(table) % BLOCK), geo.inode_table(current) * BLOCK)

        for ino, raw in records:
            group, index = divmod(ino - 1, geo.inodes_per_group)
            if group != current:
                end_group()
                current, table, used = group, bytearray(), []
            at = index * INODE_SIZE
            if len(table) < at:
                table += bytes(at - len(table))
            table[at : at + INODE_SIZE] = raw
            if ino >= c.FIRST_INO:
                used.append(index)
        end_group()
        return bitmaps

    def _block_bitmaps(self) -> dict[int, bytearray]:
        """Return the bitmaps of the groups with taken blocks, without the groups' own metadata."""
        bitmaps: dict[int, bytearray] = {}
        for start, count, used in self._space.log:
            at, end = start, start + count
            while at < end:
                group, bit = divmod(at, BLOCKS_PER_GROUP)
                run = min(end - at, BLOCKS_PER_GROUP - bit)
                _set_bits(bitmaps.setdefault(group, bytearray(BLOCK)), bit, run, bool(used))
                at += run
        return {group: bitmap for group, bitmap in bitmaps.items() if any(bitmap)}

    def _block_bitmap(self, group: int, bitmap: bytearray | None) -> tuple[bytes, int]:
        """Return the full bitmap of a group, its metadata and the padding marked, and the number of free blocks."""
        bitmap = bytearray(BLOCK) if bitmap is None else bitmap
        size = self.geometry.group_size(group)
        _set_bits(bitmap, 0, self.geometry.overhead(group), True)
        _set_bits(bitmap, size, BLOCKS_PER_GROUP - size, True)
        return bytes(bitmap), BLOCKS_PER_GROUP - int.from_bytes(bitmap, "little").bit_count()

    def _descriptor(
        self,
        group: int,
        *,
        flags: int,
        free_blocks: int,
        free_inodes: int,
        unused: int,
        directories: int,
        block_checksum: int,
        inode_checksum: int,
    ) -> bytes:
        geo = self.geometry
        block_bitmap, inode_bitmap, table = geo.block_bitmap(group), geo.inode_bitmap(group), geo.inode_table(group)
        raw = GroupDesc(
            bg_block_bitmap_lo=block_bitmap & 0xFFFFFFFF,
            bg_inode_bitmap_lo=inode_bitmap & 0xFFFFFFFF,
            bg_inode_table_lo=table & 0xFFFFFFFF,
            bg_free_blocks_count_lo=free_blocks & 0xFFFF,
            bg_free_inodes_count_lo=free_inodes & 0xFFFF,
            bg_used_dirs_count_lo=directories & 0xFFFF,
            bg_flags=flags,
            bg_block_bitmap_csum_lo=block_checksum & 0xFFFF,
            bg_inode_bitmap_csum_lo=inode_checksum & 0xFFFF,
            bg_itable_unused_lo=unused & 0xFFFF,
            bg_block_bitmap_hi=block_bitmap >> 32,
            bg_inode_bitmap_hi=inode_bitmap >> 32,
            bg_inode_table_hi=table >> 32,
            bg_free_blocks_count_hi=free_blocks >> 16,
            bg_free_inodes_count_hi=free_inodes >> 16,
            bg_used_dirs_count_hi=directories >> 16,
            bg_itable_unused_hi=unused >> 16,
            bg_block_bitmap_csum_hi=block_checksum >> 16,
            bg_inode_bitmap_csum_hi=inode_checksum >> 16,
        ).pack()
        checksum = group_desc_checksum(self._seed, group, raw)
        return raw[: GroupDesc.OFFSET_bg_checksum] + _CSUM.pack(checksum) + raw[GroupDesc.OFFSET_bg_checksum + 2 :]

    def _write_superblocks(self, table: bytes, free_blocks: int, free_inodes: int) -> None:
        geo = self.geometry
        overhead = sum(geo.overhead(g) for g in range(geo.groups)) + geo.journal_blocks
        journal = bool(geo.journal_blocks)
        sb = SuperBlock(
            s_inodes_count=geo.inodes,
            s_blocks_count_lo=geo.blocks & 0xFFFFFFFF,
            s_blocks_count_hi=geo.blocks >> 32,
            s_free_blocks_count_lo=free_blocks & 0xFFFFFFFF,
            s_free_blocks_count_hi=free_blocks >> 32,
            s_free_inodes_count=free_inodes,
            s_log_block_size=2,
            s_log_cluster_size=2,
            s_blocks_per_group=BLOCKS_PER_GROUP,
            s_clusters_per_group=BLOCKS_PER_GROUP,
            s_inodes_per_group=geo.inodes_per_group,
            s_wtime=self._time & 0xFFFFFFFF,
            s_wtime_hi=self._time >> 32 & 0xFF,
            s_mkfs_time=self._time & 0xFFFFFFFF,
            s_mkfs_time_hi=self._time >> 32 & 0xFF,
            s_lastcheck=self._time & 0xFFFFFFFF,
            s_lastcheck_hi=self._time >> 32 & 0xFF,
            s_max_mnt_count=0xFFFF,
            s_magic=c.MAGIC,
            s_state=c.STATE_VALID,
            s_errors=1,
            s_rev_level=1,
            s_first_ino=c.FIRST_INO,
            s_inode_size=INODE_SIZE,
            s_feature_compat=PROFILE.compat | (c.COMPAT_HAS_JOURNAL if journal else 0),
            s_feature_incompat=PROFILE.incompat,
            s_feature_ro_compat=PROFILE.ro_compat,
            s_uuid=self.uuid.bytes,
            s_volume_name=self._label,
            s_journal_inum=c.JOURNAL_INO if journal else 0,
            s_hash_seed=self._hash_seed,
            s_def_hash_version=1,
            s_jnl_backup_type=1 if journal else 0,
            s_jnl_blocks=self._journal_backup if journal else (0,) * 17,
            s_desc_size=DESC_SIZE,
            s_default_mount_opts=c.DEFM_XATTR_USER | c.DEFM_ACL,
            s_min_extra_isize=_EXTRA_ISIZE,
            s_want_extra_isize=_EXTRA_ISIZE,
            s_flags=c.FLAG_SIGNED_HASH,
            s_log_groups_per_flex=FLEX.bit_length() - 1,
            s_checksum_type=1,
            s_checksum_seed=self._seed,
            s_overhead_blocks=overhead & 0xFFFFFFFF,
        )
        for group in range(geo.groups):
            if not has_sparse_super(group):
                continue
            sb.s_block_group_nr = group & 0xFFFF
            sb.s_checksum = superblock_checksum(sb.pack())
            head = sb.pack()
            if group == 0:
                head = bytes(c.SUPERBLOCK_OFFSET) + head
            padding = BLOCK * (1 + geo.gdt_blocks) - BLOCK - len(table)
            self._put(head + bytes(BLOCK - len(head)) + table + bytes(padding), geo.first_block(group) * BLOCK)

    def _punch_freed(self) -> None:
        """Make holes of blocks that removed files left behind."""
        for start, count in self._space.freed:
            hostfs.punch(self._fd, start * BLOCK, count * BLOCK)


def encode_time(ns: int) -> tuple[int, int]:
    """Return (signed low 32 bits of the seconds, extra word) of a time.

    Beyond what ext4 holds (1901 to 2446) it is clamped.
    """
    seconds, nanos = divmod(ns, _NS)
    if not -(1 << 31) <= seconds < (1 << 34) - (1 << 31):
        seconds, nanos = (-(1 << 31), 0) if seconds < 0 else ((1 << 34) - (1 << 31) - 1, 0)
    low = (seconds + (1 << 31) & 0xFFFFFFFF) - (1 << 31)
    return low, nanos << 2 | (seconds - low) >> 32


def encode_rdev(major: int, minor: int) -> bytes:
    """Return the first 8 bytes of a device's ``i_block``: the old form where it fits, else zero and the new form."""
    if major < 256 and minor < 256:
        return (major << 8 | minor).to_bytes(8, "little")
    return bytes(4) + (minor & 0xFF | major << 8 | (minor & ~0xFF) << 12).to_bytes(4, "little")


def _seal_inode(raw: bytes, seed: int) -> bytes:
    """Pad a record to the inode's size and put its checksum in (both fields are zero so far)."""
    raw += bytes(INODE_SIZE - len(raw))
    checksum = crc32c(seed, raw)
    low, high = Inode.OFFSET_l_i_checksum_lo, Inode.OFFSET_i_checksum_hi
    return (
        raw[:low] + _CSUM.pack(checksum & 0xFFFF) + raw[low + 2 : high] + _CSUM.pack(checksum >> 16) + raw[high + 2 :]
    )


def _set_bits(bitmap: bytearray, first: int, count: int, value: bool) -> None:
    """Set or clear ``count`` bits from bit ``first`` on."""
    if count <= 0:
        return
    last = first + count
    head, tail = -(-first // 8), last // 8
    head = min(head, tail)  # all within one byte
    mask = 0xFF if value else 0
    if tail > head:
        bitmap[head:tail] = bytes([mask]) * (tail - head)
    edges = list(range(first, min(head * 8, last))) + list(range(max(tail * 8, first), last))
    for bit in edges:
        if value:
            bitmap[bit >> 3] |= 1 << (bit & 7)
        else:
            bitmap[bit >> 3] &= ~(1 << (bit & 7)) & 0xFF


def _inode_bitmap(used: list[int], per_group: int) -> tuple[bytes, int, int]:
    """Return (bitmap with padding marked, free inodes, inodes behind the last used one)."""
    bitmap = bytearray(BLOCK)
    for index in used:
        bitmap[index >> 3] |= 1 << (index & 7)
    bitmap[per_group // 8 :] = b"\xff" * (BLOCK - per_group // 8)
    return bytes(bitmap), per_group - len(used), per_group - 1 - max(used)


__all__ = ["Ext4LiteError", "FileSink", "ImageBuilder", "Kind", "Meta"]
