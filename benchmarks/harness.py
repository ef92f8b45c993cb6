"""What the benchmarks share: repeated timing, rows of results, a table and JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Row:
    """One measured thing.

    ``seconds`` holds every sample. ``against`` names the row it is compared with (of the same benchmark), ``aim`` says
    in words what the product wants.
    """

    name: str
    seconds: list[float]
    against: str = ""
    aim: str = ""
    note: str = ""

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
        for column in ("what", "median", "min", "max", "runs", "ratio", "aim", "note"):
            table.add_column(column, justify="left" if column in ("what", "aim", "note") else "right")
        for row in self.rows:
            ratio = self.ratio(row)
            table.add_row(
                row.name,
                human(row.median),
                human(min(row.seconds)),
                human(max(row.seconds)),
                str(len(row.seconds)),
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
