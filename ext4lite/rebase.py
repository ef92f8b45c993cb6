"""A delta given another backing file, or the same one at another place."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ext4lite.backing import BLOCK, Identity, aligned, identify, make_header, open_base, read_header, write_header
from ext4lite.blockdev import StrPath, lock_exclusive, lock_shared, open_image, remove_record
from ext4lite.delta import DeltaDevice
from ext4lite.device import fdatasync, host_error, pread_full
from ext4lite.errors import BackingError, HostError
from ext4lite.hostfs import data_runs
from ext4lite.layout._codecs import DeltaHeader

_CHUNK = 1 << 20
Progress = Callable[[int], None]


@dataclass(slots=True, frozen=True)
class RebaseResult:
    """What :func:`rebase` did: the backing file now, and how many bytes of the old one the delta took over."""

    path: str
    base: str
    bytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain data for JSON."""
        return asdict(self)


def rebase(
    path: StrPath,
    base: StrPath | None = None,
    *,
    unsafe: bool = False,
    progress: Progress | None = None,
    command: str = "",
) -> RebaseResult:
    """Give a delta the backing file ``base``, durably; what the delta shows stays the same.

    What ``base`` has other than the old backing file is copied from that into the delta first. With ``unsafe`` the old
    one is not needed: the caller says that both are the same where the delta has nothing (they are not compared).
    Without ``base`` the delta's own is meant: only the path is recorded anew, or with ``unsafe`` a changed file is
    accepted.

    Killed at any moment, it leaves a delta that shows the same, over the one or the other. ``progress`` is told how
    many bytes were compared. BackingError, VolumeBusy, CorruptImage, Unsupported, HostError.
    """
    where = os.fspath(path)
    with contextlib.ExitStack() as stack:
        fd = open_image(path, write=True)
        stack.callback(os.close, fd)
        lock_exclusive(fd, path, command)
        stack.callback(remove_record, path)
        header = read_header(fd, where)
        if header is None:
            raise BackingError("the image is no delta", where=where)
        if unsafe:
            target = Path(base) if base is not None else _first_there(header, Path(path))
            new = open_image(target)
            stack.callback(os.close, new)
            lock_shared(new, target)
            _point(fd, header, Path(path), target, identify(new, str(target)))
            return RebaseResult(where, os.path.realpath(target))
        old, found = open_base(header, Path(path))
        stack.callback(os.close, old)
        if base is None:
            _point(fd, header, Path(path), found, identify(old, str(found)))
            return RebaseResult(where, os.path.realpath(found))
        target = Path(base)
        new = open_image(target)
        stack.callback(os.close, new)
        lock_shared(new, target)
        identity = identify(new, str(target))
        delta = DeltaDevice(fd, where, header, old, str(found))  # not closed: the stack does that
        copied = _take_over(delta, new, identity.size, str(target), progress)
        delta.flush()
        _point(fd, header, Path(path), target, identity)
        return RebaseResult(where, os.path.realpath(target), copied)


def _first_there(header: DeltaHeader, path: Path) -> Path:
    from ext4lite.backing import base_paths

    candidates = base_paths(header, path)
    for candidate in candidates:
        if candidate.exists():
            return candidate
    names = " and ".join(map(str, candidates))
    raise BackingError(f"the backing file is missing: {names}", where=str(path), hint="--base names another")


def _point(fd: int, header: DeltaHeader, path: Path, base: Path, identity: Identity) -> None:
    """Write the header that names ``base`` beside the old one, which counts until the new one is whole."""
    new = make_header(
        header.d_size,
        base,
        identity,
        Path(os.path.realpath(path)).parent,
        own_id=header.d_id,
        sequence=header.d_sequence + 1,
    )
    try:
        write_header(fd, new)
    except OSError as e:
        raise host_error(e, str(path)) from e
    fdatasync(fd, str(path))


def _take_over(delta: DeltaDevice, new: int, new_size: int, new_where: str, progress: Progress | None) -> int:
    """Copy into the delta what it shows from its backing file and ``new`` has not."""
    copied = 0
    for block, count, present in list(delta.runs(0, aligned(delta.size()) // BLOCK)):
        if present:
            continue
        start, end = block * BLOCK, min((block + count) * BLOCK, delta.size())
        for at, length in _either(delta, new, start, end, new_size):
            was = delta.read(length, at)
            want = max(0, min(length, new_size - at))
            now = pread_full(new, want, at, new_where) if want else b""
            if len(now) != want:
                raise HostError("the file became shorter while it was read", where=new_where)
            now += bytes(length - want)
            copied += _differing(delta, was, now, at)
            if progress is not None:
                progress(length)
    return copied


def _either(delta: DeltaDevice, new: int, start: int, end: int, new_size: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, length), whole blocks and at most a MiB, of where one of two files has data."""
    runs = list(data_runs(delta.base, min(end, delta.header.d_base_size), start))
    runs += data_runs(new, min(end, new_size), start)
    at = start
    for offset, length in sorted(runs):
        stop = min(end, aligned(offset + length))
        at = max(at, offset // BLOCK * BLOCK)
        while at < stop:
            count = min(_CHUNK, stop - at)
            yield at, count
            at += count


def _differing(delta: DeltaDevice, was: bytes, now: bytes, offset: int) -> int:
    if was == now:
        return 0
    copied = 0
    for at in range(0, len(was), BLOCK):
        if was[at : at + BLOCK] != now[at : at + BLOCK]:
            delta.write(was[at : at + BLOCK], offset + at)
            copied += len(was[at : at + BLOCK])
    return copied
