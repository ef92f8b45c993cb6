"""``ext4lite ls``: list a directory of a volume."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ext4lite.cli.values import Replay, Verify
from ext4lite.units import printable

if TYPE_CHECKING:
    from ext4lite.volume import Stat, Volume

_LETTERS = {"file": "-", "dir": "d", "symlink": "l", "char": "c", "block": "b", "fifo": "p", "socket": "s"}


def ls(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="The volume to look into.")],
    path: Annotated[str, typer.Argument(metavar="[PATH]", help="A path in the volume, by default its root.")] = "/",
    *,
    long: Annotated[bool, typer.Option("--long", "-l", help="Show permissions, owner, size and time.")] = False,
    recursive: Annotated[bool, typer.Option("--recursive", "-R", help="List everything below, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
    replay: Replay = True,
    verify: Verify = True,
) -> None:
    """List what a directory of a volume holds, sorted by name. Something else is listed itself."""
    from ext4lite import paths
    from ext4lite.layout.constants import S_IFDIR
    from ext4lite.volume import Volume
    from ext4lite.walking import in_order

    with Volume.open(image, replay=replay, verify=verify) as volume:
        ino = paths.resolve(volume, path, follow=False)
        rows: Iterable[tuple[bytes, int]]
        if volume.inode(ino).type != S_IFDIR:
            rows = [(os.fsencode(path), ino)]
        elif recursive:
            rows = ((name[1:], child) for name, child in in_order(volume, ino))
        else:
            rows = sorted((name, child) for name, child, _ in volume.iterdir(ino))
        # Names must not steer the terminal that they go to; for a pipe they stay as they are, like those of ls.
        safe: Callable[[str], str] = printable if sys.stdout.isatty() else str
        for name, child in rows:
            if as_json:
                print(json.dumps(as_row(volume, name, child), separators=(",", ":")))
            elif long:
                print(safe(_line(volume, name, volume.stat(child))))
            else:
                print(safe(os.fsdecode(name)))


def as_row(volume: Volume, name: bytes, ino: int) -> dict[str, Any]:
    """Return what ``--json`` says of an inode; ``stat`` says the same and more."""
    s = volume.stat(ino)
    row: dict[str, Any] = {
        "path": os.fsdecode(name),
        "ino": ino,
        "type": s.kind,
        "mode": s.mode,
        "uid": s.uid,
        "gid": s.gid,
        "nlink": s.nlink,
        "size": s.size,
        "mtime_ns": s.mtime_ns,
    }
    if s.kind == "symlink":
        row["target"] = os.fsdecode(volume.readlink(ino))
    if s.kind in ("char", "block"):
        row["rdev"] = list(s.rdev)
    return row


def _line(volume: Volume, name: bytes, s: Stat) -> str:
    bits = "".join(letter if s.mode >> 8 - i & 1 else "-" for i, letter in enumerate("rwxrwxrwx"))
    bits = _special(bits, 2, s.mode & 0o4000, "s")
    bits = _special(bits, 5, s.mode & 0o2000, "s")
    bits = _special(bits, 8, s.mode & 0o1000, "t")
    size = f"{s.rdev[0]}, {s.rdev[1]}" if s.kind in ("char", "block") else str(s.size)
    try:
        when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(s.mtime_ns // 1_000_000_000))
    except (OverflowError, ValueError, OSError):
        when = str(s.mtime_ns // 1_000_000_000)
    target = f" -> {os.fsdecode(volume.readlink(s.ino))}" if s.kind == "symlink" else ""
    owner = f"{s.uid:>5} {s.gid:>5}"
    return f"{_LETTERS[s.kind]}{bits} {s.nlink:>3} {owner} {size:>10} {when} {os.fsdecode(name)}{target}"


def _special(bits: str, at: int, on: int, letter: str) -> str:
    if not on:
        return bits
    return bits[:at] + (letter if bits[at] == "x" else letter.upper()) + bits[at + 1 :]
