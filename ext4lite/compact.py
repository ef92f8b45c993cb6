"""``ext4lite compact``: a volume written afresh in the least space, in place of the old one.

The new volume grows in a file without a name beside the old one, whose exclusive lock is held all the time. When it is
whole and on the disk it is renamed over the old one: killed at any moment, there is the one or the other. Who opened
the old file before and locks it afterwards finds out and gets the new one (:mod:`ext4lite.blockdev`).
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import asdict, dataclass
from typing import Any

from ext4lite import hostfs
from ext4lite.blockdev import StrPath, open_device, open_image, remove_record, target_path
from ext4lite.device import Device
from ext4lite.errors import HostError
from ext4lite.rebuild import Progress, RebuildReport, rebuild, rebuild_into
from ext4lite.recover import recover, recover_locked
from ext4lite.super import read_super
from ext4lite.volume import Volume


@dataclass(slots=True)
class CompactReport:
    """What :func:`compact` did."""

    path: str
    """The file with the new volume."""
    volume: RebuildReport
    host_bytes_before: int
    host_bytes_after: int
    """Bytes that the files take on the host."""
    host_extents_before: int | None
    host_extents_after: int | None
    """In how many pieces the files lie on the host; None where it does not tell."""
    recovered: bool
    """Whether the volume's journal was replayed first."""

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data for JSON."""
        return asdict(self)


def compact(
    path: StrPath,
    *,
    size: int | None = None,
    output: StrPath | None = None,
    keep_numbers: bool = False,
    force: bool = False,
    progress: Progress | None = None,
    command: str = "",
) -> CompactReport:
    """Write a volume afresh and put the result in its place (or to ``output``, leaving the old one).

    Locks the volume exclusively itself (call it without holding a lock), recovers it first where needed, in place. The
    new file has mode, owner and attributes of the old one; ``force`` replaces an ``output`` that is there. Killed at
    any moment, it leaves the old file or the new one under the name, whole and durable. Other arguments and errors are
    those of :func:`ext4lite.rebuild.rebuild`; a file with several names (hard links) is HostError, since one of them
    would keep the old volume.
    """
    if output is not None:
        return _to_another(path, output, size=size, keep_numbers=keep_numbers, force=force, progress=progress)
    image = open_device(path, write=True, command=command)
    try:
        return _in_place(image, path, size=size, keep_numbers=keep_numbers, progress=progress)
    finally:
        remove_record(path)
        image.close()


def _in_place(
    image: Device, path: StrPath, *, size: int | None, keep_numbers: bool, progress: Progress | None
) -> CompactReport:
    where, target = os.fspath(path), target_path(path)
    info = os.fstat(image.fd)
    if not stat.S_ISREG(info.st_mode):
        raise HostError("is not a regular file", where=where, hint="--output writes the new volume to a file")
    if info.st_nlink > 1:
        what = f"the file has {info.st_nlink} names (hard links), and only one would get the new volume"
        raise HostError(what, where=where, hint="--output writes the new volume to another file")
    recovered = recover_locked(image, where).recovered
    before = _host(image.fd)
    volume = Volume(image, read_super(image, where), where)
    file = hostfs.NewFile(target)
    try:
        hostfs.take_over(image.fd, file.fd)  # first: it can be refused
        report = rebuild_into(volume, file.fd, str(target), size=size, keep_numbers=keep_numbers, progress=progress)
        os.fsync(file.fd)
        after = _host(file.fd)
        file.publish(durable=True)
    except OSError as e:
        raise HostError.from_os(e, str(target)) from e
    finally:
        file.discard()
    return CompactReport(where, report, before[0], after[0], before[1], after[1], recovered)


def _to_another(
    path: StrPath, output: StrPath, *, size: int | None, keep_numbers: bool, force: bool, progress: Progress | None
) -> CompactReport:
    with contextlib.closing(open_device(path)) as image:
        dirty = read_super(image, os.fspath(path), torn=True).needs_recovery
        before = _host(image.fd)
    recovered = recover(path).recovered if dirty else False
    report = rebuild(path, output, size=size, keep_numbers=keep_numbers, force=force, progress=progress)
    fd = open_image(output)
    try:
        after = _host(fd)
    finally:
        os.close(fd)
    return CompactReport(os.fspath(output), report, before[0], after[0], before[1], after[1], recovered)


def _host(fd: int) -> tuple[int, int | None]:
    """Return the bytes that a file takes on the host, and in how many pieces."""
    pieces: int | None = None
    with contextlib.suppress(OSError, ImportError):
        pieces = len(hostfs.fiemap(fd))
    return os.fstat(fd).st_blocks * 512, pieces
