"""``mkfs -d``: the kernel and mke2fs say what a volume made from a directory must hold."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from ext4lite.cli import run as ext4lite
from ext4lite.errors import HostError, NotADirectory, VolumeFull
from ext4lite.mkfs import mkfs
from ext4lite.volume import Volume
from support.ext4_judges import assert_same, debugfs, fill, fsck, mounted, ours, run, tool
from support.kernel_manifest import manifest

MIB = 1 << 20
pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if os.geteuid() != 0:
        pytest.skip("needs root for devices and owners")
    root = tmp_path_factory.mktemp("tree")
    fill(root, many=600)
    return root


def test_the_kernel_sees_the_same_tree_in_ours_and_in_mke2fss(tree: Path, tmp_path: Path) -> None:
    image, other = tmp_path / "ours", tmp_path / "mke2fs"
    done = mkfs(image, size=64 * MIB, directory=tree).copied
    assert done is not None and not done.skipped
    fsck(image)
    run(tool("mke2fs"), "-q", "-t", "ext4", "-d", tree, other, "64M")
    with mounted(image, tmp_path / "a", "ro") as point:
        seen = manifest(point)
    with mounted(other, tmp_path / "b", "ro") as point:
        theirs = manifest(point)
    assert_same(seen, manifest(tree))
    assert_same(ours(image), seen)
    assert_same([_by_mke2fs(e) for e in seen], [_by_mke2fs(e) for e in theirs])
    assert done.files + done.symlinks + done.others + done.directories == len(seen)


def _by_mke2fs(entry: dict[str, Any]) -> dict[str, Any]:
    """Return what mke2fs 1.47 keeps of an entry: whole seconds of 32 bits, no hard links of symlinks."""
    links = 1 if entry["type"] == "symlink" else entry["nlink"]
    return entry | {"mtime_ns": entry["mtime_ns"] // 1_000_000_000 % (1 << 32), "nlink": links}


def test_the_directory_becomes_the_root(tmp_path: Path) -> None:
    top = tmp_path / "top"
    (top / "lost+found").mkdir(parents=True)
    (top / "lost+found" / "#12").write_bytes(b"found")
    top.chmod(0o1775)
    os.chown(top, 7, 8)
    os.setxattr(top, "user.root", b"yes")
    os.utime(top, ns=(5_000_000_001, 5_000_000_001))
    mkfs(tmp_path / "image", size=8 * MIB, directory=top)
    fsck(tmp_path / "image")
    with Volume.open(tmp_path / "image") as v:
        root = v.stat(v.root)
        assert (root.mode, root.uid, root.gid, root.mtime_ns) == (0o1775, 7, 8, 5_000_000_001)
        assert v.xattrs(v.root) == {b"user.root": b"yes"}
        found = v.lookup("/lost+found/#12")
        assert found is not None and v.read(found, 0, 10) == b"found"
    assert "lost+found" in debugfs(tmp_path / "image", "ls /")


def test_equal_trees_give_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever order the names were made in, and whenever."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    digests = []
    for turn, names in enumerate((["a", "b", "c"], ["c", "a", "b"])):
        top = tmp_path / f"top{turn}"
        top.mkdir()
        for name in names:
            (top / name).write_bytes(name.encode())
            os.utime(top / name, ns=(turn, 7))  # last access differs
        os.utime(top, ns=(0, 0))
        image = tmp_path / f"image{turn}"
        words = ["mkfs", "-q", "--size", "8M", "--uuid", "12345678-1234-5678-1234-567812345678", "-d", str(top)]
        assert ext4lite([*words, str(image)]) == 0
        digests.append(hashlib.sha256(image.read_bytes()).hexdigest())
    assert digests[0] == digests[1]


def test_holes_cost_nothing(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    with (top / "sparse").open("wb") as f:
        f.truncate(5 << 40)
        for at in (3, (1 << 40) + 70_000, (5 << 40) - 9):
            f.seek(at)
            f.write(b"mark")
    mkfs(tmp_path / "image", size=8 * MIB, directory=top)
    fsck(tmp_path / "image")
    with Volume.open(tmp_path / "image") as v:
        ino = v.lookup("/sparse")
        assert ino is not None and v.stat(ino).size == 5 << 40
        for at in (3, (1 << 40) + 70_000, (5 << 40) - 9):
            assert v.read(ino, at - 3, 9).strip(b"\0") == b"mark"
        assert sum(run.count for run in v.extents(ino)) <= 3 * 16


def test_its_own_file_in_the_tree_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)  # then the image has a name while it is made
    (tmp_path / "file").write_bytes(b"x")
    mkfs(tmp_path / "image", size=8 * MIB, directory=tmp_path)
    fsck(tmp_path / "image")
    with Volume.open(tmp_path / "image") as v:
        assert sorted(name for name, _, _ in v.iterdir(v.root)) == [b"file", b"lost+found"]


def test_json_and_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    top = tmp_path / "top"
    top.mkdir()
    (top / "file").write_bytes(b"0123456789")
    here = Path.cwd()
    os.chdir(top)
    try:
        with socket.socket(socket.AF_UNIX) as s:
            s.bind("socket")
    finally:
        os.chdir(here)
    assert ext4lite(["mkfs", "--json", "--size", "8M", "-d", str(top), str(tmp_path / "image")]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["copied"] == {
        "files": 1, "directories": 0, "symlinks": 0, "others": 1, "bytes": 10, "skipped": [],
        "skipped_count": 0, "left_out": 0, "owners_lost": 0,
    }  # fmt: skip
    assert ext4lite(["mkfs", "--size", "8M", "-d", str(tmp_path / "no"), str(tmp_path / "new")]) == HostError.exit_code
    words = ["mkfs", "--size", "8M", "-d", str(top / "file"), str(tmp_path / "new")]
    assert ext4lite(words) == NotADirectory.exit_code
    (top / "large").write_bytes(os.urandom(9 * MIB))
    words[4] = str(top)
    assert ext4lite(words) == VolumeFull.exit_code
    assert not (tmp_path / "new").exists()
