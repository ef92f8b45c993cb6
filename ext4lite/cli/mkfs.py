"""``ext4lite mkfs``: a volume, empty or filled from a directory."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ext4lite.cli.progress import counter
from ext4lite.cli.values import epoch_value, size_value, uuid_value

if TYPE_CHECKING:
    from ext4lite.mkfs import MkfsResult

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
    directory: Annotated[
        Path | None, typer.Option("--directory", "-d", metavar="DIR", help="Copy everything below DIR into the volume.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace IMAGE if it exists and is not empty.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Make an ext4 volume: 4 KiB blocks, a journal, metadata checksums. Empty, a sparse file of a few hundred KiB.

    With -d as with mke2fs -d: DIR becomes the root, with owners, permissions, times, extended attributes, holes, hard
    links and devices of all that is below it.

    Equal trees and options with --uuid and SOURCE_DATE_EPOCH in the environment give equal bytes.
    """
    from ext4lite.mkfs import mkfs as make

    with counter("copying in") if directory else nullcontext() as progress:
        result = make(
            image,
            size=size_value(size, "--size") if size else _existing_size(image) or _DEFAULT_SIZE,
            uuid=uuid_value(uuid),
            label=label,
            journal_size=size_value(journal_size, "--journal-size") if journal_size else None,
            timestamp=epoch_value(),
            force=force,
            directory=directory,
            progress=progress,
        )
    for path, why in result.copied.skipped if result.copied else ():
        print(f"ext4lite: {path}: left out: {why}", file=sys.stderr)
    if as_json:
        print(json.dumps(_as_dict(result)))
    elif not quiet:
        print(_text(result))


def _text(result: MkfsResult) -> str:
    from ext4lite.units import human

    journal = human(result.journal_blocks * 4096) if result.journal_blocks else "no"
    text = f"{result.path}: {human(result.size)}, {result.inodes} inodes, {journal} journal, UUID {result.uuid}"
    done = result.copied
    return text if done is None else f"{text}; {done.files} files, {human(done.bytes)}"


def _as_dict(result: MkfsResult) -> dict[str, object]:
    from dataclasses import asdict

    row = asdict(result)
    row["uuid"] = str(result.uuid)
    row["copied"] = None if result.copied is None else result.copied.as_dict()
    return row


def _existing_size(image: str) -> int:
    path = Path(image)
    return path.stat().st_size if path.is_file() else 0
