"""Power failure at any moment of a resize or of work on the journal: the old volume or the new one, whole.

The call runs on blocks that record every write and flush; the recording is cut at seeded places, with a random part of
what was not flushed, some of it torn. After recovery e2fsck has nothing to say, the tree is what it was, and the size
is the old or the new one.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ext4lite import journal
from ext4lite.errors import Ext4LiteError
from ext4lite.jbd2.log import Blocks
from ext4lite.recover import recover
from ext4lite.resize import resize
from ext4lite.super import read_super
from ext4lite.volume import Volume
from support.cuts import Disk, Event, Recording
from support.ext4_judges import fsck
from support.volume_model import NOSPACE, Generator, Model, Ours, allowed, facts_of, make, outcome

MIB = 1 << 20
Device = Callable[[Blocks], Blocks]
Call = Callable[[Path, Device], Any]
_SMALL = "-b 1024 -g 1024 -N 1024 -J size=1"


@dataclass
class Case:
    """What is done to a volume of ``size`` MiB that ``options`` of mke2fs make (none: our mkfs)."""

    options: str
    size: int
    call: Call
    largest: int = 0
    """MiB that the file may have, if more."""
    full: bool = False
    """Whether no block is free: then a copy is changed, in which nothing can be cut off."""


def to(size: float) -> Call:
    return lambda path, device: resize(path, int(size * MIB), device=device)


def smallest(path: Path, device: Device) -> Any:
    return resize(path, minimum=True, device=device)


CASES = {
    "grow-profile": Case("", 16, to(160), 160),
    "grow-descriptors": Case(f"-t ext4 {_SMALL} -O ^resize_inode", 8, to(44), 44),
    "grow-full": Case(f"-t ext4 {_SMALL} -m 0 -O ^resize_inode,^flex_bg", 8, to(44), 44, full=True),
    "grow-resize-inode": Case(f"-t ext4 {_SMALL} -E resize=64M", 8, to(40), 40),
    "grow-ext3": Case(f"-t ext3 {_SMALL}", 8, to(40), 40),
    "shrink-profile": Case("", 24, to(18)),
    "shrink-inodes": Case(f"-t ext4 {_SMALL} -O ^flex_bg", 24, to(6)),
    "shrink-smallest": Case(f"-t ext4 {_SMALL} -O orphan_file", 16, smallest),
    "shrink-journal": Case("-t ext4 -b 4096 -J size=4", 24, to(12)),
    "shrink-ext3": Case(f"-t ext3 {_SMALL}", 24, to(8)),
    "journal-make": Case("-t ext4 -b 4096 -O ^has_journal", 16, lambda p, d: journal.create(p, 4 * MIB, device=d)),
    "journal-make-ext2": Case("-t ext2 -b 1024", 16, lambda p, d: journal.create(p, MIB, device=d)),
    "journal-grow": Case("-t ext4 -b 1024 -J size=1", 16, lambda p, d: journal.resize(p, 3 * MIB, device=d)),
    "journal-shrink": Case("-t ext3 -b 1024 -J size=3", 16, lambda p, d: journal.resize(p, MIB, device=d)),
}


def prepare(image: Path, case: Case, seed: int) -> dict[bytes, Any]:
    """Make the volume and put things into it; return its tree."""
    make(image, case.options, case.size * MIB)
    r = random.Random(seed)
    model = Model()
    generator = Generator(model, r, most=60_000, fallocate="ext3" not in case.options and "ext2" not in case.options)
    with Volume.open(image, mode="rw") as volume:
        side = Ours(volume)
        for _ in range(350):
            op = generator.op()
            if allowed(model, op) and outcome(side, op) != NOSPACE:
                outcome(model, op)
        for i in range(40 if case.full else 12):  # over all of the volume, not only at its beginning
            volume.mkdir(f"/d{i}")
            ino = volume.create(f"/d{i}/file")
            for k in range(3):
                volume.pwrite(ino, 50_000 * k, r.randbytes(20_000))
            for k in range(10):
                volume.create(f"/d{i}/{k}")
        for i in range(99_999 if case.full else 0):
            try:
                volume.pwrite(volume.create(f"/fill{i}"), 0, bytes(200_000))
            except Ext4LiteError:
                break
    fsck(image)
    with Volume.open(image) as volume:
        return facts_of(volume)


def size_of(path: Path) -> int:
    with path.open("rb") as f:
        found = read_super(f.fileno(), str(path))
    return found.blocks * found.block_size


_OFTEN: tuple[str, ...] = (
    "grow-profile",
    "grow-descriptors",
    "grow-resize-inode",
    "shrink-inodes",
    "shrink-journal",
    "journal-make",
)
_OFTEN += ("journal-make-ext2", "journal-shrink")


@pytest.mark.parametrize("name", _OFTEN)
def test_cut_off_anywhere(tmp_path: Path, name: str) -> None:
    _cut_off(tmp_path, name, long=False)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_cut_off_everywhere(tmp_path: Path, name: str) -> None:
    _cut_off(tmp_path, name, long=True)


def _cut_off(tmp_path: Path, name: str, *, long: bool) -> None:
    case = CASES[name]
    seed = sum(name.encode())
    image = tmp_path / "image"
    tree = prepare(image, case, seed)
    before = image.read_bytes()
    old = size_of(image)
    events: list[Event] = []
    case.call(image, lambda blocks: Recording(blocks, events))
    fsck(image)
    with Volume.open(image) as volume:
        assert facts_of(volume) == tree
    new = size_of(image)
    assert events
    r = random.Random(seed)
    disk = Disk(tmp_path / "disk", before + bytes(max(0, case.largest * MIB - len(before))))
    flushes = [i for i, event in enumerate(events) if event is None]
    most = 1000 if long else 6
    places = {*r.sample(range(1, len(events) + 1), min(most, len(events))), *r.sample(flushes, min(most, len(flushes)))}
    found = set()
    for at in sorted(places | {len(events)}):
        with disk.cut(events, at, r):
            recovered: list[Event] = []
            recover(disk.path, device=disk.device(recovered))
            fsck(disk.path)
            with Volume.open(disk.path) as volume:
                assert facts_of(volume) == tree, f"cut at {at} of {len(events)}"
            found.add(size_of(disk.path))
    disk.close()
    assert found <= ({old} if case.full else {old, new})
    assert case.full or new in found


def test_a_removal_that_was_cut_off_is_finished(tmp_path: Path) -> None:
    """Until it is, the volume says that it was not closed cleanly, or nobody's blocks are in use."""
    image = tmp_path / "image"
    case = Case("-t ext4 -b 1024 -J size=2", 16, lambda p, d: None)
    tree = prepare(image, case, 5)
    before = image.read_bytes()
    events: list[Event] = []
    journal.remove(image, device=lambda blocks: Recording(blocks, events))
    fsck(image)
    for at in range(1, len(events) + 1):
        if events[at - 1] is not None:
            continue
        disk = bytearray(before)
        for event in events[:at]:
            if event is not None:
                disk[event[0] : event[0] + len(event[1])] = event[1]
        image.write_bytes(disk)
        with image.open("rb") as f:
            unfinished = journal.unfinished(f.fileno(), read_super(f.fileno(), str(image)))
        if journal.show(image).size or unfinished:
            journal.remove(image)
        fsck(image)
        assert journal.show(image).size == 0
        with Volume.open(image) as volume:
            assert facts_of(volume) == tree


@pytest.mark.parametrize(
    ("options", "size", "words"),
    [
        ("-t ext4 -b 1024 -g 2048 -O ^flex_bg", 40, ["resize", "IMAGE", "12M"]),
        ("-t ext2 -b 1024", 32, ["resize", "IMAGE", "--minimum"]),
        ("-t ext4 -b 1024 -O ^resize_inode", 32, ["resize", "IMAGE", "1G"]),
        ("-t ext4 -O ^has_journal -b 4096", 64, ["journal", "IMAGE", "--create", "16M"]),
    ],
)
def test_killed(tmp_path: Path, options: str, size: int, words: list[str]) -> None:
    """SIGKILL of the command at any time."""
    image = tmp_path / "image"
    tree = prepare(image, Case(options, size, lambda p, d: None), 3)
    before, old = image.read_bytes(), size_of(image)
    command = [sys.executable, "-m", "ext4lite", *(str(image) if w == "IMAGE" else w for w in words)]
    begin = time.monotonic()
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    took = time.monotonic() - begin
    new = size_of(image)
    fsck(image)
    r = random.Random(size)
    for _ in range(2):
        image.write_bytes(before)
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(took * r.uniform(0.3, 0.95))
        child.send_signal(signal.SIGKILL)
        child.wait()
        recover(image)
        fsck(image)
        assert size_of(image) in (old, new)
        with Volume.open(image) as volume:
            assert facts_of(volume) == tree
        assert [p.name for p in tmp_path.iterdir() if p.suffix != ".lock"] == ["image"]
