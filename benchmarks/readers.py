"""Walk a volume and read every file: one function a reader, run as a program of its own.

``python readers.py READER PLACE RUNS`` prints a JSON object with the seconds of each run, those of processor time, the
files and bytes it saw and the process's peak memory. Only the standard library is imported at the top: peers have an
interpreter of their own.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

CHUNK = 1 << 20
Seen = tuple[int, int]
"""(regular files, their bytes)."""


def ext4lite(image: str, *, verify: bool = True) -> Seen:
    """Our reader."""
    from ext4lite.layout.constants import S_IFREG
    from ext4lite.volume import Volume

    files = total = 0
    with Volume.open(image) as volume:
        for _, ino in volume.walk():
            if volume.inode(ino).type == S_IFREG:
                files += 1
                for chunk in volume.chunks(ino):
                    total += len(chunk)
    return files, total


def ext4lite_unverified(image: str) -> Seen:
    """Our reader with checksums of metadata not verified."""
    return ext4lite(image, verify=False)


def mount(top: str) -> Seen:
    """A mounted tree: ``os.scandir``, ``open`` and ``read`` without a buffer."""
    files = total = 0
    pending = [top]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    files += 1
                    fd = os.open(entry.path, os.O_RDONLY)
                    while chunk := os.read(fd, CHUNK):
                        total += len(chunk)
                    os.close(fd)
    return files, total


def mount_walk(top: str) -> Seen:
    """A mounted tree as most people would: ``os.walk`` and ``open(…).read()``."""
    files = total = 0
    for directory, _, names in os.walk(top):
        for name in names:
            path = os.path.join(directory, name)  # noqa: PTH118 (what is measured)
            if not os.path.islink(path):  # noqa: PTH114
                files += 1
                with open(path, "rb") as file:
                    total += len(file.read())
    return files, total


def dissect(image: str) -> Seen:
    """dissect.extfs, from PyPI."""
    from dissect.extfs import extfs  # type: ignore[import-not-found,unused-ignore]

    files = total = 0
    with open(image, "rb") as file:
        pending = [extfs.ExtFS(file).root]
        while pending:
            for name, node in pending.pop().listdir().items():
                kind = node.filetype
                if kind == 0o040000 and name not in (".", ".."):
                    pending.append(node)
                elif kind == 0o100000:
                    files += 1
                    content = node.open()
                    while chunk := content.read(CHUNK):
                        total += len(chunk)
    return files, total


def pypi_ext4(image: str) -> Seen:
    """The package called ext4 of PyPI."""
    import ext4  # type: ignore[import-not-found,unused-ignore]

    files = total = 0
    with open(image, "rb") as file:
        volume = ext4.Volume(file)
        pending = [volume.root]
        while pending:
            for entry, kind in pending.pop().opendir():
                name = entry.name_bytes
                if kind == ext4.EXT4_FT.DIR and name not in (b".", b".."):
                    pending.append(volume.inodes[entry.inode])
                elif kind == ext4.EXT4_FT.REG_FILE:
                    files += 1
                    total += len(volume.inodes[entry.inode].open().read())
    return files, total


def ext2py(image: str) -> Seen:
    """The package called ext2py of PyPI."""
    from ext2py import ExtFS  # type: ignore[import-not-found,unused-ignore]

    files = total = 0
    with ExtFS(image) as fs:
        pending = ["/"]
        while pending:
            top = pending.pop()
            for entry in fs.scandir(top):
                path = f"{top}/{entry.name}"
                if entry.is_dir:
                    pending.append(path)
                elif entry.type_name == "file":
                    files += 1
                    for chunk in fs.iter_read(path, CHUNK):
                        total += len(chunk)
    return files, total


READERS: dict[str, Callable[[str], Seen]] = {
    f.__name__: f for f in (ext4lite, ext4lite_unverified, mount, mount_walk, dissect, pypi_ext4, ext2py)
}


def main() -> None:
    """Read as often as asked and once before, so that everything is in the page cache."""
    name, place, runs = sys.argv[1:]
    seconds, cpu = [], []
    seen = READERS[name](place)
    for _ in range(int(runs)):
        start, used = time.perf_counter(), time.process_time()
        seen = READERS[name](place)
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - used)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    json.dump({"seconds": seconds, "cpu": cpu, "files": seen[0], "bytes": seen[1], "peak": peak}, sys.stdout)


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    main()
