"""Files into a volume (what ``cp-in`` does; out of it: ``copyout.py``), trees removed from it.

Holes stay holes, times and permissions are kept; owners and extended attributes with ``archive``. Into a volume goes
everything a host can have, hard links among what is copied included.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ext4lite import paths
from ext4lite.errors import (
    HostError,
    Invalid,
    IsADirectory,
    NoRoomForAttribute,
    NotADirectory,
    NotFound,
    PathError,
    Unsupported,
)
from ext4lite.hostfs import data_runs
from ext4lite.layout import constants as c
from ext4lite.volume import Volume
from ext4lite.walking import bottom_up

if TYPE_CHECKING:
    from ext4lite.names import NodeKind
    from ext4lite.writer import WritableVolume

_CHUNK = 4 << 20
_NO_XATTRS = (errno.ENOTSUP, errno.EPERM, errno.EACCES)
NODES: dict[int, NodeKind] = {
    stat.S_IFCHR: "char",
    stat.S_IFBLK: "block",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
}
"""What is neither file, directory nor symlink, by the type in its mode."""
_REPORTED = 1000
_WHOLE = 256 << 10  # a file up to this size goes in as one operation
ENTRY_WEIGHT = 4096  # what a name counts for in progress, beside its bytes
ACLS = ("system.posix_acl_access", "system.posix_acl_default")
Progress = Callable[[int], None]
RawPath = bytes


@dataclass(slots=True)
class Copied:
    """What a copy did. ``skipped`` are the first paths that were left out, or lost an attribute, with why."""

    files: int = 0
    directories: int = 0
    symlinks: int = 0
    others: int = 0
    bytes: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)
    skipped_count: int = 0
    """How many, also those not in the list."""
    left_out: int = 0
    """How many of them are missing altogether."""
    owners_lost: int = 0
    """Files that belong to who copied them, since only root can give files away."""

    def skip(self, path: RawPath, why: str, *, missing: bool = False) -> None:
        """Note what could not be kept."""
        self.skipped_count += 1
        self.left_out += missing
        if len(self.skipped) < _REPORTED:
            self.skipped.append((os.fsdecode(path), why))

    def as_dict(self) -> dict[str, object]:
        """Return it for JSON."""
        return {
            "files": self.files,
            "directories": self.directories,
            "symlinks": self.symlinks,
            "others": self.others,
            "bytes": self.bytes,
            "skipped": [{"path": path, "why": why} for path, why in self.skipped],
            "skipped_count": self.skipped_count,
            "left_out": self.left_out,
            "owners_lost": self.owners_lost,
        }


def in_words(e: OSError) -> str:
    """Return what the system says about an error."""
    return (e.strerror or str(e)).lower()


def host_weight(sources: list[str]) -> int:
    """Return what a copy of host files counts in progress: their bytes, and something for each name."""
    total = 0
    for source in sources:
        pending = [os.fsencode(source)]
        while pending:
            path = pending.pop()
            with contextlib.suppress(OSError):
                info = os.lstat(path)
                total += ENTRY_WEIGHT + (info.st_blocks * 512 if stat.S_ISREG(info.st_mode) else 0)
                if stat.S_ISDIR(info.st_mode):
                    pending += [path + b"/" + name for name in os.listdir(path)]  # noqa: PTH208
    return total


@dataclass(slots=True)
class _Entered:
    """A host directory on the way down: its names to come."""

    source: bytes
    target: bytes
    info: os.stat_result
    names: Iterator[bytes]


class CopyIn:
    """Copies host files into a writable volume."""

    def __init__(
        self,
        volume: WritableVolume,
        *,
        recursive: bool = False,
        archive: bool = False,
        owner: tuple[int, int] = (0, 0),
        progress: Progress | None = None,
    ) -> None:
        self._volume = volume
        self._recursive = recursive
        self._archive = archive
        self._owner = owner
        self._progress = progress or (lambda _: None)
        self._seen: dict[tuple[int, int], tuple[bytes, int]] = {}
        """For files with several names: one in the volume, and how many more may come."""
        self.done = Copied()

    def copy(self, sources: list[str], target: str) -> Copied:
        """Copy ``sources`` to a path in the volume, or into it when it is a directory, as ``cp`` does.

        Files below a source that cannot be read are left out and noted, as are attributes that have no place in the
        volume. HostError for a source itself, NotADirectory for several sources, IsADirectory for a directory without
        ``recursive``, VolumeFull: what was copied by then stays.
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
            try:
                self._tree(os.fsencode(source), base + b"/" + name if into else base)
            except OSError as e:
                raise HostError.from_os(e, source) from e
        return self.done

    def _tree(self, top: bytes, target: bytes) -> None:
        """Copy a host path and all below it; a directory's attributes come after its content."""
        info = os.lstat(top)
        stack = [self._enter(top, target, info)] if stat.S_ISDIR(info.st_mode) else []
        if not stack:
            self._file(top, target, info)
        while stack:
            at = stack[-1]
            name = next(at.names, None)
            if name is None:
                stack.pop()
                self._attributes(at.source, self._volume.resolve(at.target, follow=False), at.info)
                self.done.directories += 1
                continue
            source, inside = at.source + b"/" + name, at.target + b"/" + name
            try:
                info = os.lstat(source)
                if stat.S_ISDIR(info.st_mode):
                    stack.append(self._enter(source, inside, info))
                else:
                    self._file(source, inside, info)
            except OSError as e:
                self.done.skip(source, in_words(e), missing=True)
            self._progress(ENTRY_WEIGHT)

    def _enter(self, source: bytes, target: bytes, info: os.stat_result) -> _Entered:
        names = sorted(os.listdir(source)) if self._recursive else []  # noqa: PTH208
        self._directory(source, target, info)
        return _Entered(source, target, info, iter(names))

    def _owner_of(self, info: os.stat_result) -> tuple[int, int]:
        return (info.st_uid, info.st_gid) if self._archive else self._owner

    def _directory(self, source: bytes, target: bytes, info: os.stat_result) -> None:
        v = self._volume
        if not self._recursive:
            raise IsADirectory("is a directory", where=os.fsdecode(source), hint="-r copies directories")
        old = self._there(target)
        if old is None:
            uid, gid = self._owner_of(info)
            v.mkdir(target, mode=stat.S_IMODE(info.st_mode), uid=uid, gid=gid)
        elif v.inode(old).type != c.S_IFDIR:
            raise NotADirectory("is not a directory", where=f"{v.where}: {os.fsdecode(target)}")

    def _file(self, source: bytes, target: bytes, info: os.stat_result) -> None:
        """Copy what is no directory; a small file, attributes included, as one operation."""
        v, done = self._volume, self.done
        kind = stat.S_IFMT(info.st_mode)
        several = info.st_nlink > 1
        key = info.st_dev, info.st_ino
        if several and key in self._seen:
            self._clear(target, self._there(target))
            first, left = self._seen.pop(key)
            v.link(first, target)
            if left > 1:
                self._seen[key] = first, left - 1
            done.files += 1
            return
        if kind == stat.S_IFREG:
            self._regular(source, target, info)
            done.files += 1
        else:
            self._clear(target, self._there(target))
            v.together(lambda: self._special(source, target, info))
            done.symlinks += kind == stat.S_IFLNK
            done.others += kind != stat.S_IFLNK
        if several:
            self._seen[key] = target, info.st_nlink - 1

    def _special(self, source: bytes, target: bytes, info: os.stat_result) -> None:
        v = self._volume
        kind = stat.S_IFMT(info.st_mode)
        uid, gid = self._owner_of(info)
        if kind == stat.S_IFLNK:
            ino = v.symlink(target, os.readlink(source), uid=uid, gid=gid)  # noqa: PTH115
        else:
            device = os.major(info.st_rdev), os.minor(info.st_rdev)
            ino = v.mknod(target, NODES[kind], *device, mode=stat.S_IMODE(info.st_mode), uid=uid, gid=gid)
        self._attributes(source, ino, info)

    def _regular(self, source: bytes, target: bytes, info: os.stat_result) -> None:
        v = self._volume
        fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            old = self._there(target)
            if old is not None and v.inode(old).type != c.S_IFREG:
                v.unlink(target)
                old = None

            def make() -> int:
                uid, gid = self._owner_of(info)
                return v.create(target, mode=stat.S_IMODE(info.st_mode), uid=uid, gid=gid)

            def whole() -> int:
                ino = make()
                copied = self._content(fd, ino)
                self._attributes(source, ino, info)
                return copied

            if old is None and info.st_size <= _WHOLE:
                self.done.bytes += v.together(whole)
                return
            if old is not None:
                v.truncate(old, 0)
            ino = make() if old is None else old
            try:
                self.done.bytes += self._content(fd, ino)
            except BaseException:
                if old is None:  # nobody shall find half of it and take it for all
                    with contextlib.suppress(Exception):
                        v.unlink(target)
                raise
            v.together(lambda: self._attributes(source, ino, info))
        finally:
            os.close(fd)

    def _there(self, target: bytes) -> int | None:
        try:
            return self._volume.resolve(target, follow=False)
        except NotFound:
            return None

    def _clear(self, target: bytes, old: int | None) -> None:
        """Make way for something that is no directory."""
        if old is not None:
            self._volume.unlink(target)

    def _content(self, fd: int, ino: int) -> int:
        size, copied = os.fstat(fd).st_size, 0
        for start, length in data_runs(fd, size):
            at = start
            while at < start + length:
                data = os.pread(fd, min(_CHUNK, start + length - at), at)
                if not data:
                    break
                self._volume.pwrite(ino, at, data)
                at += len(data)
                copied += len(data)
                self._progress(len(data))
        if self._volume.inode(ino).size < size:
            self._volume.truncate(ino, size)
        return copied

    def _attributes(self, source: bytes, ino: int, info: os.stat_result) -> None:
        """Set owner, mode and times, then the extended attributes, which a new owner would take away."""
        v = self._volume
        uid, gid = self._owner_of(info)
        if self._archive:
            self._drop_inherited(ino)
        v.set_attributes(
            ino,
            mode=None if stat.S_ISLNK(info.st_mode) else stat.S_IMODE(info.st_mode),
            uid=uid,
            gid=gid,
            atime_ns=info.st_atime_ns,
            mtime_ns=info.st_mtime_ns,
        )
        if self._archive:
            self._xattrs(source, ino)

    def _drop_inherited(self, ino: int) -> None:
        """What a directory of the volume handed down is not the source's."""
        found = self._volume.xattrs(ino)
        for name in ACLS:
            if os.fsencode(name) in found:
                self._volume.remove_xattr(ino, os.fsencode(name))

    def _xattrs(self, source: bytes, ino: int) -> None:
        if not hasattr(os, "listxattr"):
            return
        try:
            names = os.listxattr(source, follow_symlinks=False)
        except OSError as e:
            if e.errno not in _NO_XATTRS:
                raise
            return
        for name in names:
            try:
                value = os.getxattr(source, name, follow_symlinks=False)
                self._volume.set_xattr(ino, os.fsencode(name), value)
            except OSError as e:
                self.done.skip(source, f"{name}: {in_words(e)}")
            except (Unsupported, NoRoomForAttribute) as e:
                self.done.skip(source, e.what)


def inodes_below(volume: Volume, sources: list[str]) -> Iterator[int]:
    """Yield the inodes of paths and of all below them; what is not there is passed over."""
    for source in sources:
        with contextlib.suppress(PathError):
            top = paths.resolve(volume, source, follow=False)
            yield top
            if volume.inode(top).type == c.S_IFDIR:
                yield from (ino for _, ino in volume.walk(top))


def count_below(volume: Volume, sources: list[str]) -> int:
    """Return how many names paths and all below them are."""
    return sum(1 for _ in inodes_below(volume, sources))


def remove(
    volume: WritableVolume, path: str | bytes, *, recursive: bool = False, progress: Progress | None = None
) -> int:
    """Remove a path; with ``recursive`` a directory and all below it. Return how many names went.

    ``progress`` is called with 1 for each.

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
        if progress is not None:
            progress(1)
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
