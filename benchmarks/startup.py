"""What short commands take above ``import typer`` alone, which the command line is built on."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness import Report, Row, clean_environment

AIM = 0.1
PROGRAM = Path(sys.executable).with_name("ext4lite")


def commands(where: Path, turn: int) -> dict[str, list[str]]:
    """Return the short commands by what a table calls them, those that make something with a new name each turn."""
    image, file = str(where / "volume.ext4"), str(where / "file")
    new = f"/{{}}{turn}"
    return {
        "--help": ["--help"],
        "ls": ["ls", image],
        "cat": ["cat", image, "/file"],
        "stat": ["stat", image, "/file"],
        "label (show)": ["label", image],
        "label (set)": ["label", image, f"name{turn}"],
        "uuid (set)": ["uuid", image, "random"],
        "xattr (show)": ["xattr", image, "/file"],
        "xattr (set)": ["xattr", "-s", f"user.turn={turn}", image, "/file"],
        "mkdir": ["mkdir", image, new.format("directory")],
        "cp-in, one file": ["cp-in", image, file, new.format("copy")],
        "ln": ["ln", image, "/file", new.format("link")],
        "mv": ["mv", image, new.format("link"), new.format("moved")],
        "rm": ["rm", image, new.format("moved")],
        "cp-out, one file": ["cp-out", image, "/file", str(where / f"out{turn}")],
        "clone": ["clone", image, str(where / f"clone{turn}")],
        "recover, a clean volume": ["recover", image],
        "inspect": ["inspect", image],
        "mkfs": ["mkfs", "-q", "--size", "256M", str(where / f"made{turn}")],
    }


def report(scratch: Path, runs: int) -> Report:
    """Time every command once a turn, ``import typer`` among them, so that a disturbance meets all."""
    found = Report("Short commands: wall time, beside a Python that imports typer")
    where = scratch / "startup"
    where.mkdir()
    (where / "file").write_bytes(b"content\n")
    _run([str(PROGRAM), "mkfs", "-q", "--size", "256M", str(where / "volume.ext4")])
    _run([str(PROGRAM), "cp-in", str(where / "volume.ext4"), str(where / "file"), "/file"])
    base = [sys.executable, "-c", "import typer"]
    floor: list[float] = []
    samples: dict[str, list[float]] = {}
    for turn in range(runs * 2 + 1):  # the first writes compiled modules and is dropped
        floor.append(_run(base))
        for name, words in commands(where, turn).items():
            samples.setdefault(name, []).append(_run([str(PROGRAM), *words]))
    floor = floor[1:]
    found.add(Row("python -c 'import typer'", floor))
    for name, seconds in samples.items():
        above = statistics.median(seconds[1:]) - statistics.median(floor)
        note = f"{above * 1e3:+.0f} ms"
        found.add(Row(f"ext4lite {name}", seconds[1:], aim=f"at most +{AIM * 1e3:.0f} ms", note=note))
    return found


def _run(words: list[str]) -> float:
    start = time.perf_counter()
    done = subprocess.run(words, env=clean_environment(), stdin=subprocess.DEVNULL, capture_output=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"{words}: exit code {done.returncode}: {done.stderr.decode(errors='replace')}")
    return seconds
