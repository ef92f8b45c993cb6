"""Volumes of every kind, filled by the kernel, written afresh: the kernel finds the same, and goes on writing."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ext4lite import hostfs
from ext4lite.compact import compact
from ext4lite.rebuild import rebuild
from ext4lite.volume import Volume
from support.ext4_judges import assert_same, debugfs, fill, fsck, mounted, ours, run, tool
from support.kernel_manifest import manifest as kernel_manifest
from support.rebuilt import kept_of_inodes, kept_of_super

pytestmark = pytest.mark.root

MIB = 1 << 20

MOUNTABLE = {
    "defaults": "-t ext4",
    "4k": "-t ext4 -b 4096 -O orphan_file,metadata_csum_seed,large_dir,fast_commit",
    "2k, inodes of 1k": "-t ext4 -b 2048 -I 1024",
    "ext3 1k, small inodes": "-t ext3 -b 1024 -I 128",
    "ext2 4k": "-t ext2 -b 4096",
    "uninit_bg, small groups": "-t ext4 -b 1024 -g 1024 -G 4 -O ^metadata_csum,uninit_bg,^64bit",
    "no flex_bg": "-t ext4 -b 4096 -g 2048 -O ^flex_bg",
    "meta_bg": "-t ext4 -b 1024 -O meta_bg,^resize_inode",
    "meta_bg, 4k": "-t ext4 -b 4096 -g 256 -N 8192 -O meta_bg,^resize_inode",
    "sparse_super2": "-t ext4 -b 1024 -O sparse_super2",
    "every group a superblock": "-t ext4 -b 1024 -O ^sparse_super,^resize_inode",
    "bigalloc": "-t ext4 -b 4096 -C 16384 -O bigalloc",
    "bigalloc 1k": "-t ext4 -b 1024 -C 8192 -O bigalloc",
    "inline_data": "-t ext4 -b 4096 -I 512 -O inline_data",
    "ea_inode, mmp": "-t ext4 -b 4096 -O ea_inode,mmp",
    "no journal": "-t ext4 -b 4096 -O ^has_journal,^resize_inode",
}


def fill_more(root: Path, options: str) -> None:
    """What ``fill`` has not: unwritten blocks, deep maps, values in inodes of their own, generations."""
    fill(root, many=500)
    if "ext4" in options:
        run("fallocate", "-l", "300K", root / "unwritten")
        with (root / "unwritten").open("r+b") as f:
            f.seek(100_000)
            f.write(b"middle" * 1000)
        run("fallocate", "-n", "-l", "1M", root / "unwritten")
    if "ea_inode" in options:
        for i in range(3):
            (root / f"large{i}").touch()
            os.setxattr(root / f"large{i}", "user.large", b"%d" % (i // 2) * 20_000)
    with (root / "deep-map").open("wb") as f:
        for at in (0, 50_000, 5_000_000, 70_000_000):  # three levels with blocks of 1 KiB
            f.seek(at)
            f.write(b"d" * 5000)


def went_on(image: Path, where: Path) -> None:
    """Let the kernel write to a volume, and check it."""
    with mounted(image, where) as root:
        (root / "again").mkdir()
        (root / "again" / "file").write_bytes(b"z" * 300_000)
        for i in range(100):
            (root / "many" / f"later-{i}").touch()
        run("rm", "-r", root / "plain", root / "deep-map")
        expected = kernel_manifest(root)
    fsck(image)
    assert_same(ours(image), expected)


@pytest.mark.parametrize("name", MOUNTABLE)
def test_the_kernel_finds_the_same(tmp_path: Path, name: str) -> None:
    image, options = tmp_path / "image", MOUNTABLE[name]
    run(tool("mke2fs"), "-q", "-F", *options.split(), "-m", "3", "-L", "name", image, "64M")
    with mounted(image, tmp_path / "mnt") as root:
        fill_more(root, options)
        expected = kernel_manifest(root)
    with Volume.open(image) as volume:
        before, super_before = kept_of_inodes(volume), kept_of_super(volume)
    smallest = tmp_path / "smallest"
    for target, size in ((smallest, None), (tmp_path / "same", 64 * MIB), (tmp_path / "large", 301 * MIB)):
        report = rebuild(image, target, size=size, durable=False)
        fsck(target)
        assert report.size_after == target.stat().st_size
        with Volume.open(target) as volume:
            assert kept_of_super(volume) == super_before
            after = kept_of_inodes(volume)
            assert after == before, [(p, after.get(p), v) for p, v in before.items() if after.get(p) != v][:1]
        with mounted(target, tmp_path / "mnt", "ro") as root:
            assert_same(kernel_manifest(root), expected)
    assert smallest.stat().st_size < 20 * MIB
    assert rebuild(smallest, tmp_path / "twice").size_after <= smallest.stat().st_size
    went_on(tmp_path / "same", tmp_path / "mnt")
    went_on(tmp_path / "large", tmp_path / "mnt")
    # The smallest is full; but what goes makes room.
    with mounted(smallest, tmp_path / "mnt") as root:
        run("rm", "-r", root / "plain", root / "sparse")
        (root / "new").write_bytes(b"n" * 50_000)
    fsck(smallest)


UNMOUNTABLE = {
    "quota, project": "-t ext4 -b 4096 -O quota,project",
    "64k": "-t ext4 -b 65536 -O ^resize_inode",
    "32k, ext3": "-t ext3 -b 32768",
    "casefold, verity, stable_inodes": "-t ext4 -b 4096 -O casefold,verity,stable_inodes,encrypt -E encoding=utf8",
}


@pytest.mark.parametrize("name", UNMOUNTABLE)
def test_debugfs_fills_what_the_kernel_does_not_mount(tmp_path: Path, name: str) -> None:
    source, image = tmp_path / "source", tmp_path / "image"
    source.mkdir()
    r = random.Random(name)
    for i in range(40):
        (source / f"d{i % 5}").mkdir(exist_ok=True)
        (source / f"d{i % 5}" / f"f{i}").write_bytes(r.randbytes(r.randrange(200_000)))
        os.chown(source / f"d{i % 5}" / f"f{i}", i % 7 * 1000, i % 3)
    with (source / "scattered").open("wb") as f:
        for i in range(0, 60, 2):
            f.seek(i * 70_000)
            f.write(b"s")
    run(tool("mke2fs"), "-q", "-F", *UNMOUNTABLE[name].split(), "-d", source, image, "200M")
    if "quota" in name:
        run(tool("debugfs"), "-w", "-R", "rm /d0/f0", image)
        subprocess.run([tool("e2fsck"), "-fy", image], capture_output=True, check=False)
    fsck(image)
    with Volume.open(image) as volume:
        before = kept_of_inodes(volume)
        numbers = dict(volume.walk())
    for i, size in enumerate((None, 300 * MIB)):
        target = tmp_path / f"target{i}"
        rebuild(image, target, size=size, durable=False)
        fsck(target)
        with Volume.open(target) as volume:
            assert kept_of_inodes(volume) == before
            if "stable" in name:
                assert dict(volume.walk()) == numbers


def make_scattered(root: Path, size: int, *, extents: bool) -> None:
    """Fill a volume, punch 10,000 holes of a block into one file, and put another into what became free."""
    with (root / "holes").open("wb") as f:
        for i in range(20_000):
            f.write((b"%d " % i) * 10 + bytes(size - len(b"%d " % i) * 10))
    with contextlib.suppress(OSError), (root / "rest").open("wb", buffering=0) as f:
        while True:
            f.write(b"r" * 100_000)
    os.sync()
    fd = os.open(root / "holes", os.O_RDWR)
    for i in range(0, 20_000, 2):
        hostfs.fallocate(fd, hostfs.FALLOC_FL_PUNCH_HOLE | hostfs.FALLOC_FL_KEEP_SIZE, i * size, size)
    os.close(fd)
    os.sync()
    fd = os.open(root / "scattered", os.O_RDWR | os.O_CREAT)
    if extents:
        hostfs.fallocate(fd, 0, 0, 9_600 * size)
    for i in range(9_600):
        if i % 3 or not extents:
            os.pwrite(fd, (b"%d-" % i) * 20, i * size)
    os.close(fd)


@pytest.mark.parametrize("options", ["-t ext4 -b 4096", "-t ext4 -b 1024 -I 128 -O ^metadata_csum", "-t ext3 -b 1024"])
def test_files_of_10000_extents(tmp_path: Path, options: str) -> None:
    """Every second block a hole; every block elsewhere, and with extents every third one unwritten."""
    image, mnt = tmp_path / "image", tmp_path / "mnt"
    size = 4096 if "4096" in options else 1024
    run(tool("mke2fs"), "-q", "-F", *options.split(), image, f"{(24_000 if size == 4096 else 32_000) * size // 1024}K")
    with mounted(image, mnt) as root:
        make_scattered(root, size, extents="ext4" in options)
        expected = kernel_manifest(root)
    with Volume.open(image) as volume:
        before = kept_of_inodes(volume)
        assert len(volume.extents(volume.lookup("/holes") or 0)) >= 9_990
        assert len(volume.extents(volume.lookup("/scattered") or 0)) > 9_000
    report = compact(image).volume
    assert report.fragmented_before >= 2
    assert report.extents_before > 19_000
    fsck(image)
    with Volume.open(image) as volume:
        assert kept_of_inodes(volume) == before
        runs = volume.extents(volume.lookup("/holes") or 0)
        breaks = sum(1 for a, b in itertools.pairwise(runs) if b.physical != a.physical + a.count)
        assert breaks <= report.size_after // (8 * size * size)  # only metadata of groups
    with mounted(image, mnt, "ro") as root:
        assert_same(kernel_manifest(root), expected)


def test_quota_files_follow_the_blocks(tmp_path: Path) -> None:
    """A map that needs no tree block any more gives a block back to its owner."""
    source, image = tmp_path / "source", tmp_path / "image"
    source.mkdir()
    for i in range(1500):
        (source / f"f{i}").write_bytes(b"f" * 4096)
        os.chown(source / f"f{i}", i % 5 * 1000, i % 3)
    (tmp_path / "new").write_bytes(os.urandom(150 * 4096))
    run(
        tool("mke2fs"),
        "-q",
        "-F",
        "-t",
        "ext4",
        "-b",
        "4096",
        "-O",
        "quota,project,^has_journal",
        "-d",
        source,
        image,
        "8M",
    )
    requests = [f"rm f{i}" for i in range(0, 1500, 2)]
    requests += [f"write {tmp_path / 'new'} new{i}" for i in range(4)]
    requests += [f"sif new{i} uid {i * 1000}" for i in range(4)]
    run(tool("debugfs"), "-w", "-f", "-", image, stdin="\n".join(requests))
    subprocess.run([tool("e2fsck"), "-fy", image], capture_output=True, check=False)
    fsck(image)
    report = rebuild(image, tmp_path / "target", durable=False)
    assert report.fragmented_before
    assert not report.fragmented_after
    fsck(tmp_path / "target")


def test_a_sparse_volume_of_a_tebibyte(tmp_path: Path) -> None:
    """Its groups and a file with a hole of most of its size cost nothing, before and after."""
    image, mnt = tmp_path / "image", tmp_path / "mnt"
    run(tool("mke2fs"), "-q", "-F", "-t", "ext4", "-E", "lazy_itable_init=1", image, "1T")
    with mounted(image, mnt) as root:
        with (root / "sparse").open("wb") as f:
            for at in (0, 1 << 30, 1 << 39, (1 << 40) + 5):
                f.seek(at)
                f.write(b"data" * 5000)
        run("fallocate", "-l", "100G", root / "reserved")
        (root / "file").write_bytes(b"x" * 1_000_000)
    with Volume.open(image) as volume:
        before = kept_of_inodes(volume)
    for size in (None, 1 << 40, 2 << 40):
        target = tmp_path / "target"
        report = rebuild(image, target, size=size, force=True, durable=False)
        assert report.seconds < 30
        assert target.stat().st_blocks * 512 < 40 * MIB
        with Volume.open(target) as volume:
            assert kept_of_inodes(volume) == before
        if size != 2 << 40:
            fsck(target)
    with mounted(tmp_path / "target", mnt) as root:
        (root / "more").write_bytes(b"m" * MIB)
        assert (root / "sparse").stat().st_size == (1 << 40) + 20_005


def test_a_list_of_bad_blocks_becomes_empty(tmp_path: Path) -> None:
    """They were blocks of a disk; the new volume's file has none."""
    image, bad = tmp_path / "image", tmp_path / "bad"
    bad.write_text("9000\n9001\n12000\n")
    run(tool("mke2fs"), "-q", "-F", "-t", "ext4", "-b", "1024", "-l", bad, image, "32M")
    assert "9000" in run(tool("dumpe2fs"), "-b", image)
    compact(image)
    fsck(image)
    assert run(tool("dumpe2fs"), "-b", image).strip() == ""


def test_free_space_is_no_data_of_the_host(tmp_path: Path) -> None:
    """What was deleted, and what the journal held, goes from the host's disk; blocks of zeros stay allocated."""
    image, mnt = tmp_path / "image", tmp_path / "mnt"
    run(tool("mke2fs"), "-q", "-F", "-t", "ext4", "-b", "4096", image, "128M")
    with mounted(image, mnt) as root:
        (root / "gone").write_bytes(os.urandom(40 * MIB))
        (root / "zeros").write_bytes(bytes(20 * MIB))
        (root / "kept").write_bytes(b"k" * MIB)
        os.sync()
        (root / "gone").unlink()
        held = (root / "zeros").stat().st_blocks
    report: Any = compact(image, size=128 * MIB)
    assert report.host_bytes_before > 60 * MIB
    assert report.host_bytes_after < 4 * MIB
    assert image.stat().st_blocks * 512 == report.host_bytes_after
    fsck(image)
    with mounted(image, mnt) as root:
        assert (root / "zeros").stat().st_blocks == held
        assert (root / "zeros").read_bytes() == bytes(20 * MIB)
    assert "Free blocks" in debugfs(image, "stats")
