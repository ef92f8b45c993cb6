"""Resized volumes as kernel, e2fsck and resize2fs see them: every feature set, several times, full and fragmented."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ext4lite import journal
from ext4lite.errors import VolumeFull
from ext4lite.resize import resize
from ext4lite.volume import Volume
from support.ext4_judges import assert_same, fill, fsck, mounted, ours, run, tool
from support.kernel_manifest import manifest
from support.volume_model import make

pytestmark = pytest.mark.root
MIB = 1 << 20
_SMALL = "-b 1024 -g 1024 -N 2048 -J size=1"
FEATURES = {
    "profile": ("", 64),
    "ext4": ("-t ext4 -b 4096", 64),
    "ext4-1k": (f"-t ext4 {_SMALL}", 40),
    "no-resize-inode": (f"-t ext4 {_SMALL} -O ^resize_inode", 40),
    "no-flex": (f"-t ext4 {_SMALL} -O ^flex_bg", 40),
    "no-flex-no-resize-inode": (f"-t ext4 {_SMALL} -O ^flex_bg,^resize_inode", 40),
    "no-sparse-super": ("-t ext4 -O ^sparse_super,^resize_inode -b 1024 -g 2048 -J size=1", 40),
    "uninit_bg": (f"-t ext4 {_SMALL} -G 4 -O ^metadata_csum,uninit_bg", 40),
    "no-checksums": (f"-t ext4 {_SMALL} -O ^metadata_csum,^uninit_bg", 40),
    "32-bit, orphan file": (f"-t ext4 {_SMALL} -O ^64bit,orphan_file", 40),
    "ext3": ("-t ext3 -b 1024 -g 2048 -N 2048 -J size=1", 40),
    "ext2": ("-t ext2 -b 1024 -g 4096 -N 2048", 40),
    "inodes of 128": ("-t ext4 -I 128 -b 2048 -g 2048 -J size=2", 40),
    "inodes of 1024": ("-t ext4 -I 1024 -b 4096 -g 2048 -J size=4 -N 4096", 64),
}
_RARE = ("ext4", "no-sparse-super", "no-flex", "uninit_bg", "32-bit, orphan file", "inodes of 128")
"""Left to the long run."""


def put_in(image: Path, where: Path, options: str) -> None:
    """Have the kernel write one of everything."""
    with mounted(image, where):
        (where / "tree").mkdir()
        fill(where / "tree", xattrs=not any(old in options for old in ("128", "ext2", "ext3")), many=50)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) if n in _RARE else n for n in FEATURES])
def test_grown_and_shrunk_in_turns(tmp_path: Path, name: str) -> None:
    options, size = FEATURES[name]
    image = tmp_path / "image"
    make(image, options, size * MIB)
    put_in(image, tmp_path / "mnt", options)
    before = ours(image)
    for factor in (1.8, 3.3, 0.6, 1.0):
        resize(image, int(size * MIB * factor))
        fsck(image)
        assert_same(before, ours(image))
    smallest = resize(image, minimum=True)
    assert smallest.free_blocks * smallest.block_size < 8 * MIB
    fsck(image)
    with pytest.raises(VolumeFull, match=r"smallest size is \d+"):
        resize(image, smallest.size // 2)
    resize(image, size * MIB)
    assert image.stat().st_size <= size * MIB
    fsck(image)
    with mounted(image, tmp_path / "mnt") as root:
        assert_same(before, manifest(root))
        for i in range(100):
            (root / f"new{i}").mkdir()
            (root / f"new{i}" / "file").write_bytes(os.urandom(20_000))
        shutil.rmtree(root / "tree")
    fsck(image)


def facts(image: Path) -> dict[str, str]:
    """Return what dumpe2fs says of a volume's geometry."""
    wanted = (
        "Inode count|Block count|Reserved block count|Free blocks|Free inodes|Reserved GDT blocks|Overhead clusters"
    )
    text = run(tool("dumpe2fs"), "-h", image)
    return dict(re.findall(rf"^({wanted}): +(\S+)$", text, re.M))


@pytest.mark.parametrize(
    ("options", "size", "new"),
    [
        ("-t ext4 -b 4096", 64, 300),
        ("-t ext4 -b 4096", 300, 150),
        ("-t ext4 -b 1024", 40, 100),
        ("-t ext4 -b 1024 -E resize=400M", 40, 399),
        ("-t ext4 -b 1024 -O ^flex_bg", 100, 41),
        ("-t ext3 -b 1024", 40, 90),
        ("-t ext3 -b 4096", 300, 100),
        ("-t ext2 -b 1024", 40, 130),
        ("-t ext4 -b 1024 -g 1024 -m 10", 100, 33),
    ],
)
def test_the_same_geometry_as_resize2fs(tmp_path: Path, options: str, size: int, new: int) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    make(mine, options, size * MIB)
    shutil.copyfile(mine, theirs)
    resize(mine, new * MIB)
    run(tool("e2fsck"), "-fp", theirs)
    run(tool("resize2fs"), theirs, f"{new}M")
    a, b = facts(mine), facts(theirs)
    assert a.pop("Overhead clusters", None) or True  # resize2fs leaves it as it was
    b.pop("Overhead clusters", None)
    assert abs(int(a.pop("Free blocks")) - int(b.pop("Free blocks"))) < 4  # of maps of what was moved
    assert a == b
    fsck(mine)


@pytest.mark.parametrize(
    "options",
    [
        "-t ext4 -O ^resize_inode",
        "-t ext4 -O ^resize_inode,^flex_bg",
        pytest.param("-t ext2 -O ^resize_inode", marks=pytest.mark.long),
    ],
)
def test_no_free_block(tmp_path: Path, options: str) -> None:
    """A full volume grows although longer tables of descriptors need blocks that files have."""
    image = tmp_path / "image"
    make(image, f"{options} -b 1024 -g 1024 -N 512 -m 0", 8 * MIB)
    with mounted(image, tmp_path / "mnt") as root:
        for i in range(100_000):
            try:
                (root / f"f{i}").write_bytes(os.urandom(30_000))
            except OSError:
                break
    before = ours(image)
    fsck(image)
    result = resize(image, 60 * MIB)
    assert result.size == 60 * MIB
    fsck(image)
    assert_same(before, ours(image))
    with mounted(image, tmp_path / "mnt") as root:
        (root / "more").write_bytes(bytes(30 * MIB))
    fsck(image)


def test_fragments(tmp_path: Path) -> None:
    """Every other block of the whole volume is free."""
    image = tmp_path / "image"
    make(image, "-t ext4 -b 1024 -g 2048 -N 4096 -J size=1 -m 0", 24 * MIB)
    with mounted(image, tmp_path / "mnt") as root:
        files = [(root / f"f{i}").open("wb") for i in range(2)]
        for i in range(7000):
            os.pwrite(files[i % 2].fileno(), bytes([i % 251]) * 1024, i // 2 * 1024)
            if i % 64 == 0:
                os.fsync(files[i % 2].fileno())
        for file in files:
            file.close()
        (root / "f1").unlink()
    before = ours(image)
    fsck(image)
    result = resize(image, 8 * MIB)
    assert result.moved_bytes
    fsck(image)
    assert_same(before, ours(image))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A volume of small groups with things in all of them."""
    folder = tmp_path_factory.mktemp("filled")
    image = folder / "image"
    make(image, "-t ext4 -b 1024 -g 512 -N 1500 -J size=1", 24 * MIB)
    r = random.Random(4)
    with mounted(image, folder / "mnt") as root:
        for i in range(60):
            (root / f"d{i}").mkdir()
            for k in range(10):
                (root / f"d{i}" / f"f{k}").write_bytes(r.randbytes(r.randrange(40_000)))
    yield image


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(sizes=st.lists(st.integers(9 << 10, 80 << 10), min_size=1, max_size=3))
def test_any_sizes(filled: Path, tmp_path: Path, sizes: list[int]) -> None:
    """Sizes in KiB, one after the other."""
    image = tmp_path / "image"
    shutil.copyfile(filled, image)
    before = ours(image)
    for size in sizes:
        try:
            result = resize(image, size << 10)
        except VolumeFull:
            continue
        assert result.size <= size << 10
        assert result.size > (size << 10) - (512 << 10)
        fsck(image)
    assert_same(before, ours(image))


def test_a_device(tmp_path: Path) -> None:
    """A volume on a block device grows up to its end; what lay there before does not matter."""
    image = tmp_path / "image"
    image.write_bytes(b"\xff" * (80 * MIB))
    run(tool("mke2fs"), "-q", "-F", "-t", "ext4", "-b", "1024", "-O", "^resize_inode", image, "20M")
    device = run("losetup", "-f", "--show", image).strip()
    try:
        assert resize(device).size == 80 * MIB
        fsck(Path(device))
        with mounted(Path(device), tmp_path / "mnt", "rw") as root:
            for i in range(600):
                (root / f"d{i}").mkdir()
        fsck(Path(device))
        assert resize(device, 30 * MIB).size == 30 * MIB
        fsck(Path(device))
    finally:
        run("losetup", "-d", device)


@pytest.mark.parametrize("options", ["-t ext2 -b 1024", "-t ext4 -b 1024", ""])
def test_journals(tmp_path: Path, options: str) -> None:
    """Made, resized, removed: the kernel goes on writing each time, and tune2fs and debugfs see the same."""
    image, where = tmp_path / "image", tmp_path / "mnt"
    make(image, options, 100 * MIB)
    with mounted(image, where) as root:
        (root / "tree").mkdir()
        for i in range(200):
            (root / "tree" / f"{i}").write_bytes(os.urandom(10_000))

    def judge(size: int) -> None:
        fsck(image)
        assert_same(before, ours(image))
        found = journal.show(image)
        assert found.size == size
        text = run(tool("dumpe2fs"), "-h", image)
        assert ("has_journal" in text) == bool(size)
        if size:
            length = run(tool("debugfs"), "-R", "stat <8>", image)
            assert re.search(rf"Size: {size}\b", length)
        with mounted(image, where) as root:
            (root / "x").write_bytes(b"x" * 100_000)
            (root / "x").unlink()
            assert_same(before, [{**e, "mtime_ns": b["mtime_ns"]} for e, b in zip(manifest(root), before, strict=True)])
        fsck(image)

    before = ours(image)
    if journal.show(image).size:
        journal.remove(image)
        judge(0)
        before = ours(image)
    journal.create(image, 6 * MIB)
    judge(6 * MIB)
    before = ours(image)
    journal.resize(image, 20 * MIB)
    judge(20 * MIB)
    before = ours(image)
    journal.resize(image, 5 * MIB)
    judge(5 * MIB)
    before = ours(image)
    run(tool("tune2fs"), "-O", "^has_journal", image)
    fsck(image)
    run(tool("tune2fs"), "-j", image)
    assert journal.show(image).size
    journal.remove(image)
    judge(0)
    with Volume.open(image, mode="rw") as volume:
        volume.create("/ours")
    fsck(image)
