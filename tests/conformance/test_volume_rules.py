"""What the kernel allows, answers and hands down as root, step by step beside our writable volume."""

from __future__ import annotations

import errno
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from ext4lite.errors import Exists, NotPermitted
from ext4lite.volume import Volume
from support.ext4_judges import assert_same, fsck, mounted, ours
from support.kernel_manifest import manifest as kernel_manifest
from support.volume_model import Kernel, Op, Ours, make, outcome

pytestmark = pytest.mark.root

MIB = 1 << 20
IMMUTABLE, APPEND = 0x10, 0x20


@pytest.fixture(autouse=True)
def _no_umask() -> Iterator[None]:
    old = os.umask(0)
    yield
    os.umask(old)


def both(tmp_path: Path, steps: list[Op], options: str = "") -> Path:
    """Do steps on two equal images; every answer and the whole tree must be equal. Return our image."""
    a, b = tmp_path / "ours", tmp_path / "kernel"
    make(a, options, 16 * MIB)
    shutil.copy(a, b)
    with mounted(b, tmp_path / "mnt") as root:
        with Volume.open(a, mode="rw") as volume:
            one, two = Ours(volume), Kernel(root)
            for step in steps:
                got, wanted = outcome(one, step), outcome(two, step)
                names = errno.errorcode.get(got, "OK"), errno.errorcode.get(wanted, "OK")
                assert got == wanted, f"{step}: ours {names[0]}, the kernel {names[1]}"
        shown = [{k: v for k, v in e.items() if k != "mtime_ns"} for e in kernel_manifest(root)]
    fsck(a)
    assert_same([{k: v for k, v in e.items() if k != "mtime_ns"} for e in ours(a)], shown)
    with Volume.open(a) as one_read, Volume.open(b) as two_read:
        for path, ino in one_read.walk():
            other = two_read.lookup(path)
            assert other is not None
            assert one_read.stat(ino).flags == two_read.stat(other).flags, path
    return a


def acl(*entries: tuple[int, int, int]) -> bytes:
    """Return an ACL in the form of the system calls."""
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *e) for e in entries)


NOBODY = 0xFFFFFFFF
PLAIN = acl((1, 7, NOBODY), (4, 5, NOBODY), (32, 4, NOBODY))
NAMED = acl((1, 6, NOBODY), (2, 7, 1000), (4, 5, NOBODY), (8, 3, 70_000), (16, 5, NOBODY), (32, 1, NOBODY))
DEFAULT = acl((1, 7, NOBODY), (2, 6, 1000), (4, 7, NOBODY), (16, 7, NOBODY), (32, 5, NOBODY))
ACCESS_NAME, DEFAULT_NAME = b"system.posix_acl_access", b"system.posix_acl_default"


def test_acls(tmp_path: Path) -> None:
    """Handed down by directories, changed by chmod, changing the mode; bad ones are refused alike."""
    steps: list[Op] = [("mkdir", b"/d", 0o750), ("create", b"/f", 0o640), ("symlink", b"/s", b"f")]
    steps += [("setxattr", b"/d", DEFAULT_NAME, DEFAULT), ("setxattr", b"/f", ACCESS_NAME, NAMED)]
    steps += [("setxattr", b"/f", DEFAULT_NAME, DEFAULT), ("setxattr", b"/s", ACCESS_NAME, NAMED)]
    for mode in (0o644, 0o7777, 0o600, 0o070, 0):
        steps += [("mknod", b"/d/n%o" % mode, "fifo", 0, 0), ("bare", "create", b"/d/f%o" % mode, mode)]
        steps += [("bare", "mkdir", b"/d/d%o" % mode, mode & 0o1777), ("bare", "create", b"/d/d%o/below" % mode, mode)]
    steps += [("symlink", b"/d/s", b"x"), ("rename", b"/d/f644", b"/d/moved", "whiteout")]
    for mode in (0o400, 0o2775, 0o000, 0o777):
        steps += [("chmod", b"/f", mode), ("chmod", b"/d/d644", mode), ("chmod", b"/d/f600", mode)]
    steps += [("setxattr", b"/d/moved", ACCESS_NAME, PLAIN), ("setxattr", b"/d/d600", DEFAULT_NAME, PLAIN)]
    steps += [("bare", "create", b"/d/d600/x", 0o666), ("setxattr", b"/d/d0", ACCESS_NAME, PLAIN)]
    steps += [("setxattr", b"/d/d600", DEFAULT_NAME, acl()), ("setxattr", b"/d/d644", ACCESS_NAME, acl())]
    steps += [("bare", "mkdir", b"/d/d600/y", 0o777), ("removexattr", b"/f", ACCESS_NAME)]
    for bad in (
        acl((1, 7, NOBODY)),
        acl((4, 7, NOBODY), (1, 7, NOBODY), (32, 7, NOBODY)),
        acl((1, 7, NOBODY), (2, 7, 5), (4, 7, NOBODY), (32, 7, NOBODY)),
        acl((1, 7, NOBODY), (4, 7, NOBODY), (16, 7, NOBODY), (16, 7, NOBODY), (32, 7, NOBODY)),
        acl((1, 7, NOBODY), (4, 7, NOBODY), (32, 9, NOBODY)),
        acl((1, 7, NOBODY), (4, 7, NOBODY), (64, 7, NOBODY)),
        acl((1, 7, NOBODY), (2, 7, NOBODY), (4, 7, NOBODY), (16, 7, NOBODY), (32, 7, NOBODY)),
    ):
        steps += [("setxattr", b"/d", ACCESS_NAME, bad), ("setxattr", b"/d", DEFAULT_NAME, bad)]
    both(tmp_path, steps)


def test_flags(tmp_path: Path) -> None:
    """Which may be set on what, and what is handed down."""
    steps: list[Op] = [("mkdir", b"/d", 0o755), ("create", b"/f", 0o644)]
    for bit in (0, 1, 2, 3, 6, 7, 10, 15, 16, 17):
        steps += [("chflags", b"/d", 1 << bit), ("chflags", b"/f", 1 << bit)]
        steps += [("create", b"/d/f%d" % bit, 0o644), ("mkdir", b"/d/d%d" % bit, 0o755)]
        steps += [("symlink", b"/d/s%d" % bit, b"x"), ("mknod", b"/d/n%d" % bit, "char", 1, 3)]
    steps += [("chflags", b"/d", 0xC0), ("chflags", b"/f", 0)]
    both(tmp_path, steps)


def test_flags_that_bind(tmp_path: Path) -> None:
    """Immutable and append-only, on files and directories: every operation is refused or allowed as for root."""
    steps: list[Op] = []
    for n, flag in enumerate((IMMUTABLE, APPEND, IMMUTABLE | APPEND)):
        d, f = b"/d%d" % n, b"/f%d" % n
        steps += [("mkdir", d, 0o755), ("create", d + b"/old", 0o644), ("mkdir", d + b"/sub", 0o755)]
        steps += [("create", f, 0o644), ("write", f, 0, b"some content"), ("setxattr", f, b"user.a", b"1")]
        steps += [("create", b"/free%d" % n, 0o644), ("mkdir", b"/empty%d" % n, 0o755)]
        steps += [("chflags", d, flag), ("chflags", f, flag)]
        steps += [("append", f, b"more"), ("truncate", f, 3), ("punch", f, 0, 3), ("chmod", f, 0o600)]
        steps += [("chown", f, 1, 1), ("utimes", f, 0, 0), ("setxattr", f, b"user.b", b"2"), ("unlink", f)]
        steps += [("removexattr", f, b"user.a"), ("link", f, b"/l%d" % n), ("rename", f, b"/r%d" % n, "replace")]
        steps += [("rename", b"/free%d" % n, f, "replace"), ("rename", b"/free%d" % n, f, "exchange")]
        steps += [("rename", b"/free%d" % n, f, "noreplace"), ("setxattr", f, ACCESS_NAME, NAMED)]
        steps += [("create", d + b"/new", 0o644), ("mkdir", d + b"/newdir", 0o755), ("create", d + b"/old", 0o644)]
        steps += [("symlink", d + b"/s", b"x"), ("link", b"/free%d" % n, d + b"/l"), ("unlink", d + b"/old")]
        steps += [("unlink", d + b"/none"), ("unlink", d + b"/sub"), ("rmdir", d + b"/sub"), ("rmdir", d + b"/old")]
        steps += [("rename", d + b"/old", d + b"/older", "replace"), ("rename", d + b"/old", b"/old%d" % n, "replace")]
        steps += [
            ("rename", b"/free%d" % n, d + b"/free", "replace"),
            ("rename", b"/free%d" % n, d + b"/old", "exchange"),
        ]
        steps += [("rmdir", d), ("rename", d, b"/e%d" % n, "replace"), ("rename", b"/empty%d" % n, d, "replace")]
        steps += [("chmod", d, 0o700), ("write", d + b"/old", 0, b"x"), ("chmod", d + b"/old", 0o600)]
        steps += [("chflags", d, 0), ("chflags", f, 0x40), ("unlink", d + b"/old"), ("truncate", f, 1)]
    both(tmp_path, steps)


def test_flags_can_be_overridden(tmp_path: Path) -> None:
    image = tmp_path / "image"
    make(image, "", 8 * MIB)
    with Volume.open(image, mode="rw") as v:
        ino = v.create("/f")
        v.set_attributes(ino, flags=IMMUTABLE)
        with pytest.raises(NotPermitted, match="immutable"):
            v.unlink("/f")
        v.flags_bind = False
        v.unlink("/f")
    fsck(image)


def test_errors(tmp_path: Path) -> None:
    """The errno of whatever goes wrong with names, sizes and kinds."""
    long = b"/" + b"n" * 256
    steps: list[Op] = [("mkdir", b"/d", 0o755), ("create", b"/f", 0o644), ("mkdir", b"/d/e", 0o755)]
    steps += [("symlink", b"/loop", b"loop"), ("symlink", b"/to-d", b"d"), ("mknod", b"/fifo", "fifo", 0, 0)]
    steps += [("symlink", b"/dangling", b"nowhere"), ("symlink", b"/up", b"./d/../d")]
    for path in (long, b"/d", b"/f/x", b"/none/x", b"/loop/x", b"/to-d/x1", b"/d/.", b"/d/..", b"/up/x2"):
        steps += [("create", path, 0o644), ("mkdir", path, 0o755), ("symlink", path, b"t")]
        steps += [("link", b"/f", path), ("unlink", path), ("rmdir", path)]
        steps += [("rename", b"/f", path, how) for how in ("noreplace", "exchange", "replace")]
        steps += [("rename", path, b"/f", "replace"), ("rename", path, b"/new-name", "noreplace")]
        steps += [("create", b"/f", 0o644), ("mkdir", b"/d", 0o755)]
    steps += [("symlink", b"/l%d" % n, b"t" * n) for n in (59, 60, 4094, 4095)] + [("symlink", b"/le", b"")]
    steps += [("mkdir", b"/d/", 0o755), ("mkdir", b"/slash/", 0o755), ("rmdir", b"/slash/"), ("unlink", b"/f/")]
    steps += [("rename", b"/d", b"/d2/", "replace"), ("rename", b"/f", b"/f2/", "replace")]
    steps += [
        ("create", b"/f", 0o644),
        ("truncate", b"/f", (1 << 44) - 4096),
        ("truncate", b"/f", 1 << 44),
        ("truncate", b"/f", 0),
    ]
    steps += [("fallocate", b"/f", 1 << 44, 1, False), ("fallocate", b"/f", 0, 1 << 40, False)]
    steps += [("truncate", b"/f", 0)]  # the kernel keeps what it got by then, ours gives it back
    steps += [("punch", b"/f", 0, 0), ("zero", b"/f", 0, 0, False), ("collapse", b"/f", 0, 4096)]
    steps += [("write", b"/f", 0, b"x" * 10_000), ("collapse", b"/f", 1, 4096), ("insert", b"/f", 0, 5)]
    steps += [("insert", b"/f", 4096, 1 << 44), ("insert", b"/f", 12_288, 4096), ("collapse", b"/f", 8192, 4096)]
    steps += [("setxattr", b"/f", b"user.big", b"v" * 70_000), ("setxattr", b"/f", b"user.big", b"v" * 60_000)]
    steps += [("setxattr", b"/fifo", b"user.a", b""), ("setxattr", b"/dangling", b"user.a", b"")]
    steps += [("setxattr", b"/fifo", b"trusted.a", b"x"), ("setxattr", b"/dangling", b"trusted.a", b"x" * 300)]
    steps += [("chown", b"/f", 2**31, 2**32 - 2), ("mknod", b"/big", "char", 4095, (1 << 20) - 1)]
    both(tmp_path, steps)


def test_privileges_go_with_content_and_owner(tmp_path: Path) -> None:
    """Set-user-id bits and file capabilities do not outlive a new owner, capabilities not new content."""
    capability = bytes.fromhex("0100000200200000000000000000000000000000")
    name = b"security.capability"
    steps: list[Op] = []
    changes: list[Op] = [("write", b"", 0, b"x"), ("truncate", b"", 5), ("fallocate", b"", 0, 9000, False)]
    changes += [("chown", b"", 5, 6), ("chmod", b"", 0o4711), ("punch", b"", 0, 10), ("utimes", b"", 1, 2)]
    for n, change in enumerate(changes):
        for mode in (0o6755, 0o6644):
            path = b"/f%d-%o" % (n, mode)
            steps += [("create", path, 0o644), ("write", path, 0, b"content"), ("chmod", path, mode)]
            steps += [("setxattr", path, name, capability), ("setxattr", path, b"user.a", b"stays")]
            steps.append((change[0], path, *change[2:]))
    both(tmp_path, steps)


@pytest.mark.parametrize("options", ["", "-t ext4 -b 1024", "-t ext2 -b 1024 -O ^dir_index", "-t ext3 -b 4096"])
def test_names_come_in_the_kernels_order(tmp_path: Path, options: str) -> None:
    """By hash in a directory of one block or with an index, as they lie in others; whoever made it."""
    image = tmp_path / "image"
    make(image, f"{options} -N 9000" if options else "", 48 * MIB)
    for count in (5, 90, 2500):
        with Volume.open(image, mode="rw") as v:
            v.mkdir(f"/ours{count}")
            for i in range(count):
                v.create(f"/ours{count}/name-{i}-" + "é" * (i % 9))
    with mounted(image, tmp_path / "mnt") as root:
        for count in (5, 90, 2500):
            (root / f"theirs{count}").mkdir()
            for i in range(count):
                (root / f"theirs{count}" / f"name-{i}").touch()
        shown = {d: [os.fsencode(e.name) for e in os.scandir(root / d)] for d in os.listdir(root) if d != "lost+found"}  # noqa: PTH208
        shown[""] = [os.fsencode(e.name) for e in os.scandir(root)]
    with Volume.open(image) as v, Volume.open(image) as again:
        for d, names in shown.items():
            ino = v.lookup(d)
            assert ino is not None
            assert [name for name, *_ in v.iterdir_by_hash(ino)] == names, d
            assert [name for name, *_ in again.iterdir_by_hash(ino)] == names, d


def test_whiteouts_and_twins(tmp_path: Path) -> None:
    """A whiteout is overlayfs's: a device 0:0; a name of the same inode leaves both."""
    image = tmp_path / "image"
    make(image, "", 8 * MIB)
    with Volume.open(image, mode="rw") as v:
        v.create("/f")
        v.link("/f", "/same")
        v.rename("/f", "/same", how="whiteout")
        assert v.lookup("/f") == v.lookup("/same")
        with pytest.raises(Exists):
            v.rename("/f", "/same", how="noreplace")
        v.rename("/f", "/other", how="whiteout")
        s = v.stat(v.resolve("/f"))
        assert (s.kind, s.rdev, s.mode) == ("char", (0, 0), 0)
    fsck(image)
