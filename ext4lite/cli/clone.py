"""``ext4lite clone``: an episode's copy of a golden volume."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from typing import Annotated

import typer


class When(StrEnum):
    """Values of ``--reflink``, as in cp."""

    auto = "auto"
    always = "always"
    never = "never"


def rewrite_arguments(arguments: list[str]) -> list[str]:
    """Make a bare ``--reflink`` or ``--backing`` mean ``always`` without taking the next word, as cp does.

    What follows ``--`` stays.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    bare = ("--reflink", "--backing")
    return [f"{word}=always" if word in bare else word for word in arguments[:end]] + arguments[end:]


def clone(
    golden: Annotated[
        str, typer.Argument(metavar="GOLDEN", help="The volume to copy; it must be clean and not in use.")
    ],
    episode: Annotated[str, typer.Argument(metavar="EPISODE", help="The copy to make.")],
    reflink: Annotated[
        When,
        typer.Option(
            metavar="WHEN",
            help="Share the host's blocks: always (or fail), auto, never (then copy, unless --backing is given). "
            "Bare: always.",
        ),
    ] = When.auto,
    backing: Annotated[
        When | None,
        typer.Option(
            metavar="WHEN",
            help="Make a delta that reads from GOLDEN what it has not: always, auto (the default: where blocks cannot "
            "be shared), never (then copy). Bare: always.",
        ),
    ] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: how the clone was made.")] = False,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace EPISODE if it exists.")] = False,
) -> None:
    """Copy a golden volume in milliseconds: where the host file system shares blocks (XFS, Btrfs, APFS) so, else as a
    delta over GOLDEN, which must then stay as it is; at last resort as a sparse file. Tells which on standard error.
    """
    from ext4lite.clone import clone as make
    from ext4lite.units import human, printable

    if reflink is backing is When.always:
        raise typer.BadParameter("--reflink and --backing exclude each other")
    result = make(
        golden, episode, reflink=reflink.value, backing=None if backing is None else backing.value, force=force
    )
    if as_json:
        print(json.dumps(result.as_dict(), indent=2))
    elif backing is None and reflink is When.auto and result.method != "reflink":
        how = f"copied {human(result.bytes)}"
        if result.method == "backing":
            how = f"a delta over {printable(result.base or '')}, which must stay as it is"
        print(
            f"ext4lite: {printable(episode)}: the host file system cannot share blocks; {how} ({result.seconds:.2f} s)",
            file=sys.stderr,
        )
