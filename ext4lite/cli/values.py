"""Values of options that several commands have. What cannot be read is a usage error that names the option."""

from __future__ import annotations

from uuid import UUID

import typer

from ext4lite import units


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
