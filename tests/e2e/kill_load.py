"""What an episode does until it is killed, as python3 -c in the guest: kill_load.py DIRECTORY SEED [docker].

Every line on stdout is a promise, printed after the system call that makes it has returned. The host checks them after
the kill (test_kill.py): ``log PATH BYTES CRC`` (the file begins so), ``file PATH VERSION`` (its version is that or a
later one), ``gone PATH``, ``rows PATH N``, ``commit PATH HASH``, ``docker NAME``.
"""

# System calls are what is tested.
# mypy: ignore-errors
# ruff: noqa: PTH103, PTH104, PTH108, PTH110, SIM115

import io
import mmap
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import threading
import time
import zlib

TOP, SEED = sys.argv[1], int(sys.argv[2])
os.makedirs(TOP, exist_ok=True)
LOCK = threading.Lock()


def promise(*words):
    with LOCK:
        sys.stdout.write(" ".join(map(str, words)) + "\n")
        sys.stdout.flush()


def synced_log(name, r):
    """A log as a database keeps one: append, fdatasync, now and then a new file."""
    generation = 0
    while True:
        path = f"{TOP}/{name}.{SEED}.{generation}"
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        size = crc = 0
        if generation % 2:
            os.posix_fallocate(fd, 0, 100_000)
            os.ftruncate(fd, 0)
        for _ in range(r.randrange(5, 60)):
            data = r.randbytes(r.choice((1, 100, 4096, 5000, 30_000)))
            os.write(fd, data)
            size, crc = size + len(data), zlib.crc32(data, crc)
            (os.fsync if r.random() < 0.5 else os.fdatasync)(fd)
            promise("log", path, size, crc)
        os.close(fd)
        old = f"{TOP}/{name}.{SEED}.{generation - 3}"
        if os.path.exists(old):
            os.unlink(old)
            sync_directory(TOP)
            promise("gone", old)
        generation += 1


def sync_directory(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def replaced_file(name, r):
    """A file that is always whole: written beside, synced, renamed over, the directory synced."""
    version = 0
    where = f"{TOP}/{name}.{SEED}"
    os.makedirs(where)
    while True:
        version += 1
        body = b"%d\n" % version + r.randbytes(r.randrange(20_000))
        with open(f"{where}/new", "wb") as f:
            f.write(b"%08x" % zlib.crc32(body) + body)
            f.flush()
            os.fsync(f.fileno())
        os.rename(f"{where}/new", f"{where}/file")
        sync_directory(where)
        promise("file", f"{where}/file", version)


def mapped_file(r):
    """Stores through a shared mapping, msync."""
    number = 0
    while True:
        path = f"{TOP}/mapped.{SEED}.{number}"
        data = r.randbytes(r.randrange(1, 60_000))
        with open(path, "w+b") as f:
            f.truncate(len(data))
            with mmap.mmap(f.fileno(), 0) as m:
                m[:] = data
                m.flush()
        promise("log", path, len(data), zlib.crc32(data))
        number += 1
        time.sleep(0.05)
        if number > 5:
            os.unlink(f"{TOP}/mapped.{SEED}.{number - 6}")


def trees(r):
    """Unpack, move about, remove: metadata that nobody syncs."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for i in range(250):
            info = tarfile.TarInfo(f"d{i % 7}/e{i % 31}/file-{i}-{'n' * (i % 80)}")
            info.size = r.choice((0, 10, 3000, 20_000))
            tar.addfile(info, io.BytesIO(r.randbytes(info.size)))
    number = 0
    while True:
        where = f"{TOP}/tree.{SEED}.{number % 3}"
        shutil.rmtree(where, ignore_errors=True)
        buffer.seek(0)
        with tarfile.open(fileobj=buffer) as tar:
            tar.extractall(where)
        os.rename(f"{where}/d0", f"{where}/moved")
        os.link(some_file(f"{where}/d1"), f"{where}/link")
        held = open(some_file(f"{where}/d2"))
        os.unlink(held.name)
        number += 1


def some_file(top):
    for where, _, names in os.walk(top):
        if names:
            return f"{where}/{names[0]}"
    raise FileNotFoundError(top)


def database(mode, r):
    path = f"{TOP}/{mode}.{SEED}.db"
    db = sqlite3.connect(path, isolation_level=None)
    db.execute(f"pragma journal_mode={mode}")
    db.execute("pragma synchronous=full")
    db.execute("create table t (id integer primary key, data blob)")
    n = 0
    while True:
        n += 1
        db.execute("begin")
        db.execute("insert into t values (?, ?)", (n, r.randbytes(r.randrange(3000))))
        if n % 10 == 0:
            db.execute("delete from t where id % 7 = 3 and id < ?", (n,))
        db.execute("commit")
        # A rollback journal's transaction ends with the removal of the journal, which sqlite does not sync.
        promise("rows", path, n if mode == "wal" else n - 1)


def repository(r):
    path = f"{TOP}/git.{SEED}"
    git = ["git", "-C", path, "-c", "core.fsync=all", "-c", "user.name=n", "-c", "user.email=e@x"]
    subprocess.run(["git", "init", "-q", path], check=True)
    while True:
        with open(f"{path}/f{r.randrange(20)}", "wb") as f:
            f.write(r.randbytes(2000))
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "-q", "-m", "m"], check=True)
        head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
        sync_directory(f"{path}/.git/refs/heads")
        promise("commit", path, head)


def quiet(*words):
    return subprocess.run(words, capture_output=True, check=False).returncode


def docker(r):
    """An unmodified dockerd on the volume: import, run, remove."""
    subprocess.Popen(
        ["dockerd-entrypoint.sh", "dockerd", "--host=unix:///var/run/docker.sock", "--iptables=false",
         "--ip6tables=false", "--bridge=none", f"--data-root={TOP}/../docker"],
        stdout=open("/tmp/dockerd.log", "w"), stderr=subprocess.STDOUT,
    )  # fmt: skip
    while quiet("docker", "info"):
        time.sleep(0.1)
    promise("docker", "ready")
    number = 0
    while True:
        name = f"tiny{SEED}-{number}"
        quiet("sh", "-c", "tar c -C / usr/bin/true lib lib64 usr/lib/x86_64-linux-gnu etc | docker import - " + name)
        quiet("docker", "run", "--rm", "--network=none", name, "/usr/bin/true")
        promise("docker", name)
        if number:
            quiet("docker", "rmi", "-f", f"tiny{SEED}-{number - 1}")
        number += 1


WORK = {
    "log-a": lambda r: synced_log("a", r),
    "log-b": lambda r: synced_log("b", r),
    "file": lambda r: replaced_file("file", r),
    "mapped": mapped_file,
    "trees": trees,
    "wal": lambda r: database("wal", r),
    "delete": lambda r: database("delete", r),
    "git": repository,
}


def run(name, work):
    try:
        work(random.Random(f"{SEED}-{name}"))
    except BaseException as error:
        sys.stderr.write(f"{name}: {error!r}\n")
        os._exit(9)


if sys.argv[3:] == ["docker"]:
    WORK["docker"] = docker
for name, work in WORK.items():
    threading.Thread(target=run, args=(name, work)).start()
