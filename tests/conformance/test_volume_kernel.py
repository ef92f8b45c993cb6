"""The kernel and our writable volume on the same image: in turns, and with the same answers."""

from __future__ import annotations

import itertools
import os
import random
import shutil
from pathlib import Path

import pytest

from ext4lite import htree
from ext4lite.volume import Volume
from support.ext4_judges import assert_same, debugfs, fsck, mounted, ours
from support.kernel_manifest import manifest as kernel_manifest
from support.volume_model import (
    NOSPACE,
    Generator,
    Kernel,
    Model,
    Ours,
    allowed,
    assert_tree,
    facts_of,
    make,
    outcome,
)

pytestmark = pytest.mark.root

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _no_umask() -> object:
    old = os.umask(0)
    yield
    os.umask(old)


@pytest.mark.parametrize(
    "options",
    [
        "",
        "-t ext4 -b 1024",
        "-t ext4 -O orphan_file -b 4096",
        "-t ext3 -b 1024",
        "-t ext2 -b 4096 -I 128",
        "-t ext4 -b 4096 -O ea_inode -g 4096",
    ],
)
def test_in_turns(tmp_path: Path, options: str) -> None:
    """Operations of both, 100 at a time; each sees what the other left, and answers like the model."""
    image = tmp_path / "image"
    make(image, options, 32 * MIB)
    model, r = Model(), random.Random(options)
    generator = Generator(model, r, fallocate="ext4" in options or not options, options=options)
    for _ in range(3):
        with Volume.open(image, mode="rw") as volume:
            for _ in range(100):
                op = generator.op()
                if allowed(model, op) and (got := outcome(Ours(volume), op)) != NOSPACE:
                    assert got == outcome(model, op), op[:3]
            assert_tree(volume, model)
        fsck(image)
        with mounted(image, tmp_path / "mnt") as root:
            side = Kernel(root)
            for _ in range(100):
                op = generator.op()
                if op[0] != "sync" and allowed(model, op) and (got := outcome(side, op)) != NOSPACE:
                    assert got == outcome(model, op), op[:3]
            shown = kernel_manifest(root)
        assert_same(ours(image), shown)
    fsck(image)
    with Volume.open(image) as read_only:
        assert_tree(read_only, model)


KINDS = ("file", "empty", "full", "link", "missing")


def _prepare(side: Ours | Kernel) -> None:
    for directory in (b"/a", b"/b", b"/a/deep", b"/a/deep/er"):
        assert not outcome(side, ("mkdir", directory, 0o755))
    for at in (b"/a/", b"/b/"):
        assert not outcome(side, ("create", at + b"file", 0o644))
        assert not outcome(side, ("mkdir", at + b"empty", 0o755))
        assert not outcome(side, ("mkdir", at + b"full", 0o755))
        assert not outcome(side, ("create", at + b"full/x", 0o644))
        assert not outcome(side, ("symlink", at + b"link", b"file"))
    assert not outcome(side, ("link", b"/a/file", b"/b/same"))


def test_every_rename_is_the_kernels(tmp_path: Path) -> None:
    """All kinds over all kinds, in a directory, across, into itself: the same errno, the same tree."""
    cases = [
        (a + b"/" + old.encode(), b + b"/" + new.encode(), how)
        for a, b in ((b"/a", b"/a"), (b"/a", b"/b"))
        for old, new in itertools.product(KINDS, KINDS)
        for how in ("replace", "noreplace", "exchange", "whiteout")
    ]
    for how in ("replace", "noreplace", "exchange", "whiteout"):
        cases += [(b"/a", b"/a/deep/er/x", how), (b"/a/deep/er", b"/a", how), (b"/a/file", b"/b/same", how)]
        cases += [(b"/a", b"/a/deep/er", how), (b"/a/deep/er", b"/b/er", how), (b"/a/file", b"/a/file/x", how)]
        cases += [(b"/a/full/x", b"/a/full", how), (b"/a/empty", b"/a/empty", how), (b"/a/deep", b"/b/empty", how)]
    a, b = tmp_path / "ours", tmp_path / "kernel"
    make(a, "", 16 * MIB)
    shutil.copy(a, b)
    with mounted(b, tmp_path / "mnt") as root, Volume.open(a, mode="rw") as volume:
        for n, (old, new, how) in enumerate(cases):
            base = b"/%d" % n
            here, there = Ours(volume), Kernel(os.fspath(root) + os.fsdecode(base))
            for side in (here, Kernel(root)):
                assert not outcome(side, ("mkdir", base, 0o755))
            _prepare(_Below(volume, base))
            _prepare(there)
            got = outcome(_Below(volume, base), ("rename", old, new, how))
            assert got == outcome(there, ("rename", old, new, how)), (old, new, how)
    fsck(a)
    with Volume.open(a) as one, Volume.open(b) as two:
        assert facts_of(one) == facts_of(two)


class _Below(Ours):
    """Ours, with all paths below a directory."""

    def __init__(self, volume: object, base: bytes) -> None:
        super().__init__(volume)  # type: ignore[arg-type]
        self.base = base

    def apply(self, op: tuple[object, ...]) -> None:
        paths = 2 if op[0] in ("link", "rename") else 1
        moved = [self.base + p if isinstance(p, bytes) else p for p in op[1 : 1 + paths]]
        super().apply((op[0], *moved, *op[1 + paths :]))


@pytest.mark.parametrize("options", ["", "-t ext4 -b 1024 -N 24000"])
def test_a_directory_of_20000_names(tmp_path: Path, options: str) -> None:
    """The index grows a level, the kernel finds every name by its hash, and half of them go again."""
    image = tmp_path / "image"
    make(image, options, 96 * MIB)
    names = [b"name-%d-" % i + b"\xc3\xa9" * (i % 20) for i in range(20_000)]
    with Volume.open(image, mode="rw") as volume:
        volume.mkdir("/many")
        volume.create("/many/first")
        for name in names:
            volume.link("/many/first", b"/many/" + name)
            if name == names[9_999]:
                volume.sync()
    fsck(image)
    with mounted(image, tmp_path / "mnt", "ro") as root:
        assert len(os.listdir(root / "many")) == 20_001  # noqa: PTH208
        for name in names[::37]:
            assert os.lstat(os.fsencode(root) + b"/many/" + name).st_nlink == 20_001
    if options:
        assert "indirect levels: 1" in debugfs(image, "htree /many").lower()
    gone = random.Random(1).sample(names, 10_000)
    with Volume.open(image, mode="rw") as volume:
        for name in gone:
            volume.unlink(b"/many/" + name)
    fsck(image)
    left = set(names) - set(gone) | {b"first"}
    with mounted(image, tmp_path / "mnt") as root:
        assert set(os.listdir(os.fsencode(root / "many"))) == left  # noqa: PTH208
        for name in left:
            os.unlink(os.fsencode(root) + b"/many/" + name)  # noqa: PTH108
        (root / "many").rmdir()
    fsck(image)


def test_a_file_of_10000_extents(tmp_path: Path) -> None:
    """Filled in a random order with every other block, read by the kernel; then the gaps are closed and all is cut."""
    image = tmp_path / "image"
    make(image, "", 128 * MIB)
    order = list(range(10_000))
    random.Random(3).shuffle(order)
    with Volume.open(image, mode="rw") as volume:
        ino = volume.create("/file")
        free = volume.statfs().free_blocks
        for k in order:
            volume.pwrite(ino, 8192 * k, b"%08d" % k)
        assert len(volume.extents(ino)) == 10_000
    fsck(image)
    with mounted(image, tmp_path / "mnt", "ro") as root, (root / "file").open("rb") as f:
        for k in range(10_000):
            f.seek(8192 * k)
            assert f.read(8) == b"%08d" % k
    with Volume.open(image, mode="rw") as volume:
        volume.fallocate(ino, 0, 8192 * 5000)
        for k in range(5_000, 10_000, 2):
            volume.punch(ino, 8192 * k, 4096)
        volume.truncate(ino, 8192 * 9_000 + 4)
    fsck(image)
    with Volume.open(image, mode="rw") as volume:
        assert volume.read(ino, 8192 * 4999, 8) == b"00004999"
        assert volume.read(ino, 8192 * 5000, 8) == bytes(8)
        assert volume.read(ino, 8192 * 5001, 8) == b"00005001"
        assert volume.read(ino, 8192 * 9000, 8192) == bytes(4)
        volume.truncate(ino, 0)
        assert volume.statfs().free_blocks == free
    fsck(image)


def test_attributes_are_shared_and_unshared(tmp_path: Path) -> None:
    """Equal blocks have one copy; the kernel and we take shares of each other's blocks and leave them."""
    image = tmp_path / "image"
    make(image, "", 16 * MIB)
    with Volume.open(image, mode="rw") as volume:
        inos = [volume.create(f"/f{i}") for i in range(20)]
        free = volume.statfs().free_blocks
        for ino in inos:
            volume.set_xattr(ino, b"user.big", b"v" * 2000)
            volume.set_xattr(ino, b"trusted.small", b"")
        assert free - volume.statfs().free_blocks == 1
        volume.set_xattr(inos[3], b"user.big", b"w" * 2000)
        volume.remove_xattr(inos[4], b"user.big")
        assert free - volume.statfs().free_blocks == 2
        volume.unlink("/f5")
    fsck(image)
    with mounted(image, tmp_path / "mnt") as root:
        assert os.getxattr(root / "f7", "user.big") == b"v" * 2000
        assert os.getxattr(root / "f3", "user.big") == b"w" * 2000
        assert os.listxattr(root / "f4") == ["trusted.small"]
        for i in (8, 9):
            os.setxattr(root / f"f{i}", "user.big", b"k" * 2000)
        os.setxattr(root / "f3", "security.x", b"1")
    fsck(image)
    with Volume.open(image, mode="rw") as volume:
        volume.set_xattr(volume.resolve("/f8"), b"user.more", b"2")
        assert volume.xattrs(volume.resolve("/f9")) == {b"user.big": b"k" * 2000, b"trusted.small": b""}
        for i in range(20):
            if i != 5:
                volume.unlink(f"/f{i}")
        assert volume.statfs().free_blocks >= free
    fsck(image)


def test_names_beyond_ascii_hash_as_the_kernels(tmp_path: Path) -> None:
    image = tmp_path / "image"
    make(image, "-t ext4 -b 1024", 16 * MIB)
    with Volume.open(image, mode="rw") as volume:
        volume.mkdir("/d")
        seed, version = volume.super.raw.s_hash_seed, volume.super.raw.s_def_hash_version
        names = sorted((b"\xe9\xff%d\x80" % i for i in range(500)), key=lambda n: htree.name_hash(n, version, seed))
        for name in names:
            volume.create(b"/d/" + name)
        volume.mkdir("/few")
        for name in names[::60]:
            volume.create(b"/few/" + name)
    fsck(image)
    with mounted(image, tmp_path / "mnt", "ro") as root, Volume.open(image) as volume:
        for name in names:
            os.lstat(os.fsencode(root) + b"/d/" + name)
        for path in ("d", "few"):
            listed = os.listdir(os.fsencode(root / path))  # noqa: PTH208
            ours_listed = [name for name, _, _ in volume.iterdir_by_hash(volume.lookup(path) or 0)]
            assert ours_listed == listed
