"""Power failure at any moment: what was synced is there afterwards, the volume is consistent, nothing is half there.

A workload runs on blocks that record every write and flush. Then the recording is cut: all that was flushed before is
on the disk, of the rest a random part in any order, some of it torn between sectors. Recovery must bring a volume that
e2fsck has nothing to say about and whose tree is what it was at one moment between the last completed sync and the cut.

Here are some hundred seeded cuts; every place of a long recording is cut by ``pytest -m long``, which takes minutes.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID

import pytest

from ext4lite.identity import set_label, set_uuid
from ext4lite.jbd2.log import Blocks
from ext4lite.recover import recover
from ext4lite.volume import Volume
from ext4lite.writer import WritableVolume
from support.cuts import (
    Disk,
    Recording,
    Story,
    judge,
    judge_recovery,
    prepare,
    record,
)
from support.ext4_judges import fsck
from support.memory import in_memory
from support.volume_model import make
from support.workloads import LONG, MIB, WORKLOADS

OPERATIONS = {"large-directory-goes": 892, "steps": 100, "steps-ext3": 100, "truncations": 120, "truncations-ext3": 120}
CUTS = {"large-directory-goes": 40, "steps": 12, "steps-ext3": 12, "truncations": 16, "truncations-ext3": 16}


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is room: recoveries flush very often."""
    yield from in_memory(tmp_path, "cut-")


@pytest.mark.parametrize("name", WORKLOADS)
def test_cut_off_anywhere(tmp_path: Path, name: str) -> None:
    """Seeded cuts of each workload; some recoveries are cut, too, and some volumes used on and cut again."""
    work, r = WORKLOADS[name], random.Random(name)
    image = tmp_path / "image"
    prepare(image, work)
    story = record(image, work, r, operations=OPERATIONS.get(name, 300))
    disk = Disk(tmp_path / "disk", story.before)
    count = CUTS.get(name, 25)
    between = lives = 0
    for n, at in enumerate(story.places(count, r)):
        with disk.cut(story.events, at, r):
            with disk.kept():
                state, events = judge(story, disk, at, look=n % 4 == 0)
                between += state > story.promised(at)
                if n % 10 == 5 and name not in CUTS:
                    lives += 1
                    _goes_on(tmp_path / "again", disk.path.read_bytes(), story, state, r)
            if n % 5 == 2:
                judge_recovery(story, disk, at, events, r)
    disk.close()
    assert between or name in ("flags", "large-directory-goes"), "no cut ever fell into a transaction"
    assert lives >= 2 or name in CUTS


def _goes_on(image: Path, before: bytes, story: Story, state: int, r: random.Random) -> None:
    """A volume that was recovered is used again, and cut again: nothing of its former life comes back."""
    image.write_bytes(before)
    story = record(image, story.workload, r, operations=60, past=story.operations[:state])
    disk = Disk(image, story.before)
    for at in story.places(4, r):
        with disk.cut(story.events, at, r):
            judge(story, disk, at)
    disk.close()


# -- every place -----------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("name", LONG)
def test_every_prefix_of_5000_writes(tmp_path: Path, name: str) -> None:
    """Every prefix of a recording, each with several random parts of what was not flushed; see :mod:`support.cuts`."""
    work, r = LONG[name], random.Random(name)
    image = tmp_path / "image"
    prepare(image, work)
    story = record(image, work, r, writes=5000)
    assert story.writes >= 5000
    begin = time.monotonic()
    _shared.append(story)  # forked children have it without a copy
    with multiprocessing.get_context("fork").Pool(2) as pool:
        half = len(story.events) // 2
        parts = [(0, half), (half, len(story.events))]
        jobs = [pool.apply_async(_every_place, (tmp_path / f"disk{low}", low, high)) for low, high in parts]
        done = [job.get() for job in jobs]
    _shared.clear()
    cuts, between, recoveries = (sum(numbers) for numbers in zip(*done, strict=True))
    print(
        f"{name}: {story.writes} writes, {len(story.events) - story.writes} flushes, {len(story.states)} states: "
        f"{cuts} cuts ({between} between two syncs), {recoveries} cut recoveries in {time.monotonic() - begin:.0f} s; "
        f"{story.counts}"
    )


_shared: list[Story] = []


def _every_place(path: Path, low: int, high: int) -> tuple[int, int, int]:
    (story,) = _shared
    disk, r = Disk(path, story.before), random.Random(low)
    cuts = between = recoveries = 0
    for at in range(low + 1, high + 1):
        for n in range(3):
            with disk.cut(story.events, at, r) as loose:
                with disk.kept():
                    state, events = judge(story, disk, at, look=at % 8 == 0)
                cuts += 1
                between += state > story.promised(at)
                if n == 0 and at % 16 == 1:
                    recoveries += 3
                    judge_recovery(story, disk, at, events, r, times=3)
                if loose == 0:
                    break  # all that was written is there for certain
    disk.close()
    return cuts, between, recoveries


# -- name and UUID ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["", "-t ext4 -O ^metadata_csum_seed", "-t ext4 -O uninit_bg,^metadata_csum"])
@pytest.mark.parametrize("what", ["label", "uuid"])
def test_name_and_uuid_change_or_do_not(tmp_path: Path, options: str, what: str) -> None:
    """Cut anywhere, a volume has the old name or the new one, and all its checksums are right."""
    image = tmp_path / "image"
    make(image, options, 12 * MIB)
    with Volume.open(image, mode="rw") as volume:
        volume.create("/file")
    before = image.read_bytes()
    made: list[Recording] = []

    def device(blocks: Blocks) -> Blocks:
        made.append(Recording(blocks))
        return made[0]

    volume = WritableVolume.open_for_writing(image, device=device)
    old = volume.super.label, volume.super.uuid
    new = ("new", old[1]) if what == "label" else (old[0], UUID(int=7))
    change: Callable[[], None] = (
        (lambda: set_label(volume, b"new")) if what == "label" else lambda: set_uuid(volume, new[1], add_seed=True)
    )
    change()
    done = len(made[0].events)
    volume.close()
    events, r = made[0].events, random.Random(what + options)
    disk = Disk(tmp_path / "disk", before)
    seen = set()
    for at in range(1, len(events) + 1):
        for _ in range(3):
            with disk.cut(events, at, r):
                recover(disk.path, device=disk.device([]))
                fsck(disk.path)
                with Volume.open(disk.path) as found:
                    now = found.super.label, found.super.uuid
                    assert found.lookup("/file") is not None
                assert now == new or (now == old and at < done)
                seen.add(now)
    disk.close()
    assert seen == {old, new}


# -- processes that die ----------------------------------------------------------------------------------------------


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
