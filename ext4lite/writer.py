"""A volume open for reading and writing: the tree of names.

    with Volume.open("image.ext4", mode="rw") as v:
        v.mkdir("/etc")
        ino = v.create("/etc/hostname", mode=0o644)
        v.pwrite(ino, 0, b"box\\n")
        v.rename("/etc/hostname", "/etc/name")
        v.sync()

Paths are bytes or text (encoded as file names), from the volume's root; symlinks on the way are followed inside the
volume, one at the end is not, unless a method says so. Every operation is all or nothing: when it raises, the volume is
as it was. Nobody's permissions are checked: the caller is root, who may use reserved blocks, too. What a directory
hands down is handed down: the group with the set-group-id bit, default ACLs, and the flags that ext4 inherits.
Immutable and append-only flags bind, as they bind root, unless ``flags_bind`` is set to False.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ext4lite import directory, paths
from ext4lite.blockdev import StrPath, lock_exclusive, open_image, remove_record
from ext4lite.checksum import inode_seed
from ext4lite.dirnames import NamesOnDisk
from ext4lite.dirwrite import DirState, DirWriter, Name
from ext4lite.errors import (
    Busy,
    CorruptImage,
    Exists,
    Invalid,
    IsADirectory,
    NameTooLong,
    NotADirectory,
    NotEmpty,
    NotFound,
    NotPermitted,
    PathError,
    TooManyLinks,
    Unsupported,
)
from ext4lite.extents import Extent
from ext4lite.inode import InodeRecord, encode_rdev
from ext4lite.jbd2.log import Blocks, FileBlocks
from ext4lite.jbd2.transaction import TransactionTooLarge
from ext4lite.layout import constants as c
from ext4lite.orphans import OrphanVolume
from ext4lite.super import Super, read_super

NodeKind = Literal["char", "block", "fifo", "socket"]
RenameHow = Literal["replace", "noreplace", "exchange", "whiteout"]
Path = str | bytes

_NODE_TYPES: dict[NodeKind, int] = {
    "char": c.S_IFCHR,
    "block": c.S_IFBLK,
    "fifo": c.S_IFIFO,
    "socket": c.S_IFSOCK,
}
_MAX_NAME = 255
_SPECIAL = (b"", b".", b"..")
_FAST_SYMLINK = 60
_DIRECTORIES_KEPT = 256
_NAMES_KEPT = 100_000
_LARGE_DIRECTORY = 1 << 20
"""Bytes from which a directory with an index is not held in memory."""
_TRIM_EVERY = 64
_SGID = 0o2000
_INHERITED_FLAGS = 0x1 | 0x2 | 0x4 | 0x8 | 0x40 | 0x80 | 0x4000 | 0x8000 | 0x10000 | 0x20000000
"""Flags that a directory passes on (EXT4_FL_INHERITED)."""
_INHERITED_BY_FILES = _INHERITED_FLAGS & ~(0x10000 | 0x20000000)
_INHERITED_BY_OTHERS = 0x40 | 0x80

WRITE_INCOMPAT = (
    c.INCOMPAT_FILETYPE
    | c.INCOMPAT_RECOVER
    | c.INCOMPAT_EXTENTS
    | c.INCOMPAT_64BIT
    | c.INCOMPAT_FLEX_BG
    | c.INCOMPAT_CSUM_SEED
    | c.INCOMPAT_LARGE_DIR
    | c.INCOMPAT_EA_INODE
)
WRITE_RO_COMPAT = (
    c.RO_SPARSE_SUPER
    | c.RO_LARGE_FILE
    | c.RO_HUGE_FILE
    | c.RO_GDT_CSUM
    | c.RO_DIR_NLINK
    | c.RO_EXTRA_ISIZE
    | c.RO_METADATA_CSUM
    | c.RO_ORPHAN_PRESENT
)


@dataclass(slots=True)
class StatFs:
    """Sizes of a volume: counts of blocks and inodes, ``block_size`` in bytes. ``reserved`` blocks are root's."""

    block_size: int
    blocks: int
    free_blocks: int
    reserved_blocks: int
    inodes: int
    free_inodes: int


def require_writable(sb: Super) -> None:
    """Raise Unsupported, naming the features, unless this version can write to such a volume."""
    names = c.feature_names(sb.incompat & ~WRITE_INCOMPAT, c.INCOMPAT, "I")
    names += c.feature_names(sb.ro_compat & ~WRITE_RO_COMPAT, c.RO_COMPAT, "R")
    if names:
        what = f"a volume with {', '.join(names)} can only be read"
        raise Unsupported(what, where=sb.where, hint="open it read-only")


class File:
    """An open regular file of a writable volume; a context manager. Deleted meanwhile, it lives until it is closed."""

    def __init__(self, volume: WritableVolume, ino: int) -> None:
        self.ino = ino
        self._volume: WritableVolume | None = volume

    @property
    def _open(self) -> WritableVolume:
        if self._volume is None:
            raise Invalid("the file is closed")
        return self._volume

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._open.inode(self.ino).size

    def pread(self, length: int, offset: int) -> bytes:
        """Return up to ``length`` bytes from ``offset``; short at the file's end."""
        record = self._open.inode(self.ino)
        return b"".join(self._open._chunks(record, offset, length))

    def pwrite(self, data: bytes, offset: int) -> int:
        """See :meth:`WritableVolume.pwrite`."""
        return self._open.pwrite(self.ino, offset, data)

    def truncate(self, size: int) -> None:
        """See :meth:`WritableVolume.truncate`."""
        self._open.truncate(self.ino, size)

    def close(self) -> None:
        """Close it. Harmless when called again."""
        volume, self._volume = self._volume, None
        if volume is not None:
            volume._file_closed(self)

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class WritableVolume(OrphanVolume):
    """An image open for reading and writing, under an exclusive lock. Not thread-safe. Made by ``Volume.open``."""

    def __init__(
        self, fd: int, sb: Super, where: str, *, blocks: Blocks, clock: Callable[[], int] | None = None
    ) -> None:
        if clock is None:
            super().__init__(fd, sb, where, blocks=blocks)
        else:
            super().__init__(fd, sb, where, blocks=blocks, clock=clock)
        self._states: OrderedDict[int, DirState] = OrderedDict()
        self._operations = 0
        self._files: dict[int, set[File]] = {}

    @classmethod
    def open_for_writing(
        cls,
        path: StrPath,
        *,
        clock: Callable[[], int] | None = None,
        device: Callable[[Blocks], Blocks] | None = None,
        command: str = "",
    ) -> WritableVolume:
        """See :meth:`ext4lite.volume.Volume.open`. ``device`` may wrap the blocks that are written to (for tests)."""
        where = os.fspath(path)
        fd = open_image(path, write=True)
        try:
            lock_exclusive(fd, path, command)
        except BaseException:
            os.close(fd)
            raise
        try:
            sb = read_super(fd, where, torn=True)
            require_writable(sb)
            if sb.needs_recovery:
                from ext4lite.recover import recover_locked

                recover_locked(fd, where)
                sb = read_super(fd, where)
            sb.require_clean()
            blocks: Blocks = FileBlocks(fd, sb.block_size, where)
            volume = cls(fd, sb, where, blocks=blocks if device is None else device(blocks), clock=clock)
            volume.start_journal()
            return volume
        except BaseException:
            remove_record(path)
            os.close(fd)
            raise

    def __enter__(self) -> WritableVolume:
        return self

    # -- directories in memory --------------------------------------------------------------------------------------

    def _state(self, ino: int) -> DirState:
        found = self._states.get(ino)
        if found is not None:
            self._states.move_to_end(ino)
            return found
        record = self._live(ino)
        where = self._at(f"directory inode {ino}")
        if record.type != c.S_IFDIR:
            raise NotADirectory("is not a directory", where=self._at(f"inode {ino}"))
        blocks: list[int] = []
        for run in self.map(record)[0]:
            if run.logical != len(blocks) or run.unwritten:
                raise CorruptImage(f"has a hole at its block {len(blocks)}", where=where)
            blocks += range(run.physical, run.physical + run.count)
        count, rest = divmod(record.size, self.block_size)
        if rest or not 0 < count <= len(blocks):
            raise CorruptImage(f"size of {record.size} bytes is not its blocks", where=where)
        del blocks[count:]
        if record.fields.i_flags & c.INDEX_FL and record.size >= _LARGE_DIRECTORY:
            state = self._states[ino] = DirState(0, NamesOnDisk(self, ino, blocks), blocks)
            DirWriter(self, record, state).verify_root()
            state.parent = int.from_bytes(self.block(blocks[0], where)[12:16], "little")
            return state
        seed = None if self._seed is None else inode_seed(self._seed, ino, record.fields.i_generation)
        index_possible = bool(record.fields.i_flags & c.INDEX_FL)
        names: dict[bytes, Name] = {}
        parent = 0
        for i, number in enumerate(blocks):
            inside = f"{where}, block {number}"
            data = self.block(number, inside)
            if seed is not None:
                directory.verify_block(data, seed, index_possible, inside)
            for name, child, kind in self._parse(data, inside):
                names[name] = Name(child, kind, i)
            if i == 0:
                parent = int.from_bytes(data[12:16], "little")
        state = self._states[ino] = DirState(parent, names, blocks)
        return state

    def _writer(self, ino: int) -> DirWriter:
        state = self._state(ino)
        return DirWriter(self, self._live(ino), state)

    def _forget_all(self) -> None:
        super()._forget_all()
        self._states.clear()

    def _trim(self) -> None:
        super()._trim()
        self._operations += 1
        if self._operations % _TRIM_EVERY == 0:
            for ino, state in list(self._states.items()):
                large = len(state.names) and len(state.blocks) * self.block_size >= 2 * _LARGE_DIRECTORY
                if large and self.inode(ino).fields.i_flags & c.INDEX_FL:
                    del self._states[ino]  # it has grown: its names are looked up on disk from now on
            names = sum(len(state.names) for state in self._states.values())
            while len(self._states) > _DIRECTORIES_KEPT or (names > _NAMES_KEPT and len(self._states) > 1):
                names -= len(self._states.popitem(last=False)[1].names)

    def _names_gone(self, ino: int) -> None:
        self._states.pop(ino, None)

    # -- paths ------------------------------------------------------------------------------------------------------

    def lookup(self, path: str | bytes, start: int = c.ROOT_INO) -> int | None:
        """Return the inode number of a path (from directory ``start``), or None. Symlinks are not followed."""
        ino = start
        for part in os.fsencode(path).split(b"/"):
            if part in (b"", b"."):
                continue
            if self.inode(ino).type != c.S_IFDIR:
                return None
            state = self._state(ino)
            if part == b"..":
                ino = state.parent
                continue
            found = state.names.get(part)
            if found is None:
                return None
            ino = found.ino
        return ino

    def resolve(self, path: Path, *, follow: bool = True) -> int:
        """Return the inode number of a path; symlinks on the way are followed, one at its end with ``follow``.

        NotFound, NotADirectory, LoopOfLinks.
        """
        return paths.resolve(self, path, follow=follow)

    def _name(self, path: bytes) -> str:
        return f"{self.where}: {os.fsdecode(path)}"

    def _place(self, path: Path) -> tuple[int, bytes]:
        """Return (directory, name) of what a path ends in; the name need not be there."""
        raw = os.fsencode(path)
        above, _, name = raw.rstrip(b"/").rpartition(b"/")
        if b"\0" in raw:
            raise Invalid("a name cannot hold a zero byte", where=self._name(raw.replace(b"\0", b"?")))
        ino = paths.resolve(self, above)
        if self.inode(ino).type != c.S_IFDIR:
            raise NotADirectory("something on the way is not a directory", where=self._name(raw))
        if len(name) > _MAX_NAME:
            raise NameTooLong(f"a name of {len(name)} bytes is too long", where=self.where)
        return ino, name

    def _free_place(self, path: Path, *, directory: bool = False) -> tuple[DirWriter, bytes]:
        """Return the directory and name for something new; only a directory's may end in a slash.

        Exists, NotFound, NotADirectory, NameTooLong.
        """
        raw = os.fsencode(path)
        ino, name = self._place(path)
        if name in _SPECIAL:
            raise Exists("is there already", where=self._name(raw))
        at = self._writer(ino)
        if name in at.state.names:
            raise Exists("is there already", where=self._name(raw))
        if raw.endswith(b"/") and not directory:
            raise NotFound("no such directory", where=self._name(raw))
        self.require_no_flags(at.record, c.IMMUTABLE_FL)
        return at, name

    def _taken_place(self, path: Path) -> tuple[DirWriter, bytes, InodeRecord]:
        """Return the directory, name and inode of something that is there. NotFound, NotADirectory, Busy."""
        raw = os.fsencode(path)
        ino, name = self._place(path)
        if name in _SPECIAL:
            raise Busy("that name cannot be removed or renamed", where=self._name(raw))
        at = self._writer(ino)
        found = at.state.names.get(name)
        if found is None:
            raise NotFound("no such file or directory", where=self._name(raw))
        record = self._live(found.ino)
        if raw.endswith(b"/") and record.type != c.S_IFDIR:
            raise NotADirectory("is not a directory", where=self._name(raw))
        return at, name, record

    def _require_name(self, path: Path, errors: dict[bytes, type[PathError]]) -> None:
        """Raise the error for a path that ends in no name of its own."""
        name = self._place(path)[1]
        if name in errors:
            raise errors[name]("that name cannot be removed", where=self._name(os.fsencode(path)))

    def _require_removable(self, at: DirWriter, record: InodeRecord) -> None:
        """Raise NotPermitted if flags of a directory, or of what it names, forbid that the name goes."""
        self.require_no_flags(at.record, c.IMMUTABLE_FL | c.APPEND_FL)
        self.require_no_flags(record, c.IMMUTABLE_FL | c.APPEND_FL)

    # -- making -----------------------------------------------------------------------------------------------------

    def _new(self, at: DirWriter, kind: int, mode: int, uid: int, gid: int | None) -> InodeRecord:
        if mode & ~0o7777:
            raise Invalid(f"mode {mode:#o} has other bits than permissions")
        above = at.record.fields
        if gid is None:
            gid = 0
            if above.i_mode & _SGID:
                gid = above.i_gid | above.l_i_gid_high << 16
                if kind == c.S_IFDIR:
                    mode |= _SGID
        ino = self.alloc.allocate_inode(at.record.ino, directory=kind == c.S_IFDIR)
        record = self.new_record(ino, kind | mode, uid=uid, gid=gid, links=2 if kind == c.S_IFDIR else 1)
        passed = {c.S_IFDIR: _INHERITED_FLAGS, c.S_IFREG: _INHERITED_BY_FILES}.get(kind, _INHERITED_BY_OTHERS)
        record.fields.i_flags = above.i_flags & passed
        if kind in (c.S_IFREG, c.S_IFDIR):
            self._give_map(record)
        self._inherit_acl(at.record, record)
        return record

    def _enter(self, at: DirWriter, name: bytes, record: InodeRecord) -> int:
        """Store a new inode and name it."""
        self.put_inode(record)
        at.add(name, record.ino, c.FT_BY_MODE[record.type])
        self._touch(at)
        return record.ino

    def _touch(self, at: DirWriter) -> None:
        now = self.clock()
        self.set_times(at.record, mtime=now, ctime=now)
        self.put_inode(at.record)

    def create(self, path: Path, *, mode: int = 0o644, uid: int = 0, gid: int | None = None) -> int:
        """Make an empty regular file; return its inode number. Exists, NotFound, NotADirectory, VolumeFull."""

        def make() -> int:
            raw = os.fsencode(path)
            if raw.rstrip(b"/") and raw.endswith(b"/"):
                raise IsADirectory("is the name of a directory", where=self._name(raw))
            at, name = self._free_place(path)
            return self._enter(at, name, self._new(at, c.S_IFREG, mode, uid, gid))

        return self._run(make)

    def mkdir(self, path: Path, *, mode: int = 0o755, uid: int = 0, gid: int | None = None) -> int:
        """Make a directory; return its inode number. As :meth:`create`, and TooManyLinks."""

        def make() -> int:
            at, name = self._free_place(path, directory=True)
            self._require_room_for_subdirectory(at)
            record = self._new(at, c.S_IFDIR, mode, uid, gid)
            state = self._states[record.ino] = DirState(at.record.ino, {}, [])
            DirWriter(self, record, state).initialise()
            self._count_subdirectory(at, 1)
            return self._enter(at, name, record)

        return self._run(make)

    def _require_room_for_subdirectory(self, at: DirWriter) -> None:
        if at.record.fields.i_links_count >= c.LINK_MAX and not (self.super.ro_compat & c.RO_DIR_NLINK and at.indexed):
            raise TooManyLinks("has too many subdirectories", where=at.where)

    def _count_subdirectory(self, at: DirWriter, change: int) -> None:
        """Count subdirectories in the links; 1 stands for more than can be counted (dir_nlink)."""
        f = at.record.fields
        if change > 0:
            f.i_links_count = 1 if f.i_links_count in (1, c.LINK_MAX) else f.i_links_count + 1
        elif f.i_links_count > 2:
            f.i_links_count -= 1

    def symlink(self, path: Path, target: Path, *, uid: int = 0, gid: int | None = None) -> int:
        """Make a symlink; return its inode number. As :meth:`create`, and NameTooLong for the target."""
        content = os.fsencode(target)

        def make() -> int:
            if not content:
                raise NotFound("an empty target leads nowhere", where=self._name(os.fsencode(path)))
            if b"\0" in content:
                raise Invalid("a target cannot hold a zero byte", where=self._name(os.fsencode(path)))
            if len(content) >= self.block_size:
                raise NameTooLong(f"a target of {len(content)} bytes is too long", where=self.where)
            at, name = self._free_place(path)
            record = self._new(at, c.S_IFLNK, 0o777, uid, gid)
            if len(content) < _FAST_SYMLINK:
                record.fields.i_block = content + bytes(60 - len(content))
            else:
                self._give_map(record)
                run = self.alloc.allocate(self.goal_of(record), 1)
                self.file_map(record).insert(Extent(0, run.start, 1))
                self.add_blocks(record, 1)
                self._blocks.write(run.start, content + bytes(self.block_size - len(content)))
            self.set_size(record, len(content))
            return self._enter(at, name, record)

        return self._run(make)

    def mknod(
        self,
        path: Path,
        kind: NodeKind,
        major: int = 0,
        minor: int = 0,
        *,
        mode: int = 0o600,
        uid: int = 0,
        gid: int | None = None,
    ) -> int:
        """Make a device, fifo or socket; return its inode number. As :meth:`create`."""

        def make() -> int:
            if not (0 <= major < 1 << 12 and 0 <= minor < 1 << 20):
                raise Invalid(f"device number {major}:{minor} is out of range")
            at, name = self._free_place(path)
            record = self._new(at, _NODE_TYPES[kind], mode, uid, gid)
            if kind in ("char", "block"):
                record.fields.i_block = encode_rdev(major, minor)
            return self._enter(at, name, record)

        return self._run(make)

    def link(self, existing: Path, path: Path) -> None:
        """Give something that is no directory one more name. NotPermitted, TooManyLinks, and as :meth:`create`."""

        def make() -> None:
            record = self._live(self.resolve(existing, follow=False))
            at, name = self._free_place(path)
            if record.type == c.S_IFDIR:
                raise NotPermitted("a directory has one name only", where=self._name(os.fsencode(existing)))
            self.require_no_flags(record, c.IMMUTABLE_FL | c.APPEND_FL)
            if record.fields.i_links_count >= c.LINK_MAX:
                raise TooManyLinks("has too many names", where=self._name(os.fsencode(existing)))
            at.add(name, record.ino, c.FT_BY_MODE[record.type])
            record.fields.i_links_count += 1
            self.set_times(record, ctime=self.clock())
            self.put_inode(record)
            self._touch(at)

        self._run(make)

    # -- removing ---------------------------------------------------------------------------------------------------

    def _drop_link(self, record: InodeRecord, *, later: bool) -> None:
        """One name of an inode is gone. The last one's content goes too, ``later`` if it is to go in steps."""
        last = record.type == c.S_IFDIR or record.fields.i_links_count <= 1
        if not last:
            record.fields.i_links_count -= 1
            self.set_times(record, ctime=self.clock())
            self.put_inode(record)
            return
        record.fields.i_links_count = 0
        if later or record.ino in self._files:
            self.set_times(record, ctime=self.clock())
            self.add_orphan(record)
            self.put_inode(record)
        else:
            self.erase(record)

    def _dropping(self, operation: Callable[[bool], int]) -> None:
        """Run an operation that may erase an inode; if that is too much at once, erase it in steps behind it.

        ``operation(later)`` returns the number of the inode whose last name it took, or 0.
        """
        try:
            self._run(lambda: operation(False))
        except TransactionTooLarge:
            ino = self._run(lambda: operation(True))
            if ino and ino not in self._files and not self.inode(ino).fields.i_links_count:
                self.erase_orphan(ino)

    def unlink(self, path: Path) -> None:
        """Remove a name that is not a directory's. NotFound, NotADirectory, IsADirectory.

        With its last name an inode goes, too, unless it is open: then when it is closed.
        """

        def remove(later: bool) -> int:
            self._require_name(path, {b"": IsADirectory, b".": IsADirectory, b"..": IsADirectory})
            at, name, record = self._taken_place(path)
            self._require_removable(at, record)
            if record.type == c.S_IFDIR:
                raise IsADirectory("is a directory", where=self._name(os.fsencode(path)))
            at.remove(name)
            self._drop_link(record, later=later)
            self._touch(at)
            return record.ino

        self._dropping(remove)

    def rmdir(self, path: Path) -> None:
        """Remove an empty directory. NotFound, NotADirectory, NotEmpty; Invalid for the root."""

        def remove(later: bool) -> int:
            self._require_name(path, {b".": Invalid, b"..": NotEmpty})
            at, name, record = self._taken_place(path)
            self._require_removable(at, record)
            if record.type != c.S_IFDIR:
                raise NotADirectory("is not a directory", where=self._name(os.fsencode(path)))
            if self._state(record.ino).names:
                raise NotEmpty("the directory is not empty", where=self._name(os.fsencode(path)))
            at.remove(name)
            self._drop_link(record, later=later)
            self._count_subdirectory(at, -1)
            self._touch(at)
            return record.ino

        self._dropping(remove)

    # -- renaming ---------------------------------------------------------------------------------------------------

    def rename(self, old: Path, new: Path, *, how: RenameHow = "replace") -> None:
        """Give something another name, also in another directory; what had that name goes, if it may.

        A directory may only take the place of an empty one, anything else not that of a directory. ``noreplace``:
        Exists when the name is taken. ``exchange``: both names must be there and swap what they name. ``whiteout``: a
        device 0:0 takes the old name, which overlayfs takes for a deleted file. Two names of the same inode: nothing
        happens. NotFound, NotADirectory, IsADirectory, NotEmpty, TooManyLinks, VolumeFull; Invalid
        when a directory would come to lie in itself.
        """
        self._dropping(lambda later: self._rename(old, new, how, later))

    def _rename(self, old: Path, new: Path, how: RenameHow, later: bool) -> int:
        source, old_name, moved = self._taken_place(old)
        target_ino, new_name = self._place(new)
        where = self._name(os.fsencode(new))
        if new_name in _SPECIAL:
            error = Exists if how == "noreplace" else Busy
            raise error("that name cannot be given", where=where)
        target = self._writer(target_ino)
        found = target.state.names.get(new_name)
        if found is None and how == "exchange":
            raise NotFound("no such file or directory", where=where)
        if found is not None and how == "noreplace":
            raise Exists("is there already", where=where)
        if found is not None and found.ino == moved.ino:
            return 0
        if moved.type == c.S_IFDIR and moved.ino in self._ancestors(target_ino):
            raise Invalid("a directory cannot be moved into itself", where=where)
        other = None if found is None else self._live(found.ino)
        if other is not None and how != "exchange" and other.type == c.S_IFDIR:
            self._require_not_above(other, source.record.ino, where)
        self._require_removable(source, moved)
        if other is None:
            self.require_no_flags(target.record, c.IMMUTABLE_FL)
        else:
            self._require_removable(target, other)
        if how == "exchange" and other is not None:
            self._exchange((source, old_name, moved), (target, new_name, other))
            return 0
        if other is not None:
            self._require_replaceable(moved, other, where)
        return self._move((source, old_name, moved), (target, new_name, other), later, whiteout=how == "whiteout")

    def _ancestors(self, ino: int) -> set[int]:
        """Return a directory and all above it."""
        out = set()
        while ino not in out:
            out.add(ino)
            if ino == c.ROOT_INO:
                return out
            ino = self._state(ino).parent
        raise CorruptImage(f"directory {ino} lies in itself", where=self.where)

    def _require_not_above(self, other: InodeRecord, source: int, where: str) -> None:
        if other.ino in self._ancestors(source):
            raise NotEmpty("the directory is not empty", where=where)

    def _require_replaceable(self, moved: InodeRecord, other: InodeRecord, where: str) -> None:
        if moved.type == c.S_IFDIR and other.type != c.S_IFDIR:
            raise NotADirectory("a directory cannot replace something else", where=where)
        if moved.type != c.S_IFDIR and other.type == c.S_IFDIR:
            raise IsADirectory("is a directory", where=where)
        if other.type == c.S_IFDIR and self._state(other.ino).names:
            raise NotEmpty("the directory is not empty", where=where)

    def _move(
        self,
        source: tuple[DirWriter, bytes, InodeRecord],
        target: tuple[DirWriter, bytes, InodeRecord | None],
        later: bool,
        *,
        whiteout: bool,
    ) -> int:
        here, old_name, moved = source
        there, new_name, other = target
        if here.record is there.record:
            there = here
        across = moved.type == c.S_IFDIR and here is not there
        if across and other is None:
            self._require_room_for_subdirectory(there)
        kind = c.FT_BY_MODE[moved.type]
        if other is not None:
            there.replace(new_name, moved.ino, kind)
        else:
            there.add(new_name, moved.ino, kind)
        if whiteout:
            left = self._new(here, c.S_IFCHR, 0, 0, None)
            left.fields.i_block = encode_rdev(0, 0)
            self.put_inode(left)
            here.replace(old_name, left.ino, c.FT_BY_MODE[c.S_IFCHR])
        else:
            here.remove(old_name)
        if across:
            self._writer(moved.ino).set_parent(there.record.ino)
            self._count_subdirectory(here, -1)
            self._count_subdirectory(there, 1)
        self.set_times(moved, ctime=self.clock())
        self.put_inode(moved)
        if other is not None:
            if other.type == c.S_IFDIR:
                self._count_subdirectory(there, -1)
            self._drop_link(other, later=later)
        self._touch(here)
        if there is not here:
            self._touch(there)
        return other.ino if other is not None else 0

    def _exchange(self, one: tuple[DirWriter, bytes, InodeRecord], two: tuple[DirWriter, bytes, InodeRecord]) -> None:
        (here, old_name, moved), (there, new_name, other) = one, two
        if here.record is there.record:
            there = here
        is_dir, other_is_dir = moved.type == c.S_IFDIR, other.type == c.S_IFDIR
        if other_is_dir and other.ino in self._ancestors(here.record.ino):
            raise Invalid("a directory cannot be moved into itself", where=there.where)
        if here is not there and is_dir != other_is_dir:
            self._require_room_for_subdirectory(there if is_dir else here)
        there.replace(new_name, moved.ino, c.FT_BY_MODE[moved.type])
        here.replace(old_name, other.ino, c.FT_BY_MODE[other.type])
        if here is not there:
            for record, left, entered in ((moved, here, there), (other, there, here)):
                if record.type == c.S_IFDIR:
                    self._writer(record.ino).set_parent(entered.record.ino)
                    if is_dir != other_is_dir:
                        self._count_subdirectory(left, -1)
                        self._count_subdirectory(entered, 1)
        for record in (moved, other):
            self.set_times(record, ctime=self.clock())
            self.put_inode(record)
        self._touch(here)
        if there is not here:
            self._touch(there)

    # -- open files -------------------------------------------------------------------------------------------------

    def open_file(self, path: Path, *, create: bool = False, mode: int = 0o644) -> File:
        """Open a regular file (through a symlink at the end, too); with ``create`` make it if it is not there.

        NotFound, IsADirectory, NotPermitted for other kinds.
        """
        try:
            ino = self.resolve(path)
        except NotFound:
            if not create:
                raise
            ino = self.create(path, mode=mode)
        self._regular(ino)
        made = File(self, ino)
        self._files.setdefault(ino, set()).add(made)
        return made

    def _is_open(self, ino: int) -> bool:
        return ino in self._files

    def _file_closed(self, closed: File) -> None:
        left = self._files[closed.ino]
        left.discard(closed)
        if not left:
            del self._files[closed.ino]
            self.alloc.begin()  # outside of an operation: nothing to take back
            self.alloc.drop_window(closed.ino)
            if not self._broken and self._fd >= 0 and not self.inode(closed.ino).fields.i_links_count:
                self.erase_orphan(closed.ino)

    def _release_all(self) -> None:
        for files in list(self._files.values()):
            for file in list(files):
                file.close()

    # -- the volume -------------------------------------------------------------------------------------------------

    def statfs(self) -> StatFs:
        """Return sizes and what is free."""
        raw = self.super.raw
        return StatFs(
            self.block_size,
            self.blocks,
            self.alloc.free_blocks,
            raw.s_r_blocks_count_lo | raw.s_r_blocks_count_hi << 32,
            raw.s_inodes_count,
            self.alloc.free_inodes,
        )
