"""Volumes: what a guest writes is what the core, e2fsck and the kernel read afterwards."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from e2e.conftest import User, descendants, is_root, wait_for

from gvx.residue import left_behind

pytestmark = [pytest.mark.sentry, pytest.mark.images, pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(240)]

WALK = r"""
import base64, hashlib, json, os, stat, sys
TYPES = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "symlink", stat.S_IFCHR: "char",
         stat.S_IFBLK: "block", stat.S_IFIFO: "fifo", stat.S_IFSOCK: "socket"}
top = os.fsencode(sys.argv[1])
for parent, directories, names in os.walk(top):
    for name in directories + names:
        path = parent + b"/" + name
        shown = os.fsdecode(path[len(top):])
        if shown.split("/")[1] == "lost+found":
            continue
        s = os.lstat(path)
        kind = TYPES[stat.S_IFMT(s.st_mode)]
        entry = {"path": shown, "type": kind, "mode": stat.S_IMODE(s.st_mode), "uid": s.st_uid, "gid": s.st_gid,
                 "nlink": s.st_nlink, "mtime_ns": s.st_mtime_ns}
        if kind == "file":
            data = open(path, "rb").read()
            entry |= {"size": s.st_size, "sha256": hashlib.sha256(data).hexdigest()}
        elif kind == "symlink":
            entry["target"] = os.fsdecode(os.readlink(path))
        elif kind in ("char", "block"):
            entry["rdev"] = [os.major(s.st_rdev), os.minor(s.st_rdev)]
        xattrs = {n: base64.b64encode(os.getxattr(path, n, follow_symlinks=False)).decode()
                  for n in os.listxattr(path, follow_symlinks=False)}
        if xattrs:
            entry["xattrs"] = xattrs
        print(json.dumps(entry))
"""
"""Prints a tree as ``ext4lite manifest`` does, by what the running kernel says: the guest's, or a loop mount's."""

WRITE = r"""
import os, socket, stat, struct
os.chdir("/v")
os.makedirs("d/e/f", 0o750)
def put(name, data, mode=0o644):
    with open(name, "wb") as f: f.write(data)
    os.chmod(name, mode)
for size in (0, 1, 59, 60, 61, 160, 4095, 4096, 4097, 65536, 1 << 20, 5_000_001):
    put(f"size-{size}", (b"0123456789abcdef" * (size // 16 + 1))[:size])
with open("sparse", "wb") as f:
    f.seek(10 << 20); f.write(b"end"); f.truncate(20 << 20)
put("setuid", b"x", 0o4755); put("setgid", b"x", 0o2711); os.mkdir("sticky"); os.chmod("sticky", 0o1777)
put("owned", b""); os.chown("owned", 70000, 4000000000)
os.link("size-4097", "d/e/linked")
for n in (1, 59, 60, 61, 255, 1000): os.symlink("t" * n, f"symlink-{n}")
os.mknod("null", 0o666 | stat.S_IFCHR, os.makedev(1, 3)); os.mknod("loop300", 0o660 | stat.S_IFBLK, os.makedev(7, 300))
os.mkfifo("fifo", 0o600)
s = socket.socket(socket.AF_UNIX); s.bind("socket"); s.close()
os.setxattr("size-1", "user.comment", b"made in the guest"); os.setxattr("size-1", "user.bytes", bytes(range(256)))
os.setxattr("size-60", "user.big", b"0123456789abcdef" * 60); os.setxattr("d", "trusted.overlay.opaque", b"y")
os.setxattr("setuid", "security.capability", struct.pack("<5I", 0x02000001, 1 << 10, 0, 0, 0))
put(b"utf8-\xc3\xa9", b""); put(b"latin-\xe9", b""); put("n" * 255, b"long")
os.utime("size-59", ns=(1, 1_700_000_000_123_456_789)); os.utime("size-61", ns=(0, 4_102_444_800_000_000_001))
os.utime("size-160", ns=(0, -86_400_000_000_000))
os.mkdir("many")
for i in range(1500): put(f"many/file-{i:05}-{'x' * (i % 90)}", b"%d" % i)
for i in range(0, 1500, 3): os.unlink([n for n in (f"many/file-{i:05}-{'x' * (i % 90)}",)][0])
os.mkdir("gone"); os.rmdir("gone"); put("old", b"1"); put("new", b"2"); os.rename("new", "old")
os.rename("d/e", "moved")
with open("size-65536", "r+b") as f: f.truncate(1000); f.seek(500_000); f.write(b"tail")
os.truncate("size-1048576", 4096)
"""


@pytest.fixture
def volume(user: User) -> Iterator[Path]:
    """An empty volume of the default profile."""
    path = user.home / "volume.ext4"
    made = ext4lite(user, "mkfs", "--size", "512M", str(path))
    assert made.returncode == 0, made.stderr
    yield path
    path.unlink()


def ext4lite(user: User, *words: str) -> subprocess.CompletedProcess[str]:
    return user.python("from ext4lite.cli import main; main()", *words, timeout=120)


def on(
    user: User, volume: Path, *command: str, options: str = "", timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run a command in a guest with ``volume`` at /v."""
    mount = f"type=volume,src={volume},dst=/v{options}"
    return user.launch(
        "run", "--mount", mount, "--net", "none", "--entrypoint", "", "docker:dind", *command, timeout=timeout
    )


def tree(lines: str) -> dict[str, dict[str, Any]]:
    return {entry["path"]: entry for entry in map(json.loads, lines.splitlines())}


def manifest(user: User, volume: Path) -> dict[str, dict[str, Any]]:
    done = ext4lite(user, "manifest", str(volume))
    assert done.returncode == 0, done.stderr
    return tree(done.stdout)


def assert_clean(volume: Path) -> None:
    """By e2fsck, and by the superblock's own state (s_state at 0x3A: 1 is clean; format documentation, super block)."""
    checked = subprocess.run(["e2fsck", "-fn", volume], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    with volume.open("rb") as file:
        assert os.pread(file.fileno(), 2, 1024 + 0x3A) == b"\1\0"


@contextmanager
def kernel_mount(volume: Path) -> Iterator[Path]:
    point = volume.with_name("mnt")
    point.mkdir()
    subprocess.run(["mount", "-o", "loop,ro", volume, point], check=True)
    try:
        yield point
    finally:
        subprocess.run(["umount", point], check=True)
        point.rmdir()


def test_everything_a_guest_writes_is_there_for_everyone(user: User, volume: Path) -> None:
    written = on(user, volume, "python3", "-c", WRITE)
    assert written.returncode == 0, written.stderr
    assert_clean(volume)
    seen = on(user, volume, "python3", "-c", WALK, "/v")
    assert seen.returncode == 0, seen.stderr
    in_guest = tree(seen.stdout)
    assert len(in_guest) == 1036
    assert_clean(volume)
    by_core = manifest(user, volume)
    assert by_core == in_guest
    if is_root():
        with kernel_mount(volume) as point:
            walked = subprocess.run(["python3", "-c", WALK, point], capture_output=True, text=True, check=True)
        assert tree(walked.stdout) == in_guest
    sha256 = hashlib.sha256((b"0123456789abcdef" * 313)[:4097]).hexdigest()
    linked = in_guest["/moved/linked"]
    assert (linked["size"], linked["nlink"], linked["sha256"]) == (4097, 2, sha256)
    assert in_guest["/size-59"]["mtime_ns"] == 1_700_000_000_123_456_789
    assert in_guest["/size-160"]["mtime_ns"] == -86_400_000_000_000
    assert in_guest["/loop300"]["rdev"] == [7, 300]
    assert in_guest["/owned"]["gid"] == 4_000_000_000


def test_programs_and_libraries_run_from_the_volume(user: User, volume: Path) -> None:
    script = """
        mkdir -p /v/bin /v/lib && cp /bin/busybox /v/bin 2>/dev/null; cp /bin/sh /usr/bin/python3.11 /v/bin
        cp -L /lib/x86_64-linux-gnu/*.so* /v/lib && cp -r /usr/lib/python3.11 /v/lib/
        LD_LIBRARY_PATH=/v/lib /v/bin/sh -c 'echo shell' && LD_LIBRARY_PATH=/v/lib PYTHONHOME=/v /v/bin/python3.11 -c '
import ctypes, json, sys
maps = open("/proc/self/maps").read()
assert "/v/lib/libc.so.6" in maps and "/v/bin/python3.11" in maps, maps
print("python", json.__file__)'
    """
    done = on(user, volume, "sh", "-c", script)
    assert done.stdout == "shell\npython /v/lib/python3.11/json/__init__.py\n", done.stderr
    again = on(user, volume, "sh", "-c", "LD_LIBRARY_PATH=/v/lib /v/bin/sh -c 'echo again'")
    assert again.stdout == "again\n"
    assert_clean(volume)


def test_shared_mappings_are_the_file(user: User, volume: Path) -> None:
    code = """
import mmap, os
f = open("/v/db", "w+b"); f.truncate(1 << 20)
a = mmap.mmap(f.fileno(), 0); b = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)
a[5000:5005] = b"hello"
assert b[5000:5005] == b"hello" and os.pread(f.fileno(), 5, 5000) == b"hello"
os.pwrite(f.fileno(), b"world", 9000)
assert b[9000:9005] == b"world"
private = mmap.mmap(f.fileno(), 0, flags=mmap.MAP_PRIVATE); private[0:1] = b"x"
assert os.pread(f.fileno(), 1, 0) == b"\\0"
a[(1 << 20) - 1:] = b"!"; a.flush()
f.truncate(4096); f.truncate(1 << 20)
assert os.pread(f.fileno(), 5, 5000) == bytes(5)
os.pwrite(f.fileno(), b"last", 8000)
print("fine")
"""
    done = on(user, volume, "python3", "-c", code)
    assert done.stdout == "fine\n", done.stderr
    assert_clean(volume)
    data = bytearray(1 << 20)
    data[8000:8004] = b"last"
    assert manifest(user, volume)["/db"]["sha256"] == hashlib.sha256(data).hexdigest()


def test_overlays_have_their_layers_on_the_volume(user: User, volume: Path) -> None:
    script = """
        set -e; cd /v; mkdir -p l/one l/two/dir upper work m; echo 1 > l/one/a; echo 2 > l/two/b; echo x > l/two/dir/old
        mount -t overlay overlay -o lowerdir=l/one:l/two,upperdir=upper,workdir=work m
        cat m/a m/b; rm m/b; rm -r m/dir; mkdir m/dir; echo y > m/dir/new; echo more >> m/a; ls m/dir; mv m/a m/c
        umount m; mount -t overlay overlay -o lowerdir=/v/l/one:/v/l/two,upperdir=/v/upper,workdir=/v/work m
        cat m/c; ls m m/dir; test ! -e m/b
    """
    done = on(user, volume, "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "2", "new", "1", "more", "m:", "c", "dir", "m/dir:", "new"]
    assert_clean(volume)
    found = manifest(user, volume)
    for gone in ("/upper/a", "/upper/b"):
        assert (found[gone]["type"], found[gone]["rdev"]) == ("char", [0, 0])
    assert found["/upper/dir"]["xattrs"] == {"trusted.overlay.opaque": "eQ=="}


def test_a_read_only_volume_stays_as_it_is(user: User, volume: Path) -> None:
    assert on(user, volume, "sh", "-c", "echo kept > /v/file").returncode == 0
    before = hashlib.sha256(volume.read_bytes()).hexdigest()
    done = on(user, volume, "sh", "-c", "cat /v/file; echo x > /v/new", options=",readonly")
    assert (done.returncode != 0, done.stdout) == (True, "kept\n")
    assert "Read-only file system" in done.stderr
    assert hashlib.sha256(volume.read_bytes()).hexdigest() == before


@pytest.mark.parametrize("how", ["terminated", "timed out", "interrupted twice", "killed inside"])
def test_however_a_guest_ends_its_volume_is_clean(user: User, volume: Path, how: str) -> None:
    mount = ("--mount", f"src={volume},dst=/v", "--net", "none")
    script = "trap '' INT; echo data > /v/file; echo ready; while :; do echo more >> /v/file; sleep 0.02; done"
    words = ["run", *mount, "--entrypoint", "", "docker:dind", "sh", "-c", script]
    if how == "timed out":
        words[1:1] = ["--timeout", "1"]
    if how == "interrupted twice":
        words[-1] = script.replace("'' INT", "'' INT TERM")  # nothing but the kill can end it, so the code is certain
    if how == "killed inside":
        words[-1] = script.replace("echo ready;", "echo ready; (sleep 0.5; kill -KILL 1) &")
    process = user.start(*words)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    if how == "terminated":
        process.terminate()
    if how == "interrupted twice":
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)  # two that are both pending would be one
        process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    expected = {"terminated": 143, "timed out": 124, "interrupted twice": 137, "killed inside": 137}[how]
    assert process.returncode == expected, stderr
    assert_clean(volume)
    assert manifest(user, volume)["/file"]["size"] >= 5


def test_a_volume_has_one_user(user: User, volume: Path) -> None:
    mount = ("--mount", f"src={volume},dst=/v", "--net", "none")
    process = user.start("run", *mount, "--entrypoint", "", "docker:dind", "sh", "-c", "echo ready; sleep 1000")
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    second = on(user, volume, "true")
    assert (second.returncode, second.stdout) == (125, "")
    assert "in use by" in second.stderr
    cloned = ext4lite(user, "clone", str(volume), str(user.home / "clone.ext4"))
    assert cloned.returncode == 3, cloned.stderr
    process.terminate()
    process.communicate(timeout=30)
    assert on(user, volume, "true").returncode == 0


def test_a_killed_episodes_volume_is_recovered_by_the_next(user: User, volume: Path) -> None:
    mount = ("--mount", f"src={volume},dst=/v", "--net", "none")
    process = user.start(
        "run", *mount, "--entrypoint", "", "docker:dind", "sh", "-c", "echo x > /v/f; sync; echo ready; sleep 1000"
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.kill()
    process.communicate(timeout=30)
    wait_for(lambda: not volume.with_name("volume.ext4.lock").exists())
    shown = ext4lite(user, "inspect", "--json", str(volume))
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["state"] == "needs recovery"
    copy = user.home / "copy.ext4"
    cloned = ext4lite(user, "clone", str(volume), str(copy))
    assert cloned.returncode == 4, "a clone was made of a volume that needs recovery"
    assert "ext4lite recover" in cloned.stderr
    refused = on(user, volume, "cat", "/v/f", options=",readonly")
    assert refused.returncode == 125, "recovered without writing"
    subprocess.run(["cp", "--sparse=always", "--preserve=ownership,mode", volume, copy], check=True)
    recovered = ext4lite(user, "recover", str(copy))
    assert recovered.returncode == 0, recovered.stderr
    assert_clean(copy)
    assert manifest(user, copy)["/f"]["size"] == 2
    copy.unlink()
    assert on(user, volume, "cat", "/v/f").stdout == "x\n"
    assert_clean(volume)


def test_durability_is_a_choice(user: User, volume: Path) -> None:
    """The host sees an fdatasync for each of the guest's fsyncs with ``host``, and none with ``process``."""
    if not is_root() or shutil.which("strace") is None:
        pytest.skip("needs root and strace")
    script = "for i in 1 2 3 4 5; do dd if=/dev/zero of=/v/$i bs=4k count=1 conv=fsync 2>/dev/null; done; echo done"
    counts = {}
    for durability in ("process", "host"):
        mount = f"src={volume},dst=/v,durability={durability}"
        words = ["run", "--mount", mount, "--net", "none", "--entrypoint", "", "docker:dind"]
        process = user.start(*words, "sh", "-c", "read x; " + script, stdin=subprocess.PIPE)
        while len(below := descendants(process.pid)) < 2:
            time.sleep(0.01)
        time.sleep(1)
        watch = ["strace", "-fqq", "-e", "trace=fdatasync,fsync", "-p", str(below[1])]
        tracer = subprocess.Popen(watch, stderr=subprocess.PIPE, text=True)
        time.sleep(1)
        out, stderr = process.communicate(b"go\n", timeout=60)
        assert out == b"done\n", stderr
        counts[durability] = tracer.communicate(timeout=30)[1].count("fdatasync(")
        assert_clean(volume)
    assert counts["process"] == 0 and counts["host"] >= 10, counts


def test_what_is_no_volume_is_refused(user: User) -> None:
    path = user.home / "no.ext4"
    for content in (b"", b"no ext4" * 10_000):
        path.write_bytes(content)
        os.chmod(path, 0o666)  # noqa: PTH101 (beside write_bytes, which a umask limits)
        done = on(user, path, "true")
        assert done.returncode == 125
        assert len(done.stderr.splitlines()) == 1
    path.unlink()
    assert on(user, path, "true").returncode == 125


def test_two_volumes_at_once(user: User, volume: Path) -> None:
    second = shutil.copyfile(volume, user.home / "second.ext4")
    second.chmod(0o666)
    try:
        done = user.launch(
            *("run", "--mount", f"src={volume},dst=/v", "--mount", f"src={second},dst=/v/w/x", "--entrypoint", ""),
            *("docker:dind", "sh", "-c", "echo 1 > /v/a; echo 2 > /v/w/x/b; cat /v/a /v/w/x/b"),
        )
        assert done.stdout == "1\n2\n", done.stderr
        assert_clean(volume)
        assert_clean(second)
        assert "/w/x/b" not in manifest(user, volume)
        assert "/b" in manifest(user, second)
    finally:
        second.unlink()


def test_twenty_episodes_leave_the_host_as_it_was(user: User, volume: Path) -> None:
    before = user.look()
    socket = user.home / "twenty.sock"
    for number in range(20):
        done = user.launch(
            *("run", "--mount", f"src={volume},dst=/v", "-p", f"unix:{socket}:80", "--entrypoint", "", "docker:dind"),
            *("sh", "-c", f"echo {number} > /v/{number}; ls /v"),
        )
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.split()) == number + 2  # and lost+found
    assert_clean(volume)
    left = left_behind(before, user.look, patience=30)  # the whole mount table, which may be others' for a while
    assert not left, left
