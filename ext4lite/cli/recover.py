"""``ext4lite recover``: replay a volume's journal and leave it clean."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ext4lite.recover import RecoveryResult


def recover(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="The volume to recover; it must not be in use.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replay the journal in place, finish interrupted deletions and truncations, and mark the volume clean.

    A clean volume is left as it is.
    """
    from ext4lite.cli.progress import counter
    from ext4lite.recover import recover as bring_back

    with counter("journal read and written back") as progress:
        result = bring_back(image, command="ext4lite recover", progress=progress)
    print(json.dumps(result.as_dict(), indent=2) if as_json else _text(result))


def _text(r: RecoveryResult) -> str:
    if not r.recovered:
        return f"{r.path}: clean, nothing to do"
    parts = [f"{r.transactions} transactions replayed, {r.blocks} blocks written"]
    if r.fast_commits:
        parts.append(f"{r.fast_commits} fast-commit records applied")
    if r.orphans_deleted or r.orphans_truncated:
        parts.append(f"{r.orphans_deleted} orphans deleted, {r.orphans_truncated} truncated")
    return f"{r.path}: recovered in {r.seconds:.2f} s: {'; '.join(parts)}"
