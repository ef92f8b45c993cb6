# ruff: noqa: PTH101, PTH102, PTH106, PTH108, PTH211, RUF005
"""A tree in memory as the plainest model of a file system, random operations, and who carries them out.

``Model`` knows what each operation does and which error it must give; ``Ours`` does it with a writable volume, and
``Kernel`` with system calls below a mount point, so that both can take turns on one image.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import random
import stat
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ext4lite.errors import PathError, VolumeFull
from ext4lite.mkfs import mkfs
from ext4lite.volume import Volume
from ext4lite.writer import WritableVolume
from support.ext4_judges import run, tool

Op = tuple[Any, ...]
NOSPACE = errno.ENOSPC


@dataclass(eq=False)
class Node:
    """An inode: kind as in manifests, and what it holds."""

    kind: str
    mode: int
    uid: int = 0
    gid: int = 0
    content: bytearray = field(default_factory=bytearray)
    target: bytes = b""
    rdev: tuple[int, int] = (0, 0)
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    children: dict[bytes, Node] = field(default_factory=dict)
    mtime: int | None = None
    """The time it was set to, if nothing has changed it since."""


class Failed(Exception):
    """An operation must fail with this errno."""

    def __init__(self, number: int) -> None:
        super().__init__(errno.errorcode[number])
        self.number = number


class Model:
    """The tree; ``apply`` does one operation or raises Failed."""

    def __init__(self) -> None:
        self.root = Node("dir", 0o755)

    def find(self, path: bytes) -> Node:
        node = self.root
        for part in path.split(b"/"):
            if part:
                if node.kind != "dir":
                    raise Failed(errno.ENOTDIR)
                if part not in node.children:
                    raise Failed(errno.ENOENT)
                node = node.children[part]
        return node

    def place(self, path: bytes) -> tuple[Node, bytes]:
        above, _, name = path.rpartition(b"/")
        node = self.find(above)
        if node.kind != "dir":
            raise Failed(errno.ENOTDIR)
        node.mtime = None  # if anything comes of it
        return node, name

    def new(self, path: bytes, node: Node) -> None:
        at, name = self.place(path)
        if name in at.children:
            raise Failed(errno.EEXIST)
        at.children[name] = node
        if at.mode & 0o2000:
            node.gid = at.gid

    def taken(self, path: bytes) -> tuple[Node, bytes, Node]:
        at, name = self.place(path)
        if name not in at.children:
            raise Failed(errno.ENOENT)
        return at, name, at.children[name]

    def inside(self, above: Node, below: Node) -> bool:
        return above is below or any(self.inside(child, below) for child in above.children.values())

    def apply(self, op: Op) -> None:
        getattr(self, "do_" + op[0])(*op[1:])

    def do_create(self, path: bytes, mode: int) -> None:
        self.new(path, Node("file", mode))

    def do_mkdir(self, path: bytes, mode: int) -> None:
        self.new(path, Node("dir", mode))

    def do_symlink(self, path: bytes, target: bytes) -> None:
        self.new(path, Node("symlink", 0o777, target=target))

    def do_mknod(self, path: bytes, kind: str, major: int, minor: int) -> None:
        self.new(path, Node(kind, 0o600, rdev=(major, minor) if kind in ("char", "block") else (0, 0)))

    def do_link(self, old: bytes, path: bytes) -> None:
        node = self.taken(old)[2]
        at, name = self.place(path)
        if name in at.children:
            raise Failed(errno.EEXIST)
        if node.kind == "dir":
            raise Failed(errno.EPERM)
        at.children[name] = node

    def do_unlink(self, path: bytes) -> None:
        at, name, node = self.taken(path)
        if node.kind == "dir":
            raise Failed(errno.EISDIR)
        del at.children[name]

    def do_rmdir(self, path: bytes) -> None:
        at, name, node = self.taken(path)
        if node.kind != "dir":
            raise Failed(errno.ENOTDIR)
        if node.children:
            raise Failed(errno.ENOTEMPTY)
        del at.children[name]

    def do_rename(self, old: bytes, new: bytes, how: str) -> None:
        here, old_name, moved = self.taken(old)
        there, new_name = self.place(new)
        other = there.children.get(new_name)
        if other is None and how == "exchange":
            raise Failed(errno.ENOENT)
        if other is not None and how == "noreplace":
            raise Failed(errno.EEXIST)
        if moved.kind == "dir" and moved is not other and self.inside(moved, there):
            raise Failed(errno.EINVAL)
        if other is not None and other is not moved and other.kind == "dir" and self.inside(other, here):
            raise Failed(errno.EINVAL if how == "exchange" else errno.ENOTEMPTY)
        if other is moved:
            return
        left = {old_name: Node("char", 0, gid=here.gid if here.mode & 0o2000 else 0)} if how == "whiteout" else {}
        if how == "exchange" and other is not None:
            there.children[new_name], here.children[old_name] = moved, other
            return
        if other is not None:
            if moved.kind == "dir" and other.kind != "dir":
                raise Failed(errno.ENOTDIR)
            if moved.kind != "dir" and other.kind == "dir":
                raise Failed(errno.EISDIR)
            if other.children:
                raise Failed(errno.ENOTEMPTY)
        del here.children[old_name]
        there.children[new_name] = moved
        here.children.update(left)

    def _file(self, path: bytes) -> Node:
        node = self.find(path)
        if node.kind == "dir":
            raise Failed(errno.EISDIR)
        if node.kind != "file":
            raise Failed(errno.EPERM)
        node.mtime = None
        return node

    def do_write(self, path: bytes, offset: int, data: bytes) -> None:
        content = self._file(path).content
        if data and offset > len(content):
            content.extend(bytes(offset - len(content)))
        content[offset : offset + len(data)] = data

    def do_truncate(self, path: bytes, size: int) -> None:
        content = self._file(path).content
        if size < len(content):
            del content[size:]
        else:
            content.extend(bytes(size - len(content)))

    def do_fallocate(self, path: bytes, offset: int, length: int, keep: bool) -> None:
        content = self._file(path).content
        if not keep and offset + length > len(content):
            content.extend(bytes(offset + length - len(content)))

    def do_punch(self, path: bytes, offset: int, length: int) -> None:
        content = self._file(path).content
        end = min(len(content), offset + length)
        if end > offset:
            content[offset:end] = bytes(end - offset)

    def do_zero(self, path: bytes, offset: int, length: int, keep: bool) -> None:
        self.do_punch(path, offset, length)
        self.do_fallocate(path, offset, length, keep)

    def do_collapse(self, path: bytes, offset: int, length: int) -> None:
        content = self._file(path).content
        if offset + length >= len(content):
            raise Failed(errno.EINVAL)
        del content[offset : offset + length]

    def do_insert(self, path: bytes, offset: int, length: int) -> None:
        content = self._file(path).content
        if offset >= len(content):
            raise Failed(errno.EINVAL)
        content[offset:offset] = bytes(length)

    def do_utimes(self, path: bytes, atime: int, mtime: int) -> None:
        self.find(path).mtime = mtime

    def do_chmod(self, path: bytes, mode: int) -> None:
        self.find(path).mode = mode

    def do_chown(self, path: bytes, uid: int, gid: int) -> None:
        node = self.find(path)
        node.uid, node.gid = uid, gid
        if node.kind != "dir":
            node.mode &= ~(0o4000 | (0o2000 if node.mode & 0o010 else 0))

    def do_setxattr(self, path: bytes, name: bytes, value: bytes) -> None:
        self.find(path).xattrs[name] = value

    def do_removexattr(self, path: bytes, name: bytes) -> None:
        node = self.find(path)
        if name not in node.xattrs:
            raise Failed(errno.ENODATA)
        del node.xattrs[name]

    def do_sync(self) -> None:
        pass

    def walk(self) -> Iterator[tuple[bytes, Node]]:
        """Yield (path, node) of everything below the root."""

        def below(path: bytes, node: Node) -> Iterator[tuple[bytes, Node]]:
            for name, child in node.children.items():
                yield path + b"/" + name, child
                yield from below(path + b"/" + name, child)

        return below(b"", self.root)

    def facts(self) -> dict[bytes, tuple[Any, ...]]:
        """Return all that is compared, by path."""
        counts: dict[int, int] = {}
        for _, node in self.walk():
            counts[id(node)] = counts.get(id(node), 0) + 1
        out = {}
        for path, node in self.walk():
            dirs = sum(child.kind == "dir" for child in node.children.values())
            nlink = 2 + dirs if node.kind == "dir" else counts[id(node)]
            body = bytes(node.content) if node.kind == "file" else node.target
            out[path] = (node.kind, node.mode, node.uid, node.gid, nlink, body, node.rdev, dict(node.xattrs))
        return out


class Ours:
    """Does operations with a writable volume."""

    def __init__(self, volume: WritableVolume) -> None:
        self.v = volume

    def apply(self, op: Op) -> None:
        try:
            self._do(op)
        except VolumeFull as e:
            raise Failed(NOSPACE) from e
        except PathError as e:
            raise Failed(e.errno) from e

    def _do(self, op: Op) -> None:
        v = self.v
        match op:
            case ("create", path, mode):
                v.together(lambda: v.set_attributes(v.create(path), mode=mode))
            case ("mkdir", path, mode):  # without what a set-group-id directory hands down
                v.together(lambda: v.set_attributes(v.mkdir(path), mode=mode))
            case ("symlink", path, target):
                v.symlink(path, target)
            case ("mknod", path, kind, major, minor):
                v.mknod(path, kind, major, minor)
            case ("link", old, path):
                v.link(old, path)
            case ("unlink", path):
                v.unlink(path)
            case ("rmdir", path):
                v.rmdir(path)
            case ("rename", old, new, how):
                v.rename(old, new, how=how)
            case ("write", path, offset, data):
                v.pwrite(v.resolve(path, follow=False), offset, data)
            case ("truncate", path, size):
                v.truncate(v.resolve(path, follow=False), size)
            case ("fallocate", path, offset, length, keep):
                v.fallocate(v.resolve(path, follow=False), offset, length, keep_size=keep)
            case ("punch", path, offset, length):
                v.punch(v.resolve(path, follow=False), offset, length)
            case ("zero", path, offset, length, keep):
                v.zero_range(v.resolve(path, follow=False), offset, length, keep_size=keep)
            case ("collapse", path, offset, length):
                v.collapse_range(v.resolve(path, follow=False), offset, length)
            case ("insert", path, offset, length):
                v.insert_range(v.resolve(path, follow=False), offset, length)
            case ("utimes", path, atime, mtime):
                v.set_attributes(v.resolve(path, follow=False), atime_ns=atime, mtime_ns=mtime)
            case ("chmod", path, mode):
                v.set_attributes(v.resolve(path, follow=False), mode=mode)
            case ("chown", path, uid, gid):
                v.set_attributes(v.resolve(path, follow=False), uid=uid, gid=gid)
            case ("setxattr", path, name, value):
                v.set_xattr(v.resolve(path, follow=False), name, value)
            case ("removexattr", path, name):
                v.remove_xattr(v.resolve(path, follow=False), name)
            case ("bare", what, path, mode):  # without chmod behind it: what a directory hands down stays
                (v.create if what == "create" else v.mkdir)(path, mode=mode)
            case ("chflags", path, flags):
                v.set_attributes(v.resolve(path, follow=False), flags=flags)
            case ("append", path, data):
                ino = v.resolve(path, follow=False)
                v.pwrite(ino, v.inode(ino).size, data)
            case ("sync",):
                v.sync()
            case _:
                raise AssertionError(op)


def facts_of(volume: Any) -> dict[bytes, tuple[Any, ...]]:
    """Return what :meth:`Model.facts` does, as a volume shows it."""
    out = {}
    for path, ino in volume.walk():
        if path == b"/lost+found" or path.startswith(b"/lost+found/"):
            continue
        s = volume.stat(ino)
        body = b"".join(volume.chunks(ino)) if s.kind == "file" else b""
        if s.kind == "symlink":
            body = volume.readlink(ino)
        out[path] = (s.kind, s.mode, s.uid, s.gid, s.nlink, body, s.rdev, volume.xattrs(ino))
    return out


_LIBC = ctypes.CDLL(None, use_errno=True)
_GETFLAGS, _SETFLAGS = 0x80086601, 0x40086602
_KEPT = 0x80000 | 0x1000  # extents, index: to leave them out would ask for another map
_FLAGS = {"replace": 0, "noreplace": 1, "exchange": 2, "whiteout": 4}
_NODES = {"char": stat.S_IFCHR, "block": stat.S_IFBLK, "fifo": stat.S_IFIFO, "socket": stat.S_IFSOCK}


class Kernel:
    """Does operations with system calls below a directory."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.fsencode(root)

    def apply(self, op: Op) -> None:
        try:
            self._do(op)
        except OSError as e:
            raise Failed(e.errno or 0) from e

    def _do(self, op: Op) -> None:
        at = self._at
        match op:
            case ("create", path, mode):
                os.close(os.open(at(path), os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
                os.chmod(at(path), mode)
            case ("mkdir", path, mode):
                os.mkdir(at(path))
                os.chmod(at(path), mode)
            case ("symlink", path, target):
                os.symlink(target, at(path))
            case ("mknod", path, kind, major, minor):
                os.mknod(at(path), 0o600 | _NODES[kind], os.makedev(major, minor))
            case ("link", old, path):
                os.link(at(old), at(path), follow_symlinks=False)
            case ("unlink", path):
                os.unlink(at(path))
            case ("rmdir", path):
                os.rmdir(at(path))
            case ("rename", old, new, how):
                if _LIBC.renameat2(-100, at(old), -100, at(new), _FLAGS[how]):
                    raise OSError(ctypes.get_errno(), "renameat2")
            case ("write", path, offset, data):
                self._with(path, lambda fd: os.pwrite(fd, data, offset))
            case ("truncate", path, size):
                self._with(path, lambda fd: os.ftruncate(fd, size))
            case ("fallocate", path, offset, length, keep):
                self._with(path, lambda fd: _fallocate(fd, int(keep), offset, length))
            case ("punch", path, offset, length):
                self._with(path, lambda fd: _fallocate(fd, 3, offset, length))
            case ("zero", path, offset, length, keep):
                self._with(path, lambda fd: _fallocate(fd, 0x10 | int(keep), offset, length))
            case ("collapse", path, offset, length):
                self._with(path, lambda fd: _fallocate(fd, 0x08, offset, length))
            case ("insert", path, offset, length):
                self._with(path, lambda fd: _fallocate(fd, 0x20, offset, length))
            case ("utimes", path, atime, mtime):
                os.utime(at(path), ns=(atime, mtime), follow_symlinks=False)
            case ("chmod", path, mode):
                os.chmod(at(path), mode)
            case ("chown", path, uid, gid):
                os.chown(at(path), uid, gid, follow_symlinks=False)
            case ("setxattr", path, name, value):
                os.setxattr(at(path), name, value, follow_symlinks=False)
            case ("removexattr", path, name):
                os.removexattr(at(path), name, follow_symlinks=False)
            case ("bare", "create", path, mode):
                os.close(os.open(at(path), os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
            case ("bare", "mkdir", path, mode):
                os.mkdir(at(path), mode)
            case ("chflags", path, flags):
                fd = os.open(at(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
                try:
                    old = array("l", [0])
                    fcntl.ioctl(fd, _GETFLAGS, old)
                    fcntl.ioctl(fd, _SETFLAGS, array("l", [flags | old[0] & _KEPT]))
                finally:
                    os.close(fd)
            case ("append", path, data):
                fd = os.open(at(path), os.O_WRONLY | os.O_APPEND)
                try:
                    os.write(fd, data)
                finally:
                    os.close(fd)
            case ("sync",):
                os.sync()
            case _:
                raise AssertionError(op)

    def _at(self, path: bytes) -> bytes:
        return self.root + path

    def _with(self, path: bytes, call: Callable[[int], object]) -> None:
        info = os.lstat(self._at(path))
        if stat.S_ISDIR(info.st_mode):
            raise OSError(errno.EISDIR, "directory")
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EPERM, "not a regular file")
        fd = os.open(self._at(path), os.O_RDWR)
        try:
            call(fd)
        finally:
            os.close(fd)


def _fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    if _LIBC.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(length)):
        raise OSError(ctypes.get_errno(), "fallocate")


class Generator:
    """Random operations on a model's tree: mostly on what is there, sometimes on what is not."""

    def __init__(
        self, model: Model, r: random.Random, *, fallocate: bool = True, most: int = 200_000, options: str = ""
    ) -> None:
        """``options`` are those of mke2fs: what the volume can do, and the size of its blocks, follows from them."""
        self.model, self.r, self.most = model, r, most
        self.fallocate = fallocate
        self.large_values = "ea_inode" in options
        self.wide_times = "-I 128" not in options
        self.block = int(options.partition("-b ")[2].split(maxsplit=1)[0]) if "-b " in options else 4096
        self.serial = 0

    def name(self) -> bytes:
        self.serial += 1
        if self.r.random() < 0.05:
            return b"%d-" % self.serial + b"n" * self.r.randrange(200, 240)
        return b"%d" % self.serial + self.r.choice([b"", b"-name", b"\xc3\xa9", b"\xff"])

    def paths(self, kind: str = "") -> list[bytes]:
        return [path for path, node in self.model.walk() if not kind or node.kind == kind]

    def some(self, kind: str = "") -> bytes:
        if self.r.random() < 0.04:
            return b"/nothing-here"
        if self.r.random() < 0.06:
            kind = ""
        found = self.paths(kind)
        return self.r.choice(found) if found else b"/nothing"

    def fresh(self) -> bytes:
        if self.r.random() < 0.06:
            found = self.paths()
            return self.r.choice(found) if found else b"/x"
        directories = [b"", *self.paths("dir")]
        above = self.r.choice(directories[-3:] if self.r.random() < 0.3 else directories)
        return above + b"/" + self.name()

    def offset(self) -> int:
        r = self.r
        return r.choice([0, r.randrange(300), r.randrange(20_000), r.randrange(self.most), 4096 * r.randrange(20)])

    def size(self) -> int:
        r = self.r
        return r.choice([1, r.randrange(1, 300), 4096, r.randrange(1, 10_000), r.randrange(1, 60_000)])

    def value(self) -> bytes:
        """An attribute's value; some are equal to others, so that they may be shared."""
        r = self.r
        size = r.choice([0, 1, 20, 100, 700] + ([3000, 4040, 5000, 20_000, 65_536] if self.large_values else []))
        return random.Random(size).randbytes(size) if r.random() < 0.5 else r.randbytes(size)

    def time(self) -> int:
        """Nanoseconds since 1970: from 1901 to 2446."""
        if not self.wide_times:
            return self.r.randrange(1 - 2**31, 2**31 - 1) * 10**9
        return self.r.choice([1 - 2**31, 0, 2**31 - 1, 2**33, 2**34 - 2**31 - 2, -1]) * 10**9 + self.r.randrange(10**9)

    def op(self) -> Op:
        r = self.r
        kind = r.choices(
            ["create", "mkdir", "symlink", "mknod", "link", "unlink", "rmdir", "rename", "write", "truncate"]
            + ["fallocate", "punch", "chmod", "chown", "setxattr", "removexattr", "sync"]
            + ["zero", "collapse", "insert", "utimes"],
            [14, 6, 4, 2, 5, 8, 4, 12, 22, 6, 4, 5, 3, 3, 7, 3, 1, 4, 2, 2, 3],
        )[0]
        match kind:
            case "create":
                return kind, self.fresh(), r.choice([0o644, 0o600, 0o1751])
            case "mkdir":
                return kind, self.fresh(), r.choice([0o755, 0o700, 0o1777])
            case "symlink":
                return kind, self.fresh(), b"t" * r.choice([1, 58, 59, 60, 61, 300])
            case "mknod":
                node = r.choice(["char", "block", "fifo", "socket"])
                return kind, self.fresh(), node, *(r.choice([(1, 3), (0, 0), (300, 70_000)]))
            case "link":
                return kind, self.some("file"), self.fresh()
            case "unlink":
                return kind, self.some(r.choice(["file", "symlink", "char", "file"]))
            case "rmdir":
                return kind, self.some("dir")
            case "rename":
                old = self.some(r.choice(["file", "dir", ""]))
                new = self.some(r.choice(["file", "dir"])) if r.random() < 0.5 else self.fresh()
                return kind, old, new, r.choice(["replace", "replace", "replace", "noreplace", "exchange", "whiteout"])
            case "write":
                return kind, self.some("file"), self.offset(), r.randbytes(self.size())
            case "truncate":
                return kind, self.some("file"), self.offset()
            case "fallocate" if self.fallocate:
                return kind, self.some("file"), self.offset(), self.size(), r.random() < 0.3
            case "zero" if self.fallocate:
                return kind, self.some("file"), self.offset(), self.size(), r.random() < 0.3
            case "collapse" | "insert" if self.fallocate:
                at, length = self.block * r.randrange(12), self.block * r.randrange(1, 5)
                return kind, self.some("file"), at, length
            case "utimes":
                return kind, self.some(), self.time(), self.time()
            case "punch":
                return kind, self.some("file"), self.offset(), self.size()
            case "chmod":
                return kind, self.some(r.choice(["file", "dir"])), r.choice([0o600, 0o6755, 0o2644, 0o1777, 0])
            case "chown":
                return kind, self.some(), r.choice([0, 70_000]), r.choice([5, 80_000])
            case "setxattr":
                name = r.choice([b"user.a", b"user.long-name", b"trusted.overlay.opaque", b"security.x", b"user.z"])
                return kind, self.some(r.choice(["file", "dir"])), name, self.value()
            case "removexattr":
                return kind, self.some(r.choice(["file", "dir"])), r.choice([b"user.a", b"user.z", b"security.x"])
        return ("sync",)


def outcome(who: Any, op: Op) -> int:
    """Do an operation; return 0 or the errno."""
    try:
        who.apply(op)
    except Failed as e:
        return e.number
    return 0


def make(path: Path, options: str, size: int) -> None:
    """Make a volume by our mkfs, or by mke2fs with ``options``."""
    if options:
        run(tool("mke2fs"), "-q", "-F", *options.split(), path, f"{size // 1024}K")
    else:
        mkfs(path, size=size)


def allowed(model: Model, op: Op) -> bool:
    """Leave out user attributes on what is neither file nor directory, and modes of symlinks."""
    if op[0] not in ("setxattr", "removexattr", "chmod"):
        return True
    try:
        kind = model.find(op[1]).kind
    except Failed:
        return True
    return kind != "symlink" if op[0] == "chmod" else kind in ("file", "dir")


def assert_tree(volume: Volume, model: Model) -> None:
    """Compare all that the model knows; name the first differences."""
    found, wanted = facts_of(volume), model.facts()
    wrong = [(p, found.get(p), wanted.get(p)) for p in found.keys() | wanted.keys() if found.get(p) != wanted.get(p)]
    assert not wrong, f"{len(wrong)} differ: {str(wrong[:2])[:1500]}"
    for path, node in model.walk():
        if node.mtime is not None:
            found_ns = volume.stat(volume.lookup(path) or 0).mtime_ns
            assert found_ns == node.mtime, (path, node.kind)
