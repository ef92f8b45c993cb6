"""Inode tables read without their names: what is in use is found, and nobody pays for what was never used."""

from __future__ import annotations

from pathlib import Path

import pytest

from ext4lite.errors import CorruptImage
from ext4lite.layout import constants as c
from ext4lite.mkfs import mkfs
from ext4lite.volume import Volume
from support.ext4_judges import fsck, run, tool
from support.samples import build_sample


def _by_names(volume: Volume) -> set[int]:
    return {ino for _, ino in volume.walk()} | {c.ROOT_INO, c.JOURNAL_INO}


@pytest.mark.parametrize("mode", ["r", "rw"])
def test_inodes_in_use_are_those_with_names(tmp_path: Path, mode: str) -> None:
    build_sample(tmp_path / "image")
    with Volume.open(tmp_path / "image", mode=mode) as volume:  # type: ignore[call-overload]
        assert {record.ino for record in volume.used_inodes()} == _by_names(volume)
        if mode == "rw":
            volume.create("/one-more")
            assert {record.ino for record in volume.used_inodes()} == _by_names(volume)
    fsck(tmp_path / "image")


@pytest.mark.parametrize("options", [("-b", "1024"), ("-I", "128"), ("-O", "^metadata_csum,^uninit_bg"), ("-N", "333")])
def test_tables_of_every_kind(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "tree").mkdir()
    for number in range(300):
        (tmp_path / "tree" / f"file{number}").touch()
    run(tool("mke2fs"), "-q", "-t", "ext4", *options, "-d", tmp_path / "tree", tmp_path / "image", "32M")
    with Volume.open(tmp_path / "image") as volume:
        assert {record.ino for record in volume.used_inodes()} == _by_names(volume)


def test_a_record_that_is_not_zero_is_verified_even_without_links(tmp_path: Path) -> None:
    mkfs(tmp_path / "image", size=8 << 20)
    with Volume.open(tmp_path / "image") as volume:
        group = volume.group(0)
        at = (group.bg_inode_table_lo * 4096) + 10 * 256  # lost+found
    with open(tmp_path / "image", "r+b") as file:
        file.seek(at + 26)
        file.write(bytes(2))
    with Volume.open(tmp_path / "image") as volume, pytest.raises(CorruptImage, match=r"inode 11: .*checksum"):
        list(volume.used_inodes())


def test_a_million_unused_inodes_are_passed_by(tmp_path: Path) -> None:
    """Without checksums of groups nothing says that they are unused: only their zeros do."""
    (tmp_path / "image").touch()
    words = ("-q", "-t", "ext4", "-O", "^metadata_csum,^uninit_bg,^has_journal", "-E", "lazy_itable_init=1")
    run(tool("mke2fs"), *words, "-N", "1000000", tmp_path / "image", "4G")
    with Volume.open(tmp_path / "image") as volume:
        assert {record.ino for record in volume.used_inodes()} == {c.ROOT_INO, c.FIRST_INO}
        assert len(volume._records) < c.FIRST_INO  # no others were decoded
