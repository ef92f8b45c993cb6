"""``ext4lite resize``: what it says, what it refuses, what it leaves alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ext4lite import cli
from ext4lite.checksum import inode_seed
from ext4lite.errors import HostError, Unsupported, VolumeFull
from ext4lite.jbd2.log import Blocks
from ext4lite.jbd2.transaction import Journal
from ext4lite.mkfs import mkfs
from ext4lite.recover import recover
from ext4lite.resize import resize
from ext4lite.resize.grow import new_groups
from ext4lite.shape import Shape, reshaped, shape_of
from ext4lite.volume import Volume
from support.ext4_judges import fsck, run, tool
from support.volume_model import make

MIB, GIB = 1 << 20, 1 << 30


def shape(image: Path) -> Shape:
    with Volume.open(image) as volume:
        return shape_of(volume.super)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "image"
    mkfs(path, size=64 * MIB)
    with Volume.open(path, mode="rw") as volume:
        volume.pwrite(volume.create("/file"), 0, b"content" * 1000)
    return path


def content(image: Path) -> bytes:
    with Volume.open(image) as volume:
        ino = volume.lookup("/file")
        assert ino is not None
        return volume.read(ino, 0, 10_000)


# -- the plan ---------------------------------------------------------------------------------------------------------


def test_a_last_group_that_is_too_short_is_left_out(image: Path) -> None:
    old = shape(image)
    group = old.per_group
    assert reshaped(old, 2 * group + 49, keeps_room=False).blocks == 2 * group
    assert reshaped(old, 2 * group + 2 + old.table + 49, keeps_room=False).blocks == 2 * group
    assert reshaped(old, 2 * group + 2 + old.table + 50, keeps_room=False).groups == 3
    # the fourth group has a copy of the superblock
    assert reshaped(old, 3 * group + 2 + old.table + 50, keeps_room=False).groups == 3
    assert reshaped(old, 3 * group + 2 + old.table + 50 + old.base(3), keeps_room=False).groups == 4


def test_kept_blocks_become_descriptors_and_back(tmp_path: Path) -> None:
    make(tmp_path / "image", "-t ext4 -b 1024 -g 1024", 16 * MIB)
    old = shape(tmp_path / "image")
    new = reshaped(old, 200 * 1024, keeps_room=True)
    assert new.gdt > old.gdt
    assert new.base(1) == old.base(1)
    back = reshaped(new, old.blocks, keeps_room=True)
    assert back == old


def test_metadata_of_new_groups_does_not_overlap(image: Path) -> None:
    new = reshaped(shape(image), 40 * GIB // 4096, keeps_room=False)
    used: set[int] = {block for g in range(new.groups) for block in range(new.start(g), new.start(g) + new.base(g))}
    for group in new_groups(new, 1):
        mine = {group.block_bitmap, group.inode_bitmap, *range(group.inode_table, group.inode_table + new.table)}
        assert not used & mine
        assert max(mine) < new.blocks
        used |= mine


# -- growing ----------------------------------------------------------------------------------------------------------


def test_growing_copies_nothing_and_takes_no_space(tmp_path: Path) -> None:
    image = tmp_path / "image"
    mkfs(image, size=16 * GIB)
    with Volume.open(image, mode="rw") as volume:
        features = volume.super.features
        volume.pwrite(volume.create("/file"), 0, os.urandom(20 * MIB))
    taken = image.stat().st_blocks
    result = resize(image, 32 * GIB)
    assert result.method == "in place"
    assert result.moved_bytes == 2 * 4096  # two bitmaps lay where descriptors go now
    assert (image.stat().st_blocks - taken) * 512 < MIB
    assert image.stat().st_size == 32 * GIB
    with Volume.open(image) as volume:
        assert volume.super.features == features
    fsck(image)


def test_to_the_size_of_the_file(image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = content(image)
    os.truncate(image, 200 * MIB)
    assert cli.run(["resize", str(image)]) == 0
    assert "64.0 MiB is now 200.0 MiB" in capsys.readouterr().out
    assert content(image) == before
    assert cli.run(["resize", "--json", str(image)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["method"], told["size"], told["old_size"]) == ("none", 200 * MIB, 200 * MIB)
    fsck(image)


def test_what_lay_behind_the_end_is_gone(image: Path) -> None:
    with image.open("ab") as f:
        f.write(b"\xff" * (100 * MIB))
    resize(image)
    fsck(image)
    with Volume.open(image, mode="rw") as volume:
        for i in range(500):
            volume.mkdir(f"/d{i}")
    fsck(image)


# -- shrinking --------------------------------------------------------------------------------------------------------


def test_too_small_names_the_smallest_size(image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = image.read_bytes()
    assert cli.run(["resize", str(image), "2M"]) == 9
    text = capsys.readouterr().err
    assert image.read_bytes() == before
    least = int(text.split("smallest size is ")[1].split()[0])
    with pytest.raises(VolumeFull):
        resize(image, least - 4096)
    smallest = resize(image, minimum=True)
    assert least <= smallest.size < least + MIB
    assert image.stat().st_size == smallest.size
    assert content(image) == b"content" * 1000
    fsck(image)


def test_another_number_and_the_same_seed(tmp_path: Path) -> None:
    """A renumbered inode keeps the checksums of its blocks: its generation makes up for the number."""
    image = tmp_path / "image"
    make(image, "-t ext4 -b 1024 -g 1024 -N 512 -J size=1", 16 * MIB)
    with Volume.open(image, mode="rw") as volume:
        for i in range(16):
            volume.mkdir(f"/d{i}")
            for k in range(5):
                volume.create(f"/d{i}/{k}-{'n' * 200}")
        per = volume.super.raw.s_inodes_per_group
        before = {path: volume.inode(ino) for path, ino in volume.walk()}
        seed = volume.super.seed
    assert max(record.ino for record in before.values()) > 6 * per
    result = resize(image, 6 * MIB)
    assert result.moved_inodes
    with Volume.open(image) as volume:
        after = {path: volume.inode(ino) for path, ino in volume.walk()}
    assert after.keys() == before.keys()
    for path, record in after.items():
        old = before[path]
        assert record.ino <= 6 * per
        assert inode_seed(seed, record.ino, record.fields.i_generation) == inode_seed(
            seed, old.ino, old.fields.i_generation
        )
        assert (record.ino == old.ino) == (old.ino <= 6 * per)
    fsck(image)


def test_a_shared_attribute_block_stays_shared(tmp_path: Path) -> None:
    image = tmp_path / "image"
    make(image, "-t ext4 -b 1024 -J size=1", 40 * MIB)
    with Volume.open(image, mode="rw") as volume:
        volume.pwrite(volume.create("/first"), 0, bytes(20 * MIB))
        for i in range(50):
            ino = volume.create(f"/f{i}")
            volume.set_xattr(ino, b"user.long", b"v" * 700)
        volume.unlink("/first")
        blocks = {volume.inode(volume.resolve(f"/f{i}")).file_acl for i in range(50)}
        assert len(blocks) == 1
        free = volume.statfs().free_blocks
    assert resize(image, (min(blocks) - 1) * 1024).moved_bytes
    with Volume.open(image, mode="rw") as volume:
        assert len({volume.inode(volume.resolve(f"/f{i}")).file_acl for i in range(50)}) == 1
        assert volume.xattrs(volume.resolve("/f7"))[b"user.long"] == b"v" * 700
        assert volume.statfs().free_blocks < free
    fsck(image)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ("-t ext4 -O bigalloc", "bigalloc"),
        ("-t ext4 -O meta_bg,^resize_inode", "meta_bg"),
        ("-t ext4 -O sparse_super2,^resize_inode", "sparse_super2"),
        ("-t ext4 -O quota", "quota"),
        ("-t ext4 -O inline_data", "inline_data"),
    ],
)
def test_features_are_refused_by_name(tmp_path: Path, options: str, name: str) -> None:
    make(tmp_path / "image", options, 64 * MIB)
    before = (tmp_path / "image").read_bytes()
    with pytest.raises(Unsupported, match=name):
        resize(tmp_path / "image", 128 * MIB)
    assert (tmp_path / "image").read_bytes() == before


def test_stable_inodes_keep_their_numbers(tmp_path: Path) -> None:
    image = tmp_path / "image"
    make(image, "-t ext4 -O stable_inodes -b 1024", 64 * MIB)
    resize(image, 128 * MIB)
    with pytest.raises(Unsupported, match="stable_inodes"):
        resize(image, 64 * MIB)
    fsck(image)


@pytest.mark.parametrize(("size", "code"), [("1K", 5), ("17T", 5), ("nonsense", 2)])
def test_impossible_sizes(image: Path, size: str, code: int) -> None:
    before = image.stat().st_size
    assert cli.run(["resize", str(image), size]) == code
    assert image.stat().st_size == before
    fsck(image)


def test_usage_and_use(image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["resize", "--minimum", str(image), "1G"]) == 2
    with Volume.open(image):
        assert cli.run(["resize", str(image), "1G"]) == 3
    assert "in use" in capsys.readouterr().err
    assert cli.run(["resize", str(image.with_name("nothing")), "1G"]) == 6
    assert cli.run(["resize", "-q", str(image), "1G"]) == 0
    assert not capsys.readouterr().out
    assert sorted(p.name for p in image.parent.iterdir()) == ["image"]


def test_recovered_first(image: Path) -> None:
    volume = Volume.open(image, mode="rw")
    volume.create("/synced")
    volume.sync()
    volume.abandon()
    resize(image, 128 * MIB)
    with Volume.open(image) as seen:
        assert seen.lookup("/synced") is not None
    fsck(image)


@pytest.mark.parametrize("size", [30, 100])
def test_what_no_transaction_holds_is_done_on_a_copy(image: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Journal, "most_changes", property(lambda self: 2))
    result = resize(image, size * MIB)
    assert (result.method, result.size) == ("copy", size * MIB)
    assert content(image) == b"content" * 1000
    assert sorted(p.name for p in image.parent.iterdir()) == ["image"]
    fsck(image)


class _Failing:
    """Blocks of a host whose disk is full after some writes."""

    def __init__(self, below: Blocks, left: list[int]) -> None:
        self.below, self.left = below, left

    @property
    def block_size(self) -> int:
        return self.below.block_size

    def read(self, block: int, count: int = 1) -> bytes:
        return self.below.read(block, count)

    def write(self, block: int, data: bytes | memoryview) -> None:
        self.left[0] -= 1
        if self.left[0] < 0:
            raise HostError("no space left on device")
        self.below.write(block, data)

    def flush(self) -> None:
        self.below.flush()


@pytest.mark.parametrize("size", [30, 200])
@pytest.mark.parametrize("options", ["", "-t ext4 -b 4096"])
def test_the_host_fails(tmp_path: Path, options: str, size: int) -> None:
    """The error is told; what is left is the old volume or the new one."""
    image = tmp_path / "image"
    make(image, options, 64 * MIB)
    with Volume.open(image, mode="rw") as volume:
        volume.pwrite(volume.create("/first"), 0, bytes(20 * MIB))
        volume.pwrite(volume.create("/file"), 0, b"content" * 1000)
        volume.unlink("/first")
    before = image.read_bytes()
    done = False
    for writes in range(0, 200, 5):
        image.write_bytes(before)
        left = [writes]

        def device(blocks: Blocks, left: list[int] = left) -> Blocks:
            return _Failing(blocks, left)

        try:
            resize(image, size * MIB, device=device)
            done = True
        except HostError:
            recover(image)
        assert content(image) == b"content" * 1000
        assert shape(image).size in (64 * MIB, size * MIB)
        fsck(image)
        if done:
            break
    assert done


def test_a_volume_without_journal_keeps_mode_and_name(tmp_path: Path) -> None:
    image = tmp_path / "image"
    make(image, "-t ext2 -b 1024", 32 * MIB)
    image.chmod(0o640)
    assert resize(image, 64 * MIB).method == "copy"
    assert image.stat().st_mode & 0o777 == 0o640
    os.link(image, tmp_path / "second")
    with pytest.raises(HostError, match="hard links"):
        resize(image, 32 * MIB)
    fsck(image)
    run(tool("dumpe2fs"), "-h", image)
