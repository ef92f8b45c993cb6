"""Making and cloning golden volumes, against what the same bytes cost elsewhere.

Input: the OCI layouts (gzip layers) of ``python:3.11-slim`` and ``swe-task``. Peers: decompressing and hashing the same
layers with the same libraries (the floor), ``mke2fs -d`` of the same tree (the volume's own content, mounted by the
kernel), ``docker load`` of the same images into a fresh dockerd on the same disk. Every contestant's output is on
stable storage when its clock stops. Root is needed for the kernel mount and dockerd.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

from benchmarks.harness import Report, Row, fsync_path, loop_mounted, removed_afterwards, timed
from ext4lite.clone import clone
from ext4lite.volume import Volume
from fixtures import image_path

IMAGES = ("python", "swe-task")
CHUNK = 4 << 20


def blobs_of(layout: Path) -> list[Path]:
    """The layer blobs of an OCI layout, each once, in order."""

    def blob(digest: str) -> Path:
        return layout / "blobs" / digest.replace(":", "/")

    index = json.loads((layout / "index.json").read_bytes())
    found: list[Path] = []
    for entry in index["manifests"]:
        manifest = json.loads(blob(entry["digest"]).read_bytes())
        found += [blob(layer["digest"]) for layer in manifest["layers"]]
    return list(dict.fromkeys(found))


def decompress_and_hash(blobs: list[Path]) -> None:
    """Read gzip ``blobs``, hash what they hold compressed and decompressed: the least any importer must do."""
    from isal import igzip_threaded

    for path in blobs:
        digest = hashlib.sha256()
        with igzip_threaded.open(path, "rb", threads=1) as stream:  # type: ignore[no-untyped-call]
            while chunk := stream.read(CHUNK):
                digest.update(chunk)


def make_golden(target: Path, layouts: list[Path]) -> None:
    """Run ``ext4lite mkgolden`` as a user would."""
    command = [sys.executable, "-m", "ext4lite", "mkgolden"]
    for layout in layouts:
        command += ["--image", str(layout)]
    subprocess.run([*command, str(target)], check=True, stdout=subprocess.DEVNULL)


def docker_load(scratch: Path, archives: list[Path]) -> float:
    """Seconds that ``docker load`` of ``archives`` takes in a fresh dockerd whose data is on the same disk."""
    from conformance.host_docker import HostDocker

    with tempfile.TemporaryDirectory(dir=scratch) as data, HostDocker(Path(data, "docker")) as host:

        def load() -> None:
            for archive in archives:
                host.docker("load", "-i", str(archive))
            os.sync()

        return timed(load)


def golden_report(scratch: Path, golden: Path, runs: int) -> Report:
    """Measure ``mkgolden`` into ``golden`` (left there) beside its peers."""
    report = Report("golden volume of python:3.11-slim and swe-task (gzip layers)")
    layouts = [image_path(name, "oci-gzip") for name in IMAGES]
    blobs = list(dict.fromkeys(b for layout in layouts for b in blobs_of(layout)))
    unique = list({b.name: b for b in blobs}.values())
    floor = report.add(Row("decompress + sha256", [timed(lambda: decompress_and_hash(unique)) for _ in range(runs)]))
    ours: list[float] = []
    for _ in range(runs):
        golden.unlink(missing_ok=True)
        ours.append(timed(lambda: make_golden(golden, layouts)))
    report.add(Row("ext4lite mkgolden", ours, "floor + mke2fs", "at most 1.5 x"))
    if os.geteuid() != 0:
        report.rows[-1].against = floor.name
        return report
    other = scratch / "mke2fs.ext4"
    theirs: list[float] = []
    with removed_afterwards(other), loop_mounted(golden, "ro") as tree:
        for _ in range(runs):
            other.unlink(missing_ok=True)

            def mke2fs() -> None:
                subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", str(tree), str(other), "16G"], check=True)
                fsync_path(other)

            theirs.append(timed(mke2fs))
    report.add(Row("mke2fs -d, same tree", theirs))
    report.add(
        Row("floor + mke2fs", [a + b for a, b in zip(floor.seconds, theirs, strict=True)], note="sum of the two")
    )
    archives = [image_path(name, "docker") for name in IMAGES]
    report.add(
        Row(
            "docker load, fresh dockerd",
            [docker_load(scratch, archives) for _ in range(min(runs, 2))],
            note="uncompressed archives",
        )
    )
    report.rows.append(Row("mkgolden again", ours, "docker load, fresh dockerd"))
    return report


def clone_report(scratch: Path, golden: Path, runs: int) -> Report:
    """Measure ``clone`` of ``golden`` on this disk's file system and, where root, on XFS and Btrfs made for it."""
    report = Report(f"clone of a golden volume ({golden.stat().st_blocks * 512 / 1e9:.2f} GB used)")

    def samples(where: Path, reflink: Literal["auto", "always", "never"], count: int) -> list[float]:
        source = where / "golden.ext4"
        if not source.exists():
            subprocess.run(["cp", "--sparse=always", str(golden), str(source)], check=True)
        out = []
        for number in range(count):
            episode = where / f"episode-{number}.ext4"
            with removed_afterwards(episode):
                out.append(timed(lambda episode=episode: clone(source, episode, reflink=reflink)))  # type: ignore[misc]
        return out

    if os.geteuid() == 0:
        for kind, mkfs in (("xfs", ["mkfs.xfs", "-q", "-m", "reflink=1"]), ("btrfs", ["mkfs.btrfs", "-q"])):
            disk = scratch / f"{kind}.disk"
            with removed_afterwards(disk):
                with disk.open("wb") as file:
                    file.truncate(24 << 30)
                subprocess.run([*mkfs, str(disk)], check=True)
                with loop_mounted(disk) as mounted:
                    report.add(
                        Row(f"clone on {kind} (reflink)", samples(mounted, "always", runs * 5), aim="below 10 ms")
                    )
    here = scratch / "here"
    here.mkdir()
    try:
        report.add(Row("clone on this disk (sparse copy)", samples(here, "never", max(2, runs // 2))))
        source, episode = here / "golden.ext4", here / "delta.ext4"
        times = []
        for _ in range(runs * 5):
            with removed_afterwards(episode):
                times.append(timed(lambda: clone(source, episode, backing="always")))
        report.add(Row("clone on this disk (delta)", times, aim="below 10 ms"))
        clone(source, episode, backing="always")
        read_all(source)  # warms the page cache
        report.add(Row("read every file of the golden volume", [timed(lambda: read_all(source)) for _ in range(2)]))
        report.add(Row("read every file of a delta over it", [timed(lambda: read_all(episode)) for _ in range(2)]))
    finally:
        shutil.rmtree(here)
    return report


def read_all(image: Path) -> int:
    """Read every file of a volume; return the bytes."""
    total = 0
    with Volume.open(image) as volume:
        for _, ino in volume.walk():
            if volume.inode(ino).type == stat.S_IFREG:
                total += sum(len(chunk) for chunk in volume.chunks(ino))
    return total


def run(runs: int) -> list[Report]:
    """Run this module's benchmarks ``runs`` times each and return their reports."""
    scratch = Path(tempfile.mkdtemp(prefix="gvx-bench-", dir=os.environ.get("GVX_BENCH_DIR", "/var/tmp")))
    try:
        golden = scratch / "golden.ext4"
        return [golden_report(scratch, golden, runs), clone_report(scratch, golden, runs)]
    finally:
        shutil.rmtree(scratch)
