"""``ext4lite stat``: show what inodes of a volume say."""

from __future__ import annotations

import json
import os
from base64 import b64encode
from typing import Annotated, Any

import typer

from ext4lite.cli.values import Replay, Verify


def stat(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="The volume to look into.")],
    files: Annotated[list[str], typer.Argument(metavar="PATH...", help="Paths in the volume.")],
    *,
    follow: Annotated[bool, typer.Option("--dereference", "-L", help="Follow a symlink at the end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
    replay: Replay = True,
    verify: Verify = True,
) -> None:
    """Show what the inodes of paths say: kind, permissions, owner, size, times, flags, attributes, extents."""
    from ext4lite import paths
    from ext4lite.cli.ls import as_row
    from ext4lite.volume import Volume

    with Volume.open(image, replay=replay, verify=verify) as volume:
        for path in files:
            ino = paths.resolve(volume, path, follow=follow)
            s = volume.stat(ino)
            row: dict[str, Any] = as_row(volume, os.fsencode(path), ino)
            row |= {
                "blocks512": s.blocks512,
                "atime_ns": s.atime_ns,
                "ctime_ns": s.ctime_ns,
                "crtime_ns": s.crtime_ns,
                "flags": s.flags,
                "generation": s.generation,
                "extents": [[e.logical, e.physical, e.count, e.unwritten] for e in volume.extents(ino)],
                "xattrs": {os.fsdecode(k): b64encode(v).decode() for k, v in sorted(volume.xattrs(ino).items())},
            }
            if as_json:
                print(json.dumps(row, separators=(",", ":")))
            else:
                print("\n".join(f"{key:10} {_text(key, value)}" for key, value in row.items()))


def _text(key: str, value: object) -> str:
    if key == "mode" and isinstance(value, int):
        return f"{value:04o}"
    if key == "flags" and isinstance(value, int):
        return f"{value:#x}"
    if key == "extents" and isinstance(value, list):
        return ", ".join(f"{a}+{n} at {b}{' unwritten' if u else ''}" for a, b, n, u in value) or "-"
    if key == "xattrs" and isinstance(value, dict):
        return ", ".join(value) or "-"
    return str(value)
