"""``ext4lite compact``: write a volume afresh in the least space."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from ext4lite.cli.values import size_value

if TYPE_CHECKING:
    from ext4lite.compact import CompactReport


def compact(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="The volume to compact; it must not be in use.")],
    *,
    size: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="Size of the new volume: bytes, or with K, M, G, T; by default the smallest."
        ),
    ] = "",
    output: Annotated[
        str,
        typer.Option("--output", "-o", metavar="FILE", help="Write the new volume there; IMAGE is recovered at most."),
    ] = "",
    keep_inodes: Annotated[
        bool, typer.Option("--keep-inodes", help="Let inodes keep their numbers, even if the volume becomes larger.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace FILE if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, and no progress.")] = False,
) -> None:
    """Defragment a volume and drop its free blocks: files contiguous, the journal empty, the smallest size or --size.

    A volume that needs recovery is recovered first. Killed at any moment, IMAGE is the old volume or the new one.
    """
    from ext4lite.cli.progress import bar
    from ext4lite.compact import compact as run

    wanted = size_value(size, "--size") if size else None
    with bar("compacting", shown=not as_json) as progress:
        report = run(
            image,
            size=wanted,
            output=output or None,
            keep_numbers=keep_inodes,
            force=force,
            progress=progress,
            command="ext4lite compact",
        )
    print(json.dumps(report.as_dict(), indent=2) if as_json else _text(report))


def _text(r: CompactReport) -> str:
    from ext4lite.units import human

    v = r.volume
    parts = [
        f"{human(v.size_before)} to {human(v.size_after)}",
        f"{human(r.host_bytes_before)} to {human(r.host_bytes_after)} on the host",
        f"{v.fragmented_before} to {v.fragmented_after} fragmented files",
    ]
    if v.renumbered:
        parts.append("inodes renumbered")
    if v.journal_after != v.journal_before:
        parts.append(f"journal {human(v.journal_before)} to {human(v.journal_after)}")
    return f"{r.path}: compacted in {v.seconds:.2f} s: {'; '.join(parts)}"
