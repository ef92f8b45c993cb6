"""``ext4lite cat``: print files of a volume."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ext4lite.cli.values import Replay, Verify


def cat(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="The volume to look into.")],
    files: Annotated[list[str], typer.Argument(metavar="PATH...", help="Files in the volume.")],
    replay: Replay = True,
    verify: Verify = True,
) -> None:
    """Write the content of files of a volume to standard output. Symlinks are followed inside the volume."""
    from ext4lite import paths
    from ext4lite.errors import IsADirectory, NotPermitted
    from ext4lite.volume import Volume

    with Volume.open(image, replay=replay, verify=verify) as volume:
        for path in files:
            ino = paths.resolve(volume, path)
            kind = volume.stat(ino).kind
            if kind == "dir":
                raise IsADirectory("is a directory", where=f"{image}: {path}")
            if kind != "file":
                raise NotPermitted(f"is no file, but a {kind}", where=f"{image}: {path}")
            for piece in volume.chunks(ino):
                sys.stdout.buffer.write(piece)
