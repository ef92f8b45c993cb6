"""The kernel, e2fsck, debugfs and mke2fs as judges of images, and a tree that has one of everything."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ext4lite import manifest
from ext4lite.volume import Volume

SBIN = "/usr/sbin:/sbin:/usr/bin:/bin"


def tool(name: str) -> str:
    """Return the path of a program of e2fsprogs or the like; skip the test where it is not installed."""
    found = shutil.which(name, path=f"{SBIN}:{os.environ.get('PATH', '')}")
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def run(*words: str | Path, stdin: str = "") -> str:
    """Run a program for at most a minute and return its output; AssertionError with all it said when it fails."""
    done = subprocess.run([str(w) for w in words], input=stdin, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{words}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def fsck(image: Path) -> None:
    """Assert that ``e2fsck -fn`` finds nothing at all."""
    run(tool("e2fsck"), "-fn", image)


def debugfs(image: Path, request: str) -> str:
    """Return what debugfs answers to a request."""
    return run(tool("debugfs"), "-R", request, image)


@contextmanager
def mounted(image: Path, where: Path, options: str = "rw") -> Iterator[Path]:
    """Mount an image through a loop device while the block runs; needs root."""
    if os.geteuid() != 0:
        pytest.skip("needs root for loop mounts")
    where.mkdir(exist_ok=True)
    run("mount", "-o", f"loop,{options}", image, where)
    try:
        yield where
    finally:
        run("umount", where)


def ours(image: Path) -> list[dict[str, Any]]:
    """Return the manifest that ext4lite reads."""
    with Volume.open(image) as volume:
        return list(manifest.entries(volume))


def assert_same(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> None:
    """Compare two manifests; the message names the first entries that differ."""
    if left == right:
        return
    a, b = ({e["path"]: e for e in entries} for entries in (left, right))
    wrong = [(a.get(p), b.get(p)) for p in sorted(a.keys() | b.keys()) if a.get(p) != b.get(p)]
    raise AssertionError(f"{len(wrong)} entries differ, first: {wrong[:3]}" if wrong else "the order differs")


def fill(root: Path, *, xattrs: bool = True, many: int = 5000) -> None:
    """Make a tree with one of everything, as root: what a layer can hold, and the cases of EXT4-FACTS.md."""
    r = random.Random(7)
    (root / "plain").mkdir()
    for i, size in enumerate((0, 1, 59, 60, 61, 1023, 1024, 1025, 4095, 4096, 4097, 70_000, 300_000)):
        (root / "plain" / f"f{i}").write_bytes(r.randbytes(size))
    os.link(root / "plain" / "f3", root / "hardlink")
    (root / "plain" / "f5").chmod(0o4755)
    os.chown(root / "plain" / "f6", 70_000, 80_000)
    (root / "sticky").mkdir()
    (root / "sticky").chmod(0o3777)
    _sparse(root, r)
    _fragmented(root, r)
    for length in (1, 58, 59, 60, 61, 200, 1000):
        (root / f"link{length}").symlink_to("t" * length)
    os.link(root / "link61", root / "link-to-link", follow_symlinks=False)
    os.mknod(root / "null", 0o20666, os.makedev(1, 3))
    os.mknod(root / "whiteout", 0o20000, os.makedev(0, 0))
    os.mknod(root / "wide", 0o60600, os.makedev(300, 70_000))
    os.mkfifo(root / "fifo")
    with socket.socket(socket.AF_UNIX) as s:
        here = Path.cwd()
        os.chdir(root)  # a socket's path is short
        try:
            s.bind("socket")
        finally:
            os.chdir(here)
    (root / ("n" * 255)).write_bytes(b"long")
    (root / "größe-ü").write_bytes(b"utf-8")
    Path(os.fsdecode(bytes(root) + b"/\xff\xfe")).write_bytes(b"not utf-8")
    (root / "many").mkdir()
    for i in range(many):
        (root / "many" / f"entry-{i}-{'é' * (i % 20)}").touch()
    deep = root / "deep"
    for i in range(40):
        deep = deep / f"level{i}"
    deep.mkdir(parents=True)
    os.utime(root / "plain" / "f1", ns=(-5_500_000_000, -5_500_000_000))
    os.utime(root / "plain" / "f2", ns=(1_700_000_000_123_456_789, 1_700_000_000_123_456_789))
    if xattrs:
        os.utime(root / "plain" / "f4", ns=(4_000_000_000_000_000_001, 4_000_000_000_000_000_001))
        _attributes(root, r)


def _sparse(root: Path, r: random.Random) -> None:
    with (root / "sparse").open("wb") as f:
        f.write(b"begin")
        f.seek(3_000_000)
        f.write(r.randbytes(5000))
        f.truncate(9_000_000)
    (root / "only-a-hole").touch()
    os.truncate(root / "only-a-hole", 1_000_000)


def _fragmented(root: Path, r: random.Random) -> None:
    """A file of many extents: every other block is a hole, written backwards."""
    with (root / "fragmented").open("wb") as f:
        for i in reversed(range(0, 900, 2)):
            f.seek(i * 4096)
            f.write(r.randbytes(100))


def _attributes(root: Path, r: random.Random) -> None:
    os.setxattr(root / "plain" / "f0", "user.small", b"1")
    os.setxattr(root / "plain" / "f0", "trusted.overlay.opaque", b"y")
    os.setxattr(root / "plain" / "f1", "user.empty", b"")
    os.setxattr(root / "plain" / "f2", "user.large", r.randbytes(700))
    os.setxattr(root / "plain" / "f2", "user.small", b"beside")
    for i in range(20):
        os.setxattr(root / "plain" / "f3", f"user.number{i}", r.randbytes(i))
    os.setxattr(root / "sticky", "trusted.overlay.opaque", b"y")
    capability = bytes.fromhex("0100000200200000000000000000000000000000")
    os.setxattr(root / "plain" / "f5", "security.capability", capability)
    acl = bytes.fromhex("0200000001000700ffffffff02000500e803000004000500ffffffff10000700ffffffff20000500ffffffff")
    os.setxattr(root / "plain" / "f7", "system.posix_acl_access", acl)
    os.setxattr(root / "sticky", "system.posix_acl_default", acl)
