"""``gvx-launch images``: the cache of images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from gvx.images import ImageCache

_Json = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    images = typer.Typer(name="images", help="The cache of images.", no_args_is_help=True, add_completion=False)
    images.command("import")(import_)
    images.command("ls")(ls)
    images.command("rm")(rm)
    app.add_typer(images)


def import_(
    archives: Annotated[
        list[Path], typer.Argument(metavar="ARCHIVE...", help="docker-archive, OCI layout or tar of one.")
    ],
    name: Annotated[str | None, typer.Option(metavar="NAME", help="One more name for it.")] = None,
    as_json: _Json = False,
) -> None:
    """Put images into the cache."""
    for archive in archives:
        for image in ImageCache.default().import_(archive, name=name):
            print(json.dumps(image) if as_json else f"{_short(image)}  {', '.join(image['names'])}")


def ls(as_json: _Json = False) -> None:
    """List the images in the cache."""
    found = ImageCache.default().list()
    if as_json:
        for image in found:
            print(json.dumps(image))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("DIGEST", "NAMES", "SIZE", box=None)
    for image in found:
        table.add_row(_short(image), ", ".join(image["names"] or ()), f"{image['size'] / 1e6:.1f} MB")
    Console().print(table)


def rm(
    references: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names or digests.")],
    as_json: _Json = False,
) -> None:
    """Remove images from the cache."""
    for reference in references:
        removed = ImageCache.default().remove(reference)
        print(json.dumps(removed) if as_json else f"removed {reference}")


def _short(image: dict[str, Any]) -> str:
    return str(image["digest"]).removeprefix("sha256:")[:12]
