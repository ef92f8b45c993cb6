"""``python -m gvx.demo``: the whole path once, as an ordinary user, with its times.

Image archives → golden volume → clone → an episode with dockerd on it → ``docker run`` in there → closed, nothing left.
Started as root it drops to uid 65534 for all of that, and root itself shows real reflinks on XFS and Btrfs afterwards.
Scratch files are made in $GVX_DEMO_DIR or /tmp, and removed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

from gvx import Config, ImageCache, Mount, Publish, Resources, Sandbox
from gvx.errors import GvxError
from gvx.images import sentry_binary
from gvx.logs import BoundedLog
from gvx.residue import HostState, left_behind

NOBODY = 65534
"""The ordinary user that root becomes."""
PYTHON_IMAGE = "python:3.11-slim"
READY_TIMEOUT = 120.0
CHANGED = 16 << 20
"""Bytes that the episode on a reflinked clone writes."""
LEEWAY = 4 << 20
"""Bytes that the host's own metadata and the guest's may add."""
Rows = list[tuple[str, str]]


class DemoFailed(Exception):
    """Something did not come out as promised."""


def main() -> None:
    """Run the demo, or (``--as-user``, ``--episode``) the part of it that root starts as an ordinary user."""
    parser = argparse.ArgumentParser(prog="python -m gvx.demo", description=__doc__)
    parser.add_argument("--as-user", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    parser.add_argument("--episode", type=Path, metavar="VOLUME", help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        if options.episode:
            change_some_blocks(options.episode)
        elif options.as_user:
            ordinary_user(options.as_user)
        else:
            whole()
    except (DemoFailed, GvxError) as error:
        print(f"demo: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def whole() -> None:
    """Build or find the images, run everything, and compare the host before and after."""
    require(sys.platform == "linux", "the demo needs linux on x86_64")
    subprocess.run([sys.executable, "-m", "fixtures", "build", "python", "dind"], check=True, stdout=subprocess.DEVNULL)
    before = HostState.take(sentry_binary())
    parent = os.environ.get("GVX_DEMO_DIR") or "/tmp"
    scratch = Path(tempfile.mkdtemp(prefix="gvx-demo-", dir=parent))
    try:
        if os.geteuid() != 0:
            ordinary_user(scratch)
        else:
            drop = Ordinary.prepare(scratch)
            drop.run("--as-user", str(scratch))
            print_rows("Clones on file systems with reflinks", list(reflinks(scratch, drop)))
    finally:
        shutil.rmtree(scratch)
    left = left_behind(before, lambda: HostState.take(sentry_binary()))
    require(not left, "left behind: " + "; ".join(left))
    print("Nothing is left: no process, no mount, no socket, no file.")


class Ordinary:
    """How to run Python with this package as an ordinary user: root becomes :data:`NOBODY`, others stay who they are.

    Attributes:
        python: the interpreter.
        environment: its environment, with its home, caches and temporary files in a scratch directory.
        identity: keyword arguments for subprocess.
    """

    def __init__(self, python: str, environment: dict[str, str]) -> None:
        """Use :meth:`prepare`."""
        self.python, self.environment = python, environment
        self.identity: dict[str, Any] = (
            {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        )

    @classmethod
    def prepare(cls, scratch: Path) -> Ordinary:
        """Give ``scratch`` to the user, and find a Python with this package that he can run.

        A checkout below somebody's private home is copied to ``scratch``.
        """
        if os.geteuid() == 0:
            os.chown(scratch, NOBODY, NOBODY)
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(scratch),
            "TMPDIR": str(scratch),
            "XDG_CACHE_HOME": str(scratch / "cache"),
            "LANG": "C.UTF-8",
            "COLUMNS": str(shutil.get_terminal_size().columns),
            "GVX_SENTRY": str(sentry_binary()),
        }
        for name in ("GVX_FIXTURES_CACHE", "TERM"):
            if name in os.environ:
                environment[name] = os.environ[name]
        here = cls(sys.executable, environment)
        if here._works():
            return here
        copy = scratch / "python"
        for path in filter(Path.is_dir, map(Path, dict.fromkeys(sys.path))):
            for package in ("site-packages", "dist-packages", "gvx", "ext4lite", "fixtures"):
                source = path if path.name == package else path / package
                if source.is_dir() and (package.endswith("-packages")) == (source is path):
                    shutil.copytree(
                        source, copy if source is path else copy / package, symlinks=True, dirs_exist_ok=True
                    )
        environment["PYTHONPATH"] = str(copy)
        environment["GVX_SENTRY"] = str(shutil.copy2(sentry_binary(), scratch / "gvx-sentry"))
        there = cls(str(Path(sys.executable).resolve()), environment)
        require(there._works(), f"uid {NOBODY} can run neither {sys.executable} nor {there.python}")
        return there

    def _works(self) -> bool:
        code = "import os, gvx.demo, fixtures, ext4lite, docker; os.stat(os.environ['GVX_SENTRY'])"
        try:
            return self._call("-c", code, stderr=subprocess.DEVNULL).returncode == 0
        except PermissionError:  # not even the interpreter
            return False

    def run(self, *words: str) -> None:
        """Run a part of the demo. Fails as it fails."""
        done = self._call("-m", "gvx.demo", *words)
        require(done.returncode == 0, f"the part as uid {NOBODY} ended with {done.returncode}")

    def _call(self, *words: str, stderr: int | None = None) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [self.python, *words],
            env=self.environment,
            cwd="/",
            **self.identity,
            stdin=subprocess.DEVNULL,
            stderr=stderr,
            check=False,
        )


def ordinary_user(scratch: Path) -> None:
    """The main job in ``scratch``, by whoever runs this."""
    from rich.console import Console

    from fixtures import image_path

    console = Console(stderr=True)
    rows: Rows = []
    console.print(f"[bold]uid {os.geteuid()}[/], {file_system(scratch)} in {scratch}")
    cache = ImageCache.default()
    with console.status("importing docker:dind into the image cache"):
        imported = timed(lambda: cache.import_(image_path("dind")))
    rows.append(("image cache: docker:dind", show(imported)))
    golden = scratch / "golden.ext4"
    made = timed(lambda: ext4lite("mkgolden", "--image", str(image_path("python")), "--size", "8G", str(golden)))
    rows.append((f"mkgolden of {PYTHON_IMAGE}", show(made)))
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(DockerEpisode(clone_of(golden, scratch / f"{name}.ext4", rows), scratch / name))
            for name in ("first", "second")
        )
        for row in first.until_ready():
            rows.append(row)
        tags = [tag for image in first.docker.images.list() for tag in image.tags]
        require(PYTHON_IMAGE in tags, f"docker images shows {tags}, not {PYTHON_IMAGE}")
        console.print(f"docker images: {', '.join(tags)} (no pull, no load)")
        answer = b""

        def inner() -> None:
            nonlocal answer
            answer = first.docker.containers.run(PYTHON_IMAGE, ["python", "-c", "print(6*7)"], remove=True)

        rows.append(("docker run --rm, inside", show(timed(inner))))
        require(answer == b"42\n", f"the inner container printed {answer!r}, not 42")
        console.print("docker run --rm python:3.11-slim python -c 'print(6*7)': 42")
        first.docker.containers.run(PYTHON_IMAGE, ["true"], name="left-in-the-first")
        second.start()
        for what, time_ in second.until_ready():
            rows.append((f"{what}, second episode beside it", time_))
        of_first, of_second = (
            sorted(container.name for container in box.docker.containers.list(all=True)) for box in (first, second)
        )
        require(of_first == ["left-in-the-first"], f"the first episode has the containers {of_first}")
        require(of_second == [], f"the second episode sees the containers {of_second}")
        console.print("docker ps -a: left-in-the-first in the first episode, nothing in the second")
        rows.append(("stop (SIGTERM until all is gone, volume clean)", show(timed(first.stop))))
        rows.append(("close (SIGKILL until all is gone)", show(timed(second.kill))))
        if shutil.which("e2fsck"):
            ext4lite(
                "flatten", str(first.volume)
            )  # where the host shares no blocks it is a delta, which e2fsck knows not
            checked = subprocess.run(["e2fsck", "-fn", str(first.volume)], capture_output=True, text=True, check=False)
            require(
                checked.returncode == 0, f"e2fsck of the stopped episode's volume: {checked.stdout}{checked.stderr}"
            )
            console.print("e2fsck -fn of the first volume: clean")
    print_rows("An episode from end to end", rows)


class DockerEpisode:
    """An episode with dockerd whose /var/lib/docker is ``volume``; its API is published in ``home``/docker.sock."""

    def __init__(self, volume: Path, home: Path) -> None:
        """Prepare; :meth:`start` starts."""
        home.mkdir()
        self.volume, self._socket, self._log = volume, home / "docker.sock", BoundedLog(home / "log", 1 << 20)
        self._client: Any = None
        self._box = Sandbox(
            Config(
                image="docker:dind",
                command=("--tls=false",),
                env={"DOCKER_TLS_CERTDIR": ""},
                resources=Resources(memory_bytes=4 << 30, cpus=2),
                mounts=(Mount("volume", "/var/lib/docker", volume),),
                publish=(Publish(2375, path=self._socket),),
            ),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )

    def start(self) -> None:
        """Start the episode; nothing happens when it runs."""
        self._box.start()

    def until_ready(self) -> Iterator[tuple[str, str]]:
        """Start and wait for ``docker info``. Yields rows with times."""
        import docker

        self.start()
        started = self._box.wait_started(READY_TIMEOUT)
        yield "start to the guest's first process", show((started.t_ns - self._box.exec_ns) / 1e9)
        deadline = time.monotonic() + READY_TIMEOUT
        while True:
            try:
                self._client = docker.DockerClient(base_url=f"unix://{self._socket}", timeout=60)
                self._client.info()
                break
            except Exception as error:
                if self._client is not None:
                    self._client.close()
                ended = self._box.poll()
                if ended is not None or time.monotonic() > deadline:
                    self._log.close()
                    raise DemoFailed(f"no dockerd ({ended or 'still running'}): {error}\n{self._log.text()}") from error
                time.sleep(0.01)
        yield "start to docker ready", show((time.monotonic_ns() - self._box.exec_ns) / 1e9)

    @property
    def docker(self) -> Any:
        """The docker SDK's client of this episode's dockerd."""
        return self._client

    def stop(self) -> None:
        """End in order: the volume is clean afterwards."""
        self._forget_client()
        self._box.stop(30)
        self._gone()

    def kill(self) -> None:
        """End at once."""
        self._forget_client()
        self._box.kill()
        self._gone()

    def _gone(self) -> None:
        require(not self._socket.exists(), f"{self._socket} is left")

    def _forget_client(self) -> None:
        if self._client is not None:
            self._client.close()

    def __enter__(self) -> DockerEpisode:
        """Return self; nothing is started."""
        return self

    def __exit__(self, *_: object) -> None:
        """Make sure that nothing runs."""
        self._forget_client()
        self._box.close()
        self._log.close()


def change_some_blocks(volume: Path) -> None:
    """Run an episode that writes :data:`CHANGED` bytes to the volume."""
    command = ("sh", "-c", f"head -c {CHANGED} /dev/urandom > /v/changed && sync")
    config = Config(
        image="docker:dind", entrypoint="", command=command, mounts=(Mount("volume", "/v", volume),), network="none"
    )
    with Sandbox(config) as box:
        status = box.wait(READY_TIMEOUT)
    require(status.code == 0, f"the episode on {volume} ended with {status.code}")


def reflinks(scratch: Path, drop: Ordinary) -> Iterator[tuple[str, str]]:
    """Clone the golden volume on XFS and Btrfs, and change the clone by an episode. Yields rows."""
    golden = scratch / "golden.ext4"
    for kind, make in (("XFS", ["mkfs.xfs", "-q", "-m", "reflink=1"]), ("Btrfs", ["mkfs.btrfs", "-q"])):
        if shutil.which(make[0]) is None:
            yield kind, f"skipped: no {make[0]} here"
            continue
        with loop_mounted(scratch, kind.lower(), make, 2 * golden.stat().st_blocks * 512 + (1 << 30)) as point:
            here, episode = point / "golden.ext4", point / "episode.ext4"
            subprocess.run(["cp", "--sparse=always", golden, here], check=True)
            empty = used(point)
            rows: Rows = []
            clone_of(here, episode, rows, reflink="always")
            cloned = used(point) - empty
            shared, whole_size = shared_bytes(episode)
            require(shared == whole_size > 0, f"{kind}: {shared} of {whole_size} bytes of the clone are shared")
            require(cloned < LEEWAY, f"{kind}: cloning took {cloned} bytes")
            for path in (here, episode):
                os.chown(path, NOBODY, NOBODY)
            drop.run("--episode", str(episode))
            grown = used(point) - empty
            still_shared, _ = shared_bytes(episode)
            require(CHANGED <= grown <= CHANGED + LEEWAY, f"{kind}: an episode that wrote {CHANGED} bytes took {grown}")
            require(0 < still_shared < whole_size, f"{kind}: {still_shared} bytes are shared after the episode")
            yield f"{kind}: clone", f"{rows[0][1]}, {shared / 1e6:.1f} MB shared of {whole_size / 1e6:.1f}"
            yield f"{kind}: an episode that writes {CHANGED / 1e6:.1f} MB", f"{grown / 1e6:.1f} MB more in use"


@contextmanager
def loop_mounted(scratch: Path, kind: str, make: list[str], size: int) -> Iterator[Path]:
    """A fresh file system of ``size`` bytes in a sparse file, unmounted and removed afterwards."""
    image, point = scratch / f"{kind}.img", scratch / kind
    point.mkdir()
    with image.open("wb") as file:
        file.truncate(size)
    try:
        made = subprocess.run([*make, image], capture_output=True, text=True, check=False)
        require(made.returncode == 0, f"{make[0]}: {made.stderr}")
        subprocess.run(["mount", "-o", "loop", image, point], check=True)
        try:
            os.chown(point, NOBODY, NOBODY)
            yield point
        finally:
            subprocess.run(["umount", point], check=True)
    finally:
        image.unlink()
        point.rmdir()


def used(point: Path) -> int:
    """Return the bytes in use on a file system, everything written."""
    fd = os.open(point, os.O_RDONLY)
    try:
        subprocess.run(["sync", "--file-system", point], check=True)
        found = os.fstatvfs(fd)
    finally:
        os.close(fd)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def shared_bytes(path: Path) -> tuple[int, int]:
    """Return how many of a file's mapped bytes share their blocks with another file, and how many are mapped."""
    from ext4lite.hostfs import fiemap

    with path.open("rb") as file:
        os.fsync(file.fileno())
        extents = list(fiemap(file.fileno()))
    return sum(extent.length for extent in extents if extent.shared), sum(extent.length for extent in extents)


def clone_of(golden: Path, episode: Path, rows: Rows, reflink: Literal["auto", "always"] = "auto") -> Path:
    """Clone, and add a row with the time. Returns ``episode``."""
    from ext4lite.clone import clone

    result = clone(golden, episode, reflink=reflink)
    how = {"copy": "sparse copy: no reflinks here", "backing": "delta: no reflinks here"}.get(result.method, "reflink")
    rows.append((f"clone {episode.name} ({how})", show(result.seconds)))
    return episode


def ext4lite(*words: str) -> None:
    """Run the ``ext4lite`` command."""
    subprocess.run([sys.executable, "-c", "from ext4lite.cli import main; main()", *words], check=True)


def file_system(path: Path) -> str:
    """Name the file system of ``path``."""
    found = subprocess.run(["stat", "--file-system", "--format=%T", path], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def timed(action: Callable[[], object]) -> float:
    """Run and return the seconds."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def show(seconds: float) -> str:
    """Write a time with three digits."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


def print_rows(title: str, rows: Rows) -> None:
    """Print a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "measured", title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def require(condition: bool, otherwise: str) -> None:
    """Fail with ``otherwise`` unless ``condition`` holds."""
    if not condition:
        raise DemoFailed(otherwise)


if __name__ == "__main__":
    main()
