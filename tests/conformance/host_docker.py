"""A real dockerd on the host, the judge of golden volumes and image archives.  For tests only; needs root.

The daemon runs in its own mount and PID namespace with its own /run: it finds no other containerd, whatever it mounts
and starts ends with it, and the host's mount table never changes, not even when it is killed.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

NO_NETWORK = ("--bridge=none", "--iptables=false", "--ip6tables=false")
"""Arguments for a daemon that leaves the host's network alone: its containers take ``--network none`` or ``host``."""


class HostDockerError(Exception):
    """The daemon did not start or a docker command failed; the message has its last output."""


class HostDocker:
    """dockerd on a data root, as a context manager.

    >>> with HostDocker(Path("/mnt/golden")) as host:          # doctest: +SKIP
    ...     host.docker("run", "--rm", "--network", "none", "python:3.11-slim", "python", "-c", "print(6*7)").stdout
    '42\\n'

    `data_root` is the daemon's ``--data-root``.  With `volume`, an ext4 image such as a clone of a golden volume, the
    daemon's own mount namespace has that mounted there, read-write and by a loop device that is gone after `stop`;
    without, what is mounted there is the caller's affair.
    `socket` is the daemon's unix socket while it runs, `log` its output.
    """

    def __init__(
        self,
        data_root: Path,
        *,
        volume: Path | None = None,
        storage_driver: str = "overlay2",
        arguments: Sequence[str] = NO_NETWORK,
        dockerd: str = "dockerd",
        client: str = "docker",
        ready_timeout: float = 60.0,
    ) -> None:
        self.data_root = data_root
        self._volume = volume
        self._dockerd = dockerd
        self._client = client
        self._arguments = (f"--storage-driver={storage_driver}", *arguments)
        self._ready_timeout = ready_timeout
        self._process: subprocess.Popen[bytes] | None = None
        # Short, since a unix socket's path has at most 107 bytes.
        self._directory = Path(tempfile.mkdtemp(prefix="gvxd-", dir="/tmp"))
        self._cgroup = f"gvx-test-{self._directory.name.removeprefix('gvxd-')}"
        self.socket = self._directory / "docker.sock"
        self.log = self._directory / "dockerd.log"

    @staticmethod
    def missing() -> str | None:
        """Why there can be no daemon here, or None: for ``pytest.mark.skipif``."""
        if os.geteuid() != 0:
            return "needs root"
        path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
        absent = [name for name in ("dockerd", "containerd", "docker", "unshare") if not shutil.which(name, path=path)]
        return f"not installed: {', '.join(absent)}" if absent else None

    def __enter__(self) -> HostDocker:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def environment(self) -> dict[str, str]:
        """The environment for a docker client that shall talk to this daemon."""
        path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
        config = self._directory / "client"
        kept = {key: value for key, value in os.environ.items() if not key.startswith("DOCKER_")}
        return {**kept, "PATH": path, "DOCKER_HOST": f"unix://{self.socket}", "DOCKER_CONFIG": str(config)}

    def start(self) -> None:
        """Start the daemon and wait until it answers; HostDockerError when it does not in time."""
        if self._process:
            raise HostDockerError("already started")
        inside = "mount -t tmpfs -o mode=755 tmpfs /run && "
        if self._volume:
            inside += f"mount -t ext4 -o loop {shlex.quote(str(self._volume))} {shlex.quote(str(self.data_root))} && "
        command = [
            *("setpriv", "--pdeathsig", "KILL"),
            *("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"),
            *("sh", "-c", inside + 'exec "$@"', "sh", self._dockerd),
            f"--data-root={self.data_root}",
            f"--exec-root={self._directory / 'exec'}",
            f"--pidfile={self._directory / 'docker.pid'}",
            f"--host=unix://{self.socket}",
            f"--cgroup-parent=/{self._cgroup}",
            *self._arguments,
        ]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )
        deadline = time.monotonic() + self._ready_timeout
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = self._tail()
                self.stop()
                raise HostDockerError(f"dockerd did not become ready: {tail}")
            time.sleep(0.05)

    def _answers(self) -> bool:
        if not self.socket.exists():
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.docker("version", "--format", "{{.Server.Version}}", check=False, timeout=10).returncode == 0
        return False

    def _tail(self, lines: int = 8) -> str:
        with contextlib.suppress(OSError):
            return " | ".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        return "no log"

    def docker(
        self, *arguments: str, stdin: bytes | None = None, check: bool = True, timeout: float = 300.0
    ) -> subprocess.CompletedProcess[str]:
        """Run ``docker ARGUMENTS…`` against this daemon; with `check`, HostDockerError when it fails."""
        done = subprocess.run(
            [self._client, *arguments],
            input=stdin or b"",
            capture_output=True,
            env=self.environment,
            timeout=timeout,
            check=False,
        )
        result = subprocess.CompletedProcess(
            done.args, done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
        )
        if check and result.returncode:
            raise HostDockerError(
                f"docker {' '.join(arguments)} exited with {result.returncode}: {result.stderr.strip()}\n{self._tail()}"
            )
        return result

    def stop(self, timeout: float = 30.0) -> None:
        """Stop the daemon, its containers and everything they left; a second call does nothing."""
        if self._process:
            for pid in self._children(self._process.pid):
                # The first process of the PID namespace: the daemon.  When it ends, so does everything it started.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
            self._wait_unmounted()
        self._remove_cgroups()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _wait_unmounted(self) -> None:
        """Wait until the volume's bytes are final: its mount and loop device end a moment after the last process."""
        deadline = time.monotonic() + 30
        while self._volume and _has_loop_device(self._volume):
            if time.monotonic() > deadline:
                raise HostDockerError(f"{self._volume} is still mounted after the daemon's end")
            time.sleep(0.02)

    @staticmethod
    def _children(pid: int) -> list[int]:
        with contextlib.suppress(OSError):
            return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return []

    def _remove_cgroups(self) -> None:
        for hierarchy in (Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").glob("*")):
            top = hierarchy / self._cgroup
            if top.is_dir():
                for directory, _, _ in os.walk(top, topdown=False):
                    with contextlib.suppress(OSError):
                        Path(directory).rmdir()


def _has_loop_device(image: Path) -> bool:
    wanted = str(image.resolve())
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            if backing.read_text().rstrip("\n") == wanted:
                return True
    return False


@contextlib.contextmanager
def fresh_docker(parent: Path | None = None, *, size: int = 16 << 30) -> Iterator[HostDocker]:
    """A daemon on a new, empty data root, which is removed afterwards.

    The data root is a sparse image of `size` bytes under `parent`: to remove one file is quick, ten thousands are not.
    """
    directory = Path(tempfile.mkdtemp(prefix="gvxd-data-", dir=parent or "/tmp"))
    image, data_root = directory / "image.ext4", directory / "root"
    data_root.mkdir()
    host = HostDocker(data_root, volume=image)
    try:
        with image.open("wb") as handle:
            handle.truncate(size)
        mke2fs = ["mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-E", "lazy_itable_init=1,nodiscard", str(image)]
        subprocess.run(mke2fs, check=True, stdin=subprocess.DEVNULL, env=host.environment)
        with host:
            yield host
    finally:
        host.stop()
        shutil.rmtree(directory, ignore_errors=True)
