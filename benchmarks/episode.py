"""Episodes: exec to first instruction, dockerd ready, close; beside stock runsc and the host's own dockerd.

gvx runs as an ordinary user (uid 65534 when this is started as root); stock runsc (built from the same Go module) and
the host's dockerd need root. All three run the same ``docker:dind`` root file system with a clone of the same golden
volume at /var/lib/docker, the same dockerd arguments, and the same wait for ``GET /info`` inside the guest. The clock
starts at exec of gvx-sentry, runsc or the docker client. Clones themselves are measured in ``golden``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import Report, Row, timed
from fixtures import FixtureError, image_path
from gvx import Config, Mount, Sandbox
from gvx.config import Publish
from gvx.demo import Ordinary
from gvx.images import ImageCache, sentry_binary
from gvx.residue import running

GOLDEN_IMAGES = ("python", "swe-task")
NATIVE = Path(__file__).parents[1] / "native"
PLAIN = "dockerd-entrypoint.sh dockerd --host=unix:///var/run/docker.sock"
BARE = f"{PLAIN} --iptables=false --ip6tables=false --bridge=none"
"""Without a network, since not every host's kernel has what dockerd's needs."""
DIND_NEEDS = (
    *(f"--cap-add={name}" for name in ("SYS_ADMIN", "NET_ADMIN", "NET_RAW", "MKNOD", "SYS_CHROOT", "SYS_PTRACE")),
    *(f"--security-opt={name}=unconfined" for name in ("seccomp", "apparmor", "systempaths")),
)
"""Not --privileged itself: on a host that lacks a capability, runc cannot give all of them."""
WAIT = (
    "import socket, time\n"
    "while True:\n"
    "    try:\n"
    "        s = socket.socket(socket.AF_UNIX); s.connect('/var/run/docker.sock')\n"
    "        s.sendall(b'GET /info HTTP/1.0\\r\\n\\r\\n')\n"
    "        if s.recv(12).endswith(b'200'): break\n"
    "    except OSError: pass\n"
    "    time.sleep(0.01)\n"
    "print('ready', flush=True)\n"
)


def until_ready(daemon: str) -> list[str]:
    """Return the guest's command: dockerd in the background, a line on stdout once it answers, then wait."""
    return ["sh", "-c", f'{daemon} >/tmp/dockerd.log 2>&1 & python3 -c "$0"; wait', WAIT]


def run(runs: int) -> list[Report]:
    """Measure everything that this user may; one report."""
    report = Report("Episodes")
    parent = os.environ.get("GVX_BENCH_DIR") or "/tmp"
    scratch = Path(tempfile.mkdtemp(prefix="gvx-bench-", dir=parent))
    try:
        golden = make_golden(scratch)
        ordinary = Ordinary.prepare(scratch)
        # A copy that nobody else runs: what counts as still there when an episode closes is ours alone.
        ordinary.environment["GVX_SENTRY"] = str(shutil.copy2(sentry_binary(), scratch / "gvx-sentry"))
        samples = measured_by(ordinary, scratch, golden, runs)
        root = os.geteuid() == 0
        if root:
            for name, measure in (("stock runsc", ready_in_runsc), ("host dockerd", ready_in_docker)):
                samples[f"docker ready, {name}"] = measure(scratch, golden, runs)
        aims = {
            "exec to first instruction": "< 60 ms",
            "close: SIGKILL until all is gone": "< 20 ms",
            "docker ready, gvx": "< 0.8 s",
        }
        peers = {"docker ready, stock runsc": "docker ready, gvx", "docker ready, host dockerd": "docker ready, gvx"}
        for name, seconds in samples.items():
            report.add(Row(name, seconds, peers.get(name, ""), aims.get(name, "")))
    finally:
        shutil.rmtree(scratch)
    return [report]


def make_golden(scratch: Path) -> Path:
    """Make the golden volume with those of the images that are built."""
    golden = scratch / "golden.ext4"
    words: list[str] = []
    for name in GOLDEN_IMAGES:
        try:
            words += ["--image", str(image_path(name))]
        except FixtureError as error:
            print(f"benchmarks: without {name}: {error}", file=sys.stderr)
    code = "from ext4lite.cli import main; main()"
    subprocess.run([sys.executable, "-c", code, "mkgolden", *words, "--size", "16G", str(golden)], check=True)
    golden.chmod(0o666)
    return golden


def measured_by(ordinary: Ordinary, scratch: Path, golden: Path, runs: int) -> dict[str, list[float]]:
    """Run :func:`measure_gvx` as the ordinary user."""
    done = subprocess.run(
        [ordinary.python, "-m", "benchmarks.episode", str(scratch), str(golden), str(runs)],
        env=ordinary.environment,
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        check=True,
        **ordinary.identity,
    )
    return dict(json.loads(done.stdout))


def measure_gvx(scratch: Path, golden: Path, runs: int) -> dict[str, list[float]]:
    """All that gvx does itself, by whoever runs this. Seconds by name."""
    from ext4lite.clone import clone

    ImageCache.default().import_(image_path("dind"))
    samples: dict[str, list[float]] = {}
    volume = scratch / "episode.ext4"

    def add(name: str, seconds: float) -> None:
        samples.setdefault(name, []).append(seconds)

    def fresh() -> Path:
        volume.unlink(missing_ok=True)
        return volume

    for _ in range(runs + 1):  # the first warms the page cache and is dropped
        clone(golden, fresh())
        with guest(["echo", "ready"], volume, network=False) as (box, first_output):
            add("exec to first instruction", (box.wait_started(60).t_ns - box.exec_ns) / 1e9)
            add("exec to first output", first_output())
            box.wait(60)
        clone(golden, fresh())
        with guest(until_ready(BARE), volume, network=False) as (box, first_output):
            add("docker ready, gvx", first_output())
            add("close: SIGKILL until all is gone", timed(lambda: close(box)))
        clone(golden, fresh())
        with guest(until_ready(PLAIN), volume, network=True) as (_, first_output):
            add("docker ready, gvx, with bridge and iptables", first_output())
        clone(golden, fresh())
        with published(volume, scratch / "docker.sock") as (box, ready):
            add("docker ready through a published socket (dockerd sleeps 1 s before it serves TCP)", ready())
    fresh()
    return {name: seconds[1:] for name, seconds in samples.items()}


@contextmanager
def guest(command: list[str], volume: Path, *, network: bool) -> Iterator[tuple[Sandbox, Callable[[], float]]]:
    """Start an episode. Yields it, and a function that waits for the first line and returns the seconds since exec."""
    config = Config(
        image="docker:dind",
        entrypoint="",
        command=tuple(command),
        mounts=(Mount("volume", "/var/lib/docker", volume),),
        network="nat" if network else "none",
    )
    with Sandbox(config, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as box:
        output = box.stdout
        assert output is not None

        def first_output() -> float:
            if output.readline() != b"ready\n":
                raise RuntimeError("the guest ended before it was ready")
            return (time.monotonic_ns() - box.exec_ns) / 1e9

        yield box, first_output


@contextmanager
def published(volume: Path, socket: Path) -> Iterator[tuple[Sandbox, Callable[[], float]]]:
    """Start the image's own dockerd with its API published. The function waits for the SDK's ``info()``."""
    import docker

    config = Config(
        image="docker:dind",
        command=("--tls=false",),
        env={"DOCKER_TLS_CERTDIR": ""},
        mounts=(Mount("volume", "/var/lib/docker", volume),),
        publish=(Publish(2375, path=socket),),
    )
    null = subprocess.DEVNULL
    with Sandbox(config, stdin=null, stdout=null, stderr=null) as box:

        def ready() -> float:
            while True:
                try:
                    docker.DockerClient(base_url=f"unix://{socket}", timeout=60).info()
                    return (time.monotonic_ns() - box.exec_ns) / 1e9
                except Exception:
                    if box.poll() is not None or time.monotonic_ns() - box.exec_ns > 60e9:
                        raise
                    time.sleep(0.01)

        yield box, ready


def close(box: Sandbox) -> None:
    """Kill the episode and wait until the host has nothing of it."""
    box.kill()
    while running(sentry_binary()):
        time.sleep(0.0005)


@contextmanager
def kernel_mounted_clone(scratch: Path, golden: Path) -> Iterator[Path]:
    """A clone of the golden volume, mounted by the kernel: what the peers have at /var/lib/docker."""
    from ext4lite.clone import clone

    image, point = scratch / "peer.ext4", scratch / "peer"
    clone(golden, image, backing="never")  # the kernel mounts no deltas
    point.mkdir()
    try:
        subprocess.run(["mount", "-o", "loop", image, point], check=True)
        try:
            yield point
        finally:
            subprocess.run(["umount", point], check=True)
    finally:
        point.rmdir()
        image.unlink()


def time_to_line(argv: list[Any], **options: Any) -> tuple[float, subprocess.Popen[bytes]]:
    """Start a command and wait for the line ``ready``. Returns the seconds and the process, which goes on."""
    start = time.perf_counter()
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, **options)
    assert process.stdout is not None
    line = process.stdout.readline()
    if line != b"ready\n":
        raise RuntimeError(f"{argv[0]} said {line!r} and ended with {process.wait()}")
    return time.perf_counter() - start, process


def ready_in_runsc(scratch: Path, golden: Path, runs: int) -> list[float]:
    """Seconds until dockerd is ready under ``runsc run`` with a bundle, no gofer options changed, systrap."""
    runsc = scratch / "runsc"
    subprocess.run(
        [NATIVE.parent / ".ci" / "go", "build", "-ldflags=-s -w", "-o", runsc, "gvisor.dev/gvisor/runsc"],
        cwd=NATIVE,
        check=True,
    )
    bundle = scratch / "bundle"
    unpack(image_path("dind"), bundle / "rootfs")
    state = scratch / "runsc-state"
    # runsc leaves a mount in its state directory: in a mount namespace of its own, that goes with it.
    private = ("unshare", "--mount", "--propagation=private")
    flags = [str(runsc), f"--root={state}", "--ignore-cgroups", "--net-raw", "--TESTONLY-nftables"]
    samples = []
    for number in range(runs + 1):
        with kernel_mounted_clone(scratch, golden) as point:
            (bundle / "config.json").write_text(json.dumps(oci_spec(until_ready(BARE), point)))
            name = f"bench-{number}"
            seconds, process = time_to_line(
                [*private, *flags, "run", f"--bundle={bundle}", name], stderr=subprocess.DEVNULL
            )
            subprocess.run([*flags, "kill", name, "KILL"], check=True, stderr=subprocess.DEVNULL)
            process.wait(60)
            samples.append(seconds)
    shutil.rmtree(bundle)
    return samples[1:]


def unpack(archive: Path, root: Path) -> None:
    """Unpack a docker-archive's layers (the dind image has no whiteouts)."""
    with tempfile.TemporaryDirectory(dir=root.parents[1]) as temporary:
        subprocess.run(["tar", "-xf", archive, "-C", temporary], check=True)
        root.mkdir(parents=True)
        for layer in json.loads(Path(temporary, "manifest.json").read_bytes())[0]["Layers"]:
            subprocess.run(["tar", "-xf", Path(temporary, layer), "-C", root], check=True)


def oci_spec(args: list[str], docker_root: Path) -> dict[str, Any]:
    """A bundle's config.json: all capabilities, a network namespace of its own, ``docker_root`` at /var/lib/docker."""
    capabilities = subprocess.run(["capsh", "--print"], capture_output=True, text=True, check=True).stdout
    bounding = next(line for line in capabilities.splitlines() if line.startswith("Bounding set"))
    every = [name.upper() for name in bounding.partition("=")[2].split(",")]
    mounts = [("/proc", "proc"), ("/dev", "tmpfs"), ("/sys", "sysfs"), ("/sys/fs/cgroup", "cgroup"), ("/tmp", "tmpfs")]
    return {
        "ociVersion": "1.0.0",
        "root": {"path": "rootfs"},
        "hostname": "bench",
        "process": {
            "args": args,
            "cwd": "/",
            "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "DOCKER_TLS_CERTDIR="],
            "user": {"uid": 0, "gid": 0},
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted", "inheritable"), every),
        },
        "mounts": [
            *({"destination": where, "type": kind, "source": kind} for where, kind in mounts),
            {"destination": "/var/lib/docker", "type": "bind", "source": str(docker_root), "options": ["rbind", "rw"]},
        ],
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network")]},
    }


def ready_in_docker(scratch: Path, golden: Path, runs: int) -> list[float]:
    """Seconds until dockerd is ready in a container of the host's kernel, with what dind needs of ``--privileged``."""
    from conformance.host_docker import HostDocker

    data = scratch / "host-docker"
    samples = []
    with HostDocker(data) as host:
        host.docker("load", "-i", str(image_path("dind")))
    for number in range(runs + 1):
        # The daemon has a mount namespace of its own: it sees what was mounted before it started.
        with kernel_mounted_clone(scratch, golden) as point, HostDocker(data) as host:
            words = ["run", "--rm", "--network=none", f"--name=bench-{number}", "--entrypoint=", *DIND_NEEDS]
            argv = ["docker", *words, f"-v={point}:/var/lib/docker", "docker:dind", *until_ready(BARE)]
            seconds, process = time_to_line(argv, env=host.environment, stderr=subprocess.DEVNULL)
            host.docker("kill", f"bench-{number}")
            process.wait(60)
            samples.append(seconds)
    return samples[1:]


def main() -> None:
    """``python -m benchmarks.episode SCRATCH GOLDEN RUNS``: the part that runs as an ordinary user."""
    parser = argparse.ArgumentParser()
    parser.add_argument("scratch", type=Path)
    parser.add_argument("golden", type=Path)
    parser.add_argument("runs", type=int)
    options = parser.parse_args()
    json.dump(measure_gvx(options.scratch, options.golden, options.runs), sys.stdout)


if __name__ == "__main__":
    main()
