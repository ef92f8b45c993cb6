"""``python -m benchmarks [golden] [episode] [ext4] [--runs N] [--json FILE]``: run them and print tables."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from benchmarks.harness import Report, write_json

ALL = ("golden", "episode", "ext4")


def main() -> None:
    """Parse the command line, run, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("which", nargs="*", choices=[*ALL, []], help="which benchmarks (all)")
    parser.add_argument("--runs", type=int, default=5, help="samples a row")
    parser.add_argument("--json", type=Path, help="also write the samples to this file")
    options = parser.parse_args()
    reports: list[Report] = []
    for name in options.which or ALL:
        for report in importlib.import_module(f"benchmarks.{name}").run(options.runs):
            report.print()
            reports.append(report)
    if options.json:
        write_json(reports, options.json)


if __name__ == "__main__":
    main()
