"""Files out of a volume: what ``cp-out`` does. Nothing follows a symlink of the target, and nothing leaves it."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ext4lite import directory, hostfs, paths
from ext4lite.errors import CorruptImage, HostError, Invalid, IsADirectory, NotADirectory
from ext4lite.layout import constants as c
from ext4lite.transfer import ACLS, ENTRY_WEIGHT, Copied, Progress, in_words, inodes_below
from ext4lite.volume import Volume

_NOBODY = 0xFFFFFFFF  # no owner at all, for the system calls


def volume_weight(volume: Volume, sources: list[str]) -> int:
    """Return what a copy of a volume's paths counts in progress; see :func:`host_weight`."""
    total = 0
    for ino in inodes_below(volume, sources):
        s = volume.stat(ino)
        total += ENTRY_WEIGHT + (s.blocks512 * 512 if s.kind == "file" else 0)
    return total


class CopyOut:
    """Copies files of a volume to the host."""

    def __init__(
        self,
        volume: Volume,
        *,
        recursive: bool = False,
        archive: bool = False,
        progress: Progress | None = None,
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
        seen: set[int] = set()
        stack: list[tuple[int, bytes, Iterator[directory.DirEntry]]] = []

        def visit(ino: int, target: bytes) -> None:
            if self._volume.inode(ino).type != c.S_IFDIR:
                self._one(ino, target)
            elif self._make_directory(ino, target, seen):
                stack.append((ino, target, iter(self._volume.iterdir(ino))))
            self._progress(ENTRY_WEIGHT)

        visit(ino, target)
        while stack:
            above, path, entries = stack[-1]
            entry = next(entries, None)
            if entry is None:
                stack.pop()
                self._one(above, path)
            else:
                visit(entry[1], path + b"/" + entry[0])

    def _make_directory(self, ino: int, target: bytes, seen: set[int]) -> bool:
        """Make a directory for what is to be copied; False if it is left out."""
        where = f"{self._volume.where}: inode {ino}"
        if not self._recursive:
            raise IsADirectory("is a directory", where=where, hint="-r copies directories")
        if ino in seen:
            raise CorruptImage(f"has a second name, {target!r}", where=where)
        seen.add(ino)
        if self._encrypted(ino, target):
            return False
        if not (os.path.isdir(target) and not os.path.islink(target)):  # noqa: PTH112, PTH114
            os.mkdir(target, 0o700)  # noqa: PTH102
        return True

    def _encrypted(self, ino: int, target: bytes) -> bool:
        if not self._volume.inode(ino).fields.i_flags & c.ENCRYPT_FL:
            return False
        self.done.skip(target, "is encrypted", missing=True)
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
                done.skip(target, in_words(e), missing=True)
                return
            done.others += 1
        if s.nlink > 1 and s.kind != "dir":
            self._seen[ino] = target
        owned = self._archive and self._give_away(target, s.uid, s.gid)
        if self._archive:
            self._xattrs(ino, target)
        if s.kind != "symlink":
            # Whose set-user-id it is must be certain.
            os.chmod(target, s.mode if owned else s.mode & 0o1777)  # noqa: PTH101
        os.utime(target, ns=(s.atime_ns, s.mtime_ns), follow_symlinks=False)

    def _give_away(self, target: bytes, uid: int, gid: int) -> bool:
        """Set the owner; False where only root could."""
        ids = [-1 if n == _NOBODY else n for n in (uid, gid)]
        try:
            os.chown(target, ids[0], ids[1], follow_symlinks=False)
        except PermissionError:
            self.done.owners_lost += 1
            return False
        return True

    def _xattrs(self, ino: int, target: bytes) -> None:
        found = self._volume.xattrs(ino)
        if not hasattr(os, "setxattr"):
            for name in found:
                self.done.skip(target, f"{os.fsdecode(name)}: this system has no extended attributes")
            return
        with contextlib.suppress(OSError):
            for inherited in set(ACLS).intersection(os.listxattr(target, follow_symlinks=False)):
                os.removexattr(target, inherited, follow_symlinks=False)
        for name, value in found.items():
            try:
                os.setxattr(target, name, value, follow_symlinks=False)
            except OSError as e:
                self.done.skip(target, f"{os.fsdecode(name)}: {in_words(e)}")

    @staticmethod
    def _clear(target: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(target)  # noqa: PTH108

    def _content(self, ino: int, size: int, target: bytes) -> None:
        """Make a file that gets its name, in place of what had it, when it is whole: nobody finds half of one."""
        file = hostfs.NewFile(Path(os.fsdecode(target)))
        try:
            os.fchmod(file.fd, 0o600)
            os.ftruncate(file.fd, size)
            for at, data in self._volume.pieces(ino):
                self._write(file.fd, data, at)
            file.publish()
        finally:
            file.discard()

    def _write(self, fd: int, data: bytes, at: int) -> None:
        view = memoryview(data)
        while view:
            count = os.pwrite(fd, view, at)
            view, at = view[count:], at + count
        self.done.bytes += len(data)
        self._progress(len(data))
