"""cp-in and cp-out with -a keep what a file system can hold; as an ordinary user what they cannot is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ext4lite.copyout import CopyOut
from ext4lite.mkfs import mkfs
from ext4lite.transfer import CopyIn
from ext4lite.volume import Volume
from support.ext4_judges import assert_same, fill, fsck, mounted, ours
from support.kernel_manifest import manifest as kernel_manifest

pytestmark = pytest.mark.root

MIB = 1 << 20
USER = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


def cli(*words: str | Path, user: bool = False) -> subprocess.CompletedProcess[str]:
    code = "from ext4lite.cli import main; main()"
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(
        [*USER, *command] if user else command, capture_output=True, text=True, timeout=100, check=False
    )


def source(tmp_path: Path) -> Path:
    """A tree with one of everything on an ext4 mount (tmpfs and overlays have no times before 1970, or no ACLs)."""
    image = tmp_path / "from.img"
    mkfs(image, size=64 * MIB)
    return image


def test_everything_goes_in_and_out(tmp_path: Path) -> None:
    """Kernel's tree → cp-in -a → cp-out -a → the same tree, by the kernel's manifest; holes stay holes."""
    start, image, end = source(tmp_path), tmp_path / "image", tmp_path / "to.img"
    mkfs(image, size=64 * MIB)
    mkfs(end, size=64 * MIB)
    with mounted(start, tmp_path / "mnt") as top:
        fill(top, many=50)
        for directory in (top, top / "sticky"):
            os.utime(directory, ns=(1_000_000_001, 2_000_000_002))
        shown = kernel_manifest(top)
        with Volume.open(image, mode="rw") as v:
            done = CopyIn(v, archive=True, recursive=True).copy(
                [str(path) for path in top.iterdir() if path.name != "lost+found"], "/"
            )
            assert not done.skipped
            hole = v.stat(v.resolve("/only-a-hole"))
            assert (hole.size, hole.blocks512) == (1_000_000, 0)
            assert v.stat(v.resolve("/sparse")).blocks512 < 60
    fsck(image)
    assert_same(ours(image), shown)
    with mounted(image, tmp_path / "mnt") as top:
        assert_same(kernel_manifest(top), shown)
    with mounted(end, tmp_path / "mnt") as top, Volume.open(image) as v:
        names = [os.fsdecode(name) for name, _, _ in v.iterdir(v.root) if name != b"lost+found"]
        done = CopyOut(v, archive=True, recursive=True).copy([f"/{name}" for name in names], str(top))
        assert not done.skipped
        assert_same(kernel_manifest(top), shown)
        assert (top / "only-a-hole").stat().st_blocks == 0
    fsck(end)


def test_what_a_directory_hands_down_is_not_the_sources(tmp_path: Path) -> None:
    """With -a a default ACL and a set-group-id directory in the volume, or on the host, change nothing."""
    image, tree = tmp_path / "image", tmp_path / "mnt"
    start = source(tmp_path)
    mkfs(image, size=16 * MIB)
    acl = bytes.fromhex("0200000001000700ffffffff02000500e803000004000500ffffffff10000700ffffffff20000500ffffffff")
    with mounted(start, tree) as top:
        (top / "from" / "below").mkdir(parents=True)
        (top / "from" / "file").write_bytes(b"x")
        (top / "into").mkdir()
        os.setxattr(top / "into", "system.posix_acl_default", acl)
        with Volume.open(image, mode="rw") as v:
            v.set_xattr(v.mkdir("/d", mode=0o2775, gid=77), b"system.posix_acl_default", acl)
            CopyIn(v, archive=True, recursive=True).copy([str(top / "from")], "/d")
            for path in ("/d/from", "/d/from/below", "/d/from/file"):
                ino = v.resolve(path)
                assert (v.xattrs(ino), v.stat(ino).gid) == ({}, 0), path
            CopyIn(v, recursive=True).copy([str(top / "from")], "/d/plain")
            assert b"system.posix_acl_default" in v.xattrs(v.resolve("/d/plain/below"))
            CopyOut(v, archive=True, recursive=True).copy(["/d/from"], str(top / "into"))
        assert os.listxattr(top / "into" / "from" / "below") == []
    fsck(image)


@pytest.fixture
def users(tmp_path: Path) -> Path:
    """A directory of an ordinary user's, reachable for it."""
    for above in (tmp_path, *tmp_path.parents):
        if above.stat().st_uid == 0 and above.stat().st_mode & 0o005 != 0o005:
            above.chmod(above.stat().st_mode | 0o005)
    made = tmp_path / "user"
    made.mkdir()
    os.chown(made, 65534, 65534)
    return made


def test_an_ordinary_user_is_told_what_is_not_kept(tmp_path: Path, users: Path) -> None:
    """Into the volume everything readable goes; out of it no owners, devices, trusted attributes; set-user-id goes."""
    image = users / "image"
    mkfs(image, size=16 * MIB)
    os.chown(image, 65534, 65534)
    with Volume.open(image, mode="rw") as v:
        v.mkdir("/d")
        v.pwrite(v.create("/d/suid", mode=0o4755), 0, b"#!")
        v.mknod("/d/null", "char", 1, 3)
        v.mknod("/d/fifo", "fifo")
        v.set_xattr(v.create("/d/attr"), b"trusted.x", b"1")
        v.set_xattr(v.resolve("/d/attr"), b"user.x", b"2")
    done = cli("cp-out", "-a", "--json", image, "/d", users / "out", user=True)
    assert done.returncode == 6, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    assert (answer["left_out"], answer["files"], answer["others"]) == (1, 2, 1)
    reasons = {os.path.basename(s["path"]): s["why"] for s in answer["skipped"]}  # noqa: PTH119
    assert "operation not permitted" in reasons["null"]
    assert "trusted.x" in reasons["attr"]
    assert answer["owners_lost"] >= 3
    assert "owners of" in done.stderr
    assert (users / "out" / "suid").stat().st_mode & 0o7777 == 0o755
    assert os.getxattr(users / "out" / "attr", "user.x") == b"2"

    tree = users / "tree"
    tree.mkdir()
    (tree / "secret").write_bytes(b"root's")
    (tree / "secret").chmod(0o600)
    (tree / "open").write_bytes(b"everyone's")
    (tree / "closed").mkdir(mode=0o700)
    done = cli("cp-in", "-a", image, tree, "/", user=True)
    assert done.returncode == 6, done.stderr
    assert "secret: left out: permission denied" in done.stderr
    assert "closed: left out: permission denied" in done.stderr
    with Volume.open(image) as v:
        assert v.read(v.lookup("/tree/open") or 0, 0, 99) == b"everyone's"
        assert v.lookup("/tree/secret") is None
    fsck(image)
    done = cli("cp-in", image, tree / "secret", "/x", user=True)
    assert done.returncode == 6
    assert "permission denied" in done.stderr


def test_attributes_without_room_are_told(tmp_path: Path) -> None:
    start, image = source(tmp_path), tmp_path / "image"
    mkfs(image, size=16 * MIB)
    with mounted(start, tmp_path / "mnt") as top:
        (top / "f").write_bytes(b"content")
        os.setxattr(top / "f", "user.a", b"a" * 3900)
        with Volume.open(image, mode="rw") as v:
            ino = v.create("/f")
            v.set_xattr(ino, b"trusted.other", b"o" * 3000)  # stays, as cp does with a file that is there
            done = CopyIn(v, archive=True).copy([str(top / "f")], "/f")
            assert [path for path, _ in done.skipped] == [str(top / "f")]
            assert v.read(ino, 0, 99) == b"content"
    fsck(image)


def test_a_sparse_file_of_20_gib_goes_in_fast(tmp_path: Path) -> None:
    image, big = tmp_path / "image", tmp_path / "big"
    mkfs(image, size=16 * MIB)
    with big.open("wb") as f:
        for at in (0, 1 << 30, (20 << 30) - 5):
            f.seek(at)
            f.write(b"here!")
    with Volume.open(image, mode="rw") as v:
        CopyIn(v).copy([str(big)], "/")
        ino = v.resolve("/big")
        assert v.stat(ino).size == 20 << 30
        assert v.stat(ino).blocks512 < 200
        assert v.read(ino, 1 << 30, 5) == b"here!"
    fsck(image)


def test_an_ordinary_user_is_told_why_there_is_no_new_file(tmp_path: Path, users: Path) -> None:
    """A directory that cannot be written to, an owner that cannot be kept: said as that, before anything is done."""
    image = users / "image"
    mkfs(image, size=16 * MIB, journal_size=0)
    before = image.read_bytes()
    os.chown(image, 65534, 0)
    for words in (("compact", image), ("resize", "-M", image)):
        done = cli(*words, user=True)
        assert done.returncode == 6
        assert "a new file in its place cannot have its owner, 65534:0" in done.stderr
    os.chown(image, 65534, 65534)
    os.chown(users, 0, 0)
    commands: list[list[str | Path]] = [
        ["compact", image],
        ["resize", "-M", image],
        ["mkfs", "--size", "8M", users / "new"],
    ]
    for command in commands:
        done = cli(*command, user=True)
        assert (done.returncode, done.stderr) == (6, f"ext4lite: {users}: no file may be made in this directory\n")
    assert image.read_bytes() == before
    assert os.listdir(users) == ["image"]  # noqa: PTH208
