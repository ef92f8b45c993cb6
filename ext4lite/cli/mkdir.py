"""``ext4lite mkdir``: make directories in a volume."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer


def mkdir(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="The volume to write to; it must not be in use.")],
    directories: Annotated[list[str], typer.Argument(metavar="PATH...", help="Directories to make.")],
    parents: Annotated[
        bool, typer.Option("--parents", "-p", help="Make missing parents; no error if it exists.")
    ] = False,
    mode: Annotated[str, typer.Option("--mode", "-m", metavar="OCTAL", help="Permissions.")] = "755",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Make directories in a volume, owned by root."""
    from ext4lite.volume import Volume

    try:
        bits = int(mode, 8)
    except ValueError:
        raise typer.BadParameter(f"{mode!r} is not an octal mode") from None
    made: list[str] = []
    with Volume.open(image, mode="rw") as volume:
        for path in directories:
            if parents:
                from ext4lite.transfer import make_parents

                made += [os.fsdecode(p) for p in make_parents(volume, path, mode=bits)]
            else:
                volume.mkdir(path, mode=bits)
                made.append(path)
    if as_json:
        print(json.dumps({"made": made}))
