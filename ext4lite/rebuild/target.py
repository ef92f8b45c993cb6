"""The file of the new volume: blocks handed out in ascending order, bytes gathered, copied and written."""

from __future__ import annotations

import os
from collections.abc import Callable

from ext4lite import hostfs
from ext4lite.device import Device
from ext4lite.errors import CorruptImage, HostError
from ext4lite.rebuild.plan import Layout

_BUFFER = 1 << 20  # what was read is still in the processor's cache when it is written
_RUN = 4 << 20
_WRITEBACK = 16 << 20
_PIECE = 64 << 10
_ZEROS = bytes(_PIECE)
_PROBE = _ZEROS[:32]
_LOOK_FOR_HOLES = 1 << 20
_NEAR = 64 << 10


class OutOfSpace(Exception):
    """No free blocks are left in the new volume."""


class Space:
    """Hands out a layout's free blocks (in clusters), always the next ones."""

    def __init__(self, layout: Layout) -> None:
        self._ratio = layout.shape.ratio
        self._runs = layout.free_runs()
        self._start = self._at = self._end = 0
        self.used: list[tuple[int, int]] = []
        """(start, count) of the runs handed out, ascending, not touching each other."""
        self.count = 0
        """Blocks handed out."""

    def take(self, clusters: int) -> list[tuple[int, int]]:
        """Return runs (start, count of blocks) that together are so many clusters. OutOfSpace."""
        count = clusters * self._ratio
        self.count += count
        if self._end - self._at >= count:  # nearly always
            start = self._at
            self._at += count
            return [(start, count)]
        out = []
        while count:
            if self._at == self._end:
                self._next()
            got = min(count, self._end - self._at)
            out.append((self._at, got))
            self._at += got
            count -= got
        return out

    def take_run(self, count: int) -> int:
        """Return the first of so many blocks that lie together; -1, and nothing taken, where the next ones do not."""
        start = self._at
        if self._end - start < count or self._ratio > 1:
            return -1
        self.count += count
        self._at = start + count
        return start

    def take_each(self, clusters: int) -> list[int]:
        """Return the first blocks of so many clusters. OutOfSpace."""
        return [block for start, count in self.take(clusters) for block in range(start, start + count, self._ratio)]

    def _next(self) -> None:
        run = next(self._runs, None)
        if run is None:
            raise OutOfSpace
        if self._end:
            self.used.append((self._start, self._end - self._start))
        self._start, count = run
        self._at, self._end = self._start, self._start + count

    def close(self) -> int:
        """Hand out no more; return the block behind the last one handed out."""
        if self._at > (self._start if self._end else 0):
            self.used.append((self._start, self._at - self._start))
        end = self._at
        self._start = self._at = self._end = 0
        self._runs = iter(())
        return end


class Output:
    """Writes the new image's bytes; neighbours together, zeros of 64 KiB not at all (they are holes of the file)."""

    def __init__(self, fd: int, where: str, source: Device, source_where: str, *, durable: bool) -> None:
        self._fd, self._where = fd, where
        self._source, self._source_where = source, source_where
        self._durable = durable
        self._buffer = bytearray(_BUFFER)
        self._view = memoryview(self._buffer)
        self._at = 0
        """Byte of the image where the buffer begins."""
        self._fill = 0
        self._from = self._to = self._pending = 0
        """A run to copy (bytes) that may become longer."""
        self._small = bytearray()
        self._small_at = 0
        self._unsent = 0
        self.copied: Callable[[int], None] = lambda _: None

    def put(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        """Write bytes (at most 1 MiB) to byte ``offset`` of the image, gathered with what lies before them."""
        if self._pending:
            self._settle()
        size = len(data)
        if offset != self._at + self._fill or self._fill + size > _BUFFER:
            self.flush()
            self._at = offset
        self._view[self._fill : self._fill + size] = data
        self._fill += size

    def put_record(self, data: bytes | bytearray, offset: int) -> None:
        """Write a small record that has neighbours, but far from the rest."""
        small = self._small
        if offset != self._small_at + len(small) or len(small) >= _PIECE:
            self._write(memoryview(bytes(small)), self._small_at)
            self._small = small = bytearray()
            self._small_at = offset
        small += data

    def expect(self, runs: list[tuple[int, int]], block_size: int) -> None:
        """Let the host begin to read runs (first block, count; ascending) that will be copied soon.

        Long ones it reads ahead by itself; short ones, here and there, it would wait for one after the other.
        """
        at = length = 0
        for block, count in (*runs, (1 << 62, 0)):
            start, size = block * block_size, count * block_size
            if length and start <= at + length + _NEAR and length < _LOOK_FOR_HOLES:
                length = max(length, start + size - at)
                continue
            if 0 < length < _LOOK_FOR_HOLES:
                self._source.prefetch(at, length)
            at, length = start, size

    def copy(self, start: int, offset: int, length: int) -> None:
        """Copy bytes from byte ``start`` of the old image to byte ``offset`` of the new one."""
        waiting = self._pending
        if waiting and self._from + waiting == start and self._to + waiting == offset and waiting < _RUN:
            self._pending += length
            return
        self._settle()
        self._from, self._to, self._pending = start, offset, length

    def _settle(self) -> None:
        """Copy the run that waited for more."""
        length, self._pending = self._pending, 0
        if length >= _LOOK_FOR_HOLES:
            self._copy_data(self._from, self._to, length)
        elif length:
            self._copy(self._from, self._to, length)

    def _copy_data(self, start: int, offset: int, length: int) -> None:
        """Copy a long run without what is a hole of the old image."""
        delta, at, end = offset - start, start, start + length
        for data, count in self._source.data_runs(start, end):
            self.copied(data - at)
            self._copy(data, data + delta, count)
            at = data + count
        self.copied(end - at)

    def _copy(self, start: int, offset: int, length: int) -> None:
        while length:
            if offset != self._at + self._fill or self._fill == _BUFFER:
                self.flush()
                self._at = offset
            size = min(length, _BUFFER - self._fill)
            self._read(self._view[self._fill : self._fill + size], start)
            self._fill += size
            self.copied(size)
            start, offset, length = start + size, offset + size, length - size

    def _read(self, view: memoryview, start: int) -> None:
        got = self._source.read_into(view, start)
        if got != len(view):
            raise CorruptImage(f"the image ends before byte {start + len(view)}", where=self._source_where)

    def flush(self) -> None:
        """Write what is in the buffer."""
        if self._pending:
            self._settle()
        fill, at = self._fill, self._at
        self._at += fill
        self._fill = 0
        buffer = self._buffer
        begin = position = 0
        while position < fill:
            step = min(_PIECE - (at + position) % _PIECE, fill - position)
            if buffer.startswith(_PROBE[:step], position) and buffer[position : position + step] == _ZEROS[:step]:
                if position > begin:
                    self._write(self._view[begin:position], at + begin)
                begin = position + step
            position += step
        if fill > begin:
            self._write(self._view[begin:fill], at + begin)

    def flush_records(self) -> None:
        """Write the records that wait for neighbours."""
        self._write(memoryview(bytes(self._small)), self._small_at)
        self._small = bytearray()

    def _write(self, view: memoryview, offset: int) -> None:
        start = offset
        while view:
            try:
                done = os.pwrite(self._fd, view, offset)
            except OSError as e:
                raise HostError.from_os(e, self._where) from e
            view = view[done:]
            offset += done
        self._unsent += offset - start
        if self._durable and self._unsent >= _WRITEBACK:
            # from the file's beginning: what is on its way already costs nothing
            hostfs.start_writeback(self._fd, max(0, offset - 4 * _WRITEBACK), 4 * _WRITEBACK)
            self._unsent = 0
