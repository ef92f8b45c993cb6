"""A line on standard error that says how far a copy is, where a person can see it and it takes long."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_EVERY = 0.2
_AFTER = 1.0
_WIDTH = 30


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


@contextmanager
def bar(what: str, *, shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Give a function to call with (bytes done, bytes in all); where a person can see it, it draws a bar."""
    if not shown or not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    begin = last = time.monotonic()

    def draw(done: int, total: int) -> None:
        nonlocal last
        from ext4lite.units import human

        now = time.monotonic()
        if now - begin > _AFTER and now - last > _EVERY and total:
            last = now
            filled = min(_WIDTH, _WIDTH * done // total)
            marks = "#" * filled + "-" * (_WIDTH - filled)
            rate = human(int(done / (now - begin)))
            text = f"{what} [{marks}] {100 * done // total} % of {human(total)}, {rate}/s"
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    try:
        yield draw
    finally:
        if last != begin:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextmanager
def steps(what: str, total: Callable[[], int], *, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """Give a function to call with how much was done each time; where a person can see it, it draws a bar.

    ``total`` is only asked how much there is when there is a bar: finding out may take a walk.
    """
    if not shown or not sys.stderr.isatty():
        yield lambda _: None
        return
    most, done = max(1, total()), 0
    begin = last = time.monotonic()

    def add(count: int) -> None:
        nonlocal done, last
        done += count
        now = time.monotonic()
        if now - begin > _AFTER and now - last > _EVERY:
            last = now
            part = min(1.0, done / most)
            marks = "#" * int(_WIDTH * part) + "-" * (_WIDTH - int(_WIDTH * part))
            left = (now - begin) * (1 - part) / part if part else 0
            print(f"\r\x1b[K{what} [{marks}] {part:.0%}, {left:.0f} s left", end="", file=sys.stderr, flush=True)

    try:
        yield add
    finally:
        if last != begin:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
