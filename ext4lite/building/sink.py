"""The data of a new file: to consecutive blocks as it comes, with holes for long runs of zeros."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from ext4lite.building.output import Buffer, Output
from ext4lite.building.space import Space
from ext4lite.extents import Extent
from ext4lite.geometry import BLOCK

_HOLE = 64 << 10
_ZEROS = bytes(_HOLE)


class FileSink:
    """Takes a new file's bytes. Only one is open at a time. As a context manager it closes itself.

    ``closed`` is called at the end with the inode's number, the file's size and its extents.
    """

    __slots__ = ("_closed", "_extents", "_open", "_output", "_pending", "_size", "_space", "_tail", "ino")

    def __init__(
        self, ino: int, space: Space, output: Output, closed: Callable[[int, int, list[Extent]], None]
    ) -> None:
        self.ino = ino
        self._space, self._output, self._closed = space, output, closed
        self._size = 0
        self._extents: list[Extent] = []
        self._pending = bytearray()
        self._tail = 0  # bytes used in the last block
        self._open = True

    def write(self, data: Buffer) -> None:
        """Append bytes; runs of zeros that fill aligned 64 KiB pieces become holes. VolumeFull, HostError."""
        if not self._open:
            raise ValueError("write to a closed FileSink")
        size = len(data)
        pending = self._pending
        if len(pending) + size < _HOLE:
            pending += data
            return
        view = memoryview(data)
        at = 0
        if pending:
            at = _HOLE - len(pending)
            pending += view[:at]
            self._piece(pending)
            self._pending = pending = bytearray()
        start = at
        while at + _HOLE <= size:
            if view[at : at + _HOLE] == _ZEROS:
                if at > start:
                    self._append(view[start:at])
                self._size += _HOLE
                start = at + _HOLE
            at += _HOLE
        if at > start:
            self._append(view[start:at])
        pending += view[at:]

    def skip(self, count: int) -> None:
        """Append ``count`` zero bytes without work for those that become holes. VolumeFull, HostError."""
        head = min(count, -len(self._pending) % _HOLE)
        if head:
            self.write(bytes(head))
        rest = count - head
        if rest <= 0:
            return
        self._size += rest - rest % _HOLE
        self.write(bytes(rest % _HOLE))

    def close(self) -> None:
        """End the file. Harmless when called again."""
        if not self._open:
            return
        self._open = False
        try:
            if self._pending:
                self._append(self._pending)
        finally:
            self._end()

    def __enter__(self) -> FileSink:
        return self

    def __exit__(self, t: type[BaseException] | None, v: BaseException | None, tb: TracebackType | None) -> None:
        if t is None:
            self.close()
        elif self._open:
            self._open = False
            self._end()

    def _end(self) -> None:
        self._closed(self.ino, self._size, self._extents)
        if self._tail:
            self._output.put(bytes(BLOCK - self._tail))

    def _piece(self, piece: bytearray) -> None:
        if piece == _ZEROS:
            self._size += _HOLE
        else:
            self._append(piece)

    def _append(self, data: Buffer) -> None:
        """Write bytes at the file's end, which lies in its last block or at a block's beginning."""
        output, size, at = self._output, len(data), 0
        if self._tail:
            at = min(size, BLOCK - self._tail)
            output.put(data[:at])
            self._tail = (self._tail + at) % BLOCK
            self._size += at
        rest = size - at
        if not rest:
            return
        logical = self._size // BLOCK
        for start, count in self._space.take(-(-rest // BLOCK)):
            length = min(rest, count * BLOCK)
            output.put(data if length == size else memoryview(data)[at : at + length], start * BLOCK)
            add_extent(self._extents, logical, start, count)
            logical += count
            at += length
            rest -= length
            self._size += length
        self._tail = self._size % BLOCK


def add_extent(extents: list[Extent], logical: int, start: int, count: int) -> None:
    """Append a run of blocks to a file's extents, to the last one if it continues that."""
    if extents:
        last = extents[-1]
        if last.logical + last.count == logical and last.physical + last.count == start:
            last.count += count
            return
    extents.append(Extent(logical, start, count))
