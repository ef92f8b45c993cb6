"""Clones: the command line as in cp, the fallback, and that a clone appears whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ext4lite import hostfs
from ext4lite.cli import run
from ext4lite.cli.clone import rewrite_arguments
from ext4lite.clone import clone
from ext4lite.errors import CorruptImage, HostError, ReflinkUnavailable
from support.samples import build_sample


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("golden") / "golden.ext4"
    build_sample(path, many=100)
    return path


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["--reflink", "a", "b"], ["--reflink=always", "a", "b"]),
        (["a", "--reflink", "b"], ["a", "--reflink=always", "b"]),
        (["--reflink=never", "a", "b"], ["--reflink=never", "a", "b"]),
        (["--backing", "a", "b"], ["--backing=always", "a", "b"]),
        (["a", "b"], ["a", "b"]),
        (["--", "--reflink", "b"], ["--", "--reflink", "b"]),
    ],
)
def test_bare_reflink_means_always(given: list[str], meant: list[str]) -> None:
    assert rewrite_arguments(given) == meant


def _no_reflink(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(target: int, source: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(hostfs, "ficlone", refuse)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.EXDEV, errno.ENOTTY])
def test_without_reflinks(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    _no_reflink(monkeypatch, number)
    target = tmp_path / "always"
    assert run(["clone", "--reflink", str(golden), str(target)]) == 8
    assert not target.exists()
    with pytest.raises(ReflinkUnavailable):
        clone(golden, tmp_path / "c", reflink="always")
    assert list(tmp_path.iterdir()) == []
    capsys.readouterr()
    assert run(["clone", str(golden), str(tmp_path / "auto")]) == 0
    assert f"a delta over {golden}" in capsys.readouterr().err
    assert run(["clone", "--backing=never", str(golden), str(tmp_path / "copy")]) == 0
    assert run(["clone", "--reflink=never", str(golden), str(tmp_path / "never")]) == 0
    assert capsys.readouterr().err == ""
    for name in ("copy", "never"):
        assert (tmp_path / name).read_bytes() == golden.read_bytes()
        assert (tmp_path / name).stat().st_blocks <= golden.stat().st_blocks + 512


def test_a_full_disk_leaves_nothing(golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(target: int, source: int, size: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(hostfs, "copy_sparse", full)
    with pytest.raises(HostError, match="no space left"):
        clone(golden, tmp_path / "c", reflink="never")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_copy_leaves_nothing(golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(target: int, source: int, size: int) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(hostfs, "copy_sparse", interrupted)
    assert run(["clone", "--reflink=never", str(golden), str(tmp_path / "c")]) == 130
    assert list(tmp_path.iterdir()) == []


def test_existing_targets(golden: Path, tmp_path: Path) -> None:
    target = tmp_path / "c"
    target.write_bytes(b"old")
    with pytest.raises(HostError, match="exists"):
        clone(golden, target)
    assert target.read_bytes() == b"old"
    clone(golden, target, force=True, reflink="never")
    assert target.stat().st_size == golden.stat().st_size
    with pytest.raises(HostError, match="golden volume itself"):
        clone(golden, golden, force=True)


def test_a_golden_volume_must_be_one(tmp_path: Path) -> None:
    (tmp_path / "g").write_bytes(bytes(10_000))
    with pytest.raises(CorruptImage):
        clone(tmp_path / "g", tmp_path / "c")
    with pytest.raises(HostError, match="no such file"):
        clone(tmp_path / "none", tmp_path / "c")
    with pytest.raises(ValueError, match="reflink"):
        clone(tmp_path / "g", tmp_path / "c", reflink="sometimes")  # type: ignore[arg-type]


def test_a_copy_without_copy_file_range(golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "copy_file_range")
    result = clone(golden, tmp_path / "c", reflink="never")
    assert result.method == "copy"
    assert (tmp_path / "c").read_bytes() == golden.read_bytes()
    assert 0 < result.bytes < golden.stat().st_size
