"""``ext4lite manifest``: a volume's content as JSON Lines."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ext4lite.cli.values import Replay, Verify


def manifest(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="The volume to read.")],
    replay: Replay = True,
    verify: Verify = True,
) -> None:
    """Print one JSON object an entry, sorted by path: type, mode, owner, size, hash, target, attributes."""
    from ext4lite.manifest import entries, to_line
    from ext4lite.volume import Volume

    with Volume.open(image, replay=replay, verify=verify) as volume:
        for entry in entries(volume):
            sys.stdout.write(to_line(entry) + "\n")
