"""``ext4lite diff``: which blocks of two volumes differ."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def diff(
    old: Annotated[str, typer.Argument(metavar="OLD", help="A volume, for example the golden one.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="Another volume, for example a clone of it.")],
    names: Annotated[bool, typer.Option("--names", help="Say which files of NEW have blocks that differ.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with all ranges.")] = False,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit with 12 if something differs, as git diff does with 1.")
    ] = False,
) -> None:
    """Tell how many bytes of two volumes differ, in blocks of 4096 bytes. A delta and its backing file are compared in
    the delta's private blocks only.
    """
    from ext4lite.cli.progress import counter
    from ext4lite.diff import diff as compare
    from ext4lite.errors import EXIT_DIFFERENT
    from ext4lite.units import human, printable

    with counter("diff") as count:
        r = compare(old, new, names=names, progress=count)
    if as_json:
        print(json.dumps(r.as_dict(), indent=2))
    else:
        print(f"{human(r.bytes)} differ, in {len(r.ranges)} places")
        for name in r.names or []:
            print(printable(name))
    if exit_code and not r.same:
        raise typer.Exit(EXIT_DIFFERENT)
