"""Sizes as people write them."""

from __future__ import annotations

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
