"""What the core needs of the host's file system and Python's os module lacks: reflinks, hole punching, extents.

Sparse copies.

Everything here works on plain file descriptors; on a system without the call the answer is "not available", never a
crash at import.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Any

from ext4lite.errors import HostError

FICLONE = 0x40049409
FS_IOC_FIEMAP = 0xC020660B
FALLOC_FL_KEEP_SIZE = 0x1
FALLOC_FL_PUNCH_HOLE = 0x2
SYNC_FILE_RANGE_WRITE = 0x2
FIEMAP_FLAG_SYNC = 0x1
FIEMAP_EXTENT_LAST = 0x1
FIEMAP_EXTENT_UNWRITTEN = 0x800
FIEMAP_EXTENT_SHARED = 0x2000

NO_REFLINK = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.EXDEV, errno.ENOTTY, errno.ENOSYS, errno.EPERM})
"""Errors by which FICLONE says that blocks cannot be shared here."""

_NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL})

_FIEMAP = Struct("=QQIIII")
_FIEMAP_EXTENT = Struct("=QQQQQIIII")
_CHUNK = 8 << 20


@dataclass(slots=True, frozen=True)
class HostExtent:
    """A run of a host file, all in bytes; ``shared`` says that another file has the same blocks."""

    logical: int
    physical: int
    length: int
    flags: int

    @property
    def shared(self) -> bool:
        """Whether the run's blocks belong to another file too."""
        return bool(self.flags & FIEMAP_EXTENT_SHARED)


def temp_name(path: Path) -> Path:
    """Return a new name in the same directory. It begins like the old one; all of it could make it too long a name."""
    return path.with_name(f".{path.name[:32]}.{os.urandom(6).hex()}.tmp")


class NewFile:
    """A file that appears under its name whole or not at all.

    Where the host can (O_TMPFILE) it has no name until :meth:`publish`, so that nothing is left even of a killed
    process; elsewhere it has a temporary one beside its target. HostError when it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd, self._temp = self._open()

    def _open(self) -> tuple[int, Path | None]:
        flags = os.O_RDWR | os.O_CLOEXEC
        try:
            if hasattr(os, "O_TMPFILE") and Path("/proc/self/fd").is_dir():
                try:
                    return os.open(self.path.parent, flags | os.O_TMPFILE, 0o666), None
                except OSError as e:
                    if e.errno not in _NO_TMPFILE:
                        raise
            while True:
                temp = temp_name(self.path)
                with contextlib.suppress(FileExistsError):
                    return os.open(temp, flags | os.O_CREAT | os.O_EXCL, 0o666), temp
        except PermissionError as e:  # it is the directory that refuses, not a file that may be there
            raise HostError("no file may be made in this directory", where=str(self.path.parent)) from e
        except OSError as e:
            raise HostError.from_os(e, str(self.path)) from e

    def publish(self, *, durable: bool = False, replace: bool = True) -> None:
        """Give the file its name, replacing what has it, and close it.

        With ``durable`` its bytes and its name outlive a crash of the host. Without ``replace`` a file that has the
        name is FileExistsError. OSError; then :meth:`discard` it.
        """
        if durable:
            os.fsync(self.fd)
        if self._temp is None:
            self._temp = self._link(replace)
        elif not replace:
            os.link(self._temp, self.path, follow_symlinks=False)
            self._temp.unlink()
            self._temp = None
        if self._temp is not None:
            self._temp.rename(self.path)
        if durable:
            parent = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(parent)
            finally:
                os.close(parent)
        self._temp = None
        self._close()

    def _link(self, replace: bool) -> Path | None:
        """Name the nameless: its own name where that is free (None is returned), else a temporary one to rename."""
        source = f"/proc/self/fd/{self.fd}"
        try:
            os.link(source, self.path, src_dir_fd=self.fd)  # only with a dir_fd does Python follow the link
        except FileExistsError:
            if not replace:
                raise
            temp = temp_name(self.path)
            os.link(source, temp, src_dir_fd=self.fd)
            return temp
        return None

    def discard(self) -> None:
        """Forget the file. Harmless when it is published or discarded already."""
        if self._temp is not None:
            unlink_quietly(self._temp)
            self._temp = None
        self._close()

    def _close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def ficlone(target: int, source: int) -> None:
    """Make the file ``target`` share all blocks of ``source`` (Linux). OSError, see :data:`NO_REFLINK`."""
    import fcntl

    if sys.platform != "linux":
        raise OSError(errno.ENOTTY, os.strerror(errno.ENOTTY))
    fcntl.ioctl(target, FICLONE, source)


def clonefile(source: Path, target: Path) -> None:
    """macOS: make ``target``, which must not exist, a copy-on-write clone of ``source``.

    OSError. (Not tested: no macOS at hand.)
    """
    import ctypes
    import ctypes.util

    libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
    if libc.clonefile(os.fsencode(source), os.fsencode(target), 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


_ffi: tuple[Any, Any] | None = None


def _libc() -> tuple[Any, Any]:
    """The C library by cffi in ABI mode, loaded at first use."""
    global _ffi
    if _ffi is None:
        from cffi import FFI

        ffi = FFI()
        ffi.cdef("int fallocate64(int fd, int mode, int64_t offset, int64_t len);")
        ffi.cdef("int sync_file_range(int fd, int64_t offset, int64_t nbytes, unsigned flags);")
        _ffi = ffi, ffi.dlopen(None)
    return _ffi


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """``fallocate(2)`` with its mode flags. OSError; EOPNOTSUPP where the system has no such call."""
    if sys.platform != "linux":
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    ffi, libc = _libc()
    if libc.fallocate64(fd, mode, offset, length) != 0:
        raise OSError(ffi.errno, os.strerror(ffi.errno))


def punch(fd: int, offset: int, length: int) -> bool:
    """Turn bytes of a file into a hole, keeping its size.

    False where the host cannot (they then keep their content).
    """
    try:
        fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, length)
    except OSError:
        return False
    return True


def start_writeback(fd: int, offset: int, length: int) -> None:
    """Let the host begin to write bytes of a file to its disk, so that a later fsync finds less to do.

    Nothing is promised and nothing waited for; where the host has no such call nothing happens.
    """
    if sys.platform == "linux":
        _, libc = _libc()
        libc.sync_file_range(fd, offset, length, SYNC_FILE_RANGE_WRITE)


def fiemap(fd: int) -> list[HostExtent]:
    """Return the host extents of a whole file after a sync of it (Linux). OSError."""
    import fcntl

    out: list[HostExtent] = []
    start, room = 0, 512
    while True:
        buffer = bytearray(_FIEMAP.pack(start, (1 << 64) - 1 - start, FIEMAP_FLAG_SYNC, 0, room, 0))
        buffer += bytes(room * _FIEMAP_EXTENT.size)
        fcntl.ioctl(fd, FS_IOC_FIEMAP, buffer, True)
        mapped = _FIEMAP.unpack_from(buffer)[3]
        for i in range(mapped):
            values = _FIEMAP_EXTENT.unpack_from(buffer, _FIEMAP.size + i * _FIEMAP_EXTENT.size)
            out.append(HostExtent(values[0], values[1], values[2], values[5]))
        if mapped == 0 or out[-1].flags & FIEMAP_EXTENT_LAST:
            return out
        start = out[-1].logical + out[-1].length


def data_runs(fd: int, size: int, start: int = 0) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) of what is not a hole in the first ``size`` bytes of a file, from ``start`` on."""
    at = start
    if not hasattr(os, "SEEK_DATA"):
        if at < size:
            yield at, size - at
        return
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
            end = os.lseek(fd, start, os.SEEK_HOLE)
        except OSError as e:
            if e.errno == errno.ENXIO:
                return
            if e.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                yield at, size - at
                return
            raise
        if start >= size:
            return
        yield start, min(end, size) - start
        at = end


def copy_sparse(target: int, source: int, size: int) -> int:
    """Copy ``size`` bytes between files, holes staying holes; return how many bytes were copied. OSError."""
    os.ftruncate(target, size)
    total = 0
    for start, length in data_runs(source, size):
        copy_run(target, source, start, length)
        total += length
    return total


def copy_run(target: int, source: int, start: int, length: int) -> None:
    """Copy bytes between files, from and to the same offset (where the target has a hole); by the kernel if it can.

    OSError.
    """
    at, end = start, start + length
    kernel = hasattr(os, "copy_file_range")
    while at < end:
        if kernel:
            try:
                done = os.copy_file_range(source, target, min(end - at, _CHUNK * 16), at, at)
            except OSError as e:
                if e.errno not in NO_REFLINK:
                    raise
                kernel = False
                continue
        else:
            data = os.pread(source, min(end - at, _CHUNK), at)
            done = len(data)
            _pwrite_nonzero(target, data, at)
        if done == 0:
            raise OSError(errno.EIO, "the source became shorter while it was copied")
        at += done


def _pwrite_nonzero(fd: int, data: bytes, offset: int) -> None:
    """Write what is not zeros of 64 KiB: a source that cannot tell its holes (a block device) has them here."""
    step = 64 << 10
    zeros = bytes(step)
    for at in range(0, len(data), step):
        piece = data[at : at + step]
        if piece != zeros[: len(piece)]:
            pwrite_all(fd, piece, offset + at)


def pwrite_all(fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """Write all of ``data``, also where a single call stops half-way. OSError, OverflowError."""
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def take_over(old: int, new: int) -> None:
    """Give a new file the old one's owner, mode and attributes. OSError when owner or mode cannot be kept."""
    info, made = os.fstat(old), os.fstat(new)
    if (made.st_uid, made.st_gid) != (info.st_uid, info.st_gid):
        try:
            os.fchown(new, info.st_uid, info.st_gid)
        except PermissionError as e:
            what = f"a new file in its place cannot have its owner, {info.st_uid}:{info.st_gid}"
            raise OSError(e.errno, what) from e
    os.fchmod(new, stat.S_IMODE(info.st_mode))
    if hasattr(os, "listxattr"):
        with contextlib.suppress(OSError):  # a host without attributes, or not permitted: they matter to few
            for name in os.listxattr(old):
                with contextlib.suppress(OSError):
                    os.setxattr(new, name, os.getxattr(old, name))


def unlink_quietly(path: Path) -> None:
    """Remove a file if it is there."""
    with contextlib.suppress(OSError):
        path.unlink()
