"""``ext4lite mv``: move or rename in a volume."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ext4lite.writer import RenameHow


def mv(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="The volume to write to; it must not be in use.")],
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE... TARGET", help="What to move, and to where.")],
    *,
    no_clobber: Annotated[bool, typer.Option("--no-clobber", "-n", help="Fail if the target exists.")] = False,
    exchange: Annotated[bool, typer.Option("--exchange", help="Swap source and target.")] = False,
    no_target_directory: Annotated[
        bool, typer.Option("--no-target-directory", "-T", help="Do not move into TARGET if it is a directory.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Give something in a volume another name or place, as rename(2) does; into TARGET if that is a directory."""
    from ext4lite.errors import NotADirectory, NotFound
    from ext4lite.layout.constants import S_IFDIR
    from ext4lite.volume import Volume

    if len(sources) < 2 or (no_clobber and exchange):
        raise typer.BadParameter("needs SOURCE and TARGET, and one way only")
    *olds, target = sources
    how: RenameHow = "exchange" if exchange else "noreplace" if no_clobber else "replace"
    moved = []
    with Volume.open(image, mode="rw") as volume:
        try:
            into = not (exchange or no_target_directory) and volume.inode(volume.resolve(target)).type == S_IFDIR
        except NotFound:
            into = False
        if len(olds) > 1 and not into:
            raise NotADirectory("several sources need a directory as target", where=f"{image}: {target}")
        for old in olds:
            name = os.path.basename(old.rstrip("/"))  # noqa: PTH119
            new = f"{target.rstrip('/')}/{name}" if into else target
            volume.rename(old, new, how=how)
            moved.append([old, new])
    if as_json:
        print(json.dumps({"moved": moved}))
