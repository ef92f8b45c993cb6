"""The storage core: reading, filling, recovering and compacting volumes, memory, short commands; beside its peers.

Everything is warm: sources and images are in the page cache. What writes is measured until it is on the disk. Root is
needed for the kernel's mounts and for crashing them; without it only what needs no mount is measured.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import peers, readers, startup, trees, volumes
from benchmarks.harness import (
    Measured,
    Report,
    Row,
    clean_environment,
    fsync_path,
    loop_mounted,
    measured,
    removed_afterwards,
    timed,
)
from ext4lite.cli import COMMANDS

PROGRAM = str(startup.PROGRAM)
MEMORY = "< 200 MB"
READ_FILES, FILL_FILES = 10_000, 30_000
MANY_DIRECTORIES, MANY_FILES = 10_000, 99
PART = 1000
"""Directories of the volume with a million inodes that ``cp-out`` and ``rm`` are given: 100,000 inodes."""


def run(runs: int) -> Iterator[Report]:
    """Measure everything ``runs`` times (slow peers and what takes minutes less often); each table when it is ready."""
    scratch = Path(tempfile.mkdtemp(prefix="gvx-bench-", dir=os.environ.get("GVX_BENCH_DIR", "/var/tmp")))
    try:
        small = trees.make(scratch / "small", READ_FILES)
        large = trees.make(scratch / "large", FILL_FILES)
        tables: list[Callable[[], Report]] = [
            lambda: reading(scratch, small, runs),
            lambda: filling(scratch, large, runs),
            lambda: recovery(scratch, runs),
            lambda: compaction(scratch, large, runs),
            lambda: startup.report(scratch, runs),
            lambda: memory(scratch, small),
        ]
        for table in tables:
            report = table()
            if report.rows:
                yield report
    finally:
        shutil.rmtree(scratch)


def mke2fs(tree: Path, image: Path, size: str) -> list[str]:
    """Return the command that makes an ext4 volume of e2fsprogs's defaults with a tree in it."""
    return ["mke2fs", "-qF", "-t", "ext4", "-d", str(tree), str(image), size]


# -- reading ----------------------------------------------------------------------------------------------------------


def reading(scratch: Path, tree: trees.Tree, runs: int) -> Report:
    """Walk a volume and read all files, by everything that can."""
    report = Report(f"Walk and read {tree.files:,} files, {tree.bytes / 1e6:.0f} MB, made by mke2fs -d, warm")
    image = scratch / "read.ext4"
    subprocess.run(mke2fs(tree.path, image, "512M"), check=True, stdout=subprocess.DEVNULL)
    os.sync()
    floor = "kernel mount: scandir"
    contestants: dict[str, Callable[[], Measured]] = {
        "ext4lite": lambda: _read(sys.executable, readers.ext4lite, image),
        "ext4lite, checksums not verified": lambda: _read(sys.executable, readers.ext4lite_unverified, image),
    }
    slow: dict[str, Callable[[], Measured]] = {"debugfs rdump": lambda: _rdump(image)}
    python = peers.interpreter()
    if python is not None:
        slow["ext2py"] = lambda: _read(python, readers.ext2py, image)
        slow["dissect.extfs"] = lambda: _read(python, readers.dissect, image)
        slow["ext4 of PyPI"] = lambda: _read(python, readers.pypi_ext4, image)
    samples: dict[str, list[Measured]] = {}
    with removed_afterwards(image), _mounts(image) as (mounts, point):
        for name, where in mounts.items():
            slow[name] = lambda where=where: _read(sys.executable, readers.mount, where)  # type: ignore[misc]
        if point is not None:
            contestants[floor] = lambda: _read(sys.executable, readers.mount, point)
            contestants["kernel mount: os.walk"] = lambda: _read(sys.executable, readers.mount_walk, point)
            contestants["kernel mount: tar"] = lambda: _tar(point)
        for turn in range(runs):
            taking = list({**contestants, **(slow if turn < 2 else {})}.items())
            for name, action in taking[turn % len(contestants) :] + taking[: turn % len(contestants)]:
                samples.setdefault(name, []).append(action())
    seen = {tuple(json.loads(m.output).values()) for each in samples.values() for m in each if m.output}
    if len(seen) != 1:
        raise RuntimeError(f"the readers did not see the same: {seen}")
    aims = {"ext4lite": "at most 1.5 x"}
    notes = {"debugfs rdump": "written to memory", "kernel mount: tar": "into a pipe"}
    for name, each in samples.items():
        against = floor if name != floor and floor in samples else ""
        report.add(_row(name, each, against, aims.get(name, ""), notes.get(name, "")))
    return report


def _row(name: str, each: list[Measured], against: str, aim: str, note: str = "") -> Row:
    return Row(name, [m.seconds for m in each], against, aim, note, max(m.peak for m in each), [m.cpu for m in each])


def _read(python: str, reader: Callable[..., readers.Seen], place: Path) -> Measured:
    """Let a process of its own read once unmeasured and once measured; the output is what it saw."""
    # -P: this directory has an ext4.py, too
    words = [python, "-P", readers.__file__, reader.__name__, str(place), "1"]
    done = subprocess.run(words, env=clean_environment(), capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{reader.__name__}: {done.stderr.decode(errors='replace')[-500:]}")
    found = json.loads(done.stdout)
    seen = json.dumps({"files": found["files"], "bytes": found["bytes"]})
    return Measured(found["seconds"][0], found["cpu"][0], found["peak"], seen.encode())


def _rdump(image: Path) -> Measured:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as target:
        return measured(["debugfs", "-R", f"rdump / {target}", image])


def _tar(point: Path) -> Measured:
    """Tar reads nothing when it sees that its output is /dev/null."""
    return measured(["sh", "-c", f"tar -C {point} -cf - . | cat"])


@contextmanager
def _mounts(image: Path) -> Iterator[tuple[dict[str, Path], Path | None]]:
    """Yield mounts by name, and the kernel's; none where there is no root."""
    if os.geteuid() != 0:
        yield {}, None
        return
    with loop_mounted(image, "ro") as point:
        if shutil.which("fuse2fs") is None or not Path("/dev/fuse").exists():
            yield {}, point
            return
        with tempfile.TemporaryDirectory() as other:
            subprocess.run(["fuse2fs", "-o", "ro", image, other], check=True)
            try:
                yield {"fuse2fs: scandir": Path(other)}, point
            finally:
                subprocess.run(["umount", other], check=True)


# -- writing ----------------------------------------------------------------------------------------------------------


def filling(scratch: Path, tree: trees.Tree, runs: int) -> Report:
    """Make a volume from a directory."""
    report = Report(f"Make a volume of {tree.files:,} files, {tree.bytes / 1e6:.0f} MB from a directory, on the disk")
    image = scratch / "fill.ext4"

    def theirs() -> Measured:
        made = measured(mke2fs(tree.path, image, "2G"))
        seconds = timed(lambda: fsync_path(image))
        return Measured(made.seconds + seconds, made.cpu, made.peak, b"")

    rows = {
        "ext4lite mkfs -d": lambda: measured([PROGRAM, "mkfs", "-q", "--size", "2G", "-d", tree.path, image]),
        "mke2fs -d": theirs,
    }
    _rounds(report, rows, runs=runs, outputs=[image], against="mke2fs -d", aims={"ext4lite mkfs -d": "at most 1.5 x"})
    return report


def _rounds(
    report: Report,
    rows: dict[str, Callable[[], Measured]],
    *,
    runs: int,
    outputs: list[Path],
    against: str,
    aims: dict[str, str],
) -> None:
    """Run all rows in turn, ``runs`` times, and remove ``outputs`` after each."""
    samples: dict[str, list[Measured]] = {name: [] for name in rows}
    for _ in range(runs):
        for name, action in rows.items():
            with removed_afterwards(*outputs):
                samples[name].append(action())
                os.sync()
    for name, each in samples.items():
        report.add(_row(name, each, against if name != against else "", aims.get(name, "")))


def recovery(scratch: Path, runs: int) -> Report:
    """Replay a journal of 64 MiB that a crash left full."""
    report = Report("Recover a volume with a full journal of 64 MiB (data and metadata of 1,100 files), on the disk")
    if os.geteuid() != 0:
        return report
    crashed, image = scratch / "crashed.ext4", scratch / "recovered.ext4"
    with removed_afterwards(crashed):
        volumes.with_full_journal(crashed)

        def on_a_copy(words: list[str]) -> Measured:
            subprocess.run(["cp", "--sparse=always", crashed, image], check=True)
            fsync_path(image)
            return measured([*words, image])

        rows = {
            "ext4lite recover": lambda: on_a_copy([PROGRAM, "recover"]),
            "e2fsck -p": lambda: on_a_copy(["sh", "-c", 'e2fsck -p "$0" || test $? = 1']),
            "e2fsck -E journal_only": lambda: on_a_copy(["sh", "-c", 'e2fsck -E journal_only -p "$0" || test $? = 1']),
        }
        _rounds(report, rows, runs=runs, outputs=[image], against="e2fsck -p", aims={"ext4lite recover": "at most 2 x"})
    return report


def compaction(scratch: Path, tree: trees.Tree, runs: int) -> Report:
    """Compact a volume, beside a plain copy of as many bytes."""
    report = Report("Compact a volume of 30,000 files, half of them removed again, on the disk")
    if "compact" not in COMMANDS or os.geteuid() != 0:
        return report
    image, target, copy = scratch / "worn.ext4", scratch / "compact.ext4", scratch / "copy"
    with removed_afterwards(image, target, copy):
        subprocess.run(mke2fs(tree.path, image, "2G"), check=True, stdout=subprocess.DEVNULL)
        _wear(image)
        first = measured([PROGRAM, "compact", "--json", "-o", target, image], keep_output=True)
        held = target.stat().st_blocks * 512
        shutil.copyfile(target, scratch / "bytes")
        target.unlink()

        def sequential() -> Measured:
            source = scratch / "bytes"
            return measured(["dd", f"if={source}", f"of={copy}", "bs=4M", "conv=fsync,sparse", "status=none"])

        rows = {
            "ext4lite compact": lambda: measured([PROGRAM, "compact", "-o", target, image]),
            "dd of the same bytes": sequential,
        }
        with removed_afterwards(scratch / "bytes"):
            _rounds(
                report,
                rows,
                runs=runs,
                outputs=[target, copy],
                against="dd of the same bytes",
                aims={"ext4lite compact": "near 1 x"},
            )
    row = report.rows[0]
    row.note = f"{held / 1e6:.0f} MB, {held / 1e6 / row.median:.0f} MB/s"
    row.peak = max(row.peak, first.peak)
    return report


def _wear(image: Path) -> None:
    """Remove every second file and write half of them again, in small pieces."""
    with loop_mounted(image) as point:
        files = sorted(path for path in point.rglob("*") if path.is_file() and not path.is_symlink())
        for path in files[::2]:
            path.unlink()
        for path in files[::4]:
            path.write_bytes(b"again" * 3000)


# -- memory -----------------------------------------------------------------------------------------------------------


def memory(scratch: Path, tree: trees.Tree) -> Report:
    """Peak memory of every command on volumes that are large in one way or another."""
    report = Report(f"Memory: a sparse volume of 1 TiB, and one of {MANY_DIRECTORIES * (MANY_FILES + 1):,} inodes")
    sparse, many = scratch / "sparse.ext4", scratch / "many.ext4"
    with removed_afterwards(sparse, many):
        made = measured([PROGRAM, "mkfs", "-q", "--size", "1T", "-d", tree.path, sparse])
        report.add(_row("1 TiB: mkfs -d", [made], "", MEMORY))
        _commands(report, scratch, "1 TiB", sparse, ["/"])
        sparse.unlink()
        volumes.of_many_inodes(many, MANY_DIRECTORIES, MANY_FILES)
        _commands(report, scratch, "many inodes", many, [f"/directory{n}" for n in range(PART)])
    return report


def _commands(report: Report, scratch: Path, what: str, image: Path, part: list[str]) -> None:
    """Add a row for each command; ``part`` is what ``cp-out`` and ``rm`` are given."""
    out, copy = scratch / "out", scratch / "copy.ext4"

    def row(name: str, *words: str | Path, note: str = "") -> None:
        done = measured([PROGRAM, *words])
        report.add(_row(f"{what}: {name}", [done], "", MEMORY, note))

    few = f"{len(part)} directories" if len(part) > 1 else ""
    row("ls -R", "ls", "-R", image)
    row("inspect", "inspect", image)
    row("manifest", "manifest", image)
    with removed_afterwards(copy):
        row("clone", "clone", image, copy)
        if "compact" in COMMANDS:
            row("compact", "compact", copy)
    try:
        out.mkdir()
        row("cp-out -r", "cp-out", "-r", image, *part, out, note=few)
    finally:
        shutil.rmtree(out)
    if os.geteuid() == 0:
        volumes.crash(image)
        row("recover", "recover", image)
    inside = ["lost+found"] if part == ["/"] else []
    if inside:
        listed = measured([PROGRAM, "ls", image], keep_output=True).output.decode().split("\n")
        part = [f"/{name}" for name in listed if name and name not in inside]
    row("rm -r", "rm", "-r", image, *part, note=few)
