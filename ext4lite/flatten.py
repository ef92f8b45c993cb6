"""A delta made into a plain image: what it lacks is copied from the backing file, then the bitmap goes in one step."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ext4lite.backing import BLOCK, aligned
from ext4lite.blockdev import StrPath, open_device, remove_record
from ext4lite.delta import DeltaDevice, as_delta
from ext4lite.device import host_error
from ext4lite.hostfs import copy_run, data_runs, punch, pwrite_all

_CHUNK = 1 << 20
Progress = Callable[[int], None]


@dataclass(slots=True, frozen=True)
class FlattenResult:
    """What :func:`flatten` did: nothing (``flattened`` False) to an image that was plain before."""

    path: str
    flattened: bool
    base: str | None = None
    bytes: int = 0
    """Bytes that came from the backing file."""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain data for JSON."""
        return asdict(self)


def absent_data(delta: DeltaDevice, target: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) of what the backing file holds where the delta has nothing.

    Of the file ``target`` the places where the delta has nothing have become holes before. OSError.
    """
    for block, count, present in delta.runs(0, aligned(delta.size()) // BLOCK):
        if present:
            continue
        start = block * BLOCK
        end = min(start + count * BLOCK, delta.size())
        clear(target, start, end)
        yield from data_runs(delta.base, min(end, delta.header.d_base_size), start)


def clear(fd: int, start: int, end: int) -> None:
    """Make bytes of a file read as zeros, as holes where the host can. OSError."""
    for offset, length in list(data_runs(fd, end, start)):
        if not punch(fd, offset, length):
            for at in range(offset, offset + length, _CHUNK):
                pwrite_all(fd, bytes(min(_CHUNK, offset + length - at)), at)


def copy_flat(target: int, delta: DeltaDevice) -> int:
    """Write what a delta shows into the empty file ``target``; return how many bytes were copied. OSError."""
    os.ftruncate(target, delta.size())
    copied = 0
    for block, count, present in delta.runs(0, aligned(delta.size()) // BLOCK):
        start = block * BLOCK
        end = min(start + count * BLOCK, delta.size())
        source, end = (delta.fd, end) if present else (delta.base, min(end, delta.header.d_base_size))
        for offset, length in data_runs(source, end, start):
            copy_run(target, source, offset, length)
            copied += length
    return copied


def flatten(path: StrPath, *, progress: Progress | None = None, command: str = "") -> FlattenResult:
    """Make a delta a plain image, in place and durably.

    Killed at any moment (or out of space), it leaves the delta as it was, but for space that it takes; called again it
    starts over. ``progress`` is told how many bytes were copied, piece by piece. VolumeBusy, BackingError,
    CorruptImage, Unsupported, HostError.
    """
    begin = time.perf_counter()
    where = os.fspath(path)
    image = open_device(path, write=True, command=command)
    try:
        delta = as_delta(image)
        if delta is None:
            return FlattenResult(where, False)
        copied = _fill(delta, progress)
        try:
            os.fsync(delta.fd)
            os.ftruncate(delta.fd, delta.size())  # bitmap and header go at once: from here on it is a plain image
            os.fsync(delta.fd)
        except OSError as e:
            raise host_error(e, where) from e
        return FlattenResult(where, True, delta.base_where, copied, time.perf_counter() - begin)
    finally:
        remove_record(path)
        image.close()


def _fill(delta: DeltaDevice, progress: Progress | None) -> int:
    copied = 0
    try:
        for start, length in absent_data(delta, delta.fd):
            for at in range(start, start + length, _CHUNK):
                count = min(_CHUNK, start + length - at)
                copy_run(delta.fd, delta.base, at, count)
                copied += count
                if progress is not None:
                    progress(count)
    except OSError as e:
        with contextlib.suppress(OSError):  # give back what was taken for nothing
            for block, count, present in delta.runs(0, aligned(delta.size()) // BLOCK):
                if not present:
                    clear(delta.fd, block * BLOCK, min((block + count) * BLOCK, delta.size()))
        raise host_error(e, delta.where) from e
    return copied
