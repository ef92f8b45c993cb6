"""What ``cp-in`` and ``cp-out`` say at their end."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import typer

from ext4lite.units import printable

if TYPE_CHECKING:
    from ext4lite.transfer import Copied

_SHOWN = 20
_EXIT_HOST = 6


def report(done: Copied, *, as_json: bool) -> None:
    """Print what could not be kept to standard error, and the counts if they are wanted.

    Exit code 6 if a file is missing; an owner or an attribute that could not be kept is no failure.
    """
    shown = done.skipped[:_SHOWN]
    for path, why in shown:
        print(f"ext4lite: {printable(path)}: left out: {printable(why)}", file=sys.stderr)
    if done.skipped_count > len(shown):
        print(f"ext4lite: {done.skipped_count - len(shown)} more were left out (--json tells)", file=sys.stderr)
    if done.owners_lost:
        print(f"ext4lite: owners of {done.owners_lost} files are not kept: that takes root", file=sys.stderr)
    if as_json:
        print(json.dumps(done.as_dict()))
    if done.left_out:
        raise typer.Exit(_EXIT_HOST)
