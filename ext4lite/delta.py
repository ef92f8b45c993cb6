"""A volume that keeps only what differs from a backing file (a "dense clone"); the format is docs/delta.md.

The file is sparse. Blocks that were written lie where they lie in the backing file; behind them come a bitmap that
tells which these are, and a header that names the backing file. Absent blocks are read from there.

Nobody sees a block as present before its bytes are there: :meth:`DeltaDevice.flush` makes the bytes durable first, then
the bitmap, and each page of the bitmap has two places, so that a torn write loses no more than was not promised yet.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

from ext4lite.backing import BLOCK, PAGE_BITS, PAIR, aligned, pages_of, seal
from ext4lite.bitmap import count_clear, fill, next_clear, next_set
from ext4lite.device import Buffer, Device, fdatasync, host_error, pread_full, prefetch
from ext4lite.errors import CorruptImage, HostError
from ext4lite.hostfs import data_runs, punch, pwrite_all
from ext4lite.layout._codecs import DeltaHeader, DeltaPage

_ZERO_PAGE = bytes(DeltaPage.SIZE)
T = TypeVar("T")


def as_delta(device: Device) -> DeltaDevice | None:
    """Return the device if it is a delta."""
    return device if isinstance(device, DeltaDevice) else None


class DeltaDevice:
    """A delta file open at ``fd`` over the backing file at ``base``; a :class:`~ext4lite.device.Device`.

    Not thread-safe. Both descriptors are closed by :meth:`close`. ``eager`` puts the bitmap into the file with every
    write (right for those who need not outlive the host's crash: what a killed process wrote is there); without it only
    :meth:`flush` and :meth:`close` do.
    """

    def __init__(
        self,
        fd: int,
        where: str,
        header: DeltaHeader,
        base: int,
        base_where: str,
        *,
        eager: bool = False,
    ) -> None:
        self._fd, self.where, self.header = fd, where, header
        self.base, self.base_where = base, base_where
        self._eager = eager
        self._size = header.d_size
        self._blocks = aligned(self._size) // BLOCK
        self._bitmap_at = aligned(self._size)
        self._pages: dict[int, bytearray] = {}
        self._slots: dict[int, tuple[int, int]] = {}
        """Which place has the current state of a page, and its sequence number."""
        self._unsynced: set[int] = set()
        """Pages written since the last fdatasync: their other place may be the only durable one."""
        self._dirty: set[int] = set()
        self._broken: HostError | None = None
        self._load()

    # -- the bitmap -------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        pages = pages_of(self._size)
        end = self._bitmap_at + pages * PAIR
        done = -1
        for start, length in self._stored(self._fd, self._bitmap_at, end):
            first = max((start - self._bitmap_at) // PAIR, done + 1)
            done = (start + length - 1 - self._bitmap_at) // PAIR
            for number in range(first, done + 1):
                self._load_page(number, pread_full(self._fd, PAIR, self._bitmap_at + number * PAIR, self.where))
        if self._eager:  # what a killed process left may not be durable
            self._unsynced.update(self._pages)

    def _load_page(self, number: int, raw: bytes) -> None:
        damaged = 0
        for slot in (0, 1):
            piece = raw[slot * DeltaPage.SIZE : (slot + 1) * DeltaPage.SIZE]
            if piece == _ZERO_PAGE:
                continue
            page = DeltaPage.unpack(piece)
            right = seal(piece, DeltaPage.OFFSET_p_checksum) == piece
            if not right or page.p_number != number or page.p_id != self.header.d_id:
                damaged += 1
            elif page.p_sequence > self._slots.get(number, (0, 0))[1]:
                self._slots[number] = slot, page.p_sequence
                self._pages[number] = bytearray(page.p_bits)
        if damaged == 2 or len(raw) != PAIR:
            raise CorruptImage(f"both places of page {number} of the delta's bitmap are damaged", where=self.where)
        # One damaged and one never written: the very first write was torn, and nothing was promised yet.
        count = min(PAGE_BITS, self._blocks - number * PAGE_BITS)
        bits = self._pages.get(number)
        if bits is not None and next_set(bits, count, PAGE_BITS) != PAGE_BITS:
            raise CorruptImage(f"page {number} of the delta's bitmap has blocks outside the volume", where=self.where)

    def _host(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except (OSError, OverflowError) as e:
            raise host_error(e, self.where) from e

    def _stored(self, fd: int, start: int, end: int) -> list[tuple[int, int]]:
        """Return (offset, length) of what is no hole of a file within ``[start, end)``."""
        return self._host(lambda: list(data_runs(fd, end, start)))

    def runs(self, block: int, count: int) -> Iterator[tuple[int, int, bool]]:
        """Yield (first block, blocks, whether they are present) of a range, in order."""
        end = block + count
        while block < end:
            number, bit = divmod(block, PAGE_BITS)
            bits = self._pages.get(number)
            last = min(PAGE_BITS, bit + end - block)
            if bits is None:
                stop, present = last, False
            else:
                present = bool(bits[bit >> 3] >> (bit & 7) & 1)
                stop = (next_clear if present else next_set)(bits, bit, last)
            yield block, stop - bit, present
            block += stop - bit

    def present(self, block: int) -> bool:
        """Tell whether a block is the delta's own."""
        number, bit = divmod(block, PAGE_BITS)
        bits = self._pages.get(number)
        return bits is not None and bool(bits[bit >> 3] >> (bit & 7) & 1)

    def present_bytes(self) -> int:
        """Return how many bytes of the volume are the delta's own."""
        blocks = sum(PAGE_BITS - count_clear(bits, PAGE_BITS) for bits in self._pages.values())
        return min(blocks * BLOCK, self._size)

    def _mark(self, block: int, count: int) -> None:
        """Note blocks as present, whose bytes are in the file."""
        changed = set()
        while count:
            number, bit = divmod(block, PAGE_BITS)
            step = min(count, PAGE_BITS - bit)
            bits = self._pages.get(number)
            if bits is None:
                bits = self._pages[number] = bytearray(PAGE_BITS // 8)
            if next_clear(bits, bit, bit + step) != bit + step:
                fill(bits, bit, step, used=True)
                changed.add(number)
            block, count = block + step, count - step
        if self._eager:
            for number in sorted(changed):
                self._write_page(number)
        else:
            self._dirty |= changed

    def _write_page(self, number: int) -> None:
        """Write a page to the place that does not have its durable state."""
        slot, sequence = self._slots.get(number, (1, 0))
        if number not in self._unsynced or not sequence:
            slot = 1 - slot
        raw = DeltaPage(
            p_number=number, p_sequence=sequence + 1, p_id=self.header.d_id, p_bits=bytes(self._pages[number])
        ).pack()
        at = self._bitmap_at + number * PAIR + slot * DeltaPage.SIZE
        self._host(lambda: pwrite_all(self._fd, seal(raw, DeltaPage.OFFSET_p_checksum), at))
        self._slots[number] = slot, sequence + 1
        self._unsynced.add(number)

    # -- Device -----------------------------------------------------------------------------------------------------

    @property
    def fd(self) -> int:
        """See :class:`~ext4lite.device.Device`."""
        return self._fd

    def size(self) -> int:
        """See :class:`~ext4lite.device.Device`."""
        return self._size

    def read(self, length: int, offset: int) -> bytes:
        """See :class:`~ext4lite.device.Device`."""
        if offset < 0 or length < 0:
            raise HostError("invalid argument", where=self.where)
        end = min(offset + length, self._size)
        if offset >= end:
            return b""
        first = offset // BLOCK
        pieces = []
        for block, count, present in self.runs(first, -(-end // BLOCK) - first):
            start = max(offset, block * BLOCK)
            stop = min(end, (block + count) * BLOCK)
            pieces.append(self._own(stop - start, start) if present else self._below(stop - start, start))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def read_into(self, view: memoryview, offset: int) -> int:
        """See :class:`~ext4lite.device.Device`."""
        data = self.read(len(view), offset)
        view[: len(data)] = data
        return len(data)

    def _own(self, length: int, offset: int) -> bytes:
        data = pread_full(self._fd, length, offset, self.where)
        if len(data) != length:
            raise HostError("the delta became shorter while it was open", where=self.where)
        return data

    def _below(self, length: int, offset: int) -> bytes:
        """Read the backing file, behind whose end there are zeros."""
        want = max(0, min(length, self.header.d_base_size - offset))
        data = pread_full(self.base, want, offset, self.base_where) if want else b""
        if len(data) != want:
            raise HostError("the backing file became shorter while it was in use", where=self.base_where)
        return data if want == length else data + bytes(length - want)

    def write(self, data: Buffer, offset: int) -> None:
        """See :class:`~ext4lite.device.Device`."""
        view = memoryview(data)
        if not view:
            return
        end = offset + len(view)
        if offset < 0 or end > self._size:
            raise HostError("no space left on device", where=self.where)
        first, last = offset // BLOCK, (end - 1) // BLOCK
        start, stop = first * BLOCK, min((last + 1) * BLOCK, self._size)
        head = b"" if start == offset or self.present(first) else self._below(offset - start, start)
        tail = b"" if stop == end or self.present(last) else self._below(stop - end, end)
        if head or tail:  # what a block holds beside the written bytes comes along from below
            view = memoryview(b"".join((head, view, tail)))
        self._host(lambda: pwrite_all(self._fd, view, offset - len(head)))
        self._mark(first, last - first + 1)

    def flush(self) -> None:
        """Make bytes durable, then the bitmap; see :class:`~ext4lite.device.Device`.

        Once that has failed it fails for ever: nobody knows then what the host has lost.
        """
        if self._broken is not None:
            raise self._broken
        try:
            fdatasync(self._fd, self.where)
            self._unsynced.clear()
            if self._dirty:
                self._write_dirty()
                fdatasync(self._fd, self.where)
                self._unsynced.clear()
        except HostError as e:
            self._broken = e
            raise

    def _write_dirty(self) -> None:
        for number in sorted(self._dirty):
            self._write_page(number)
            self._dirty.discard(number)

    def punch(self, offset: int, length: int) -> bool:
        """See :class:`~ext4lite.device.Device`. Whole blocks become holes that are present, edges zeros."""
        end = min(offset + length, self._size)
        first, last = -(-offset // BLOCK), end // BLOCK
        if end == self._size:
            last = self._blocks
        if first >= last:
            self.write(bytes(max(0, end - offset)), offset)
            return True
        if not punch(self._fd, first * BLOCK, (last - first) * BLOCK):
            return False
        self._mark(first, last - first)
        self.write(bytes(first * BLOCK - offset), offset)
        if end > last * BLOCK:
            self.write(bytes(end - last * BLOCK), last * BLOCK)
        return True

    def data_runs(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """See :class:`~ext4lite.device.Device`."""
        end = min(end, self._size)
        first = start // BLOCK
        for block, count, present in self.runs(first, max(0, -(-end // BLOCK) - first)):
            low, high = max(start, block * BLOCK), min(end, (block + count) * BLOCK)
            source = self._fd if present else self.base
            if not present:
                high = min(high, self.header.d_base_size)
            yield from self._stored(source, low, high)

    def prefetch(self, offset: int, length: int) -> None:
        """See :class:`~ext4lite.device.Device`."""
        first, end = offset // BLOCK, -(-min(offset + length, self._size) // BLOCK)
        for block, count, present in self.runs(first, max(0, end - first)):
            prefetch(self._fd if present else self.base, block * BLOCK, count * BLOCK)

    def close(self) -> None:
        """Write what the bitmap lacks (without waiting for it to be durable) and close both files."""
        if self._fd < 0:
            return
        try:
            if self._dirty and self._broken is None:
                fdatasync(self._fd, self.where)
                self._unsynced.clear()
                self._write_dirty()
        finally:
            for fd in (self._fd, self.base):
                with contextlib.suppress(OSError):
                    os.close(fd)
            self._fd = self.base = -1
