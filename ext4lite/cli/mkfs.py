"""``ext4lite mkfs``: an empty volume."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated
from uuid import UUID

import typer

_DEFAULT_SIZE = 16 << 30


def mkfs(  # noqa: PLR0917 (a command line, not called by position)
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="The file to make.")],
    size: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Size of the volume: bytes, or with K, M, G, T. By default that of an existing IMAGE, else 16G.",
        ),
    ] = "",
    uuid: Annotated[str, typer.Option(metavar="UUID", help="UUID of the volume; random by default.")] = "",
    label: Annotated[str, typer.Option(metavar="LABEL", help="Label of the volume, at most 16 bytes.")] = "",
    journal_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Size of the journal, 0 for none; by default by the volume's size.")
    ] = "",
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace IMAGE if it exists and is not empty.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing.")] = False,
) -> None:
    """Make an empty ext4 volume: 4 KiB blocks, a journal, metadata checksums.

    A sparse file that is a few hundred KiB at first.

    Equal options with --uuid and SOURCE_DATE_EPOCH in the environment give equal bytes.
    """
    from ext4lite.mkfs import mkfs as make
    from ext4lite.units import human

    try:
        volume_uuid = UUID(uuid) if uuid else None
    except ValueError:
        raise typer.BadParameter(f"{uuid!r} is not a UUID", param_hint="--uuid") from None
    result = make(
        image,
        size=_size(size, "--size") if size else _existing_size(image) or _DEFAULT_SIZE,
        uuid=volume_uuid,
        label=label,
        journal_size=_size(journal_size, "--journal-size") if journal_size else None,
        timestamp=source_date_epoch(),
        force=force,
    )
    if not quiet:
        journal = human(result.journal_blocks * 4096) if result.journal_blocks else "no"
        print(f"{result.path}: {human(result.size)}, {result.inodes} inodes, {journal} journal, UUID {result.uuid}")


def _existing_size(image: str) -> int:
    path = Path(image)
    return path.stat().st_size if path.is_file() else 0


def _size(text: str, option: str) -> int:
    from ext4lite.units import parse_size

    try:
        return parse_size(text)
    except ValueError as e:
        raise typer.BadParameter(str(e), param_hint=option) from None


def source_date_epoch() -> int | None:
    """Return SOURCE_DATE_EPOCH in seconds, None when it is not set. Usage error when it is not a number."""
    text = os.environ.get("SOURCE_DATE_EPOCH")
    if not text:
        return None
    if not text.isdigit():
        raise typer.BadParameter(f"{text!r} is not a number of seconds", param_hint="SOURCE_DATE_EPOCH")
    return int(text)
