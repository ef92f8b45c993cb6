"""Which blocks of two volumes differ, and what they belong to.

Of deltas over one file only the private blocks are read.
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from ext4lite.backing import BLOCK, aligned
from ext4lite.blockdev import StrPath, open_device
from ext4lite.delta import as_delta
from ext4lite.device import Device
from ext4lite.volume import Volume

_CHUNK = 1 << 20
Progress = Callable[[int], None]


@dataclass(slots=True)
class DiffResult:
    """What differs between two volumes, as bytes of their images (not what a journal would still bring)."""

    old: str
    new: str
    bytes: int = 0
    """Bytes in blocks that differ."""
    ranges: list[tuple[int, int]] = field(default_factory=list)
    """(offset, length) of neighbouring blocks that differ."""
    names: list[str] | None = None
    """Files and directories of the new volume that have such blocks among their content."""
    metadata_bytes: int | None = None
    """Bytes in blocks that differ and are nobody's content: metadata, the journal, free space."""

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.ranges

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain data for JSON."""
        return {**asdict(self), "same": self.same}


def diff(old: StrPath, new: StrPath, *, names: bool = False, progress: Progress | None = None) -> DiffResult:
    """Compare two volumes block by block (4096 bytes); with ``names`` say whose blocks differ.

    ``progress`` is told how many bytes were compared. VolumeBusy, BackingError, CorruptImage, Unsupported, HostError.
    """
    result = DiffResult(os.fspath(old), os.fspath(new))
    with contextlib.closing(open_device(old)) as before, contextlib.closing(open_device(new)) as after:
        for offset, length in _differing(before, after, progress):
            result.bytes += length
            if result.ranges and sum(result.ranges[-1]) == offset:
                result.ranges[-1] = (result.ranges[-1][0], result.ranges[-1][1] + length)
            else:
                result.ranges.append((offset, length))
    if names:
        with Volume.open(new, dirty=True) as after:
            _name(result, after)
    return result


def _differing(old: Device, new: Device, progress: Progress | None) -> Iterator[tuple[int, int]]:
    end = max(old.size(), new.size())
    for start, stop in _candidates(old, new, end):
        for at in range(start, stop, _CHUNK):
            count = min(_CHUNK, stop - at)
            a, b = old.read(count, at), new.read(count, at)
            if a != b:
                for i in range(0, count, BLOCK):
                    if a[i : i + BLOCK] != b[i : i + BLOCK]:
                        yield at + i, min(BLOCK, count - i)
            if progress is not None:
                progress(count)


def _candidates(old: Device, new: Device, end: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end), whole blocks in order, of where the two may differ."""
    runs: list[tuple[int, int]] = []
    if _below(old) == _below(new):
        for device in (old, new):
            delta = as_delta(device)
            if delta is not None:
                blocks = delta.runs(0, aligned(delta.size()) // BLOCK)
                runs += [(block * BLOCK, count * BLOCK) for block, count, present in blocks if present]
    else:
        runs += [*old.data_runs(0, old.size()), *new.data_runs(0, new.size())]
    if old.size() != new.size():
        runs.append((min(old.size(), new.size()) // BLOCK * BLOCK, end))
    at = 0
    for offset, length in sorted(runs):
        start, stop = max(at, offset // BLOCK * BLOCK), min(end, aligned(offset + length))
        if start < stop:
            yield start, stop
            at = stop


def _below(device: Device) -> tuple[int, int]:
    """Return what tells the file that holds most of a device: a delta's backing file, else the image itself."""
    delta = as_delta(device)
    info = os.fstat(delta.base if delta is not None else device.fd)
    return info.st_dev, info.st_ino


def _name(result: DiffResult, volume: Volume) -> None:
    """Find the files whose content lies in blocks that differ."""
    size = volume.block_size
    starts = [offset for offset, _ in result.ranges]

    def overlap(offset: int, length: int) -> int:
        total, end = 0, offset + length
        i = max(0, bisect_right(starts, offset) - 1)
        while i < len(starts) and starts[i] < end:
            at, count = result.ranges[i]
            total += max(0, min(end, at + count) - max(offset, at))
            i += 1
        return total

    result.names = []
    content = 0
    seen: dict[int, int] = {}
    for path, ino in [(b"/", volume.root), *volume.walk()]:
        if ino not in seen:
            seen[ino] = sum(overlap(e.physical * size, e.count * size) for e in volume.extents(ino))
            content += seen[ino]
        if seen[ino]:
            result.names.append(os.fsdecode(path))
    result.metadata_bytes = max(0, result.bytes - content)
