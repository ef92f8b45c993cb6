"""``ext4lite flatten``: make a delta a plain image."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def flatten(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="The delta; it must not be in use.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Copy into a delta what it has not from its backing file, and make it a plain image, in place.

    It may be killed at any moment. A plain image is left as it is.
    """
    from ext4lite.cli.progress import counter
    from ext4lite.flatten import flatten as make
    from ext4lite.units import human, printable

    with counter("flatten") as count:
        r = make(image, progress=count, command="ext4lite flatten")
    if as_json:
        print(json.dumps(r.as_dict(), indent=2))
    elif not r.flattened:
        print(f"{printable(r.path)}: plain, nothing to do")
    else:
        print(f"{printable(r.path)}: flattened in {r.seconds:.2f} s, {human(r.bytes)} from {printable(r.base or '')}")
