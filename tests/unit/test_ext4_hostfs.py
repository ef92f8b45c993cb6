"""Files that appear whole or not at all, holes, and sparse copies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ext4lite import hostfs
from ext4lite.errors import HostError

MIB = 1 << 20


@pytest.fixture(params=["nameless", "named"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With and without O_TMPFILE."""
    if request.param == "named":
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    return str(request.param)


def test_a_file_has_its_name_only_when_published(tmp_path: Path, way: str) -> None:
    new = hostfs.NewFile(tmp_path / "f")
    os.write(new.fd, b"content")
    assert [p.name for p in tmp_path.iterdir() if p.name == "f"] == []
    assert (way == "named") == bool(list(tmp_path.iterdir()))
    new.publish(durable=True)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("f", b"content")]
    new.discard()
    assert (tmp_path / "f").exists()
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.usefixtures("way")
def test_publishing_replaces(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    new = hostfs.NewFile(tmp_path / "f")
    os.write(new.fd, b"new")
    assert (tmp_path / "f").read_bytes() == b"old"
    new.publish()
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("f", b"new")]


@pytest.mark.usefixtures("way")
def test_publishing_refuses_what_came_meanwhile(tmp_path: Path) -> None:
    new = hostfs.NewFile(tmp_path / "f")
    (tmp_path / "f").write_bytes(b"somebody else's")
    with pytest.raises(FileExistsError):
        new.publish(replace=False)
    new.discard()
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("f", b"somebody else's")]
    second = hostfs.NewFile(tmp_path / "g")
    second.publish(replace=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f", "g"]


@pytest.mark.usefixtures("way")
def test_a_discarded_file_leaves_nothing(tmp_path: Path) -> None:
    new = hostfs.NewFile(tmp_path / "f")
    os.write(new.fd, b"content")
    new.discard()
    new.discard()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("way")
def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="none/f: no such file"):
        hostfs.NewFile(tmp_path / "none" / "f")


@pytest.fixture
def sparse(tmp_path: Path) -> Iterator[int]:
    """A file of 3 MiB with data in [1 MiB, 1 MiB + 8 KiB) and at its very end."""
    fd = os.open(tmp_path / "sparse", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 3 * MIB)
    os.pwrite(fd, b"a" * 8192, MIB)
    os.pwrite(fd, b"end", 3 * MIB - 3)
    yield fd
    os.close(fd)


def test_data_runs(sparse: int) -> None:
    assert list(hostfs.data_runs(sparse, 3 * MIB)) == [(MIB, 8192), (3 * MIB - 4096, 4096)]
    assert list(hostfs.data_runs(sparse, MIB)) == []


def test_copy_sparse(sparse: int, tmp_path: Path) -> None:
    copy = os.open(tmp_path / "copy", os.O_RDWR | os.O_CREAT)
    assert hostfs.copy_sparse(copy, sparse, 3 * MIB) == 8192 + 4096
    assert list(hostfs.data_runs(copy, 3 * MIB)) == list(hostfs.data_runs(sparse, 3 * MIB))
    assert os.pread(copy, 4 * MIB, 0) == os.pread(sparse, 4 * MIB, 0)
    os.close(copy)


def test_punch_makes_a_hole_and_keeps_the_size(sparse: int) -> None:
    assert hostfs.punch(sparse, MIB, 4096)
    assert next(hostfs.data_runs(sparse, 3 * MIB)) == (MIB + 4096, 4096)
    assert os.fstat(sparse).st_size == 3 * MIB


def test_punch_says_when_it_cannot() -> None:
    reader, writer = os.pipe()
    assert not hostfs.punch(writer, 0, 4096)
    os.close(reader)
    os.close(writer)


def test_fiemap_lists_the_data(sparse: int) -> None:
    extents = hostfs.fiemap(sparse)
    assert [(e.logical, e.length) for e in extents] == [(MIB, 8192), (3 * MIB - 4096, 4096)]
    assert not any(e.shared for e in extents)


@pytest.mark.usefixtures("way")
def test_the_longest_names_can_be_replaced(tmp_path: Path) -> None:
    for name in ("n" * 255, "ö" * 127, "𝄞" * 63):
        path = tmp_path / name
        path.write_text("old")
        new = hostfs.NewFile(path)
        os.write(new.fd, b"new")
        new.publish()
        assert path.read_text() == "new"
