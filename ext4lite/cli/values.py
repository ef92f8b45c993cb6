"""Options that several commands have, and their values. What cannot be read is a usage error that names the option."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

import typer

from ext4lite import units

Replay = Annotated[
    bool,
    typer.Option("--replay/--no-replay", help="Read a volume that was not closed as it will be once recovered."),
]
Verify = Annotated[
    bool, typer.Option("--verify/--no-verify", help="Verify the checksums of what is read of the volume's structures.")
]


def size_value(text: str, option: str) -> int:
    """Return the bytes of a size such as 16G."""
    try:
        return units.parse_size(text)
    except ValueError as e:
        raise typer.BadParameter(str(e), param_hint=option) from None


def uuid_value(text: str) -> UUID | None:
    """Return the UUID that ``--uuid`` gives, None if it is empty."""
    try:
        return UUID(text) if text else None
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a UUID", param_hint="--uuid") from None


def epoch_value() -> int | None:
    """Return SOURCE_DATE_EPOCH in seconds, None when it is not set."""
    try:
        return units.source_date_epoch()
    except ValueError as e:
        raise typer.BadParameter(str(e), param_hint="SOURCE_DATE_EPOCH") from None
