"""Volumes that the benchmarks work on: crashed ones with full journals, sparse ones of a terabyte, a million inodes."""

from __future__ import annotations

import fcntl
import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness import loop_mounted
from ext4lite.builder import ImageBuilder, Meta

MIB = 1 << 20
_SHUTDOWN = 0x8004587D
"""EXT4_IOC_SHUTDOWN"""
_LOG_FLUSH = (1).to_bytes(4, "little")


@contextmanager
def crashing(image: Path, *options: str) -> Iterator[Path]:
    """Mount a volume; on leaving it, the file system ends as if the machine had stopped, its log flushed."""
    with loop_mounted(image, *options) as point:
        yield point
        fd = os.open(point, os.O_RDONLY)
        fcntl.ioctl(fd, _SHUTDOWN, _LOG_FLUSH)
        os.close(fd)


def with_full_journal(image: Path) -> None:
    """Make a volume of 1 GiB whose journal of 64 MiB is as full as the kernel lets it become.

    Its blocks are files' metadata and, with ``data=journal``, files' content. Nothing of that is in its place yet.
    """
    words = ["mke2fs", "-q", "-F", "-t", "ext4", "-J", "size=64", str(image), "1G"]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    r = random.Random(3)
    with crashing(image, "data=journal", "commit=600") as point:
        for number in range(28):
            directory = point / f"d{number}"
            directory.mkdir()
            for inside in range(40):
                (directory / f"f{inside}").write_bytes(r.randbytes(48 << 10))
            _commit(directory)


def crash(image: Path) -> None:
    """Leave a volume with a transaction in its journal that is not in place."""
    with crashing(image, "commit=600") as point:
        (point / "not-in-place").mkdir()
        _commit(point)


def _commit(directory: Path) -> None:
    """Let the kernel commit what is done. (With sync(2) it would also write everything in its place.)"""
    fd = os.open(directory, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def of_many_inodes(image: Path, directories: int, files: int) -> None:
    """Make a volume with so many directories and so many small files in each."""
    with ImageBuilder(image, size=64 << 30, timestamp=0, durable=False) as builder:
        for number in range(directories):
            directory = builder.add_dir(builder.root, b"directory%d" % number, Meta())
            for inside in range(files):
                with builder.add_file(directory, b"file%d" % inside, Meta(0o644)) as file:
                    file.write(b"%d %d" % (number, inside))
        builder.finish()
