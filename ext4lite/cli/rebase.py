"""``ext4lite rebase``: give a delta another backing file."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def rebase(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="The delta; it must not be in use.")],
    base: Annotated[
        str | None,
        typer.Option("--base", "-b", metavar="OTHER", help="The new backing file; left out, the delta's own."),
    ] = None,
    unsafe: Annotated[
        bool,
        typer.Option(
            "--unsafe", "-u", help="Compare nothing: the new file is the old one as far as the delta needs it."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Give a delta another backing file, or record where its own is now. What the delta shows stays the same.

    What the new file has other than the old one is copied from that into the delta first; with --unsafe the old one is
    not needed.
    """
    from ext4lite.cli.progress import counter
    from ext4lite.rebase import rebase as move
    from ext4lite.units import human, printable

    with counter("rebase") as count:
        r = move(image, base, unsafe=unsafe, progress=count, command="ext4lite rebase")
    if as_json:
        print(json.dumps(r.as_dict(), indent=2))
    else:
        print(f"{printable(r.path)}: over {printable(r.base)}, {human(r.bytes)} of the old file taken over")
