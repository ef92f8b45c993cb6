"""Power failure at any moment: what was synced is there afterwards, the volume is consistent, nothing is half there.

A workload runs on blocks that record every write and flush. Then the recording is cut at seeded places: all that was
flushed before is on the disk, of the rest a random part in any order, the last one perhaps torn between sectors.
Recovery must bring a volume that e2fsck has nothing to say about and whose tree is what it was at one moment between
the last completed sync and the cut.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ext4lite.jbd2.log import Blocks
from ext4lite.recover import recover
from ext4lite.volume import Volume
from ext4lite.writer import WritableVolume
from support.ext4_judges import fsck
from support.volume_model import (
    NOSPACE,
    Generator,
    Model,
    Op,
    Ours,
    allowed,
    facts_of,
    make,
    outcome,
)

MIB = 1 << 20
SECTOR = 512
Facts = dict[bytes, tuple[Any, ...]]


@dataclass
class Recording:
    """Everything written: (byte offset, data), or None for a flush; passes on to ``below``."""

    below: Blocks
    log: list[tuple[int, bytes] | None] = field(default_factory=list)

    @property
    def block_size(self) -> int:
        return self.below.block_size

    def read(self, block: int, count: int = 1) -> bytes:
        return self.below.read(block, count)

    def write(self, block: int, data: bytes) -> None:
        self.log.append((block * self.block_size, bytes(data)))
        self.below.write(block, data)

    def flush(self) -> None:
        self.log.append(None)


@dataclass
class Workload:
    """What a recorded run left: the image before it, the recording, and the tree at each commit.

    ``states`` are (length of the recording when the state was complete, tree); ``synced`` the lengths at which a sync
    had returned, with the number of the state that it promised.
    """

    before: bytes
    log: list[tuple[int, bytes] | None]
    states: list[Facts]
    synced: list[tuple[int, int]]


def record(tmp: Path, options: str, seed: int, operations: int) -> Workload:
    """Run random operations that never overwrite in place what was synced; sync now and then."""
    image = tmp / "recorded"
    make(image, options, 12 * MIB)
    before = image.read_bytes()
    recording: list[Recording] = []

    def device(blocks: Blocks) -> Blocks:
        recording.append(Recording(blocks))
        return recording[0]

    r = random.Random(seed)
    model = Model()
    generator = Generator(model, r, most=60_000, fallocate="ext3" not in options)
    states: list[Facts] = [{}]
    synced: list[tuple[int, int]] = []
    volume = WritableVolume.open_for_writing(image, device=device)
    side, log = Ours(volume), recording[0].log
    written: set[int] = set()
    queue: list[Op] = []
    for _ in range(operations):
        op = queue.pop() if queue else generator.op()
        if not queue and r.random() < 0.1:  # give blocks back, and want them again at once
            new = generator.fresh()
            queue = [("write", new, 0, r.randbytes(40_000)), ("create", new, 0o600), ("unlink", generator.some("file"))]
        if op[0] == "sync" or r.random() < 0.06:
            volume.sync()
            synced.append((len(log), len(states) - 1))
            written = {id(node) for _, node in model.walk()}
            continue
        if not allowed(model, op) or (
            op[0] in ("write", "truncate", "punch", "fallocate") and in_place(model, op, written)
        ):
            continue
        got = outcome(side, op)
        if got != NOSPACE:
            assert got == outcome(model, op), op[:3]
            states.append(model.facts())
    volume.close()
    synced.append((len(log), len(states) - 1))
    return Workload(before, log, states, synced)


def in_place(model: Model, op: tuple[Any, ...], written: set[int]) -> bool:
    """Tell whether data of a synced file would change in place: no file system promises what a crash leaves of that."""
    try:
        return id(model.find(op[1])) in written
    except Exception:
        return False


def cut(work: Workload, at: int, r: random.Random) -> bytearray:
    """Return the disk after a failure just before write ``at``."""
    disk = bytearray(work.before)
    flushed = max((i for i in range(at) if work.log[i] is None), default=-1)
    for entry in work.log[: flushed + 1]:
        if entry is not None:
            disk[entry[0] : entry[0] + len(entry[1])] = entry[1]
    loose = [e for e in work.log[flushed + 1 : at] if e is not None]
    keep = r.random()
    for offset, data in loose:
        if r.random() < keep:
            if r.random() < 0.2:  # torn: only some of its sectors
                for piece in range(0, len(data), SECTOR):
                    if r.random() < 0.5:
                        disk[offset + piece : offset + piece + SECTOR] = data[piece : piece + SECTOR]
            else:
                disk[offset : offset + len(data)] = data
    return disk


@pytest.mark.parametrize(
    ("options", "seed"),
    [
        ("", 1),
        ("-t ext4 -b 1024 -J size=1", 2),
        ("-t ext4 -b 4096 -O orphan_file", 3),
        ("-t ext3 -b 1024 -J size=1", 4),
    ],
)
def test_cut_off_anywhere(tmp_path: Path, options: str, seed: int) -> None:
    work = record(tmp_path, options, seed, 400)
    r = random.Random(seed)
    places = sorted(r.sample(range(1, len(work.log) + 1), min(50, len(work.log))))
    assert len(places) == 50
    image = tmp_path / "cut"
    between = 0
    for at in places:
        image.write_bytes(cut(work, at, r))
        recover(image)
        fsck(image)
        promised = max((state for length, state in work.synced if length <= at), default=0)
        with Volume.open(image) as volume:
            found = facts_of(volume)
        for state in range(promised, len(work.states)):
            if work.states[state] == found:
                between += state > promised
                break
        else:
            wanted = work.states[promised]
            wrong = [
                (p, found.get(p), wanted.get(p)) for p in found.keys() | wanted.keys() if found.get(p) != wanted.get(p)
            ]
            raise AssertionError(f"cut at {at} of {len(work.log)}: no state from {promised} on; {str(wrong[:3])[:900]}")


def test_a_killed_writer_loses_only_what_was_not_synced(tmp_path: Path) -> None:
    """The process dies, the host lives: opened again, the volume is as the last sync left it."""
    image = tmp_path / "image"
    make(image, "", 16 * MIB)
    volume = Volume.open(image, mode="rw")
    volume.mkdir("/kept")
    ino = volume.create("/kept/file")
    volume.pwrite(ino, 0, b"synced")
    volume.sync()
    volume.create("/lost")
    volume.abandon()
    with Volume.open(image) as seen:  # replayed in memory
        assert seen.read(ino, 0, 10) == b"synced"
    with Volume.open(image, mode="rw") as again:
        assert again.lookup("/kept/file") == ino
        assert again.lookup("/lost") is None
    fsck(image)


def test_an_open_file_without_a_name_goes_with_the_crash(tmp_path: Path) -> None:
    image = tmp_path / "image"
    make(image, "", 16 * MIB)
    with Volume.open(image, mode="rw") as volume:
        before = volume.statfs()
    volume = Volume.open(image, mode="rw")
    files = [volume.open_file(f"/f{i}", create=True) for i in range(3)]
    for file in files:
        file.pwrite(b"x" * 100_000, 0)
        volume.unlink(f"/f{files.index(file)}")
    files[1].close()
    volume.sync()
    volume.abandon()
    recover(image)
    fsck(image)
    with Volume.open(image, mode="rw") as volume:
        assert volume.statfs() == before


def test_what_is_too_large_for_the_journal_goes_in_steps(tmp_path: Path) -> None:
    """A file over more groups than a transaction can change goes piece by piece, with an orphan between."""
    image = tmp_path / "image"
    make(image, "-t ext4 -b 1024 -g 256 -N 512 -J size=1 -O ^resize_inode", 96 * MIB)
    with Volume.open(image, mode="rw") as volume:
        free = volume.statfs().free_blocks
        for name in ("/cut", "/gone"):
            ino = volume.create(name)
            for k in range(0, 36):
                volume.pwrite(ino, k << 20, b"\1" * (1 << 20))
        volume.sync()
        volume.truncate(volume.resolve("/cut"), 5000)
        volume.unlink("/gone")
        assert volume.read(volume.resolve("/cut"), 0, 9999) == b"\1" * 5000
        assert volume.super.raw.s_last_orphan == 0
        volume.unlink("/cut")
        assert volume.statfs().free_blocks == free
    fsck(image)
