"""Episodes killed in the middle of everything: what they had fsynced is there, and the volume is consistent.

The load (kill_load.py) tells on stdout what it was promised. Its Sentry is killed at a random moment; two copies of the
volume are recovered, one by ``ext4lite recover``, one by mounting it, and both must be clean to e2fsck and keep every
promise, earlier episodes' included. Then the next episode goes on with the volume itself, as it was left: the launcher
recovers it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from e2e.conftest import User, descendants, is_root, wait_for
from e2e.test_volume import ext4lite

pytestmark = [pytest.mark.sentry, pytest.mark.images, pytest.mark.usefixtures("nothing_left")]

LOAD = (Path(__file__).parent / "kill_load.py").read_text()
TOP = "/v/work"


@dataclass
class Promises:
    """What guests were promised, by file; a later line about the same thing takes the place of an earlier one."""

    logs: dict[str, tuple[int, int]] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    rows: dict[str, int] = field(default_factory=dict)
    commits: dict[str, str] = field(default_factory=dict)
    count: int = 0

    def take(self, line: str) -> None:
        """Note one line of the load's output."""
        kind, path, *rest = line.split()
        path = path.removeprefix("/v/")
        self.count += 1
        match kind:
            case "log":
                self.logs[path] = int(rest[0]), int(rest[1])
            case "file":
                self.files[path] = int(rest[0])
            case "gone":
                self.gone.add(path)
                self.logs.pop(path, None)
            case "rows":
                self.rows[path] = int(rest[0])
            case "commit":
                self.commits[path] = rest[0]

    def check(self, root: Path) -> None:
        """Assert that they are kept below ``root``."""
        for path, (size, crc) in self.logs.items():
            if "/mapped." in path and not (root / path).exists():
                continue  # removed since, without a word
            if path not in self.gone and (root / path).exists() is False and self._unlinking(path):
                continue
            data = (root / path).read_bytes()
            assert len(data) >= size, f"{path}: {len(data)} bytes of {size} that were synced"
            assert zlib.crc32(data[:size]) == crc, f"{path}: the first {size} bytes are not what was synced"
        for path, version in self.files.items():
            data = (root / path).read_bytes()
            assert int(data[:8], 16) == zlib.crc32(data[8:]), f"{path}: torn"
            assert int(data[8:].split(b"\n")[0]) >= version, f"{path}: older than version {version}"
        for path in self.gone:
            assert not (root / path).exists(), f"{path} is back"
        for path, count in self.rows.items():
            db = sqlite3.connect(root / path)
            assert db.execute("pragma integrity_check").fetchall() == [("ok",)], path
            found = db.execute("select max(id) from t").fetchone()[0] or 0
            assert found >= count, f"{path}: {found} rows of {count}"
            db.close()
        for path, commit in self.commits.items():
            git = ["git", "-c", "safe.directory=*", "-C", str(root / path)]
            done = subprocess.run([*git, "fsck", "--no-dangling"], capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{path}: {done.stdout}{done.stderr}"
            done = subprocess.run(
                [*git, "merge-base", "--is-ancestor", commit, "HEAD"], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{path}: commit {commit} is not there: {done.stderr}"

    def _unlinking(self, path: str) -> bool:
        """Tell whether a log is so old that its removal may have been under way."""
        name, generation = path.rsplit(".", 1)
        newest = max(int(p.rsplit(".", 1)[1]) for p in self.logs if p.rsplit(".", 1)[0] == name)
        return int(generation) <= newest - 3


@contextmanager
def loop_mounted(volume: Path, options: str) -> Iterator[Path]:
    """Mount an image for the kernel to replay or read."""
    point = volume.with_name(volume.name + ".mnt")
    point.mkdir()
    subprocess.run(["mount", "-o", f"loop,{options}", volume, point], check=True)
    try:
        yield point
    finally:
        subprocess.run(["umount", point], check=True)
        point.rmdir()


def fsck(volume: Path) -> None:
    done = subprocess.run(["e2fsck", "-fn", volume], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def kill(user: User, volume: Path, promises: Promises, seed: int, *, seconds: float, options: str, load: str) -> None:
    """Run the load and kill its Sentry (or, one time in four, the supervisor or the launcher) after some time."""
    mount = f"type=volume,src={volume},dst=/v{options}"
    words = ["run", "--mount", mount, "--net", "none", "--entrypoint", "", "docker:dind"]
    process = user.start(*words, "python3", "-c", LOAD, TOP, str(seed), *load.split())
    assert process.stdout is not None
    lines: list[str] = []
    first = threading.Event()
    ready = "docker ready" if load else ""

    def listen() -> None:
        for line in process.stdout or ():
            if line.endswith(b"\n"):  # the kill may have cut the last one
                lines.append(line.decode())
                if ready in lines[-1]:
                    first.set()
        first.set()

    listener = threading.Thread(target=listen)
    listener.start()
    assert first.wait(60), "the load does not start"
    time.sleep(seconds)
    assert process.poll() is None, process.communicate()
    supervisor, sentry = descendants(process.pid)[:2]
    victim = random.Random(seed).choice([sentry, sentry, sentry, supervisor, process.pid])
    os.kill(victim, signal.SIGKILL)
    process.wait(30)
    listener.join(30)
    if process.stderr is not None:
        process.stderr.close()
    process.stdout.close()
    wait_for(lambda: not Path(f"/proc/{sentry}").exists(), 30)
    wait_for(lambda: not _busy(volume), 30)
    for line in lines:
        promises.take(line)


def _busy(volume: Path) -> bool:
    """Tell whether a process has the volume open."""
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if descriptor.readlink() == volume:
                return True
        except OSError:
            continue
    return False


def judge(user: User, volume: Path, promises: Promises) -> None:
    """Recover two copies, by the core and by the kernel, and check both."""
    ours, kernels = volume.with_name("ours.ext4"), volume.with_name("kernels.ext4")
    for copy in (ours, kernels):
        subprocess.run(["cp", "--sparse=always", "--preserve=ownership", volume, copy], check=True)
    try:
        shown = ext4lite(user, "inspect", "--json", str(ours))
        assert shown.returncode == 0, shown.stderr
        assert json.loads(shown.stdout)["state"] == "needs recovery"
        done = ext4lite(user, "recover", str(ours))
        assert done.returncode == 0, done.stderr
        fsck(ours)
        with loop_mounted(ours, "rw"):  # sqlite recovers on its own account
            promises.check(Path(str(ours) + ".mnt"))
        with loop_mounted(kernels, "rw") as point:
            promises.check(point)
        fsck(kernels)
    finally:
        ours.unlink()
        kernels.unlink()


def campaign(user: User, rounds: int, seed: int, *, longest: float, load: str = "", size: str = "512M") -> int:
    """Kill ``rounds`` episodes one after the other on one volume. Returns the number of promises."""
    if not is_root():
        pytest.skip("needs root for loop mounts")
    volume = user.home / "killed.ext4"
    made = ext4lite(user, "mkfs", "--size", size, str(volume))
    assert made.returncode == 0, made.stderr
    r = random.Random(seed)
    promises = Promises()
    try:
        for number in range(rounds):
            options = ",durability=host" if r.random() < 0.25 else ""
            seconds = r.uniform(0.05, longest)
            kill(user, volume, promises, seed * 1000 + number, seconds=seconds, options=options, load=load)
            judge(user, volume, promises)
            print(f"kill {number}: fine, {promises.count} promises", flush=True)
            if number % 5 == 4:  # makes room
                promises = Promises(count=promises.count)
                cleared = user.launch(
                    "run", "--mount", f"type=volume,src={volume},dst=/v", "--net", "none", "--entrypoint", "",
                    "docker:dind", "rm", "-rf", TOP, timeout=120,
                )  # fmt: skip
                assert cleared.returncode == 0, cleared.stderr
                fsck(volume)
    finally:
        volume.unlink()
        shutil.rmtree(user.home / "killed.ext4.lock", ignore_errors=True)
    return promises.count


@pytest.mark.timeout(400)
def test_twenty_kills(user: User) -> None:
    assert campaign(user, 20, 1, longest=1.5) > 200


@pytest.mark.timeout(400)
def test_kills_of_a_docker_host(user: User) -> None:
    campaign(user, 3, 2, longest=4.0, load="docker", size="1G")


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_two_hundred_kills(user: User) -> None:
    """Or as many as GVX_KILLS says, some of them of docker hosts."""
    kills = int(os.environ.get("GVX_KILLS", "200"))
    docker = kills * 15 // 100
    assert campaign(user, kills - docker, 3, longest=4.0) > kills * 10
    campaign(user, docker, 4, longest=8.0, load="docker", size="2G")
