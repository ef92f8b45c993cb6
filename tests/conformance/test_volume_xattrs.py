"""Extended attributes that the writer stores, in every place they can lie; e2fsck and the kernel judge."""

from __future__ import annotations

import os
import random
import re
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from ext4lite.errors import NoRoomForAttribute, NotPermitted
from ext4lite.mkfs import mkfs
from ext4lite.recover import recover
from ext4lite.volume import Volume
from ext4lite.writer import WritableVolume
from support.ext4_judges import debugfs, fsck, mounted, run, tool
from support.kernel_manifest import manifest

MIB = 1 << 20
PROFILES = {
    "4k": "-t ext4 -b 4096 -O ea_inode",
    "1k, no inode space": "-t ext4 -b 1024 -I 128 -O ea_inode,^metadata_csum",
    "ext3": "-t ext3 -b 2048 -O ea_inode",
}
VALUES = [random.Random(n).randbytes(n) for n in (10, 900, 3000, 4040, 4041, 5000, 20_000, 65_536)]


def make(path: Path, options: str) -> None:
    run(tool("mke2fs"), "-q", "-F", *options.split(), path, "48M")


def seen(volume: Volume) -> dict[str, Any]:
    """Return the attributes of everything, as the kernel's manifest has them."""
    out = {}
    for path, ino in volume.walk():
        found = {os.fsdecode(name): b64encode(value).decode() for name, value in volume.xattrs(ino).items()}
        out[os.fsdecode(path)] = found or None
    del out["/lost+found"]
    return out


@pytest.mark.parametrize("options", PROFILES.values(), ids=PROFILES)
def test_values_in_inodes_of_their_own(tmp_path: Path, options: str) -> None:
    """Set, replaced, shared and removed at random; what the kernel made is changed, too; in the end nothing is left."""
    image = tmp_path / "image"
    make(image, options)
    r = random.Random(options)
    with Volume.open(image, mode="rw") as v:
        empty = v.statfs()
        for _ in range(150):
            path = f"/f{r.randrange(40)}"
            ino = v.lookup(path) or v.create(path)
            name = r.choice([b"user.a", b"user.b", b"trusted.c", b"security.d"])
            if r.random() < 0.1:
                v.unlink(path)
            elif r.random() < 0.25 and name in v.xattrs(ino):
                v.remove_xattr(ino, name)
            else:
                value = r.choice(VALUES)
                v.set_xattr(ino, name, value)
                assert v.xattrs(ino)[name] == value
        for target in ("short", "long" * 30):
            ino = v.symlink(f"/to-{target}", target)
            v.set_xattr(ino, b"trusted.large", VALUES[-1])
            assert v.readlink(ino) == target.encode()
    fsck(image)
    with Volume.open(image) as v:
        ours = seen(v)
    with mounted(image, tmp_path / "mnt") as top:
        assert {e["path"]: e.get("xattrs") for e in manifest(top)} == ours
        for i in range(12):
            (top / f"k{i}").touch()
            os.setxattr(top / f"k{i}", "user.i", b"%d" % i)  # kernel 6.18 miscounts values in blocks that it shares
            os.setxattr(top / f"k{i}", "user.z", VALUES[5 + i % 3])
    fsck(image)
    with Volume.open(image, mode="rw") as v:
        assert v.stat(v.resolve("/k0")).blocks512 >= 8
        for i in range(6):
            v.set_xattr(v.resolve(f"/k{i}"), b"user.z", b"small")
    fsck(image)
    with Volume.open(image, mode="rw") as v:
        for name, _ in list(v.walk()):
            if name != b"/lost+found":
                v.unlink(name)
        assert v.statfs() == empty
    fsck(image)


def users(image: Path, ino: int) -> int:
    """Return how many users a value's inode counts, by debugfs."""
    found = re.search(r"Version: 0x[0-9a-f]*:([0-9a-f]*)|Version: 0x([0-9a-f]+)$", debugfs(image, f"stat <{ino}>"))
    assert found is not None
    return int(found[1] or found[2], 16)


def test_equal_values_share_an_inode(tmp_path: Path) -> None:
    image = tmp_path / "image"
    make(image, PROFILES["4k"])
    with Volume.open(image, mode="rw") as v:
        free = v.statfs()
        a, b, c = v.create("/a"), v.create("/b"), v.create("/c")
        for ino in (a, b, c):
            v.set_xattr(ino, b"user.v", VALUES[-1])
        value = max(record.ino for record in v.used_inodes())
        assert free.free_inodes - v.statfs().free_inodes == 4
        v.set_xattr(b, b"user.v", VALUES[-2])
        assert v.xattrs(a)[b"user.v"] == v.xattrs(c)[b"user.v"] == VALUES[-1]
        with pytest.raises(NotPermitted):
            v.pwrite(value, 0, b"x")
    fsck(image)
    assert users(image, value) == 2
    with Volume.open(image, mode="rw") as v:
        before = v.statfs()
        v.set_xattr(v.resolve("/b"), b"user.v", VALUES[-1])  # met on the disk only, not in this process: a twin
        v.unlink("/a")
        v.unlink("/c")
        assert v.statfs().free_inodes > before.free_inodes
    fsck(image)


@pytest.mark.parametrize("options", [*PROFILES.values(), "-t ext4 -b 4096 -O ea_inode,orphan_file"])
def test_values_of_what_was_open_when_the_system_went_down(tmp_path: Path, options: str) -> None:
    """Recovery deletes the file and its own values; those it shared stay with the other one."""
    image = tmp_path / "image"
    make(image, options)
    v = Volume.open(image, mode="rw")
    empty = v.statfs()
    file = v.open_file("/f", create=True)
    file.pwrite(b"x" * 9000, 0)
    other = v.create("/g")
    for ino in (file.ino, other):
        v.set_xattr(ino, b"user.large", VALUES[-1])
        v.set_xattr(ino, b"user.middle", VALUES[1][:700])
    v.set_xattr(file.ino, b"user.own", VALUES[-2])
    v.unlink("/f")
    v.sync()
    v.abandon()
    assert recover(image).orphans_deleted == 1
    fsck(image)
    with Volume.open(image, mode="rw") as v:
        assert v.xattrs(v.resolve("/g"))[b"user.large"] == VALUES[-1]
        v.unlink("/g")
        assert v.statfs() == empty
    fsck(image)


def test_without_the_feature_large_values_have_no_room(tmp_path: Path) -> None:
    image = tmp_path / "image"
    mkfs(image, size=8 * MIB)
    with Volume.open(image, mode="rw") as v:
        ino = v.create("/f")
        before = v.statfs()
        with pytest.raises(NoRoomForAttribute):
            v.set_xattr(ino, b"user.v", VALUES[-1])
        assert v.statfs() == before
        assert v.xattrs(ino) == {}
    fsck(image)


def _blocks(v: WritableVolume, *paths: str) -> set[int]:
    return {v.inode(v.resolve(path)).file_acl for path in paths}


def test_shared_blocks_are_copied_when_they_change(tmp_path: Path) -> None:
    """Equal sets share one block, also one that an earlier opening or the kernel made; a change leaves the others."""
    image = tmp_path / "image"
    mkfs(image, size=8 * MIB)
    big = b"v" * 600
    with Volume.open(image, mode="rw") as v:
        for name in "abc":
            v.set_xattr(v.create(f"/{name}"), b"user.v", big)
        assert len(_blocks(v, "/a", "/b", "/c")) == 1
        v.set_xattr(v.resolve("/b"), b"user.v", b"w" * 600)
        assert len(_blocks(v, "/a", "/b", "/c")) == 2
        v.set_xattr(v.resolve("/b"), b"user.v", big)
        assert len(_blocks(v, "/a", "/b", "/c")) == 1
    fsck(image)
    with mounted(image, tmp_path / "mnt") as top:
        (top / "k").touch()
        os.getxattr(top / "a", "user.v")
        os.setxattr(top / "k", "user.v", big)
    with Volume.open(image, mode="rw") as v:
        assert len(_blocks(v, "/a", "/k")) == 1
        assert v.xattrs(v.resolve("/a"))[b"user.v"] == big
        v.set_xattr(v.resolve("/a"), b"user.other", b"1" * 90)
        v.remove_xattr(v.resolve("/a"), b"user.other")  # the block of before was met on the way
        assert len(_blocks(v, "/a", "/b", "/c", "/k")) == 1
        v.unlink("/c")
    fsck(image)
