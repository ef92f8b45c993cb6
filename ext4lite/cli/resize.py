"""``ext4lite resize``: make a volume larger or smaller."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from ext4lite.cli.progress import counter
from ext4lite.cli.values import size_value

if TYPE_CHECKING:
    from ext4lite.resize import ResizeResult


def resize(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="The volume; it must not be in use.")],
    size: Annotated[
        str,
        typer.Argument(metavar="[SIZE]", help="The new size: bytes, or with K, M, G, T. By default that of the file."),
    ] = "",
    minimum: Annotated[
        bool, typer.Option("--minimum", "-M", help="Make the volume as small as what it holds allows.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing.")] = False,
) -> None:
    """Make a volume larger or smaller, in place. The file gets the volume's size.

    Growing moves next to nothing, whatever the volume holds. Shrinking moves what lies behind the new end; inodes there
    get other numbers. A volume without a journal is changed in a copy, which then takes its place. When it is killed,
    the volume is the old one or the new one.
    """
    if minimum and size:
        raise typer.BadParameter("either a size or --minimum", param_hint="SIZE")
    wanted = size_value(size, "SIZE") if size else None
    from ext4lite.resize import resize as change

    with counter("moved") as progress:
        result = change(image, wanted, minimum=minimum, progress=progress, command="ext4lite resize")
    if as_json:
        print(json.dumps(result.as_dict(), indent=2))
    elif not quiet:
        print(_text(result))


def _text(r: ResizeResult) -> str:
    from ext4lite.units import human

    if r.method == "none":
        return f"{r.path}: {human(r.size)}, nothing to do"
    parts = [f"{human(r.old_size)} is now {human(r.size)} ({r.blocks} blocks of {human(r.block_size)})"]
    if r.moved_bytes:
        parts.append(f"{human(r.moved_bytes)} moved")
    if r.moved_inodes:
        parts.append(f"{r.moved_inodes} inodes renumbered")
    if r.method == "copy":
        parts.append("on a copy")
    return f"{r.path}: {', '.join(parts)}, {r.seconds:.2f} s"
