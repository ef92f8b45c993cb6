"""``ext4lite journal``: what it shows, makes, resizes and removes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ext4lite import cli, journal
from ext4lite.errors import Unsupported, VolumeFull
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import SuperBlock
from ext4lite.mkfs import mkfs
from ext4lite.volume import Volume
from support.ext4_judges import fsck
from support.volume_model import make

MIB = 1 << 20


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "image"
    mkfs(path, size=64 * MIB)
    return path


def test_shown(image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["journal", str(image)]) == 0
    text = capsys.readouterr().out
    assert "4.0 MiB in inode 8, empty" in text
    assert "64bit csum_v3" in text
    assert cli.run(["journal", "--json", str(image)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["size"], told["blocks"], told["inode"], told["empty"]) == (4 * MIB, 1024, 8, True)


def test_made_resized_removed(image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = (
        (["--resize", "8M"], 8 * MIB),
        (["--resize", "default"], 4 * MIB),
        (["--remove"], 0),
        (["--create", "6M"], 6 * MIB),
        (["--remove"], 0),
        (["--create", "default"], 4 * MIB),
    )
    for n, (words, size) in enumerate(changes):
        assert cli.run(["journal", str(image), *words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["size"] == size
        fsck(image)
        with Volume.open(image, mode="rw") as volume:
            assert (volume.journal is None) == (size == 0)
            volume.mkdir(f"/{n}")
        fsck(image)


def test_copies_of_the_superblock_say_the_same(tmp_path: Path) -> None:
    image = tmp_path / "image"
    make(image, "-t ext4 -b 1024", 40 * MIB)

    def copy() -> SuperBlock:
        return SuperBlock.unpack(image.read_bytes()[8193 * 1024 :][:1024])

    journal.remove(image)
    assert not copy().s_feature_compat & c.COMPAT_HAS_JOURNAL
    journal.create(image, 2 * MIB)
    assert copy().s_feature_compat & c.COMPAT_HAS_JOURNAL
    assert not copy().s_feature_incompat & c.INCOMPAT_RECOVER


def test_refusals(image: Path, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="already"):
        journal.create(image)
    with pytest.raises(Unsupported, match="cannot be made"):
        journal.resize(image, 2 * MIB)  # 512 blocks
    with pytest.raises(Unsupported, match="cannot be made"):
        journal.resize(image, 40 * MIB)  # more than half of the volume
    assert cli.run(["journal", str(image), "--remove", "--create", "8M"]) == 2
    assert cli.run(["journal", str(image), "--create", "lots"]) == 2
    with Volume.open(image):
        assert cli.run(["journal", str(image), "--remove"]) == 3
    journal.remove(image)
    for call in (journal.remove, journal.resize):
        with pytest.raises(Unsupported, match="no journal"):
            call(image)
    small = tmp_path / "small"
    make(small, "-t ext2 -b 1024", 1 * MIB)
    with pytest.raises(Unsupported, match="too small for a journal"):
        journal.create(small)
    fsck(image)


def test_a_full_volume_gets_none(image: Path) -> None:
    journal.remove(image)
    with Volume.open(image, mode="rw") as volume, pytest.raises(VolumeFull):
        for i in range(100):
            volume.pwrite(volume.create(f"/{i}"), 0, bytes(MIB))
    before = image.read_bytes()
    with pytest.raises(VolumeFull):
        journal.create(image)
    assert image.read_bytes() == before
    fsck(image)


def test_recovered_first(image: Path) -> None:
    volume = Volume.open(image, mode="rw")
    volume.create("/synced")
    volume.sync()
    volume.abandon()
    assert not journal.show(image).empty
    journal.remove(image)
    with Volume.open(image) as seen:
        assert seen.lookup("/synced") is not None
    fsck(image)


def test_fast_commit_blocks_stay(tmp_path: Path) -> None:
    image = tmp_path / "image"
    make(image, "-t ext4 -b 4096 -O fast_commit", 200 * MIB)
    before = journal.show(image)
    assert before.fast_commit_blocks
    after = journal.resize(image, 32 * MIB)
    assert (after.size, after.fast_commit_blocks) == (32 * MIB, before.fast_commit_blocks)
    assert after.sequence > before.sequence
    fsck(image)
