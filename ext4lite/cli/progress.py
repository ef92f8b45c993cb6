"""A line on standard error that says how far a copy is, where a person can see it and it takes long."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_EVERY = 0.2
_AFTER = 1.0


@contextmanager
def counter(what: str) -> Iterator[Callable[[int], None]]:
    """Give a function to call with each number of bytes done. Shows nothing unless standard error is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    begin = shown = time.monotonic()
    total = 0

    def add(count: int) -> None:
        nonlocal total, shown
        from ext4lite.units import human

        total += count
        now = time.monotonic()
        if now - begin > _AFTER and now - shown > _EVERY:
            shown = now
            rate = human(int(total / (now - begin)))
            print(f"\r\x1b[K{what}: {human(total)}, {rate}/s", end="", file=sys.stderr, flush=True)

    try:
        yield add
    finally:
        if shown != begin:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
