"""Volumes with quotas after a crash: orphans and fast commits change what is counted; e2fsck compares the counts.

This kernel mounts no volume with the feature, so crashes are made without it, in a volume that has the files already.
"""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.test_recovery import NO_LOG_FLUSH, crashing, fsync
from ext4lite.errors import CorruptImage
from ext4lite.jbd2.log import FileBlocks, Overlay, write_back
from ext4lite.jbd2.patch import Patch
from ext4lite.jbd2.quota import quota_file
from ext4lite.layout.constants import INCOMPAT_RECOVER, RO_QUOTA
from ext4lite.recover import Recovered, recover
from ext4lite.super import read_super
from ext4lite.volume import Volume
from support.ext4_judges import debugfs, fsck, run, tool

ALL = ["-O", "quota,project", "-E", "quotatype=usrquota:grpquota:prjquota"]


def change(image: Path, *requests: str) -> None:
    run(tool("debugfs"), "-w", "-f", "-", image, stdin="\n".join(requests) + "\n")


def with_quotas(image: Path, options: list[str], source: Path) -> list[int]:
    """Make a volume of files of several owners, in projects where it has them; return their inodes."""
    source.mkdir()
    r = random.Random(1)
    for i in range(40):
        path = source / f"f{i}"
        path.write_bytes(r.randbytes(r.randrange(60_000)))
        if os.geteuid() == 0:
            os.chown(path, r.choice([0, 1000, 70_000, 5]), r.choice([0, 7, 80_000]))
    run(tool("mke2fs"), "-q", "-F", "-t", "ext4", *options, "-d", source, image, "24M")
    with Volume.open(image) as v:
        inodes = [v.lookup(f"/f{i}") or 0 for i in range(40)]
    if "quota,project" in options:
        change(image, *(f"sif <{ino}> projid {i % 3}" for i, ino in enumerate(inodes)))
    run("sh", "-c", f"{tool('e2fsck')} -fy {image} || test $? = 1")  # mke2fs does not count what -d brings
    fsck(image)
    return inodes


def usage(image: Path, kind: str) -> dict[int, tuple[int, int]]:
    """Return what debugfs lists: bytes and inodes of each owner."""
    lines = re.findall(r"^\s*(\d+)\s+(\d+)\s+\d+\s+\d+\s+(\d+)", debugfs(image, f"lq {kind}"), re.MULTILINE)
    return {int(owner): (int(space), int(inodes)) for owner, space, inodes in lines}


@pytest.mark.parametrize(
    "options",
    [
        ["-b", "4096", *ALL],
        ["-b", "1024", "-O", "quota"],
        ["-b", "4096", "-O", "quota,bigalloc"],
        ["-I", "128", "-O", "quota"],
    ],
    ids=["all", "1k", "bigalloc", "small-inodes"],
)
def test_orphans_give_back_what_they_held(tmp_path: Path, options: list[str]) -> None:
    image = tmp_path / "image"
    inodes = with_quotas(image, options, tmp_path / "source")
    before = usage(image, "user")
    gone, cut = inodes[0:40:4], inodes[1:40:4]
    chain = [*gone, *cut]
    requests = [f"sif <{ino}> dtime {after}" for ino, after in zip(chain, [*chain[1:], 0], strict=True)]
    for i, ino in enumerate(inodes):
        if ino in gone:
            requests += [f"unlink /f{i}", f"sif <{ino}> links_count 0"]
        elif ino in cut:
            requests += [f"sif <{ino}> size 3000"]
    change(image, *requests, f"ssv last_orphan {chain[0]}", "feature needs_recovery")
    result = recover(image)
    assert (result.orphans_deleted, result.orphans_truncated) == (10, 10)
    fsck(image)
    after = usage(image, "user")
    assert sum(inodes for _, inodes in before.values()) - sum(inodes for _, inodes in after.values()) == 10
    assert sum(space for space, _ in after.values()) < sum(space for space, _ in before.values())


@pytest.mark.root
def test_fast_commits_are_counted(tmp_path: Path) -> None:
    """Owners that nobody knew so far get entries; the feature is switched off while the kernel works."""
    image = tmp_path / "image"
    with_quotas(image, ["-b", "4096", "-O", "quota,fast_commit,^metadata_csum"], tmp_path / "source")
    with Volume.open(image) as volume:
        features = volume.super.raw.pack()[0x60:0x78]  # two sets of features and the UUID: where the superblock is
    off = features[:4] + (int.from_bytes(features[4:8], "little") & ~RO_QUOTA).to_bytes(4, "little") + features[8:]
    image.write_bytes(image.read_bytes().replace(features, off))
    with crashing(image, tmp_path / "mnt", flush=NO_LOG_FLUSH, sync=False) as root:
        os.utime(root / "f1", (5, 5))
        fsync(root / "f1")
        run("sync", "-f", root)
        for i in range(12):
            path = root / f"new{i}"
            path.write_bytes(b"n" * 5000 * (i % 4))
            os.chown(path, 100_000 + i, i % 3)
            fsync(path)
    recovering = off.replace(off[:4], (int.from_bytes(off[:4], "little") | INCOMPAT_RECOVER).to_bytes(4, "little"), 1)
    data = image.read_bytes()
    for left in (off, recovering):  # in its place and in the log, where nothing has a checksum
        data = data.replace(left, left[:4] + features[4:])
    image.write_bytes(data)
    result = recover(image)
    assert result.fast_commits > 30
    assert usage(image, "user")[100_003] == (16384, 1)
    fsck(image)


def opened(path: Path) -> tuple[int, Volume, Overlay]:
    fd = os.open(path, os.O_RDWR)
    sb = read_super(fd, "image")
    overlay = Overlay(FileBlocks(fd, sb.block_size, "image"), {})
    found = Recovered(sb, overlay, None, None, [])  # type: ignore[arg-type]
    return fd, Volume(fd, sb, "image", found), overlay


@pytest.mark.parametrize("size", ["1024", "4096"])
def test_entries_of_new_owners(tmp_path: Path, size: str) -> None:
    """The tree grows as debugfs reads it; leaves fill up, the file gets new blocks."""
    image = tmp_path / "image"
    run(tool("mke2fs"), "-q", "-F", "-t", "ext4", "-b", size, "-O", "quota", image, "24M")
    wanted = usage(image, "group")
    r = random.Random(size)
    fd, volume, overlay = opened(image)
    for _ in range(5):
        patch = Patch(volume, overlay, 1)
        file = quota_file(patch, volume.super.raw.s_grp_quota_inum, 1)
        for _ in range(60):
            owner, space, inodes = (
                r.choice([r.randrange(500), r.randrange(1 << 32)]),
                r.randrange(1 << 40),
                r.randrange(99),
            )
            file.add(owner, space, inodes)
            old = wanted.get(owner, (0, 0))
            wanted[owner] = old[0] + space, old[1] + inodes
        file.store()
        patch.finish()
    write_back(FileBlocks(fd, volume.block_size, "image"), overlay.everything())
    os.close(fd)
    assert usage(image, "group") == wanted
    run("sh", "-c", f"{tool('e2fsck')} -fn {image} > {tmp_path}/said; true")
    said = (tmp_path / "said").read_text()
    assert set(re.findall(r"quota type (\d)", said)) == {"1"}, "the usage is invented, all else is right"
    assert "differences" not in said
    assert "for group" not in said
    run("sh", "-c", f"{tool('e2fsck')} -fy {image} || test $? = 1")
    fsck(image)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    changes=st.lists(st.tuples(st.integers(0, 8 * 1024 - 4), st.binary(min_size=1, max_size=4)), min_size=1, max_size=6)
)
def test_damaged_quota_files(tree: Path, changes: list[tuple[int, bytes]]) -> None:
    """Whatever a quota file holds, adding to it ends, in a CorruptImage if at all."""
    fd, volume, overlay = opened(tree)
    try:
        runs = volume.extents(volume.super.raw.s_usr_quota_inum)
        at = runs[0].physical * volume.block_size
        patch = Patch(volume, overlay, 1)
        for offset, data in changes:
            block, inside = divmod(at + offset, volume.block_size)
            old = overlay.read(block)
            overlay.write(block, (old[:inside] + data + old[inside + len(data) :])[: volume.block_size])
        file = quota_file(patch, volume.super.raw.s_usr_quota_inum, 0)
        for owner in (0, 5, 1000, 9999, 70_000, 0xFFFFFFFF):
            file.add(owner, 1, 1)
        file.store()
        patch.finish()
    except CorruptImage as e:
        assert str(e)
    finally:
        os.close(fd)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("quota")
    with_quotas(where / "image", ["-b", "1024", "-O", "quota"], where / "source")
    return where / "image"
