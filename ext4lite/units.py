"""Sizes and times as people and their environment write them."""

from __future__ import annotations

import os

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(text: str) -> int:
    """Return the bytes of ``16G``, ``64MiB``, ``4096``…: binary units K, M, G, T.

    ValueError with a readable message.
    """
    plain = text.strip().upper().removesuffix("IB").removesuffix("B")
    number, unit = (plain[:-1], plain[-1]) if plain and plain[-1] in "KMGT" else (plain, "")
    if not (number.isascii() and number.isdigit()):
        raise ValueError(f"{text!r} is not a size such as 16G or 64M")
    return int(number) * _UNITS[unit]


LAST_SECOND = (1 << 34) - (1 << 31) - 1
"""The last second that an inode's times can say (in 2446)."""


def source_date_epoch() -> int | None:
    """Return SOURCE_DATE_EPOCH in seconds (https://reproducible-builds.org/specs/source-date-epoch/), None if not set.

    ValueError with a readable message for what is no time that ext4 can hold.
    """
    text = os.environ.get("SOURCE_DATE_EPOCH", "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= LAST_SECOND):
        raise ValueError(f"{text[:40]!r} is not a number of seconds (from 0 to {LAST_SECOND})")
    return int(text)


def printable(text: object) -> str:
    """Return a text without what breaks a line or steers a terminal (names of files and images may have it)."""
    return "".join(c if c.isprintable() else " " if c == "\n" else repr(c)[1:-1] for c in str(text)).strip()


def human(count: int) -> str:
    """Return a count of bytes in the largest binary unit that leaves at least 1: ``1.5 GiB``."""
    if count < 1024:
        return f"{count} B"
    value, unit = float(count), ""
    for unit in ("KiB", "MiB", "GiB", "TiB"):  # noqa: B007
        value /= 1024
        if value < 1024:
            break
    return f"{value:.1f} {unit}"
