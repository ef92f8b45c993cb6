"""Ctrl-C and SIGTERM wait while something must not be left half done."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_depth = 0


def held_back() -> bool:
    """Tell whether signals wait just now."""
    return _depth > 0


@contextmanager
def deferred() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back while the block runs; what came meanwhile is handled after it.

    Only the main thread gets signals; in others, and where somebody outside of Python has a handler, nothing changes.
    """
    global _depth
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if _depth or any(signal.getsignal(number) is None for number in _SIGNALS):
        _depth += 1
        try:
            yield
        finally:
            _depth -= 1
        return
    came: list[tuple[int, FrameType | None]] = []
    _depth += 1
    before = {number: signal.signal(number, lambda n, frame: came.append((n, frame))) for number in _SIGNALS}
    try:
        yield
    finally:
        _depth -= 1
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            first, frame = came[0]
            handler = before[signal.Signals(first)]
            if callable(handler):
                handler(first, frame)
            elif handler == signal.SIG_DFL:
                os.kill(os.getpid(), first)
