"""``ext4lite xattr``: show and change extended attributes in a volume."""

from __future__ import annotations

import binascii
import json
import os
import sys
from base64 import b64decode, b64encode
from typing import Annotated

import typer

from ext4lite.cli.values import Replay, Verify


def xattr(
    image: Annotated[
        str, typer.Argument(metavar="IMAGE", help="The volume; to change something it must not be in use.")
    ],
    path: Annotated[str, typer.Argument(metavar="PATH", help="A path in the volume.")],
    *,
    get: Annotated[str, typer.Option("--get", "-g", metavar="NAME", help="Print one value as it is.")] = "",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="NAME=VALUE", help="Set one; VALUE as text, 0xHEX or 0sBASE64."),
    ] = None,
    remove: Annotated[list[str] | None, typer.Option("--remove", "-r", metavar="NAME", help="Remove one.")] = None,
    follow: Annotated[bool, typer.Option("--dereference", "-L", help="Follow a symlink at the end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, values in base64.")] = False,
    replay: Replay = True,
    verify: Verify = True,
) -> None:
    """Show the extended attributes of a path, or change them: removals first, then --set in order.

    After a change nothing is shown but with --get or --json.
    """
    from ext4lite import paths
    from ext4lite.errors import NoAttribute
    from ext4lite.volume import Volume

    changes = [_assignment(text) for text in set_ or []]
    if changes or remove:
        with Volume.open(image, mode="rw") as writable:
            ino = paths.resolve(writable, path, follow=follow)
            for name in remove or []:
                writable.remove_xattr(ino, os.fsencode(name))
            for key, value in changes:
                writable.set_xattr(ino, key, value)
            found = writable.xattrs(ino)
        if not get and not as_json:
            return
    else:
        with Volume.open(image, replay=replay, verify=verify) as volume:
            found = volume.xattrs(paths.resolve(volume, path, follow=follow))
    if get:
        if os.fsencode(get) not in found:
            raise NoAttribute(f"there is no attribute {get}", where=f"{image}: {path}")
        sys.stdout.buffer.write(found[os.fsencode(get)])
    elif as_json:
        values = {os.fsdecode(name): b64encode(value).decode() for name, value in sorted(found.items())}
        print(json.dumps({"path": path, "xattrs": values}))
    else:
        for key, value in sorted(found.items()):
            print(f"{os.fsdecode(key)}={_shown(value)}")


def _assignment(text: str) -> tuple[bytes, bytes]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise typer.BadParameter(f"{text!r} is not NAME=VALUE")
    try:
        if value.startswith("0x"):
            return os.fsencode(name), bytes.fromhex(value[2:])
        if value.startswith("0s"):
            return os.fsencode(name), b64decode(value[2:], validate=True)
    except (ValueError, binascii.Error):
        raise typer.BadParameter(f"{value!r} is not a value") from None
    return os.fsencode(name), os.fsencode(value)


def _shown(value: bytes) -> str:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return "0x" + value.hex()
    return text if text.isprintable() and not text.startswith(("0x", "0s")) else "0x" + value.hex()
