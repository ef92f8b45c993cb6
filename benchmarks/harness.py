"""What the benchmarks share: repeated timing, rows of results, a table and JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Row:
    """One measured thing.

    ``seconds`` holds every sample, ``cpu`` those of processor time, ``peak`` the most memory that a process had (0 and
    none: not measured). ``against`` names the row it is compared with (of the same benchmark), ``aim`` says in words
    what the product wants.
    """

    name: str
    seconds: list[float]
    against: str = ""
    aim: str = ""
    note: str = ""
    peak: int = 0
    cpu: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median of the samples, in seconds."""
        return statistics.median(self.seconds)


@dataclass(slots=True)
class Report:
    """The rows of one benchmark."""

    title: str
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> Row:
        """Append ``row`` and return it."""
        self.rows.append(row)
        return row

    def ratio(self, row: Row) -> float | None:
        """Median of ``row`` divided by that of the row it is compared with, or None without one."""
        for other in self.rows:
            if other.name == row.against:
                return row.median / other.median
        return None

    def print(self) -> None:
        """Print the report as a table."""
        from rich.console import Console
        from rich.table import Table

        table = Table(title=self.title)
        more = any(row.peak for row in self.rows)
        columns = ["what", "median", "min", "max", "runs", *(["cpu", "memory"] if more else []), "ratio", "aim", "note"]
        for column in columns:
            table.add_column(column, justify="left" if column in ("what", "aim", "note") else "right")
        for row in self.rows:
            ratio = self.ratio(row)
            table.add_row(
                row.name,
                human(row.median),
                human(min(row.seconds)),
                human(max(row.seconds)),
                str(len(row.seconds)),
                *([human(statistics.median(row.cpu or [0.0])), f"{row.peak / 1e6:.0f} MB"] if more else []),
                f"{ratio:.2f} x {row.against}" if ratio is not None else "",
                row.aim,
                row.note,
            )
        Console(width=max(160, Console().width)).print(table)


def human(seconds: float) -> str:
    """``seconds`` as text with three digits and a fitting unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def timed(action: Callable[[], object]) -> float:
    """Run ``action`` once and return its wall time in seconds."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


@dataclass(slots=True, frozen=True)
class Measured:
    """What a command took: seconds of wall and of processor time, memory at its peak in bytes, and what it printed."""

    seconds: float
    cpu: float
    peak: int
    output: bytes


def clean_environment() -> dict[str, str]:
    """Return the environment for commands that are measured: compiled modules are kept, as where gvx is installed."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def measured(argv: Sequence[str | Path], *, keep_output: bool = False) -> Measured:
    """Run a command in a process of its own and measure it; RuntimeError with what it said when it fails."""
    reader, writer = os.pipe()
    with open(reader, "rb") as result:
        done = subprocess.run(
            [sys.executable, "-I", "-S", Path(__file__).with_name("child.py"), str(writer), *argv],
            pass_fds=[writer],
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if keep_output else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            check=False,
        )
        os.close(writer)
        if done.returncode:
            raise RuntimeError(f"{argv[0]}: exit code {done.returncode}: {done.stderr.decode(errors='replace')}")
        found = json.loads(result.read())
    return Measured(found["seconds"], found["cpu"], found["peak"], done.stdout or b"")


def fsync_path(path: Path) -> None:
    """Flush one file to stable storage."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def loop_mounted(image: Path, *options: str) -> Iterator[Path]:
    """The kernel's mount of ``image``, unmounted on leaving."""
    point = Path(tempfile.mkdtemp(prefix="gvx-bench-mnt-"))
    subprocess.run(["mount", "-o", ",".join(("loop", *options)), str(image), str(point)], check=True)
    try:
        yield point
    finally:
        subprocess.run(["umount", str(point)], check=True)
        point.rmdir()


@contextmanager
def removed_afterwards(*paths: Path) -> Iterator[None]:
    """Remove the files ``paths`` on leaving, if they are there."""
    try:
        yield
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def write_json(reports: list[Report], path: Path) -> None:
    """Write ``reports`` with what is needed to judge them (machine, kernel, date) to ``path``."""
    machine = {
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    path.write_text(
        json.dumps({"machine": machine, "reports": [asdict(report) for report in reports]}, indent=2) + "\n"
    )
