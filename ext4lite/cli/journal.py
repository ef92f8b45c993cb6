"""``ext4lite journal``: show a volume's journal, make it, resize it, remove it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from ext4lite.cli.values import size_value

if TYPE_CHECKING:
    from ext4lite.journal import JournalInfo

_DEFAULT = "default"


def journal(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="The volume; to change it, it must not be in use.")],
    create: Annotated[
        str, typer.Option("--create", metavar="SIZE|default", help="Make a journal; default is as large as mkfs does.")
    ] = "",
    resize: Annotated[
        str, typer.Option("--resize", metavar="SIZE|default", help="Give the journal another size.")
    ] = "",
    remove: Annotated[bool, typer.Option("--remove", help="Remove the journal: an ext3 volume becomes ext2.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a volume's journal, or change it in place: the files stay where they are.

    A volume that needs recovery is recovered first. Killed while it removes the journal, the same command goes on; else
    there is the old journal or the new one.
    """
    if bool(create) + bool(resize) + remove > 1:
        raise typer.BadParameter("only one of --create, --resize and --remove")
    from ext4lite import journal as admin

    command = "ext4lite journal"
    if create:
        found = admin.create(image, _size(create, "--create"), command=command)
    elif resize:
        found = admin.resize(image, _size(resize, "--resize"), command=command)
    elif remove:
        found = admin.remove(image, command=command)
    else:
        found = admin.show(image)
    print(json.dumps(found.as_dict(), indent=2) if as_json else _text(found))


def _size(text: str, option: str) -> int | None:
    return None if text == _DEFAULT else size_value(text, option)


def _text(j: JournalInfo) -> str:
    from ext4lite.units import human

    if not j.size:
        return f"{j.path}: no journal"
    parts = [f"{human(j.size)} in inode {j.inode}", "empty" if j.empty else "not empty (ext4lite recover)"]
    parts.append(f"next transaction {j.sequence}")
    parts.append(f"features {' '.join(j.features) or 'none'}")
    if j.fast_commit_blocks:
        parts.append(f"{j.fast_commit_blocks} blocks for fast commits")
    return f"{j.path}: {', '.join(parts)}"
