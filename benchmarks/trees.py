"""Trees of files as software has them, always the same for the same arguments."""

from __future__ import annotations

import math
import os
import random
from dataclasses import dataclass
from pathlib import Path

_WORDS = ("core", "test", "util", "data", "lib", "model", "view", "main", "index", "setup", "config", "parser", "io")
_ENDINGS = (".py", ".pyc", ".so", ".js", ".json", ".md", ".h", ".txt", "", ".png")
_FILES_A_DIRECTORY = 12
_MEAN = 13_000
"""Bytes of a file on average: 130 MB in 10,000, as in an image with Python and Node packages."""
_MEDIAN = 2_800


@dataclass(slots=True, frozen=True)
class Tree:
    """What :func:`make` left below ``path``."""

    path: Path
    files: int
    bytes: int
    entries: int


def make(path: Path, files: int, seed: int = 4) -> Tree:
    """Make a tree of ``files`` regular files of 13 KB on average, with directories, symlinks, hard links, attributes.

    Sizes are log-normal with a median of 2.8 KB; no content compresses. One of 300 files has a hole, one of 100 a
    second name, one of 50 an attribute (where the host's file system takes ``user.`` ones); one name of 30 is a
    symlink. The names of directories nest up to six levels.
    """
    r = random.Random(seed)
    noise = r.randbytes(8 << 20)
    spread = math.sqrt(2 * math.log(_MEAN / _MEDIAN))
    path.mkdir(parents=True)
    directories = [(path, 0)]
    total = entries = 0
    while len(directories) < max(1, files // _FILES_A_DIRECTORY):
        above, depth = directories[r.randrange(len(directories))]
        if depth < 6:
            inside = above / f"{r.choice(_WORDS)}{len(directories)}"
            inside.mkdir()
            directories.append((inside, depth + 1))
    entries += len(directories) - 1
    # The mean of a log-normal is in few large files: they are cut, and what is missing is spread over all.
    sizes = [min(2_000_000, int(r.lognormvariate(math.log(_MEDIAN), spread))) for _ in range(files)]
    factor = _MEAN * files / sum(sizes)
    for number, drawn in enumerate(sizes):
        directory, _ = directories[r.randrange(len(directories))]
        file = directory / f"{r.choice(_WORDS)}_{number:x}{r.choice(_ENDINGS)}"
        size = int(drawn * factor)
        _fill(file, noise, r.randrange(4 << 20), size, hole=number % 300 == 299)
        total += size
        entries += 1
        if number % 100 == 99:
            os.link(file, directory / f"link_{number:x}")
            entries += 1
        if number % 50 == 49:
            _set_attribute(file, b"%d" % number)
        if number % 30 == 29:
            (directory / f"to_{number:x}").symlink_to(f"../{r.choice(_WORDS)}/{file.name}")
            entries += 1
    return Tree(path, files, total, entries)


def _fill(file: Path, noise: bytes, at: int, size: int, *, hole: bool) -> None:
    with file.open("wb", buffering=0) as f:
        if hole:
            f.truncate(size)
            f.seek(min(size, 256 << 10))
            size -= min(size, 256 << 10)
        while size:
            piece = noise[at : at + size]
            f.write(piece)
            size -= len(piece)
            at = 0


def _set_attribute(file: Path, value: bytes) -> None:
    try:
        os.setxattr(file, b"user.origin", value)
    except OSError:  # not every file system that scratch files lie on has them
        return
