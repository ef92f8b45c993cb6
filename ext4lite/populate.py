"""A volume filled from a directory of the host: what ``ext4lite mkfs -d`` does, as ``mke2fs -d`` (mke2fs(8)) does it.

Everything the host has goes in: files with their holes, directories, symlinks, devices, fifos, sockets, hard links
among them, owners, permissions, times and extended attributes. The directory itself becomes the root. Names go in in
the order of their bytes and nothing of the host's own (inode numbers, change times) is taken over, so that equal trees,
UUIDs and times give equal volumes.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from struct import Struct
from typing import TYPE_CHECKING

from ext4lite.builder import ImageBuilder, Meta
from ext4lite.building.names import Names
from ext4lite.errors import HostError, NotADirectory, Unsupported
from ext4lite.hostfs import data_runs
from ext4lite.transfer import NODES, Copied
from ext4lite.xattrs import split_name

if TYPE_CHECKING:
    from ext4lite.blockdev import StrPath
    from ext4lite.builder import FileSink

_CHUNK = 1 << 20
_LOST_FOUND = b"lost+found"
_IDENTITY = Struct("<QQ")


def populate(builder: ImageBuilder, source: StrPath, progress: Callable[[int], None] | None = None) -> Copied:
    """Copy everything below the host directory ``source`` into a volume that is being built.

    ``progress`` is called with each number of bytes copied. Symlinks are not followed; mounts below ``source`` are.
    What ext4 has no place for (attributes of other file systems) is left out and named in the result's ``skipped``.
    HostError, NotADirectory, VolumeFull, Unsupported.
    """
    return _Populate(builder, progress or (lambda _: None)).run(os.fsencode(source))


class _Populate:
    def __init__(self, builder: ImageBuilder, progress: Callable[[int], None]) -> None:
        self._builder = builder
        self._progress = progress
        self._linked = Names()  # what has several names, by where it is on the host
        self._at = b""  # what is being copied
        self._has_lost_found = False
        self._done = Copied()
        # Its own file may lie in the tree: on hosts without nameless files it has a name.
        own = os.fstat(builder.fd)
        self._own = own.st_dev, own.st_ino
        self._has_xattrs = hasattr(os, "listxattr")

    def run(self, source: bytes) -> Copied:
        builder = self._builder
        self._at = source
        try:
            info = os.stat(source)  # noqa: PTH116 (bytes, as all paths here)
            if not stat.S_ISDIR(info.st_mode):
                raise NotADirectory("is not a directory", where=os.fsdecode(source))
            builder.set_meta(builder.root, self._meta(source, info))
            # The way down, with what is still to be visited of each directory on it: names are not kept twice.
            way = [(source, self._enter(source, builder.root))]
            while way:
                above, below = way[-1]
                name, ino = next(below, (b"", 0))
                if ino:
                    path = os.path.join(above, name)  # noqa: PTH118
                    way.append((path, self._enter(path, ino)))
                else:
                    way.pop()
        except OSError as e:
            raise HostError.from_os(e, os.fsdecode(self._at)) from e
        return self._done

    def _enter(self, path: bytes, ino: int) -> Iterator[tuple[bytes, int]]:
        """Copy the names in a directory; return those of the directories among them, which are still empty."""
        builder = self._builder
        self._at = path
        names = os.listdir(path)  # noqa: PTH208
        names.sort(reverse=True)
        prefix = os.path.join(path, b"")  # noqa: PTH118
        while names:  # taken off one by one, for there may be a million
            name = names.pop()
            self._entry(prefix + name, name, ino)
        below = ((name, child) for name, child in builder.children(ino) if builder.kind(child) == "dir")
        if ino != builder.root:
            return below
        if self._has_lost_found:  # it was there before all others
            return iter(sorted(below))
        return (found for found in below if found[0] != _LOST_FOUND)

    def _entry(self, path: bytes, name: bytes, parent: int) -> None:
        """Copy one name, of a directory without what is in it."""
        builder, done = self._builder, self._done
        self._at = path
        info = os.lstat(path)
        kind = stat.S_IFMT(info.st_mode)
        several = info.st_nlink > 1 and kind != stat.S_IFDIR
        identity = _IDENTITY.pack(info.st_dev, info.st_ino) if several else b""
        if several and (known := self._linked.find(0, identity)):
            builder.add_link(parent, name, known)
            done.files += 1
            return
        if kind == stat.S_IFREG:
            if (info.st_dev, info.st_ino) == self._own:
                return
            made = self._file(path, parent, name, info)
            done.files += 1
        elif kind == stat.S_IFDIR:
            meta = self._meta(path, info)
            done.directories += 1
            if parent == builder.root and name == _LOST_FOUND:
                self._has_lost_found = True
                builder.set_meta(builder.lookup(parent, name) or 0, meta)
            else:
                builder.add_dir(parent, name, meta)
            return
        elif kind == stat.S_IFLNK:
            target = os.readlink(path)  # noqa: PTH115
            made = builder.add_symlink(parent, name, target, self._meta(path, info))
            done.symlinks += 1
        else:
            meta = self._meta(path, info)
            device = os.major(info.st_rdev), os.minor(info.st_rdev)
            made = builder.add_node(parent, name, meta, NODES[kind], *device)
            done.others += 1
        if several:
            self._linked.add(0, identity, made)

    def _meta(self, path: bytes, info: os.stat_result) -> Meta:
        meta = Meta(stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid, info.st_mtime_ns)
        if self._has_xattrs:
            for name in os.listxattr(path, follow_symlinks=False):
                full = os.fsencode(name)
                try:
                    split_name(full)
                except Unsupported as e:
                    self._done.skipped.append((os.fsdecode(path), e.what))
                    continue
                meta.xattrs[full] = os.getxattr(path, name, follow_symlinks=False)
        return meta

    def _file(self, path: bytes, parent: int, name: bytes, info: os.stat_result) -> int:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            with self._builder.add_file(parent, name, self._meta(path, info)) as sink:
                size = info.st_size
                if info.st_blocks * 512 >= size:
                    self._content(fd, sink, size)
                else:
                    at = 0
                    for start, length in data_runs(fd, size):
                        sink.skip(start - at)
                        os.lseek(fd, start, os.SEEK_SET)
                        at = start + self._content(fd, sink, length)
                    sink.skip(size - at)
                return sink.ino
        finally:
            os.close(fd)

    def _content(self, fd: int, sink: FileSink, length: int) -> int:
        """Copy up to ``length`` bytes from where ``fd`` stands; return how many there were."""
        left = length
        while left:
            data = os.read(fd, min(_CHUNK, left))
            if not data:
                break
            sink.write(data)
            left -= len(data)
            self._progress(len(data))
        self._done.bytes += length - left
        return length - left
