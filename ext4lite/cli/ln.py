"""``ext4lite ln``: make a hard link or symlink in a volume."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def ln(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="The volume to write to; it must not be in use.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="What the link is to name.")],
    path: Annotated[str, typer.Argument(metavar="PATH", help="The link to make.")],
    symbolic: Annotated[bool, typer.Option("--symbolic", "-s", help="A symlink; TARGET may be any text.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Make a hard link to a file of a volume, or a symlink."""
    from ext4lite.volume import Volume

    with Volume.open(image, mode="rw") as volume:
        if symbolic:
            ino = volume.symlink(path, target)
        else:
            volume.link(target, path)
            ino = volume.resolve(path, follow=False)
    if as_json:
        print(json.dumps({"path": path, "ino": ino}))
