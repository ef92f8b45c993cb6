"""``ext4lite clone``: an episode's copy of a golden volume."""

from __future__ import annotations

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
    """Make a bare ``--reflink`` mean ``always`` without taking the next word, as cp does; what follows ``--`` stays."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return ["--reflink=always" if word == "--reflink" else word for word in arguments[:end]] + arguments[end:]


def clone(
    golden: Annotated[
        str, typer.Argument(metavar="GOLDEN", help="The volume to copy; it must be clean and not in use.")
    ],
    episode: Annotated[str, typer.Argument(metavar="EPISODE", help="The copy to make.")],
    reflink: Annotated[
        When,
        typer.Option(
            metavar="WHEN", help="Share blocks: always (or fail), auto (else copy and say so), never. Bare: always."
        ),
    ] = When.auto,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace EPISODE if it exists.")] = False,
) -> None:
    """Copy a golden volume in milliseconds where the host file system shares blocks (XFS, Btrfs, APFS), else as a
    sparse file.
    """
    from ext4lite.clone import clone as make
    from ext4lite.units import human, printable

    result = make(golden, episode, reflink=reflink.value, force=force)
    if result.method == "copy" and reflink is When.auto:
        print(
            f"ext4lite: {printable(episode)}: the host file system cannot share blocks; copied {human(result.bytes)} "
            f"in {result.seconds:.2f} s",
            file=sys.stderr,
        )
