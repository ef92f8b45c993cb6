"""``ext4lite rm``: remove files and directories of a volume."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def rm(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="The volume to write to; it must not be in use.")],
    files: Annotated[list[str], typer.Argument(metavar="PATH...", help="What to remove.")],
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="Directories, too, with all in them.")] = False,
    force: Annotated[bool, typer.Option("--force", "-f", help="No error for what is not there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Remove names from a volume; what has none left goes, too. Symlinks at the end are removed, not followed."""
    from ext4lite.cli.progress import steps
    from ext4lite.errors import NotFound
    from ext4lite.transfer import count_below, remove
    from ext4lite.volume import Volume

    removed = 0
    with (
        Volume.open(image, mode="rw") as volume,
        steps("removing", lambda: count_below(volume, files), shown=not as_json) as progress,
    ):
        for path in files:
            try:
                removed += remove(volume, path, recursive=recursive, progress=progress)
            except NotFound:
                if not force:
                    raise
    if as_json:
        print(json.dumps({"removed": removed}))
