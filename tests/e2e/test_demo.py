"""The demo's whole path: by an ordinary user, and inside a container that has been stripped of everything."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest
from e2e.conftest import is_root

from conformance.host_docker import HostDocker
from fixtures import cache_dir, image_path
from gvx.images import sentry_binary

pytestmark = [pytest.mark.sentry, pytest.mark.images, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).parents[2]
PROOFS = (
    "docker images: python:3.11-slim (no pull, no load)",
    "docker run --rm python:3.11-slim python -c 'print(6*7)': 42",
    "docker ps -a: left-in-the-first in the first episode, nothing in the second",
)
NOTHING_LEFT = "Nothing is left: no process, no mount, no socket, no file."


def test_the_demo() -> None:
    done = subprocess.run([sys.executable, "-m", "gvx.demo"], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    everything = " ".join((done.stdout + done.stderr).split())
    for proof in (*PROOFS, "e2fsck -fn of the first volume: clean", NOTHING_LEFT):
        assert proof in everything
    assert f"uid {65534 if is_root() else os.geteuid()}," in everything
    if is_root():
        for kind in ("XFS: clone", "Btrfs: clone"):
            assert kind in everything


@pytest.mark.root
@pytest.mark.skipif(HostDocker.missing() is not None, reason=str(HostDocker.missing()))
@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="the image's Python must be able to load this one's packages"
)
def test_the_demo_in_a_container_without_any_privileges() -> None:
    """--cap-drop=ALL --user 1000 no-new-privileges, Docker's default seccomp profile, no network."""
    shown = [REPOSITORY, cache_dir(), Path(sysconfig.get_path("purelib")), sentry_binary().parent]
    with tempfile.TemporaryDirectory(prefix="gvx-data-", dir="/tmp") as data, HostDocker(Path(data)) as host:
        host.docker("load", "-i", str(image_path("python")))
        done = host.docker(
            *("run", "--rm", "--network=none", "--cap-drop=ALL", "--user=1000", "--security-opt=no-new-privileges"),
            *(f"--volume={path}:{path}:ro" for path in dict.fromkeys(shown)),
            *("--env=HOME=/tmp/home", "--env=XDG_CACHE_HOME=/tmp/cache", f"--env=GVX_SENTRY={sentry_binary()}"),
            f"--env=GVX_FIXTURES_CACHE={cache_dir()}",
            f"--env=PYTHONPATH={REPOSITORY / 'launcher'}:{REPOSITORY}:{sysconfig.get_path('purelib')}",
            *("python:3.11-slim", "python3", "-B", "-m", "gvx.demo"),
            check=False,
            timeout=500,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    everything = " ".join((done.stdout + done.stderr).split())
    for proof in (*PROOFS, "uid 1000,", NOTHING_LEFT):
        assert proof in everything
