"""Episodes on deltas over one golden volume: used, killed, recovered; the golden stays as it was."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.conftest import User, wait_for
from e2e.test_volume import ext4lite, manifest, on

from support.ext4_judges import fsck

pytestmark = [pytest.mark.sentry, pytest.mark.images, pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(240)]

FILL = r"""
import os, random, shutil
r = random.Random(1)
os.makedirs("/v/d")
for i in range(40): open(f"/v/d/{i}", "wb").write(r.randbytes(r.randrange(400_000)))
shutil.copy(os.path.realpath("/usr/bin/python3"), "/v/python")
os.chmod("/v/python", 0o755)
open("/v/map", "wb").write(bytes(range(256)) * 256)
"""

USE = r"""
import mmap, os, subprocess
assert subprocess.run(["/v/python", "-c", "print(6*7)"], capture_output=True, check=True).stdout == b"42\n"
before = open("/v/map", "rb").read()
private = open("/v/map", "rb")
seen = mmap.mmap(private.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
assert seen[:] == before
with open("/v/map", "r+b") as f:
    f.seek(5000); f.write(b"written"); f.flush()
    assert seen[5000:5007] == b"written", "a mapping made before does not show a write"
    shared = mmap.mmap(f.fileno(), 0)
    shared[9000:9006] = b"mapped"; shared.flush()
    f.seek(9000); assert f.read(6) == b"mapped"
    assert seen[9000:9006] == b"mapped", "a mapping does not show another"
    os.truncate("/v/map", 20000)
    assert f.seek(0, 2) == 20000
os.unlink("/v/d/3")
open("/v/d/4", "ab").write(b"appended")
with open("/v/synced", "wb") as f:
    f.write(b"s" * 300_000); f.flush(); os.fsync(f.fileno())
os.sync()
print("ready", flush=True)
"""


@pytest.fixture
def golden(user: User) -> Iterator[Path]:
    """A golden volume that a guest has filled."""
    path = user.home / "golden.ext4"
    made = ext4lite(user, "mkfs", "--size", "256M", str(path))
    assert made.returncode == 0, made.stderr
    filled = on(user, path, "python3", "-c", FILL)
    assert filled.returncode == 0, filled.stderr
    yield path
    path.unlink()


def _clone(user: User, golden: Path, name: str) -> Path:
    episode = user.home / name
    done = ext4lite(user, "clone", "--json", "--backing", str(golden), str(episode))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["method"] == "backing"
    return episode


def _sha(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


@pytest.mark.parametrize("durability", ["process", "host"])
def test_an_episode_on_a_delta_is_killed(user: User, golden: Path, durability: str) -> None:
    before, stamp = _sha(golden), golden.stat().st_mtime_ns
    episode = _clone(user, golden, "episode.ext4")
    assert manifest(user, episode) == manifest(user, golden)
    mount = f"src={episode},dst=/v,durability={durability}"
    process = user.start(
        *("run", "--mount", mount, "--net", "none", "--entrypoint", "", "docker:dind"),
        *("sh", "-c", 'python3 -c "$0" && sleep 1000', USE),
    )
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    if line != b"ready\n":
        process.kill()
        raise AssertionError(process.communicate(timeout=30)[1].decode())
    busy = ext4lite(user, "label", str(golden), "x")
    assert busy.returncode == 3, "the backing file is not locked"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    wait_for(lambda: not episode.with_name("episode.ext4.lock").exists())
    recovered = ext4lite(user, "recover", str(episode))
    assert recovered.returncode == 0, recovered.stderr
    found = manifest(user, episode)
    assert found["/synced"]["size"] == 300_000 and "/d/3" not in found and found["/map"]["size"] == 20000
    again = on(user, episode, "sh", "-c", "/v/python -c 'print(7)' && cat /v/synced | wc -c && rm /v/synced")
    assert again.stdout.split() == ["7", "300000"], again.stderr
    assert ext4lite(user, "flatten", str(episode)).returncode == 0
    fsck(episode)
    assert "/synced" not in manifest(user, episode)
    assert (_sha(golden), golden.stat().st_mtime_ns) == (before, stamp)
    episode.unlink()


def test_a_delta_without_its_base_does_not_start(user: User, golden: Path) -> None:
    episode = _clone(user, golden, "episode.ext4")
    moved = golden.rename(golden.with_name("moved"))
    done = on(user, episode, "true")
    assert done.returncode == 125 and "backing file" in done.stderr
    moved.rename(golden)
    assert on(user, episode, "true", options=",readonly").returncode == 0
    episode.unlink()


@pytest.mark.root
def test_twenty_episodes_read_the_golden_once(user: User, golden: Path) -> None:
    """Dropped from the page cache before, the golden is read from the disk by the first of twenty, for all of them."""
    size = golden.stat().st_blocks * 512
    episodes = [_clone(user, golden, f"episode{n}.ext4") for n in range(20)]
    subprocess.run(["sync"], check=True)
    _drop(golden)
    assert _cached(golden) < size // 50
    reads = _device_reads(golden)
    read = "cat /v/d/* /v/python /v/map | md5sum"
    sums: list[str] = []

    def some(mine: list[Path]) -> None:
        for episode in mine:
            done = on(user, episode, "sh", "-c", read)
            sums.append(done.stdout if done.returncode == 0 else done.stderr)

    workers = [threading.Thread(target=some, args=(episodes[n::2],)) for n in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(sums) == 20 and len(set(sums)) == 1 and sums[0].endswith("-\n"), set(sums)
    taken = _device_reads(golden) - reads
    cached = _cached(golden)
    print(f"golden {size} bytes, {cached} in the page cache, {taken} read from the device by everybody")
    assert cached > 4 << 20
    for episode in episodes:
        assert _cached(episode) < 1 << 20, "an episode has cached what is the golden's"
        assert episode.stat().st_blocks * 512 < 1 << 20
        episode.unlink()


def _drop(path: Path) -> None:
    with path.open("rb") as f:
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _cached(path: Path) -> int:
    """Return how many bytes of a file are in the page cache (fincore reads mincore)."""
    done = subprocess.run(
        ["fincore", "--bytes", "--raw", "--noheadings", "-o", "RES", path], capture_output=True, check=True
    )
    return int(done.stdout)


def _device_reads(path: Path) -> int:
    """Return the bytes read so far from a file's device (sectors of 512: Documentation/block/stat.rst)."""
    device = path.stat().st_dev
    stat = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
    return int(stat.read_text().split()[2]) * 512 if stat.exists() else 0
