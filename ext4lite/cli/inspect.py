"""``ext4lite inspect``: what a volume is and holds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ext4lite.cli.values import Replay, Verify

if TYPE_CHECKING:
    from ext4lite.inspect import Backing, Report


def inspect(
    image: Annotated[
        str, typer.Argument(metavar="IMAGE", help="The volume to look at; it must not be in use for writing.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    replay: Replay = True,
    verify: Verify = True,
) -> None:
    """Show geometry, features, usage, journal, fragmentation, and the Docker images inside."""
    from ext4lite.inspect import inspect as look

    report = look(image, replay=replay, verify=verify)
    print(json.dumps(report.as_dict(), indent=2) if as_json else _text(report))


def _text(r: Report) -> str:
    from ext4lite.units import human, printable

    flex = f", flex groups of {r.flex_bg_groups}" if r.flex_bg_groups > 1 else ""
    journal = r.journal.state
    if r.journal.blocks:
        journal += f", {human(r.journal.bytes)} in inode {r.journal.inode}"
        journal += f", {' '.join(r.journal.features)}" if r.journal.features else ""
    rows = [
        ("image", r.path),
        ("uuid", r.uuid),
        ("label", r.label or "-"),
        ("state", r.state),
        *([("backing", _backing(r.backing))] if r.backing else []),
        ("size", f"{human(r.size)}: {r.blocks} blocks of {r.block_size} bytes"),
        (
            "groups",
            f"{r.groups} of {r.blocks_per_group} blocks, {r.inodes_per_group} inodes of {r.inode_size} bytes{flex}",
        ),
        ("features", " ".join(r.features)),
        ("journal", journal),
        ("free", f"{human(r.free_blocks * r.block_size)}, {r.free_inodes} of {r.inodes} inodes"),
    ]
    if r.usage is None:
        rows.append(("content", "not shown: the journal was not replayed"))
    else:
        u = r.usage
        kinds = ", ".join(f"{count} {kind}" for kind, count in u.kinds.items())
        rows.append(("used", f"{human(u.used_bytes)} of the volume, {human(u.host_bytes)} on the host"))
        rows.append(("content", f"{kinds}; {human(u.content_bytes)} in files"))
    if r.fragmentation is not None:
        f = r.fragmentation
        spread = ", ".join(f"{pieces}: {count}" for pieces, count in f.histogram.items())
        rows.append(("pieces", f"{f.mean:.2f} a file on average, at most {f.max} ({spread})"))
    out = [f"{name:9} {printable(value)}" for name, value in rows]
    for image in r.images or []:
        out.append(f"{'docker':9} {printable(_image(image))}")
    return "\n".join(out)


def _backing(b: Backing) -> str:
    from ext4lite.units import human

    return f"{b.path}; {human(b.private_bytes)} private, {human(b.shared_bytes)} shared"


def _image(image: dict[str, Any]) -> str:
    from ext4lite.units import human

    names = ", ".join(image.get("tags") or []) or "<none>"
    parts = [names, str(image.get("id", ""))[:19]]
    if isinstance(image.get("size"), int):
        parts.append(human(image["size"]))
    return "  ".join(part for part in parts if part)
