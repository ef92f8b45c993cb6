"""Workloads to be cut off: each an endless script of operations on a kind of volume, after what crashes bring out.

A script sees the model of the tree, so that it mostly asks for what is possible. What one is for stands in its
docstring; ``WORKLOADS`` says on which volumes it runs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle

from support.volume_model import Generator, Model, Op

KIB, MIB = 1 << 10, 1 << 20
MAGIC = b"\xc0\x3b\x39\x98"


class Stage:
    """What a script works with: chance, and names and files of the model's tree."""

    def __init__(self, model: Model, r: random.Random, block_size: int, *, extents: bool) -> None:
        self.model, self.r, self.block_size, self.extents = model, r, block_size, extents
        self.serial = 0

    def name(self, above: bytes = b"", length: int = 0) -> bytes:
        """Return the path of a new name of at least ``length`` bytes."""
        self.serial += 1
        return above + b"/" + (b"%d-" % self.serial).ljust(length, b"n")

    def below(self, above: bytes, kind: str = "") -> list[bytes]:
        """Return the paths below a directory, of a kind."""
        return [p for p, node in self.model.walk() if p.startswith(above + b"/") and kind in ("", node.kind)]

    def some(self, above: bytes, kind: str = "file") -> bytes:
        """Return one path below a directory."""
        found = self.below(above, kind)
        return self.r.choice(found) if found else above + b"/nothing"

    def room(self, above: bytes) -> Op:
        """Return the operation that makes a directory of a script's own."""
        return "mkdir", above, 0o755

    def file(self, path: bytes, size: int) -> Iterator[Op]:
        """Yield what makes a new file of ``size`` bytes."""
        yield "create", path, 0o644
        yield "write", path, 0, self.r.randbytes(size)


Script = Callable[[Stage], Iterator[Op]]


def mixed(s: Stage) -> Iterator[Op]:
    """Everything at random; now and then blocks are given back and wanted again at once."""
    g = Generator(s.model, s.r, most=60_000, fallocate=s.extents)
    while True:
        if s.r.random() < 0.1:
            yield "unlink", g.some("file")
            new = g.fresh()
            yield from s.file(new, 40_000)
        yield g.op()
        if len(g.paths()) > 200:
            yield "unlink", g.some("file")
            yield "unlink", g.some("symlink")
            yield "rmdir", g.some("dir")


def large_directory(s: Stage) -> Iterator[Op]:
    """Long names into one directory: leaves split, the index grows; then names go and come in the gaps."""
    top = b"/large"
    yield s.room(top)
    while True:
        for _ in range(30):
            yield "create", s.name(top, 180), 0o600
        for _ in range(12):
            yield "unlink", s.some(top)
        for _ in range(4):
            yield "rename", s.some(top), s.name(top, 200), "replace"
        yield ("sync",)


def large_directory_goes(s: Stage) -> Iterator[Op]:
    """A directory of very many blocks is emptied and removed; data comes in their places."""
    top = b"/goes"
    yield s.room(top)
    while True:
        base, path = s.name(top), s.name(top)
        yield "create", base, 0o600
        yield "mkdir", path, 0o755
        for _ in range(430):
            yield "link", base, s.name(path, 240)
        yield ("sync",)
        for child in s.below(path):
            yield "unlink", child
        yield ("sync",)
        yield "rmdir", path
        yield ("sync",)
        yield from s.file(s.name(top), 100 * KIB)
        yield from s.file(s.name(top), 100 * KIB)
        yield ("sync",)
        for child in s.below(top, "file"):
            yield "unlink", child


def shared_attributes(s: Stage) -> Iterator[Op]:
    """Equal sets of attributes share a block; it is left, copied, given up, and its place taken by data."""
    top = b"/attributes"
    yield s.room(top)
    values = [bytes([i]) * 700 for i in range(3)]
    while True:
        path = s.name(top)
        yield "create", path, 0o600
        yield "setxattr", path, b"user.shared", s.r.choice(values)
        for _ in range(3):
            yield "setxattr", s.some(top), b"user.shared", s.r.choice(values)
        yield "removexattr", s.some(top), b"user.shared"
        while len(s.below(top)) > 40:
            yield "unlink", s.some(top)
        if s.r.random() < 0.6:
            yield "unlink", s.some(top)
            yield from s.file(s.name(top), 3 * s.block_size)
        if s.r.random() < 0.3:
            yield ("sync",)


def renames(s: Stage) -> Iterator[Op]:
    """Files and directories over and between directories, exchanged, replaced."""
    top = b"/renames"
    yield s.room(top)
    for _ in range(4):
        yield "mkdir", s.name(top), 0o755
    while True:
        directory = s.some(top, "dir")
        yield from s.file(s.name(directory), s.r.randrange(3000))
        if s.r.random() < 0.3:
            yield "mkdir", s.name(directory), 0o700
        for _ in range(6):
            old = s.some(top, s.r.choice(["file", "file", "dir"]))
            new = s.r.choice([s.name(s.some(top, "dir")), s.some(top), s.some(top, "dir")])
            yield "rename", old, new, s.r.choice(["replace", "replace", "noreplace", "exchange"])
        if len(s.below(top)) > 60:
            yield "unlink", s.some(top)
            yield "rmdir", s.some(top, "dir")
        if s.r.random() < 0.2:
            yield ("sync",)


def truncations(s: Stage, size: int = 700 * KIB) -> Iterator[Op]:
    """Files of four pieces of ``size`` over many groups, synced, then cut and deleted."""
    top = b"/truncations"
    yield s.room(top)
    while True:
        for _ in range(2):
            path = s.name(top)
            yield "create", path, 0o600
            at = 0
            for _ in range(4):
                yield "write", path, at, s.r.randbytes(size)
                at += size + s.r.randrange(3) * size // 10
        yield ("sync",)
        yield "truncate", s.some(top), s.r.randrange(3 * size // s.block_size) * s.block_size
        yield "unlink", s.some(top)
        if s.r.random() < 0.5:
            yield "orphan", s.some(top)
        if s.r.random() < 0.3:
            yield "truncate", s.some(top), s.r.randrange(5 * size)
        while len(s.below(top)) > 3:
            yield "unlink", s.some(top)


def steps(s: Stage) -> Iterator[Op]:
    """A file over more groups than a transaction can change, cut and deleted in steps."""
    top = b"/steps"
    yield s.room(top)
    while True:
        path = s.name(top)
        yield "create", path, 0o600
        for at in range(34):
            yield "write", path, at * MIB, s.r.randbytes(MIB)
        yield ("sync",)
        yield "truncate", path, s.r.randrange(2 * KIB) * s.block_size
        if s.r.random() < 0.5:
            yield ("sync",)
        yield from s.file(s.name(top), 10)
        yield "unlink", path


def full(s: Stage) -> Iterator[Op]:
    """The volume is full; what is deleted is wanted again at once."""
    top = b"/full"
    yield s.room(top)
    while True:
        for _ in range(12):
            yield from s.file(s.name(top), s.r.randrange(200 * KIB))
            if s.r.random() < 0.3:
                yield "mkdir", s.name(top), 0o700
        for _ in range(8):
            yield "unlink", s.some(top)
            if s.r.random() < 0.5:
                yield from s.file(s.name(top), s.r.randrange(100 * KIB))
        yield "rmdir", s.some(top, "dir")
        if s.r.random() < 0.3:
            yield ("sync",)


def flags(s: Stage) -> Iterator[Op]:
    """Owners, modes and flags of files and directories that exist already: only inode tables change."""
    top = b"/flags"
    yield s.room(top)
    while True:
        if len(s.below(top)) < 40:
            yield "create", s.name(top), 0o600
        for _ in range(6):
            path = s.some(top)
            yield s.r.choice([("chattr", path, 0x40), ("chattr", path, 0xC0), ("chattr", path, 0)])
            yield "chmod", s.some(top), s.r.choice([0o600, 0o755, 0])
            yield "chown", s.some(top), s.r.randrange(100_000), 5
        if s.r.random() < 0.4:
            yield ("sync",)


def directories(s: Stage) -> Iterator[Op]:
    """Directories come and go, and what they were written to becomes data in the next transaction: revocations."""
    top = b"/directories"
    yield s.room(top)
    while True:
        made = [s.name(top) for _ in range(s.r.randrange(4, 16))]
        for path in made:
            yield "mkdir", path, 0o755
            if s.r.random() < 0.3:
                yield "symlink", s.name(path), MAGIC + b"t" * 100  # a block that must be escaped
        yield ("sync",)
        for path in made:
            for child in s.below(path):
                yield "unlink", child
            yield "rmdir", path
        if s.r.random() < 0.7:
            yield ("sync",)
        for _ in range(3):
            yield from s.file(s.name(top), s.r.randrange(1, 8) * s.block_size)
        yield ("sync",)
        if s.r.random() < 0.5:  # metadata again where data was, without a commit between
            yield "unlink", s.some(top)
            yield "mkdir", s.name(top), 0o755
        while len(s.below(top, "file")) > 25:
            yield "unlink", s.some(top)
        while len(s.below(top, "dir")) > 25:
            yield "rmdir", s.some(top, "dir")


def orphans(s: Stage) -> Iterator[Op]:
    """Files are deleted while they are open, and closed later or never."""
    top = b"/orphans"
    yield s.room(top)
    while True:
        for _ in range(4):
            yield from s.file(s.name(top), s.r.randrange(60_000))
        yield "orphan", s.some(top)
        if s.r.random() < 0.5:
            yield "orphan", s.some(top)
        if s.r.random() < 0.5:
            yield ("sync",)
        if s.r.random() < 0.6:
            yield ("let-go",)
        while len(s.below(top)) > 12:
            yield "unlink", s.some(top)


def everything(s: Stage) -> Iterator[Op]:
    """All of them by turns."""
    scripts = [script(s) for script in (mixed, large_directory, shared_attributes, renames, orphans, flags)]
    scripts += [script(s) for script in (directories, mixed)]
    scripts.append(truncations(s, 50 * KIB))
    for script in cycle(scripts):
        for _ in range(40):
            yield next(script)


@dataclass(frozen=True)
class Workload:
    """A script on a kind of volume: mke2fs options (none: our own mkfs), MiB, what debugfs does to it first."""

    script: Script
    options: str = ""
    size: int = 12
    requests: tuple[str, ...] = ()
    journal: int = 0
    """Blocks of the log that are used, so that it wraps after a few transactions; mke2fs makes none below 1,024."""
    sync: float = 0.05
    """How often an operation is followed by a sync that the script did not ask for."""


_TINY = "-t ext4 -b 1024 -J size=1"
WORKLOADS = {
    "profile": Workload(mixed),
    "ext3-1k": Workload(mixed, "-t ext3 -b 1024 -J size=1"),
    "orphan_file": Workload(orphans, "-t ext4 -b 4096 -O orphan_file"),
    "csum-v2": Workload(mixed, "-t ext4 -b 2048", requests=("jo -c -v 2", "jc")),
    "no-csum": Workload(directories, "-t ext4 -b 1024 -O ^metadata_csum", journal=300),
    "tiny-journal": Workload(mixed, _TINY, journal=200, sync=0.3),
    "tiny-journal-ext3": Workload(mixed, "-t ext3 -b 1024 -J size=1", journal=200, sync=0.3),
    "directories": Workload(directories, _TINY, journal=300),
    "large-directory": Workload(large_directory, _TINY),
    "large-directory-goes": Workload(large_directory_goes, _TINY, sync=0.01),
    "shared-attributes": Workload(shared_attributes, _TINY),
    "renames": Workload(renames),
    "truncations": Workload(truncations, f"{_TINY} -g 256 -N 512 -O ^resize_inode", size=24),
    "truncations-ext3": Workload(truncations, "-t ext3 -b 1024 -J size=1 -g 256 -N 512 -O ^resize_inode", size=24),
    "steps": Workload(steps, f"{_TINY} -g 256 -N 512 -O ^resize_inode", size=42),
    "steps-ext3": Workload(steps, "-t ext3 -b 1024 -J size=1 -g 256 -N 512 -O ^resize_inode", size=42),
    "full": Workload(full, f"{_TINY} -m 0", size=5),
    "flags": Workload(flags, _TINY, sync=0.1),
}
LONG = {
    "profile": Workload(everything, size=24, sync=0.15),
    "ext3-1k": Workload(everything, "-t ext3 -b 1024 -J size=1 -g 2048", size=24, sync=0.15),
}
