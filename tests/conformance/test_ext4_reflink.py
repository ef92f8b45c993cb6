"""Clones on host file systems that share blocks: XFS and Btrfs in loop files. Needs root."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ext4lite import hostfs
from ext4lite.cli import run as ext4lite
from ext4lite.clone import clone
from ext4lite.errors import ReflinkUnavailable
from support.ext4_judges import fsck, mounted, ours, run, tool
from support.samples import build_sample

pytestmark = pytest.mark.root

MIB = 1 << 20


@pytest.fixture(params=["xfs", "btrfs"])
def sharing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A mounted file system with reflinks."""
    image = tmp_path / "host"
    image.touch()
    os.truncate(image, 400 * MIB)
    run(tool(f"mkfs.{request.param}"), "-f", "-q", image)
    with mounted(image, tmp_path / "host-mnt") as root:
        yield root


def used(path: Path) -> int:
    """Bytes used in the file system of a path."""
    os.sync()
    s = os.statvfs(path)
    return (s.f_blocks - s.f_bfree) * s.f_frsize


def shared_bytes(path: Path) -> tuple[int, int]:
    """Return (bytes shared with another file, bytes mapped at all) of a file."""
    fd = os.open(path, os.O_RDONLY)
    try:
        extents = hostfs.fiemap(fd)
    finally:
        os.close(fd)
    return sum(e.length for e in extents if e.shared), sum(e.length for e in extents)


def test_clones_share_all_blocks_until_they_change(sharing: Path, tmp_path: Path) -> None:
    golden, episode = sharing / "golden.ext4", sharing / "episode.ext4"
    build_sample(golden)
    before = used(sharing)
    result = clone(golden, episode, reflink="always")
    assert result.method == "reflink"
    assert used(sharing) - before < 2 * MIB
    shared, mapped = shared_bytes(episode)
    assert shared == mapped > 10 * MIB
    assert episode.read_bytes() == golden.read_bytes()

    with mounted(episode, tmp_path / "mnt") as root:
        (root / "new").write_bytes(os.urandom(4 * MIB))
    fsck(episode)
    grown = used(sharing) - before
    assert 4 * MIB <= grown < 12 * MIB, "only what the episode changed takes space"
    shared, mapped = shared_bytes(episode)
    assert 0 < mapped - shared < 12 * MIB
    assert "/new" not in {e["path"] for e in ours(golden)}


def test_bare_reflink_on_the_command_line(sharing: Path, capsys: pytest.CaptureFixture[str]) -> None:
    golden = sharing / "golden.ext4"
    build_sample(golden, many=10)
    assert ext4lite(["clone", "--reflink", str(golden), str(sharing / "one")]) == 0
    assert ext4lite(["clone", str(golden), "--reflink=auto", str(sharing / "two")]) == 0
    assert capsys.readouterr().err == ""
    for name in ("one", "two"):
        shared, mapped = shared_bytes(sharing / name)
        assert shared == mapped


def test_across_file_systems(sharing: Path, tmp_path: Path) -> None:
    golden = sharing / "golden.ext4"
    build_sample(golden, many=10)
    with pytest.raises(ReflinkUnavailable, match="different file systems"):
        clone(golden, tmp_path / "c", reflink="always")
    assert clone(golden, tmp_path / "delta").method == "backing"
    assert clone(golden, tmp_path / "c", backing="never").method == "copy"
    assert (tmp_path / "c").read_bytes() == golden.read_bytes()


def test_a_reflink_takes_milliseconds(sharing: Path) -> None:
    golden = sharing / "golden.ext4"
    build_sample(golden)
    os.sync()
    fastest = min(clone(golden, sharing / f"c{i}", reflink="always").seconds for i in range(5))
    assert fastest < 0.05
