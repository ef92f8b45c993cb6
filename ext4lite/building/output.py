"""The file that becomes the image: bytes in order, gathered to large writes and sent on their way to the disk early."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ext4lite import hostfs
from ext4lite.blockdev import replacing
from ext4lite.errors import HostError
from ext4lite.geometry import BLOCK

Buffer = bytes | bytearray | memoryview

_BUFFER = 2 << 20
_WRITEBACK = 16 << 20  # smaller steps give the host's file more extents, and clones of it take longer


class Output:
    """A file of ``size`` bytes that has its name only after :meth:`publish`; ``durable`` asks for the fsyncs.

    HostError when the host cannot hold it.
    """

    def __init__(self, path: Path, size: int, *, durable: bool) -> None:
        self._path = path
        self._durable = durable
        self._buffer = bytearray()
        self._buffer_at = 0
        self._unsent = self._unsent_end = 0  # written, but not yet on its way to the disk
        self._file = hostfs.NewFile(path)
        self.fd = self._file.fd
        try:
            os.ftruncate(self.fd, size)  # at once: a host file system that cannot hold it says so now
        except OSError as e:
            self._file.discard()
            raise HostError.from_os(e, str(path)) from e

    def put(self, data: Buffer, offset: int = -1) -> None:
        """Buffer bytes for byte ``offset`` of the image (-1: right behind the last ones). HostError."""
        end = self._buffer_at + len(self._buffer)
        if offset not in (-1, end):
            self.flush()
            self._buffer_at = end = offset
        if len(data) >= _BUFFER:
            self.flush()
            self._write(data, end)
            self._buffer_at = end + len(data)
            return
        self._buffer += data
        if len(self._buffer) >= _BUFFER:
            self.flush()

    def flush(self) -> None:
        """Write what is buffered. HostError."""
        if self._buffer:
            self._write(self._buffer, self._buffer_at)
            self._buffer_at += len(self._buffer)
            self._buffer = bytearray()

    def forget(self, block: int, count: int) -> None:
        """Drop the buffered bytes of a run of blocks when they are the last, so that others may take their place."""
        start, end = block * BLOCK, (block + count) * BLOCK
        if end == self._buffer_at + len(self._buffer):
            if start >= self._buffer_at:
                del self._buffer[start - self._buffer_at :]
            else:
                self._buffer = bytearray()
                self._buffer_at = start

    def punch(self, block: int, count: int) -> None:
        """Make a hole of a run of blocks."""
        hostfs.punch(self.fd, block * BLOCK, count * BLOCK)

    def publish(self, *, replace: bool) -> None:
        """Give the file its name, in place of one that has it if ``replace``. HostError."""
        try:
            with replacing(self._path) if replace else contextlib.nullcontext():
                self._file.publish(durable=self._durable, replace=replace)
        except FileExistsError as e:
            raise HostError("the target exists", where=str(self._path), hint="--force replaces it") from e
        except OSError as e:
            raise HostError.from_os(e, str(self._path)) from e

    def discard(self) -> None:
        """Remove the file that was not published."""
        self._file.discard()

    def _write(self, data: Buffer, offset: int) -> None:
        view = memoryview(data)
        if offset != self._unsent_end:
            self._unsent = offset
        self._unsent_end = offset + len(view)
        while view:
            try:
                done = os.pwrite(self.fd, view, offset)
            except OSError as e:
                raise HostError.from_os(e, str(self._path)) from e
            view = view[done:]
            offset += done
        if self._durable and self._unsent_end - self._unsent >= _WRITEBACK:
            hostfs.start_writeback(self.fd, self._unsent, self._unsent_end - self._unsent)
            self._unsent = self._unsent_end
