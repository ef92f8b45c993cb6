"""``ext4lite label``: show or set a volume's name."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer


def label(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="The volume; to set its name it must not be in use.")],
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The new name, at most 16 bytes; '' for none.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a volume's name, or set it in an instant."""
    from ext4lite.volume import Volume

    if name is None:
        with Volume.open(image, dirty=True) as volume:
            found = volume.super.label
    else:
        from ext4lite.identity import set_label

        with Volume.open(image, mode="rw") as writable:
            set_label(writable, os.fsencode(name))
            found = writable.super.label
    if as_json:
        print(json.dumps({"image": image, "label": found}))
    elif name is None:
        print(found)
