"""What a supervisor tells while an episode runs: JSON lines on a pipe (docs/episode.md)."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

_MAX_LINE = 1 << 20
_MAX_EVENTS = 1024
"""Kept events and bytes of a line are bounded: nothing that comes from an episode may fill the launcher's memory."""


@dataclass(slots=True, frozen=True)
class Event:
    """One line: its name, its time on CLOCK_MONOTONIC in ns (as ``time.monotonic_ns()``), and everything else in it."""

    name: str
    t_ns: int
    data: dict[str, Any] = field(default_factory=dict)


class EventReader:
    """Reads events from a pipe's read end, in a thread of its own, until every writer has closed it."""

    def __init__(self, fd: int) -> None:
        """Own ``fd`` from now on."""
        self._fd = fd
        self._events: list[Event] = []
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=f"gvx-events-{fd}", daemon=True)
        self._thread.start()

    def first(self, name: str) -> Event | None:
        """Return the first event of that name so far."""
        with self._changed:
            return next((event for event in self._events if event.name == name), None)

    def all(self) -> list[Event]:
        """Return all events so far, in the order they came."""
        with self._changed:
            return list(self._events)

    def wait(self, name: str, timeout: float | None = None) -> Event | None:
        """Wait until an event of that name comes. None: the pipe was closed or ``timeout`` seconds passed before."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                for event in self._events:
                    if event.name == name:
                        return event
                left = None if deadline is None else deadline - time.monotonic()
                if self._ended or (left is not None and left <= 0):
                    return None
                self._changed.wait(None if left is None else min(left, threading.TIMEOUT_MAX))

    def join(self, timeout: float) -> bool:
        """Wait until all writers are gone. Tells whether they are."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with open(self._fd, "rb", buffering=65536) as pipe:
                while line := pipe.readline(_MAX_LINE):
                    event = parse_event(line)
                    if event is not None:
                        with self._changed:
                            if len(self._events) < _MAX_EVENTS:
                                self._events.append(event)
                            self._changed.notify_all()
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()


def parse_event(line: bytes) -> Event | None:
    """Read one line. None for what is no event: a newer supervisor may write more than this version knows."""
    try:
        document = json.loads(line)
    except ValueError:
        return None
    if not isinstance(document, dict) or not isinstance(document.get("event"), str):
        return None
    name, moment = document.pop("event"), document.pop("t_ns", 0)
    return Event(name, moment if isinstance(moment, int) else 0, document)
