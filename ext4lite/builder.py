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

import hashlib
import os
import time
import uuid as uuids
from collections.abc import Iterable, Iterator
from struct import Struct
from types import TracebackType

from ext4lite import inode
from ext4lite.blockdev import check_target, target_path
from ext4lite.building.attributes import AttributeBlocks
from ext4lite.building.directories import DirectoryWriter
from ext4lite.building.inode_tables import write_inode_tables
from ext4lite.building.inodes import NO_BODY, Body, Inodes, Meta, device_body, directory_body
from ext4lite.building.names import Names
from ext4lite.building.output import Output
from ext4lite.building.records import Records
from ext4lite.building.sink import FileSink, add_extent
from ext4lite.building.space import Space
from ext4lite.building.tables import Identity, Tables
from ext4lite.checksum import crc32c, fs_seed
from ext4lite.errors import Ext4LiteError, Unsupported, VolumeFull
from ext4lite.extents import Extent
from ext4lite.geometry import BLOCK, plan
from ext4lite.inode import KIND_OF_TYPE, Kind
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import JournalSuperBlock

_TYPE_OF_KIND = {kind: number for number, kind in KIND_OF_TYPE.items()}
_FAST_SYMLINK_MAX = 59
_NS = 1_000_000_000
_NO_BACKUP = (0,) * 17
_I_BLOCK = Struct("<15I")


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
        self._label = os.fsencode(label)
        if len(self._label) > 16:
            raise Unsupported(f"label {label!r} is longer than 16 bytes")
        self._time = int(time.time()) if timestamp is None else timestamp
        self._seed = fs_seed(self.uuid.bytes)
        digest = hashlib.sha256(b"ext4lite directory hash seed" + self.uuid.bytes).digest()
        self._hash_seed = tuple(int.from_bytes(digest[i : i + 4], "little") for i in range(0, 16, 4))
        self._space = Space(self.geometry, str(self.path))
        self._inodes = Inodes()
        self._names = Names()
        self._next_ino = c.FIRST_INO
        self._sink: FileSink | None = None
        self._done = False
        self._replace = check_target(self.path, force=force) or force
        self._output = Output(self.path, size, durable=durable)
        try:
            journal = self.geometry.journal_blocks
            self._journal_runs = self._space.take_contiguous(journal) if journal else []
            now = self._time * _NS
            self._inodes.add(c.ROOT_INO, c.S_IFDIR, Meta(0o755, mtime_ns=now), directory_body(c.ROOT_INO), 2)
            self.add_dir(c.ROOT_INO, b"lost+found", Meta(0o700, mtime_ns=now))
        except BaseException:
            self.abort()
            raise

    # -- the namespace ----------------------------------------------------------------------------------------------

    def add_dir(self, parent: int, name: bytes, meta: Meta) -> int:
        """Make a directory and return its inode number. FileExistsError when the name is taken."""
        ino = self._new(parent, name, c.S_IFDIR, meta, directory_body(parent), 2)
        self._inodes.set_links(parent, self._inodes.links(parent) + 1)
        return ino

    def add_file(self, parent: int, name: bytes, meta: Meta, size_hint: int = -1) -> FileSink:
        """Make a regular file and return the sink for its bytes (``size_hint`` is only a hint).

        The sink before must be closed.
        """
        if self._sink is not None:
            raise ValueError("another FileSink is still open")
        ino = self._new(parent, name, c.S_IFREG, meta)
        self._sink = FileSink(ino, self._space, self._output, self._closed)
        return self._sink

    def add_symlink(self, parent: int, name: bytes, target: bytes, meta: Meta) -> int:
        """Make a symlink and return its inode number. Unsupported unless the target has 1 to 4095 bytes."""
        if not 0 < len(target) < BLOCK:
            raise Unsupported(f"symlink {name!r} has a target of {len(target)} bytes")
        return self._new(parent, name, c.S_IFLNK, meta, self._inodes.symlink_body(target))

    def add_node(  # noqa: PLR0917 (as in the published interface)
        self, parent: int, name: bytes, meta: Meta, kind: Kind, major: int = 0, minor: int = 0
    ) -> int:
        """Make a device (``char`` or ``block`` with its numbers), ``fifo`` or ``socket``; return its inode number."""
        if kind not in ("char", "block", "fifo", "socket"):
            raise ValueError(f"add_node does not make a {kind}")
        device = kind in ("char", "block")
        if device and not (0 <= major < 1 << 12 and 0 <= minor < 1 << 20):
            raise Unsupported(f"device number {major}:{minor} is out of range")
        body = device_body(major, minor) if device else NO_BODY
        return self._new(parent, name, _TYPE_OF_KIND[kind], meta, body)

    def add_link(self, parent: int, name: bytes, ino: int) -> None:
        """Make another name for a non-directory. Unsupported beyond 65,000 links."""
        if self._inodes.type(ino) == c.S_IFDIR:
            raise ValueError("a directory has only one name")
        links = self._inodes.links(ino)
        if links >= c.LINK_MAX:
            raise Unsupported(f"{name!r} would be link {links + 1} of an inode", hint=f"ext4 allows {c.LINK_MAX}")
        self._enter(parent, name, ino)
        self._inodes.set_links(ino, links + 1)

    def lookup(self, parent: int, name: bytes) -> int | None:
        """Return the inode number of a name, or None."""
        self._check_directory(parent)
        return self._names.find(parent, name) or None

    def kind(self, ino: int) -> Kind:
        """Return what an inode is."""
        return KIND_OF_TYPE[self._inodes.type(ino)]

    def meta(self, ino: int) -> Meta:
        """Return what an inode says about itself (change it with :meth:`set_meta`)."""
        return self._inodes.meta(ino)

    def set_meta(self, ino: int, meta: Meta) -> None:
        """Replace what an inode says about itself."""
        self._inodes.set_meta(ino, meta)

    def children(self, parent: int) -> Iterator[tuple[bytes, int]]:
        """Yield (name, inode number) of what is in a directory, in the order in which it came.

        Adding and removing meanwhile is fine: what is added then is not seen, nor what is removed before its turn.
        """
        self._check_directory(parent)
        names = self._names
        return ((names.name(entry), ino) for entry, ino in names.children(parent))

    def remove(self, parent: int, name: bytes, recursive: bool = True) -> None:
        """Remove a name, and the inode when it was its last.

        FileNotFoundError; OSError for a filled directory if not ``recursive``.
        """
        ino = self.lookup(parent, name)
        if ino is None:
            raise FileNotFoundError(name)
        if ino == c.FIRST_INO:
            raise ValueError("lost+found stays")
        if not recursive and self.kind(ino) == "dir" and any(self.children(ino)):
            raise OSError(f"directory {name!r} is not empty")
        # A directory goes when all in it is gone; the way down is a list, since it can be long.
        way = [(parent, name, ino, self._below(ino))]
        while way:
            above, name, ino, below = way[-1]
            child = next(below, None)
            if child is None:
                way.pop()
                self._remove_one(above, name, ino)
            else:
                way.append((ino, *child, self._below(child[1])))

    @property
    def fd(self) -> int:
        """The descriptor of the file that becomes the image."""
        return self._output.fd

    @property
    def free_blocks(self) -> int:
        """Blocks that are not taken yet.

        Directories, long symlinks and attribute blocks take theirs in :meth:`finish`.
        """
        return self._space.free()

    def _check_directory(self, ino: int) -> None:
        if self._inodes.type(ino) != c.S_IFDIR:
            raise NotADirectoryError(f"inode {ino}")

    def _enter(self, parent: int, name: bytes, ino: int) -> None:
        if not 0 < len(name) < 256 or name in (b".", b"..") or b"/" in name or b"\0" in name:
            raise Unsupported(f"{name!r} cannot be a file name")
        self._check_directory(parent)
        if not self._names.add(parent, name, ino):
            raise FileExistsError(name)

    def _new(  # noqa: PLR0917 (the hot path of each add_ method)
        self, parent: int, name: bytes, kind: int, meta: Meta, body: Body = NO_BODY, links: int = 1
    ) -> int:
        if self._done:
            raise ValueError("the image is finished")
        ino = self._next_ino
        if ino > self.geometry.inodes:
            raise VolumeFull("no free inodes are left", where=str(self.path), hint="make the volume larger")
        self._enter(parent, name, ino)
        try:
            self._inodes.add(ino, kind, meta, body, links)
        except BaseException:
            self._names.remove(parent, name)
            raise
        self._next_ino += 1
        return ino

    def _closed(self, ino: int, size: int, extents: list[Extent]) -> None:
        """Note what a sink has written (it is the only one)."""
        self._sink = None
        self._inodes.set_content(ino, size, extents)

    def _below(self, ino: int) -> Iterator[tuple[bytes, int]]:
        """Return the children of a directory, and of anything else that it has none."""
        return self.children(ino) if self._inodes.type(ino) == c.S_IFDIR else iter(())

    def _remove_one(self, parent: int, name: bytes, ino: int) -> None:
        """Remove the name of an inode that has nothing below it."""
        inodes = self._inodes
        self._names.remove(parent, name)
        kind = inodes.type(ino)
        if kind == c.S_IFDIR:
            inodes.set_links(parent, inodes.links(parent) - 1)
            self._names.forget(ino)
        elif inodes.links(ino) > 1:
            inodes.set_links(ino, inodes.links(ino) - 1)
            return
        if self._sink is not None and self._sink.ino == ino:
            self._sink.close()
        if kind == c.S_IFREG:
            for e in reversed(inodes.extents(inodes.body(ino))):
                self._output.forget(e.physical, e.count)
                self._space.give_back(e.physical, e.count)
        inodes.drop(ino)

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
            self._write_metadata()
            self._output.flush()
            for start, count in self._space.freed:  # what removed files left behind becomes holes
                self._output.punch(start, count)
            self._output.publish(replace=self._replace)
        except BaseException:
            self.abort()
            raise
        self._done = True

    def abort(self) -> None:
        """Remove the unfinished image. Harmless when finished."""
        if not self._done:
            self._done = True
            self._output.discard()

    def __enter__(self) -> ImageBuilder:
        return self

    def __exit__(self, t: type[BaseException] | None, v: BaseException | None, tb: TracebackType | None) -> None:
        self.abort()

    def _write_metadata(self) -> None:
        put, geometry = self._output.put, self.geometry
        directories = DirectoryWriter(self._inodes, self._names, seed=self._seed, hash_seed=self._hash_seed)
        for ino in self._inodes.directories():
            count, blocks, indexed = directories.blocks(ino)
            extents = self._write_blocks(count, blocks)
            self._inodes.set_content(ino, count * BLOCK, extents, indexed=indexed)
        self._journal_backup: tuple[int, ...] = _NO_BACKUP
        groups = write_inode_tables(geometry, self._inode_records(), put)
        identity = Identity(self.uuid.bytes, self._label, self._time, self._hash_seed)
        tables = Tables(geometry, identity, seed=self._seed, journal_backup=self._journal_backup, put=put)
        tables.write(groups, self._space.log)

    def _write_blocks(self, count: int, blocks: Iterable[bytes]) -> list[Extent]:
        """Write so many blocks to free ones and return where they are."""
        extents: list[Extent] = []
        content = iter(blocks)
        done = 0
        for start, length in self._space.take(count):
            for number in range(start, start + length):
                self._output.put(next(content), number * BLOCK)
            add_extent(extents, done, start, length)
            done += length
        return extents

    def _take_numbers(self, count: int) -> list[int]:
        return [start + i for start, length in self._space.take(count) for i in range(length)]

    def _inode_records(self) -> Iterator[tuple[int, bool, bytes]]:
        """Write long symlinks, attribute blocks and extent trees.

        Yields (inode number, whether it is a directory, record of 256 bytes), ascending.
        """
        inodes, put = self._inodes, self._output.put
        attributes = AttributeBlocks(inodes, self._seed, lambda: self._take_numbers(1)[0], put)
        attributes.count()
        records = Records(inodes, seed=self._seed, created_ns=self._time * _NS, take=self._take_numbers, put=put)
        journal = b""
        if self._journal_runs:
            self._write_journal()
            known = inodes.known(c.JOURNAL_INO)
            journal = records.record(c.JOURNAL_INO, known, b"", 0)
            self._journal_backup = (*_I_BLOCK.unpack(journal[40:100]), known.size >> 32, known.size & 0xFFFFFFFF)
        for ino in inodes:  # ascending, so that blocks are taken in this order
            if ino == c.JOURNAL_INO:
                yield ino, False, journal
                continue
            known = inodes.known(ino)
            if known.type == c.S_IFLNK and known.size > _FAST_SYMLINK_MAX:
                target = inodes.target(known.body)
                extents = self._write_blocks(1, [target + bytes(BLOCK - len(target))])
                inodes.set_content(ino, known.size, extents)
                known = inodes.known(ino)
            area, file_acl = attributes.place(known.extra) if known.extra else (b"", 0)
            yield ino, known.type == c.S_IFDIR, records.record(ino, known, area, file_acl)

    def _write_journal(self) -> None:
        """Write the journal's superblock and note its inode."""
        blocks = self.geometry.journal_blocks
        extents: list[Extent] = []
        done = 0
        for start, count in self._journal_runs:
            add_extent(extents, done, start, count)
            done += count
        self._inodes.add(c.JOURNAL_INO, c.S_IFREG, Meta(0o600, mtime_ns=self._time * _NS))
        self._inodes.set_content(c.JOURNAL_INO, blocks * BLOCK, extents)
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
        self._output.put(head.pack() + bytes(BLOCK - JournalSuperBlock.SIZE), self._journal_runs[0][0] * BLOCK)


def encode_time(ns: int) -> tuple[int, int]:
    """Return (signed low 32 bits of the seconds, extra word) of a time.

    Beyond what ext4 holds (1901 to 2446) it is clamped.
    """
    return inode.encode_time(ns, wide=True)


def encode_rdev(major: int, minor: int) -> bytes:
    """Return the first 8 bytes of a device's ``i_block``: the old form where it fits, else zero and the new form."""
    return inode.encode_rdev(major, minor)[:8]


__all__ = ["Ext4LiteError", "FileSink", "ImageBuilder", "Kind", "Meta", "encode_rdev", "encode_time"]
