"""What lies below a volume: a flat array of bytes, in a plain file or in a delta over another (``ext4lite.delta``)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Protocol

from ext4lite.errors import HostError
from ext4lite.hostfs import data_runs, punch, pwrite_all

Buffer = bytes | bytearray | memoryview


class Device(Protocol):
    """The bytes of a volume. Offsets and lengths are in bytes; what the host refuses is HostError."""

    @property
    def fd(self) -> int:
        """Descriptor of the file that belongs to this volume alone; -1 once closed."""
        ...

    def size(self) -> int:
        """Return how many bytes there are."""
        ...

    def read(self, length: int, offset: int) -> bytes:
        """Return bytes from ``offset`` on: fewer than ``length`` only where the device ends."""
        ...

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill ``view`` with bytes from ``offset`` on; return how many there were, fewer only where the device ends."""
        ...

    def write(self, data: Buffer, offset: int) -> None:
        """Write bytes, all of them, within the device."""
        ...

    def flush(self) -> None:
        """Return when everything written before is durable."""
        ...

    def punch(self, offset: int, length: int) -> bool:
        """Make bytes read as zeros that take no space; False, and nothing done, where the host cannot."""
        ...

    def data_runs(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield (offset, length) of what may be other than zeros within ``[start, end)``."""
        ...

    def prefetch(self, offset: int, length: int) -> None:
        """Let the host begin to read bytes that will be needed. Nothing is promised."""
        ...

    def close(self) -> None:
        """Give back the descriptors (and with the last copies the locks). Harmless when called again."""
        ...


Handle = int | Device
"""A descriptor of a plain image, or a device: what the modules above take."""


def as_device(handle: Handle, where: str) -> Device:
    """Return the device that a handle is; one of a plain descriptor closes that."""
    return FileDevice(handle, where) if isinstance(handle, int) else handle


class FileDevice:
    """A plain image file, or a block device, open at ``fd``, which :meth:`close` closes."""

    __slots__ = ("_fd", "where")

    def __init__(self, fd: int, where: str) -> None:
        self._fd, self.where = fd, where

    @property
    def fd(self) -> int:
        """See :class:`Device`."""
        return self._fd

    def size(self) -> int:
        """See :class:`Device`; fstat says 0 for a block device."""
        try:
            return os.lseek(self._fd, 0, os.SEEK_END)
        except OSError as e:
            raise HostError.from_os(e, self.where) from e

    def read(self, length: int, offset: int) -> bytes:
        """See :class:`Device`."""
        return pread_full(self._fd, length, offset, self.where)

    def read_into(self, view: memoryview, offset: int) -> int:
        """See :class:`Device`."""
        done = 0
        try:
            while done < len(view):
                got = os.preadv(self._fd, [view[done:]], offset + done)
                if not got:
                    break
                done += got
        except (OSError, OverflowError) as e:
            raise host_error(e, self.where) from e
        return done

    def write(self, data: Buffer, offset: int) -> None:
        """See :class:`Device`."""
        try:
            pwrite_all(self._fd, data, offset)
        except (OSError, OverflowError) as e:
            raise host_error(e, self.where) from e

    def flush(self) -> None:
        """See :class:`Device`."""
        fdatasync(self._fd, self.where)

    def punch(self, offset: int, length: int) -> bool:
        """See :class:`Device`."""
        return punch(self._fd, offset, length)

    def data_runs(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """See :class:`Device`."""
        return data_runs(self._fd, end, start)

    def prefetch(self, offset: int, length: int) -> None:
        """See :class:`Device`."""
        prefetch(self._fd, offset, length)

    def close(self) -> None:
        """See :class:`Device`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def host_error(error: Exception, where: str) -> HostError:
    """Return the HostError for what a system call raised."""
    return HostError.from_os(error, where) if isinstance(error, OSError) else HostError(str(error), where=where)


def pread_full(fd: int, length: int, offset: int, where: str) -> bytes:
    """Return ``length`` bytes of a file from ``offset`` on, fewer only where it ends. HostError."""
    try:
        data = os.pread(fd, length, offset)
        while 0 < len(data) < length:  # Linux gives at most 2 GiB at once
            more = os.pread(fd, length - len(data), offset + len(data))
            if not more:
                break
            data += more
    except (OSError, OverflowError) as e:
        raise host_error(e, where) from e
    return data


def prefetch(fd: int, offset: int, length: int) -> None:
    """Let the host begin to read bytes of a file, where it takes advice."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, offset, length, os.POSIX_FADV_WILLNEED)


def fdatasync(fd: int, where: str) -> None:
    """Return when what was written to a file is durable. HostError."""
    try:
        os.fdatasync(fd) if hasattr(os, "fdatasync") else os.fsync(fd)
    except OSError as e:
        raise HostError.from_os(e, where) from e
