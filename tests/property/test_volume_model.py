"""Random operations on a writable volume against a plain model: same answers, same tree, nothing for e2fsck to find."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from ext4lite.mkfs import mkfs
from ext4lite.volume import Volume
from support.ext4_judges import fsck, tool
from support.volume_model import NOSPACE, Generator, Model, Op, Ours, allowed, assert_tree, make, outcome

MIB = 1 << 20
PROFILES = {
    "ours": "",
    "ext4 defaults": "-t ext4",
    "ext4 4k, orphan_file": "-t ext4 -b 4096 -O orphan_file,metadata_csum_seed",
    "uninit_bg, small groups": "-t ext4 -O ^64bit,^metadata_csum,uninit_bg -g 1024 -b 1024 -I 128",
    "no dir_index, 2k": "-t ext4 -b 2048 -O ^dir_index",
    "ext3": "-t ext3 -b 4096",
    "ext2 1k": "-t ext2 -b 1024",
    "ea_inode": "-t ext4 -b 4096 -O ea_inode",
    "ea_inode, 1k, small inodes": "-t ext4 -b 1024 -I 128 -O ea_inode,^metadata_csum",
    "64k": "-t ext4 -b 65536 -O ^resize_inode",
}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("profile", PROFILES)
def test_random_operations(tmp_path: Path, profile: str, seed: int) -> None:
    image = tmp_path / "image"
    options = PROFILES[profile]
    make(image, options, (96 if profile == "64k" else 24) * MIB)
    r = random.Random(f"{profile}{seed}")
    model = Model()
    generator = Generator(model, r, fallocate="ext4" in options or not options, options=options)
    for _ in range(3):
        with Volume.open(image, mode="rw") as volume:
            side = Ours(volume)
            for _ in range(250):
                op = generator.op()
                if not allowed(model, op):
                    continue
                got = outcome(side, op)
                if got != NOSPACE:
                    assert got == outcome(model, op), op[:3]
            assert_tree(volume, model)
        fsck(image)
    with Volume.open(image) as volume:
        assert_tree(volume, model)


@pytest.mark.parametrize("options", ["", "-t ext4 -b 1024", "-t ext2 -b 1024"])
def test_a_full_volume_says_so_and_stays_as_it_was(tmp_path: Path, options: str) -> None:
    """ENOSPC in the middle of anything leaves tree and counts alone; what is freed can be used again at once."""
    image = tmp_path / "image"
    make(image, options, 5 * MIB)
    r = random.Random(5)
    model = Model()
    generator = Generator(model, r, fallocate=False, options=options)
    full = 0
    with Volume.open(image, mode="rw") as volume:
        side = Ours(volume)
        filler = volume.create("/lost+found/filler")  # not looked at by the comparison
        volume.pwrite(filler, 0, r.randbytes(volume.statfs().free_blocks * volume.block_size - 500_000))
        for n in range(700):
            if n % 3 == 0:
                op: Op = ("write", generator.some("file"), generator.offset(), r.randbytes(r.randrange(90_000)))
            else:
                op = generator.op()
            if not allowed(model, op):
                continue
            before = volume.statfs()
            got = outcome(side, op)
            if got == NOSPACE:
                full += 1
                assert volume.statfs() == before
                if full % 20 == 1:
                    assert_tree(volume, model)
            else:
                assert got == outcome(model, op), op[:3]
        assert_tree(volume, model)
        assert full > 20
    fsck(image)


def test_every_block_can_be_used_and_given_back(tmp_path: Path) -> None:
    image = tmp_path / "image"
    mkfs(image, size=8 * MIB)
    with Volume.open(image, mode="rw") as volume:
        before = volume.statfs()
        ino = volume.create("/fill")
        at = 0
        for step in (1 << 20, 1 << 16, 4096):
            while True:
                got = outcome(Ours(volume), ("write", b"/fill", at, b"x" * step))
                if got:
                    assert got == NOSPACE
                    break
                at += step
        assert volume.statfs().free_blocks <= 1  # a tree block may be what is missing
        assert volume.stat(ino).size == at
    fsck(image)
    with Volume.open(image, mode="rw") as volume:
        volume.unlink("/fill")
        assert volume.statfs() == before
    fsck(image)


def test_debugfs_sees_no_orphans(tmp_path: Path) -> None:
    """A volume closed in order has no inode left over, whatever was open when its last name went."""
    image = tmp_path / "image"
    mkfs(image, size=8 * MIB)
    with Volume.open(image, mode="rw") as volume:
        file = volume.open_file("/open", create=True)
        other = volume.open_file("/other", create=True)
        file.pwrite(b"still there", 0)
        volume.unlink("/open")
        volume.unlink("/other")
        volume.sync()
        assert file.pread(100, 0) == b"still there"
        other.close()
    fsck(image)
    out = subprocess.run([tool("dumpe2fs"), "-h", image], capture_output=True, text=True, check=True).stdout
    assert "First orphan inode" not in out
