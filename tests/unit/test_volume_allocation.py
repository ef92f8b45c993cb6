"""Where the writer puts things, and that trees shrink as they grew."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from ext4lite.extents import HEADER
from ext4lite.volume import Volume
from support.ext4_judges import fsck
from support.volume_model import make

MIB = 1 << 20
PROFILES = ["", "-t ext4 -b 1024", "-t ext3 -b 4096", "-t ext2 -b 1024"]


@pytest.fixture(params=PROFILES)
def image(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    made = tmp_path / "image"
    make(made, request.param, 64 * MIB)
    return made


def test_files_that_grow_by_turns_do_not_lie_between_each_other(image: Path) -> None:
    """Three files, a block each at a time: few extents, and what was kept for them is free in the end."""
    with Volume.open(image, mode="rw") as v:
        block, before = v.block_size, v.statfs()
        files = [v.create(f"/f{n}") for n in range(3)]
        for i in range(1000):
            for ino in files:
                v.pwrite(ino, i * block, b"x" * block)
        assert max(len(v.extents(ino)) for ino in files) <= 25
        v.sync()
        for n in range(3):
            v.unlink(f"/f{n}")
        assert v.statfs() == before
    fsck(image)


def test_what_is_kept_for_growing_files_is_nobodys_when_space_runs_out(image: Path) -> None:
    with Volume.open(image, mode="rw") as v:
        block = v.block_size
        a, b = v.create("/a"), v.create("/b")
        for i in range(50):
            v.pwrite(a, i * block, b"x" * block)
        at = 0
        for step in (MIB, 1 << 16, block):
            while v.statfs().free_blocks > step // block + 8:
                v.pwrite(b, at, b"y" * step)
                at += step
        assert v.statfs().free_blocks <= 10
        v.truncate(b, at // 2)
        assert v.read(a, 0, 50 * block) == b"x" * block * 50
    fsck(image)


def test_small_files_lie_one_behind_the_other(image: Path) -> None:
    with Volume.open(image, mode="rw") as v:
        v.mkdir("/d")
        inos = [v.create(f"/d/{i}") for i in range(100)]
        for ino in inos:
            v.pwrite(ino, 0, b"x" * 3 * v.block_size)
        runs = [v.extents(ino) for ino in inos]
        assert all(len(r) == 1 for r in runs)
        first, last = runs[0][0].physical, runs[-1][0].physical
        assert last - first <= 110 * 3
    fsck(image)


def tree_blocks(v: Volume, ino: int) -> int:
    return v.map(v.inode(ino))[1]


@pytest.mark.parametrize("options", PROFILES)
def test_punching_and_filling_does_not_grow_a_tree(tmp_path: Path, options: str) -> None:
    """Every other block goes and comes again, in any order: the tree is what it was, not more."""
    image = tmp_path / "image"
    make(image, options, 64 * MIB)
    r = random.Random(7)
    with Volume.open(image, mode="rw") as v:
        block = v.block_size
        ino = v.create("/f")
        v.pwrite(ino, 0, b"x" * (2400 * block))
        v.sync()
        before, sizes = tree_blocks(v, ino), []
        for cycle in range(2):
            numbers = list(range(cycle % 2, 2400, 2))
            r.shuffle(numbers)
            for i in numbers:
                v.punch(ino, i * block, block)
            sizes.append(tree_blocks(v, ino))
            v.sync()
            r.shuffle(numbers)
            for i in numbers:
                v.pwrite(ino, i * block, b"y" * block)
            v.truncate(ino, 2390 * block)
            v.pwrite(ino, 2390 * block, b"z" * (10 * block))
        assert max(sizes) <= sizes[0] * 1.3 + 2
        v.punch(ino, 10 * block, 2380 * block)
        assert tree_blocks(v, ino) <= max(2, before)
        v.punch(ino, 0, 2400 * block)
        assert tree_blocks(v, ino) == 0
    fsck(image)


def test_a_tree_whose_holes_are_filled_becomes_flat_again(tmp_path: Path) -> None:
    """A leaf for 340 extents gives way to its neighbours: written from one run, 3,000 extents end as one."""
    image = tmp_path / "image"
    make(image, "", 64 * MIB)
    with Volume.open(image, mode="rw") as v:
        ino = v.create("/f")
        v.fallocate(ino, 0, 6000 * 4096)
        assert len(v.extents(ino)) == 1
        order = list(range(0, 6000, 2))
        for i in order:
            v.pwrite(ino, i * 4096, b"x" * 4096)
        assert len(v.extents(ino)) == 6000
        assert tree_blocks(v, ino) >= 18
        random.Random(3).shuffle(order)
        for i in order:
            v.pwrite(ino, (i + 1) * 4096, b"y" * 4096)
        assert len(v.extents(ino)) == 1
        assert HEADER.unpack_from(v.inode(ino).fields.i_block)[3] == 0
        assert tree_blocks(v, ino) == 0
    fsck(image)


def test_block_maps_are_filled_in_runs(tmp_path: Path) -> None:
    """A large write to an ext3 file is a few allocations, not one a block."""
    image = tmp_path / "image"
    make(image, "-t ext3 -b 4096", 64 * MIB)
    with Volume.open(image, mode="rw") as v:
        ino = v.create("/f")
        begin = time.process_time()
        for i in range(8):
            v.pwrite(ino, i << 22, b"x" * (1 << 22))
        assert time.process_time() - begin < 1.5  # 0.1 s alone; block by block it took 10 times as long
        assert len(v.extents(ino)) <= 20
        v.pwrite(ino, 3 << 30, b"far")  # three levels deep
        assert v.read(ino, (3 << 30) - 2, 5) == b"\0\0far"
        v.punch(ino, 0, 3 << 30)
        assert len(v.extents(ino)) == 1
    fsck(image)
