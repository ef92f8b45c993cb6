"""``ext4lite mkfs``: an empty volume."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ext4lite.cli.values import epoch_value, size_value, uuid_value

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

    result = make(
        image,
        size=size_value(size, "--size") if size else _existing_size(image) or _DEFAULT_SIZE,
        uuid=uuid_value(uuid),
        label=label,
        journal_size=size_value(journal_size, "--journal-size") if journal_size else None,
        timestamp=epoch_value(),
        force=force,
    )
    if not quiet:
        journal = human(result.journal_blocks * 4096) if result.journal_blocks else "no"
        print(f"{result.path}: {human(result.size)}, {result.inodes} inodes, {journal} journal, UUID {result.uuid}")


def _existing_size(image: str) -> int:
    path = Path(image)
    return path.stat().st_size if path.is_file() else 0
