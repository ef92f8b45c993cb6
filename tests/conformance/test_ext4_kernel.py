"""The kernel, e2fsck and debugfs judge what ext4lite writes; mke2fs and the kernel make what ext4lite reads."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest

from ext4lite import htree
from ext4lite.blockdev import open_for_guest
from ext4lite.builder import ImageBuilder, Meta
from ext4lite.clone import clone
from ext4lite.errors import VolumeBusy
from ext4lite.inspect import inspect
from ext4lite.mkfs import mkfs
from ext4lite.volume import Volume
from support.ext4_judges import assert_same, debugfs, fill, fsck, mounted, ours, run, tool
from support.kernel_manifest import manifest as kernel_manifest
from support.samples import build_sample

pytestmark = pytest.mark.root

MIB = 1 << 20


def test_a_mounted_image_is_in_use(tmp_path: Path) -> None:
    """The kernel takes no lock that ext4lite could see, so mounts are looked up."""
    image = tmp_path / "image"
    mkfs(image, size=16 * MIB)
    with mounted(image, tmp_path / "mnt"):
        for attempt in (
            lambda: print(inspect(image)),
            lambda: print(clone(image, tmp_path / "clone")),
            lambda: open_for_guest(image, readonly=True).close(),
            lambda: print(mkfs(image, size=16 * MIB, force=True)),
        ):
            with pytest.raises(VolumeBusy, match=f"mounted at {tmp_path / 'mnt'}"):
                attempt()  # type: ignore[no-untyped-call]
    with mounted(image, tmp_path / "mnt", "ro"):
        assert inspect(image).state == "clean"
        with pytest.raises(VolumeBusy, match="mounted"):
            open_for_guest(image)
    open_for_guest(image).close()


def test_reads_unwritten_extents_as_zeros(tmp_path: Path) -> None:
    image = tmp_path / "image"
    run(tool("mke2fs"), "-q", "-t", "ext4", image, "16M")
    with mounted(image, tmp_path / "mnt") as root:
        run("fallocate", "-l", "1M", root / "reserved")
        with (root / "reserved").open("r+b") as f:
            f.seek(500_000)
            f.write(b"middle")
        run("fallocate", "-n", "-l", "2M", root / "reserved")  # beyond the end
        expected = kernel_manifest(root)
    assert_same(ours(image), expected)


def test_kernel_reads_what_the_builder_writes(tmp_path: Path) -> None:
    image = tmp_path / "image"
    build_sample(image)
    fsck(image)
    with mounted(image, tmp_path / "mnt", "ro") as root:
        expected = kernel_manifest(root)
    assert_same(ours(image), expected)


def test_kernel_goes_on_writing_to_a_built_image(tmp_path: Path) -> None:
    image = tmp_path / "image"
    build_sample(image, size=128 * MIB)
    with mounted(image, tmp_path / "mnt") as root:
        (root / "filled").mkdir()
        fill(root / "filled")
        (root / "many-files" / "new name").write_bytes(b"x" * 10_000)  # into a directory whose index is full
        for i in range(0, 2000, 3):
            (root / "many-files" / f"file-{i}").unlink(missing_ok=True)
        for i in range(600):
            (root / "many-files" / f"another-{i}").touch()
        run("cp", "-a", root / "many-files", root / "copy")
        run("rm", "-rf", root / "filled" / "plain")
        os.setxattr(root / "shared-xattrs" / "file3", "user.more", b"m" * 300)
        expected = kernel_manifest(root)
    fsck(image)
    assert_same(ours(image), expected)


@pytest.mark.parametrize(
    "size", [4 * MIB, 8 * MIB, 9 * MIB + 12345, 128 * MIB, 129 * MIB, 700 * MIB, 16 << 30, 100 << 30]
)
def test_mkfs_of_any_size(tmp_path: Path, size: int) -> None:
    image = tmp_path / "image"
    mkfs(image, size=size)
    assert image.stat().st_size == size
    fsck(image)
    with mounted(image, tmp_path / "mnt") as root:
        (root / "file").write_bytes(b"y" * 100_000)
        (root / "directory").mkdir()
    fsck(image)
    assert [e["path"] for e in ours(image)] == ["/directory", "/file"]


@pytest.mark.parametrize("journal", [0, 4 * MIB, 40 * MIB])
def test_mkfs_journal_sizes(tmp_path: Path, journal: int) -> None:
    image = tmp_path / "image"
    mkfs(image, size=64 * MIB, journal_size=journal)
    fsck(image)
    report = inspect(image)
    assert report.journal.bytes == journal
    assert report.journal.state == ("clean" if journal else "none")
    with mounted(image, tmp_path / "mnt") as root:
        (root / "file").write_bytes(b"z")
    fsck(image)


def test_a_full_volume_is_full_for_the_kernel_too(tmp_path: Path) -> None:
    """The builder uses the last block, and e2fsck agrees with every count."""
    image = tmp_path / "image"
    written = 0
    with ImageBuilder(image, size=9 * MIB, journal_size=0) as b:
        with b.add_file(b.root, b"all", Meta()) as f:
            free = b.free_blocks - 10  # room for the directories
            f.write(random.Random(1).randbytes(4096) * free)
            written = free * 4096
        b.finish()
    fsck(image)
    assert ours(image)[0]["size"] == written


def test_a_scattered_file_gets_a_deep_tree(tmp_path: Path) -> None:
    """Every second block is freed and then taken by one file: nearly 2000 extents."""
    image = tmp_path / "image"
    r = random.Random(8)
    with ImageBuilder(image, size=16 * MIB, journal_size=0) as b:
        count = b.free_blocks - 60
        for i in range(count):
            with b.add_file(b.root, b"%d" % i, Meta()) as f:
                f.write(b"%d" % i)
        for i in range(0, count, 2):
            b.remove(b.root, b"%d" % i)
        with b.add_file(b.root, b"scattered", Meta()) as f:
            f.write(r.randbytes(count // 2 * 4096))
        b.finish()
    fsck(image)
    report = inspect(image)
    assert report.fragmentation is not None
    assert report.fragmentation.max > 4 * 340
    with mounted(image, tmp_path / "mnt", "ro") as root:
        assert_same(ours(image), kernel_manifest(root))


def test_directory_index_is_used_by_the_kernel(tmp_path: Path) -> None:
    """debugfs walks the index; a wrong hash order would hide names from lookups in the kernel."""
    image = tmp_path / "image"
    names = [b"n-%d-" % i + b"\xc3\xbc" * (i % 120) for i in range(30_000)]  # needs two levels
    with ImageBuilder(image, size=128 * MIB) as b:
        directory = b.add_dir(b.root, b"d", Meta())
        first = b.add_file(directory, b"first", Meta())
        first.close()
        for name in names:
            b.add_link(directory, name, first.ino)
        b.finish()
    fsck(image)
    with mounted(image, tmp_path / "mnt", "ro") as root:
        top = bytes(root) + b"/d/"
        for name in names[::7]:
            os.lstat(top + name)
        assert not os.path.lexists(top + b"n-99999-")


@pytest.mark.parametrize("version", ["legacy", "half_md4", "tea"])
def test_hashes_agree_with_debugfs(tmp_path: Path, version: str) -> None:
    image = tmp_path / "image"
    mkfs(image, size=4 * MIB)
    number = {"legacy": htree.LEGACY, "half_md4": htree.HALF_MD4, "tea": htree.TEA}[version]
    seed = "01234567-89ab-cdef-0123-456789abcdef"
    words = [int.from_bytes(bytes.fromhex(seed.replace("-", ""))[i : i + 4], "little") for i in range(0, 16, 4)]
    r = random.Random(5)
    names = [
        "a",
        "file.txt",
        "größe",
        "ÿ" * 20,
        "x" * 255,
        *("n" + "".join(r.choices("abcdefgü0189._-", k=k)) for k in range(2, 80)),
    ]
    with Volume.open(image) as volume:
        signed = bool(volume.super.raw.s_flags & 1)
    requests = "".join(f'dx_hash -h {version} -s {seed} "{name}"\n' for name in names)
    out = subprocess.run(
        [tool("debugfs"), "-f", "-", str(image)], input=requests, capture_output=True, text=True, timeout=60, check=True
    ).stdout
    answers = [line for line in out.splitlines() if line.startswith("Hash of ")]
    assert len(answers) == len(names)
    for name, line in zip(names, answers, strict=True):
        major, minor = htree.name_hash(name.encode(), htree.effective_version(number, not signed), words)
        assert line.endswith(f"is 0x{major:x} (minor 0x{minor:x})"), (name, line)


def test_debugfs_reads_the_extent_tree(tmp_path: Path) -> None:
    image = tmp_path / "image"
    build_sample(image)
    listing = debugfs(image, "ex /holes")
    with Volume.open(image) as volume:
        ino = volume.lookup("/holes")
        assert ino is not None
        ours_count = len(volume.extents(ino))
    assert ours_count > 340  # more than one leaf
    assert sum(line.startswith(" 1/ 1") for line in listing.splitlines()) == ours_count


@pytest.mark.root
def test_a_block_device_is_an_image_too(tmp_path: Path) -> None:
    """It is read and cloned whole, zeros becoming holes; not while the kernel has it mounted for writing."""
    build_sample(tmp_path / "i", many=10)
    device = run(tool("losetup"), "-f", "--show", tmp_path / "i").strip()
    try:
        assert_same(ours(Path(device)), ours(tmp_path / "i"))
        assert clone(device, tmp_path / "copy").method == "copy"
        assert (tmp_path / "copy").read_bytes() == (tmp_path / "i").read_bytes()
        assert (tmp_path / "copy").stat().st_blocks * 512 < 40 << 20
        (tmp_path / "m").mkdir()
        run("mount", device, tmp_path / "m")
        try:
            for attempt in (lambda: inspect(device), lambda: clone(device, tmp_path / "second")):
                with pytest.raises(VolumeBusy, match="mounted"):
                    attempt()
        finally:
            run("umount", tmp_path / "m")
    finally:
        run(tool("losetup"), "-d", device)
    assert not (tmp_path / "second").exists()
