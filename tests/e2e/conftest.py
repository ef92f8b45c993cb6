"""What the end-to-end tests share: an ordinary user with a scratch directory, and images in his cache."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from fixtures import image_path
from gvx.demo import Ordinary
from gvx.images import ImageCache, sentry_binary
from gvx.residue import HostState, left_behind

IMAGE_NAMES = ("dind",)
_OTHERS = re.compile(r"/tmp/gvx-\d+(/|$)")
"""Where episodes of users without XDG_RUNTIME_DIR are: a demo or a benchmark that runs beside the tests."""


@dataclass(slots=True)
class User:
    """Runs things as an ordinary user (uid 65534 when the tests run as root), never as root.

    ``home`` is his; ``sentry`` is a copy of gvx-sentry that nobody else runs, so that its processes are all ours, and
    the private directories of his episodes are in ``runtime`` and not beside those of others with the same uid.
    """

    home: Path
    ordinary: Ordinary
    sentry: Path
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def runtime(self) -> Path:
        """The directory above those of his episodes; it exists while there are any."""
        return self.home / "run" / "gvx"

    def popen(self, *argv: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start a command; stdin is empty, stdout and stderr are pipes unless given."""
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        environment = {**self.ordinary.environment, **self.extra}
        return subprocess.Popen(argv, env=environment, cwd=self.home, **self.ordinary.identity, **options)

    def python(self, code: str, *words: str, timeout: float = 60, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run Python code that can import gvx and ext4lite."""
        return self._finish(self.popen(self.ordinary.python, "-c", code, *words, **options), timeout)

    def start(self, *words: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start ``gvx-launch``."""
        return self.popen(self.ordinary.python, "-c", "from gvx.cli import main; main()", *words, **options)

    def launch(
        self, *words: str, timeout: float = 60, input: bytes | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run ``gvx-launch``."""
        if input is not None:
            options["stdin"] = subprocess.PIPE
        return self._finish(self.start(*words, **options), timeout, input)

    def sh(
        self, script: str, *options: str, timeout: float = 60, input: bytes | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a shell script in a guest of docker:dind."""
        return self.launch(
            "run", *options, "--entrypoint", "", "docker:dind", "sh", "-c", script, timeout=timeout, input=input
        )

    def look(self) -> HostState:
        """Take the host's state, this user's scratch directory included."""
        state = HostState.take(self.sentry, [self.home])
        return replace(state, files=frozenset(path for path in state.files if not _OTHERS.match(path)))

    @staticmethod
    def _finish(
        process: subprocess.Popen[bytes], timeout: float, input: bytes | None = None
    ) -> subprocess.CompletedProcess[str]:
        try:
            stdout, stderr = process.communicate(input, timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            stdout, stderr = process.communicate()
            pytest.fail(f"no end within {timeout} s; stdout: {stdout[-2000:]!r}; stderr: {stderr[-2000:]!r}")
        return subprocess.CompletedProcess(
            process.args,
            process.returncode,
            (stdout or b"").decode(errors="replace"),
            (stderr or b"").decode(errors="replace"),
        )


@pytest.fixture(scope="session")
def user() -> Iterator[User]:
    """An ordinary user whose cache has docker:dind."""
    home = Path(tempfile.mkdtemp(prefix="gvx-e2e-", dir="/tmp"))  # short: a unix socket's path has at most 107 bytes
    try:
        home.chmod(0o755)
        ordinary = Ordinary.prepare(home)
        sentry = Path(shutil.copy2(sentry_binary(), home / "gvx-sentry"))
        ordinary.environment["GVX_SENTRY"] = str(sentry)
        run = home / "run"
        run.mkdir(mode=0o700)
        os.chown(run, *(ordinary.identity.get(key, -1) for key in ("user", "group")))
        ordinary.environment["XDG_RUNTIME_DIR"] = str(run)
        someone = User(home, ordinary, sentry)
        if ready := os.environ.get("GVX_E2E_CACHE"):  # a cache made before, to save the import while working on a test
            ordinary.environment["XDG_CACHE_HOME"] = ready
        for name in () if ready else IMAGE_NAMES:
            done = someone.launch("images", "import", str(image_path(name)), timeout=300)
            assert done.returncode == 0, done.stderr
        # The first episode writes its caches (the seccomp program); what later ones add is residue.
        assert someone.sh("true").returncode == 0
        yield someone
    finally:
        shutil.rmtree(home)


@pytest.fixture
def nothing_left(user: User) -> Iterator[Callable[[], None]]:
    """Fail the test if it leaves anything on the host. Returns a function that checks at once.

    Of mounts, those count that have to do with us: other tests may run beside these.
    """
    before = user.look()

    def check() -> None:
        left = left_behind(before, user.look)
        left = [line for line in left if "gvx" in line or not line.startswith("mounts: ")]
        assert not left, left

    yield check
    check()


def wait_for(condition: Callable[[], Any], timeout: float = 20.0) -> Any:
    """Wait until ``condition`` is true; returns its value."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, "this did not happen in time"
        time.sleep(0.01)
    return value


def descendants(pid: int) -> list[int]:
    """The living children of a process, and theirs, parents first."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir() if Path(f"/proc/{pid}").exists() else ():
        for child in (task / "children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


@pytest.fixture(scope="session")
def cache(user: User) -> ImageCache:
    """The user's image cache."""
    return ImageCache(Path(user.ordinary.environment["XDG_CACHE_HOME"], "gvx", "images"))


def is_root() -> bool:
    """Whether the tests run as root."""
    return os.geteuid() == 0
