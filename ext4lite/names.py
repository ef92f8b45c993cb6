"""The tree of names of a writable volume, but for renaming: directories in memory, paths, making and removing."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal

from ext4lite import directory, paths
from ext4lite.checksum import inode_seed
from ext4lite.device import Handle
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
)
from ext4lite.extents import Extent
from ext4lite.inode import InodeRecord, encode_rdev
from ext4lite.jbd2.log import Blocks
from ext4lite.jbd2.transaction import TransactionTooLarge
from ext4lite.layout import constants as c
from ext4lite.orphans import OrphanVolume
from ext4lite.super import Super

NodeKind = Literal["char", "block", "fifo", "socket"]
Path = str | bytes

_NODE_TYPES: dict[NodeKind, int] = {
    "char": c.S_IFCHR,
    "block": c.S_IFBLK,
    "fifo": c.S_IFIFO,
    "socket": c.S_IFSOCK,
}
_MAX_NAME = 255
SPECIAL = (b"", b".", b"..")
"""What a path may end in that is no name of its own: the root, and the two names that every directory has."""
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


class NamesVolume(OrphanVolume):
    """Adds names; see :class:`ext4lite.writer.WritableVolume`."""

    def __init__(
        self, image: Handle, sb: Super, where: str, *, blocks: Blocks, clock: Callable[[], int] = time.time_ns
    ) -> None:
        super().__init__(image, sb, where, blocks=blocks, clock=clock)
        self._states: OrderedDict[int, DirState] = OrderedDict()
        self._operations = 0

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
            on_disk = NamesOnDisk(self, ino)
            state = on_disk.state = self._states[ino] = DirState(0, on_disk, blocks)
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
        if name in SPECIAL:
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
        if name in SPECIAL:
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
        if later or self._is_open(record.ino):
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
            if ino and not self._is_open(ino) and not self.inode(ino).fields.i_links_count:
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
