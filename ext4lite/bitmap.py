"""Bitmaps of blocks and inodes as bytearrays: bit ``n`` is bit ``n % 8`` of byte ``n // 8``.

Long stretches are skipped by a regular expression, which runs at C speed; numpy would be slower on bitmaps this small.
"""

from __future__ import annotations

import re

_NOT_FULL = re.compile(rb"[^\xff]")
_NOT_EMPTY = re.compile(rb"[^\x00]")


def next_clear(bits: bytearray, start: int, end: int) -> int:
    """Return the first clear bit of ``[start, end)``, or ``end``."""
    return _next(bits, start, end, invert=True)


def next_set(bits: bytearray, start: int, end: int) -> int:
    """Return the first set bit of ``[start, end)``, or ``end``."""
    return _next(bits, start, end, invert=False)


def _next(bits: bytearray, start: int, end: int, *, invert: bool) -> int:
    if start >= end:
        return end
    at = start >> 3
    byte = (bits[at] ^ 0xFF if invert else bits[at]) >> (start & 7)
    if byte:
        return min(end, start + (byte & -byte).bit_length() - 1)
    found = (_NOT_FULL if invert else _NOT_EMPTY).search(bits, at + 1, (end + 7) >> 3)
    if found is None:
        return end
    at = found.start()
    byte = bits[at] ^ 0xFF if invert else bits[at]
    return min(end, 8 * at + (byte & -byte).bit_length() - 1)


def fill(bits: bytearray, start: int, count: int, *, used: bool) -> None:
    """Set or clear ``count`` bits from ``start``."""
    if not count:
        return
    end = start + count
    first, last = start >> 3, end >> 3
    head = 0xFF << (start & 7) & 0xFF
    tail = (1 << (end & 7)) - 1
    if first == last:
        _mask(bits, first, head & tail, used)
        return
    _mask(bits, first, head, used)
    bits[first + 1 : last] = (b"\xff" if used else b"\0") * (last - first - 1)
    if tail:
        _mask(bits, last, tail, used)


def _mask(bits: bytearray, at: int, mask: int, used: bool) -> None:
    if used:
        bits[at] |= mask
    else:
        bits[at] &= ~mask & 0xFF


def all_are(bits: bytearray, start: int, count: int, *, used: bool) -> bool:
    """Tell whether ``count`` bits from ``start`` all are set (or clear)."""
    end = start + count
    return (next_clear if used else next_set)(bits, start, end) == end


def count_clear(bits: bytearray, count: int) -> int:
    """Return how many of the first ``count`` bits are clear."""
    return count - (int.from_bytes(bits, "little") & ((1 << count) - 1)).bit_count()
