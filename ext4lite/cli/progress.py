"""A line on standard error that says how far a copy is, where a person can see it and it takes long."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_EVERY = 0.2
_AFTER = 1.0
_WIDTH = 30


class _Line:
    """The line on standard error: drawn when the work takes long, now and then, and wiped in the end."""

    def __init__(self) -> None:
        self.begin = self._drawn = time.monotonic()

    def draw(self, text: Callable[[float], str]) -> None:
        """Draw what ``text`` makes of the seconds since the beginning, if it is time."""
        now = time.monotonic()
        if now - self.begin > _AFTER and now - self._drawn > _EVERY:
            self._drawn = now
            print(f"\r\x1b[K{text(now - self.begin)}", end="", file=sys.stderr, flush=True)

    def wipe(self) -> None:
        """Leave nothing behind."""
        if self._drawn != self.begin:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextmanager
def _line(*, shown: bool = True) -> Iterator[_Line | None]:
    """Give the line, or None where nobody could see it."""
    if not shown or not sys.stderr.isatty():
        yield None
        return
    line = _Line()
    try:
        yield line
    finally:
        line.wipe()


def _marks(part: float) -> str:
    filled = int(_WIDTH * part)
    return f"[{'#' * filled}{'-' * (_WIDTH - filled)}]"


def _human(count: float) -> str:
    from ext4lite.units import human

    return human(int(count))


@contextmanager
def counter(what: str) -> Iterator[Callable[[int], None]]:
    """Give a function to call with each number of bytes done. Shows nothing unless standard error is a terminal."""
    total = 0
    with _line() as line:

        def add(count: int) -> None:
            nonlocal total
            total += count
            if line is not None:
                line.draw(lambda seconds: f"{what}: {_human(total)}, {_human(total / seconds)}/s")

        yield add


@contextmanager
def bar(what: str, *, shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Give a function to call with (bytes done, bytes in all); where a person can see it, it draws a bar."""
    with _line(shown=shown) as line:

        def draw(done: int, total: int) -> None:
            if line is not None and total:
                part = min(1.0, done / total)
                line.draw(
                    lambda seconds: f"{what} {_marks(part)} {part:.0%} of {_human(total)}, {_human(done / seconds)}/s"
                )

        yield draw


@contextmanager
def steps(what: str, total: Callable[[], int], *, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """Give a function to call with how much was done each time; where a person can see it, it draws a bar.

    ``total`` is only asked how much there is when there is a bar: finding out may take a walk.
    """
    done = 0
    with _line(shown=shown) as line:
        most = max(1, total()) if line is not None else 1

        def add(count: int) -> None:
            nonlocal done
            done += count
            part = min(1.0, done / most)
            if line is not None and part:
                line.draw(lambda seconds: f"{what} {_marks(part)} {part:.0%}, {seconds * (1 - part) / part:.0f} s left")

        yield add
