"""A volume in the guest behaves as the kernel's ext4 does: the same calls have the same results, errors included."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from e2e.conftest import User, is_root
from e2e.test_volume import assert_clean, on, volume

__all__ = ["volume"]  # the fixture

pytestmark = [pytest.mark.sentry, pytest.mark.images, pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(240)]

NAMESPACE = r"""
import ctypes, os, random, stat, sys
top, seed, count = sys.argv[1] + "/ns", int(sys.argv[2]), int(sys.argv[3])
libc = ctypes.CDLL(None, use_errno=True)
libc.renameat2.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
os.umask(0); os.setgroups([]); os.mkdir(top); os.chmod(top, 0o1777)
r = random.Random(seed)
names = ["a", "b", "c", "d", "e"]
def path(): return "/".join(r.choice(names) for _ in range(r.randrange(1, 4)))
def act(op, p, q, x):
    p, other = f"{top}/{p}", f"{top}/{q}"
    if op == "mkdir": os.mkdir(p, x & 0o1777 | 0o500)
    elif op == "create":
        flags = os.O_CREAT | os.O_WRONLY | os.O_NONBLOCK | (os.O_EXCL if x & 1 else 0) | (os.O_TRUNC if x & 2 else 0)
        os.close(os.open(p, flags, 0o644))
    elif op == "write":
        fd = os.open(p, os.O_WRONLY | os.O_NONBLOCK | os.O_APPEND)
        try: os.write(fd, b"y" * (x % 5000))
        finally: os.close(fd)
    elif op == "unlink": os.unlink(p)
    elif op == "rmdir": os.rmdir(p)
    elif op == "rename": os.rename(p, other)
    elif op == "renameat2":  # NOREPLACE or EXCHANGE
        if libc.renameat2(-100, p.encode(), -100, other.encode(), x % 2 + 1): return ctypes.get_errno()
    elif op == "link": os.link(p, other)
    elif op == "symlink": os.symlink(q, p)
    elif op == "chmod": os.chmod(p, x & 0o7777)
    elif op == "chown": os.lchown(p, x % 3, x % 5)
    elif op == "truncate": os.truncate(p, x % 9000)
    elif op == "readlink": return os.readlink(p)
    elif op == "setxattr": os.setxattr(p, "user." + q[0], b"v" * (x % 50), follow_symlinks=False)
    elif op == "removexattr": os.removexattr(p, "user." + q[0], follow_symlinks=False)
    elif op == "mkfifo": os.mkfifo(p)
    elif op == "stat":
        s = os.stat(p)
        return s.st_mode, s.st_nlink, s.st_uid, s.st_gid, s.st_size if stat.S_ISREG(s.st_mode) else 0
    elif op == "list":
        entries = sorted(os.scandir(p), key=lambda e: e.name)
        return [(e.name, e.is_dir(follow_symlinks=False), e.is_file(follow_symlinks=False)) for e in entries]
    return 0
ops = ["mkdir", "create", "write", "unlink", "rmdir", "rename", "rename", "renameat2", "link", "symlink", "chmod",
       "chown", "truncate", "readlink", "setxattr", "removexattr", "mkfifo", "stat", "list"]
for i in range(count):
    op, p, q, x, who = r.choice(ops), path(), path(), r.randrange(1 << 16), r.choice([0, 0, 1, 2, 3])
    os.setegid(who); os.seteuid(who)
    try: result = act(op, p, q, x)
    except OSError as error: result = error.errno
    os.seteuid(0); os.setegid(0)
    print(i, who, op, p, q, x, result)
for parent, directories, files in sorted(os.walk(top)):
    for name in sorted(directories + files):
        p = os.path.join(parent, name)
        s = os.lstat(p)
        names = sorted(os.listxattr(p, follow_symlinks=False))
        attributes = [(n, os.getxattr(p, n, follow_symlinks=False)) for n in names]
        data = open(p, "rb").read() if stat.S_ISREG(s.st_mode) else None
        print(p[len(top):], oct(s.st_mode), s.st_nlink, s.st_uid, s.st_gid, attributes, data)
"""
"""Random calls on few names, by root and three users; prints each with its result, and the tree that is left."""

CONTENTS = r"""
import ctypes, mmap, os, random, sys
path, seed, count, punch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "punch"
libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
r = random.Random(seed)
limit, data = 300_000, bytearray()
fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
def grow(size): data.extend(bytes(max(0, size - len(data))))
for i in range(count):
    op = r.choice(["read", "write", "append", "load", "store", "truncate", "sync", "allocate"]
                  + ["punch", "zero"] * punch)
    at, n = r.randrange(limit), r.randrange(1, 65_000)
    if op == "read": assert os.pread(fd, n, at) == data[at:at + n], (i, op, at, n)
    elif op in ("write", "append"):
        if op == "append": at = len(data)
        new = r.randbytes(max(0, min(n, limit - at)))
        if new: assert os.pwrite(fd, new, at) == len(new); grow(at); data[at:at + len(new)] = new
    elif op in ("load", "store") and data:
        at %= len(data)
        with mmap.mmap(fd, len(data)) as m:
            assert m[at:at + n] == data[at:at + n], (i, op, at, n)
            if op == "store":
                new = r.randbytes(min(n, len(data) - at)); m[at:at + len(new)] = new; data[at:at + len(new)] = new
    elif op == "truncate": os.ftruncate(fd, at); del data[at:]; grow(at)
    elif op == "sync": os.fsync(fd)
    elif op == "allocate": assert libc.fallocate(fd, 0, at, n) == 0; grow(at + n)
    elif op == "punch":
        assert libc.fallocate(fd, 3, at, n) == 0
        if at < len(data): end = min(at + n, len(data)); data[at:end] = bytes(end - at)
    elif op == "zero": assert libc.fallocate(fd, 0x10, at, n) == 0; grow(at + n); data[at:at + n] = bytes(n)
    assert os.fstat(fd).st_size == len(data), (i, op, os.fstat(fd).st_size, len(data))
assert os.pread(fd, 2 * limit, 0) == data
print("fine")
"""
"""Reads, writes, mappings, truncations, holes on one file, against a model in memory."""


@pytest.mark.root
@pytest.mark.skipif(not is_root(), reason="mounts a volume in the kernel")
@pytest.mark.parametrize("seed", [1, 2])
def test_names_behave_as_in_the_kernel(user: User, volume: Path, seed: int) -> None:
    twin = user.home / "twin.ext4"
    twin.write_bytes(volume.read_bytes())
    point = user.home / "twin"
    point.mkdir()
    try:
        subprocess.run(["mount", "-o", "loop", twin, point], check=True)
        try:
            words = ["python3", "-c", NAMESPACE, str(point), str(seed), "12000"]
            by_kernel = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
        finally:
            subprocess.run(["umount", point], check=True)
    finally:
        point.rmdir()
        twin.unlink()
    done = on(user, volume, "python3", "-c", NAMESPACE, "/v", str(seed), "12000")
    assert done.returncode == 0, done.stderr
    in_guest = done.stdout.splitlines()
    assert len(in_guest) > 12_000
    assert [pair for pair in zip(in_guest, by_kernel, strict=True) if pair[0] != pair[1]][:10] == []
    assert_clean(volume)


@pytest.mark.parametrize("seed", [3, 4])
def test_contents_are_those_of_a_file(user: User, volume: Path, seed: int) -> None:
    done = on(user, volume, "python3", "-c", CONTENTS, "/v/file", str(seed), "1500", "punch")
    assert done.stdout == "fine\n", done.stderr
    assert_clean(volume)


def test_contents_are_those_of_a_file_through_an_overlay(user: User, volume: Path) -> None:
    script = """
        set -e; cd /v; mkdir lower upper work m; head -c 100000 /dev/urandom > lower/file
        mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work m
        exec python3 -c "$0" m/file 5 1000 plain
    """
    done = on(user, volume, "sh", "-c", script, CONTENTS)
    assert done.stdout == "fine\n", done.stderr
    assert_clean(volume)


def test_many_layers_with_relative_names(user: User, volume: Path) -> None:
    """As dockerd mounts images of so many layers that absolute names do not fit into a page."""
    script = """
        set -e; mkdir -p /v/l && cd /v; mkdir upper work m; names=
        for i in $(seq 120); do mkdir -p d/$i; echo $i > d/$i/file-$i; ln -s ../d/$i l/$i; names="$names:l/$i"; done
        mount -t overlay overlay -o "index=off,lowerdir=${names#:},upperdir=upper,workdir=work" m
        ls m | wc -l; cat m/file-1 m/file-120
        ! mount -t overlay overlay -o "metacopy=on,lowerdir=d/1:d/2" m 2>/dev/null
        ! mount -t ext4 /dev/null m 2>/dev/null
        grep ext4 /proc/filesystems
    """
    done = on(user, volume, "bash", "-c", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["120", "1", "120", "ext4"]
    assert_clean(volume)
