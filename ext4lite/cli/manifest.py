"""``ext4lite manifest``: a volume's content as JSON Lines."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def manifest(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="The volume to read.")],
    replay: Annotated[
        bool,
        typer.Option("--replay/--no-replay", help="Read a volume that was not closed as it will be once recovered."),
    ] = True,
) -> None:
    """Print one JSON object an entry, sorted by path: type, mode, owner, size, hash, target, attributes."""
    from ext4lite.manifest import entries, to_line
    from ext4lite.volume import Volume

    with Volume.open(image, replay=replay) as volume:
        for entry in entries(volume):
            sys.stdout.write(to_line(entry) + "\n")
