"""Files between the host and a volume, in both directions: what ``cp-in`` and ``cp-out`` do.

Holes stay holes, times and permissions are kept; owners and extended attributes with ``archive``. Into a volume goes
everything a host can have, hard links among what is copied included. Out of it nothing follows a symlink that lies in
the target, and nothing leaves it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ext4lite import paths
from ext4lite.errors import CorruptImage, HostError, Invalid, IsADirectory, NotADirectory, NotFound, Unsupported
from ext4lite.hostfs import data_runs
from ext4lite.layout import constants as c
from ext4lite.volume import Volume
from ext4lite.walking import bottom_up

if TYPE_CHECKING:
    from ext4lite.writer import NodeKind, WritableVolume

_NOBODY = 0xFFFFFFFF  # no owner at all, for the system calls
_CHUNK = 4 << 20
NODES: dict[int, NodeKind] = {
    stat.S_IFCHR: "char",
    stat.S_IFBLK: "block",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
}
"""What is neither file, directory nor symlink, by the type in its mode."""


@dataclass(slots=True)
class Copied:
    """What a copy did. ``skipped`` are paths that the target cannot hold, with why."""

    files: int = 0
    directories: int = 0
    symlinks: int = 0
    others: int = 0
    bytes: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)

    def as_dict(self) -> dict[str, object]:
        """Return it for JSON."""
        return {
            "files": self.files,
            "directories": self.directories,
            "symlinks": self.symlinks,
            "others": self.others,
            "bytes": self.bytes,
            "skipped": [{"path": path, "why": why} for path, why in self.skipped],
        }


class CopyIn:
    """Copies host files into a writable volume."""

    def __init__(
        self,
        volume: WritableVolume,
        *,
        recursive: bool = False,
        archive: bool = False,
        owner: tuple[int, int] = (0, 0),
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._volume = volume
        self._recursive = recursive
        self._archive = archive
        self._owner = owner
        self._progress = progress or (lambda _: None)
        self._seen: dict[tuple[int, int], bytes] = {}
        self.done = Copied()

    def copy(self, sources: list[str], target: str) -> Copied:
        """Copy ``sources`` to a path in the volume, or into it when it is a directory, as ``cp`` does.

        HostError, NotADirectory for several sources, IsADirectory for a directory without ``recursive``, VolumeFull:
        what was copied by then stays.
        """
        v = self._volume
        into = False
        with contextlib.suppress(NotFound):
            into = v.inode(v.resolve(target)).type == c.S_IFDIR
        if len(sources) > 1 and not into:
            raise NotADirectory("several sources need a directory as target", where=f"{v.where}: {target}")
        base = os.fsencode(target).rstrip(b"/")
        for source in sources:
            name = os.fsencode(os.path.basename(os.path.abspath(source)))  # noqa: PTH119, PTH100
            self._one(os.fsencode(source), base + b"/" + name if into else base)
        return self.done

    def _one(self, source: bytes, target: bytes) -> None:
        try:
            info = os.lstat(source)
            self._copy(source, target, info)
        except OSError as e:
            raise HostError.from_os(e, os.fsdecode(source)) from e

    def _copy(self, source: bytes, target: bytes, info: os.stat_result) -> None:
        v, done = self._volume, self.done
        kind = stat.S_IFMT(info.st_mode)
        uid, gid = (info.st_uid, info.st_gid) if self._archive else self._owner
        mode = stat.S_IMODE(info.st_mode)
        old = self._there(target)
        if kind == stat.S_IFDIR:
            if not self._recursive:
                raise IsADirectory("is a directory", where=os.fsdecode(source), hint="-r copies directories")
            if old is not None and v.inode(old).type != c.S_IFDIR:
                raise NotADirectory("is not a directory", where=f"{v.where}: {os.fsdecode(target)}")
            ino = v.mkdir(target, mode=mode, uid=uid, gid=gid) if old is None else old
            for name in sorted(os.listdir(source)):  # noqa: PTH208
                self._one(source + b"/" + name, target + b"/" + name)
            done.directories += 1
        elif info.st_nlink > 1 and (first := self._seen.get((info.st_dev, info.st_ino))) is not None:
            self._clear(target, old)
            v.link(first, target)
            done.files += 1
            return
        elif kind == stat.S_IFREG:
            if old is not None and v.inode(old).type == c.S_IFREG:
                v.truncate(old, 0)
                ino = old
            else:
                self._clear(target, old)
                ino = v.create(target, mode=mode, uid=uid, gid=gid)
            self._content(source, ino)
            done.files += 1
        else:
            self._clear(target, old)
            if kind == stat.S_IFLNK:
                ino = v.symlink(target, os.readlink(source), uid=uid, gid=gid)  # noqa: PTH115
                done.symlinks += 1
            else:
                device = os.major(info.st_rdev), os.minor(info.st_rdev)
                ino = v.mknod(target, NODES[kind], *device, mode=mode, uid=uid, gid=gid)
                done.others += 1
        if self._archive:
            self._attributes(source, ino)
        v.set_attributes(
            ino,
            mode=None if kind == stat.S_IFLNK else mode,
            uid=uid,
            gid=gid,
            atime_ns=info.st_mtime_ns,
            mtime_ns=info.st_mtime_ns,
        )
        if info.st_nlink > 1 and kind != stat.S_IFDIR:
            self._seen[info.st_dev, info.st_ino] = target

    def _there(self, target: bytes) -> int | None:
        try:
            return self._volume.resolve(target, follow=False)
        except NotFound:
            return None

    def _clear(self, target: bytes, old: int | None) -> None:
        """Make way for something that is no directory."""
        if old is not None:
            self._volume.unlink(target)

    def _content(self, source: bytes, ino: int) -> None:
        fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            size = os.fstat(fd).st_size
            for start, length in data_runs(fd, size):
                at = start
                while at < start + length:
                    data = os.pread(fd, min(_CHUNK, start + length - at), at)
                    if not data:
                        break
                    self._volume.pwrite(ino, at, data)
                    at += len(data)
                    self.done.bytes += len(data)
                    self._progress(len(data))
            if self._volume.inode(ino).size < size:
                self._volume.truncate(ino, size)
        finally:
            os.close(fd)

    def _attributes(self, source: bytes, ino: int) -> None:
        if not hasattr(os, "listxattr"):
            return
        for name in os.listxattr(source, follow_symlinks=False):
            value = os.getxattr(source, name, follow_symlinks=False)
            try:
                self._volume.set_xattr(ino, os.fsencode(name), value)
            except Unsupported as e:
                self.done.skipped.append((os.fsdecode(source), e.what))


class CopyOut:
    """Copies files of a volume to the host."""

    def __init__(
        self,
        volume: Volume,
        *,
        recursive: bool = False,
        archive: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._volume = volume
        self._recursive = recursive
        self._archive = archive
        self._progress = progress or (lambda _: None)
        self._seen: dict[int, bytes] = {}
        self.done = Copied()

    def copy(self, sources: list[str], target: str) -> Copied:
        """Copy paths of the volume to the host path ``target``, or into it when it is a directory, as ``cp`` does.

        An existing file is replaced. Devices are skipped and noted when this process may not make them. NotFound,
        IsADirectory, NotADirectory, HostError.
        """
        into = Path(target).is_dir()
        if len(sources) > 1 and not into:
            raise NotADirectory("several sources need a directory as target", where=target)
        for source in sources:
            ino = paths.resolve(self._volume, source, follow=False)
            name = (paths.split(os.fsencode(source)) or [b""])[-1]
            if into and name == b"..":
                raise Invalid("needs a name to copy to", where=source)
            base = os.fsencode(target)
            try:
                self._tree(ino, os.path.join(base, name) if into and name else base)  # noqa: PTH118
            except OSError as e:
                raise HostError.from_os(e, target) from e
        return self.done

    def _tree(self, ino: int, target: bytes) -> None:
        """Copy an inode and all below it; a directory's attributes come after its content."""
        v = self._volume
        seen: set[int] = set()
        pending = [(ino, target, False)]
        while pending:
            ino, target, filled = pending.pop()
            if v.inode(ino).type != c.S_IFDIR or filled:
                self._one(ino, target)
                continue
            where = f"{v.where}: inode {ino}"
            if not self._recursive:
                raise IsADirectory("is a directory", where=where, hint="-r copies directories")
            if ino in seen:
                raise CorruptImage(f"has a second name, {target!r}", where=where)
            seen.add(ino)
            if self._encrypted(ino, target):
                continue
            if not (os.path.isdir(target) and not os.path.islink(target)):  # noqa: PTH112, PTH114
                os.mkdir(target, 0o700)  # noqa: PTH102
            pending.append((ino, target, True))
            pending += [(child, target + b"/" + name, False) for name, child, _ in reversed(v.iterdir(ino))]

    def _encrypted(self, ino: int, target: bytes) -> bool:
        if not self._volume.inode(ino).fields.i_flags & c.ENCRYPT_FL:
            return False
        self.done.skipped.append((os.fsdecode(target), "is encrypted"))
        return True

    def _one(self, ino: int, target: bytes) -> None:
        v, done = self._volume, self.done
        s = v.stat(ino)
        if s.kind == "dir":
            done.directories += 1
        elif s.kind in ("file", "symlink") and self._encrypted(ino, target):
            return
        elif ino in self._seen:
            self._clear(target)
            os.link(self._seen[ino], target, follow_symlinks=False)
            done.files += 1
            return
        elif s.kind == "file":
            self._clear(target)
            self._content(ino, s.size, target)
            done.files += 1
        elif s.kind == "symlink":
            self._clear(target)
            os.symlink(v.readlink(ino), target)  # noqa: PTH211
            done.symlinks += 1
        else:
            self._clear(target)
            kind = {"char": stat.S_IFCHR, "block": stat.S_IFBLK, "fifo": stat.S_IFIFO, "socket": stat.S_IFSOCK}[s.kind]
            try:
                os.mknod(target, kind | 0o600, os.makedev(*s.rdev))
            except OSError as e:
                done.skipped.append((os.fsdecode(target), (e.strerror or str(e)).lower()))
                return
            done.others += 1
        if s.nlink > 1 and s.kind != "dir":
            self._seen[ino] = target
        self._attributes(ino, target, s.uid, s.gid)
        if s.kind != "symlink":
            os.chmod(target, s.mode if self._archive else s.mode & 0o1777)  # noqa: PTH101
        os.utime(target, ns=(s.atime_ns, s.mtime_ns), follow_symlinks=False)

    def _attributes(self, ino: int, target: bytes, uid: int, gid: int) -> None:
        if not self._archive:
            return
        ids = [-1 if n == _NOBODY else n for n in (uid, gid)]
        os.chown(target, ids[0], ids[1], follow_symlinks=False)
        for name, value in self._volume.xattrs(ino).items():
            try:
                os.setxattr(target, name, value, follow_symlinks=False)
            except OSError as e:
                self.done.skipped.append((os.fsdecode(target), f"{os.fsdecode(name)}: {(e.strerror or '').lower()}"))

    @staticmethod
    def _clear(target: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(target)  # noqa: PTH108

    def _content(self, ino: int, size: int, target: bytes) -> None:
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, size)
            for at, data in self._volume.pieces(ino):
                self._write(fd, data, at)
        finally:
            os.close(fd)

    def _write(self, fd: int, data: bytes, at: int) -> None:
        view = memoryview(data)
        while view:
            count = os.pwrite(fd, view, at)
            view, at = view[count:], at + count
        self.done.bytes += len(data)
        self._progress(len(data))


def remove(volume: WritableVolume, path: str | bytes, *, recursive: bool = False) -> int:
    """Remove a path; with ``recursive`` a directory and all below it. Return how many names went.

    NotFound, IsADirectory, Invalid for the root.
    """
    ino = volume.resolve(path, follow=False)
    if volume.inode(ino).type != c.S_IFDIR:
        volume.unlink(path)
        return 1
    if not recursive:
        raise IsADirectory(
            "is a directory", where=f"{volume.where}: {os.fsdecode(path)}", hint="-r removes directories"
        )
    if ino == c.ROOT_INO:
        raise Invalid("the root cannot be removed", where=volume.where)
    base = os.fsencode(path).rstrip(b"/")
    count = 1
    for name, _, is_directory in bottom_up(volume, ino, base):
        if is_directory:
            volume.rmdir(name)
        else:
            volume.unlink(name)
        count += 1
    volume.rmdir(base)
    return count


def make_parents(volume: WritableVolume, path: str | bytes, *, mode: int = 0o755) -> list[bytes]:
    """Make a directory and those above it that are missing; return the paths made. Exists, NotADirectory."""
    made = []
    at = b""
    for part in paths.split(os.fsencode(path)):
        at += b"/" + part
        try:
            ino = volume.resolve(at)
        except NotFound:
            volume.mkdir(at, mode=mode)
            made.append(at)
        else:
            if volume.inode(ino).type != c.S_IFDIR:
                raise NotADirectory("is not a directory", where=f"{volume.where}: {os.fsdecode(at)}")
    return made
