"""Between our stdin, stdout and stderr and the guest's: pipes of our own, as docker has them, and threads that copy.

The guest is never given our own descriptors: the Sentry makes what it is given non-blocking (which is a flag of the
open file, so of our terminal or of the shell's pipe, too), and keeps an offset of its own in regular files (so a log
shared with other commands would be overwritten from its start).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable

_CHUNK = 1 << 16
_FOREGROUND_MS = 200
"""How often to look whether we are in the foreground again, while somebody types for others."""


class Relays:
    """The copies of one episode. Its descriptors for the child are in :attr:`child_fds` until :meth:`handed_over`."""

    def __init__(self) -> None:
        """Nothing is copied yet."""
        self.child_fds: list[int] = []
        self._by_file: dict[tuple[int, int], int] = {}
        self._outputs: list[threading.Thread] = []
        self._stop_reader = self._stop = -1
        self._inputs: list[threading.Thread] = []

    def input(self, source: int) -> int:
        """Copy from ``source`` to the guest. Returns the descriptor to give to the child."""
        if self._stop < 0:
            self._stop_reader, self._stop = os.pipe()
        reader, writer = os.pipe()
        self.child_fds.append(reader)
        self._inputs.append(_thread(lambda: _copy_in(source, writer, self._stop_reader)))
        return reader

    def output(self, target: int) -> int:
        """Copy from the guest to ``target``; two that are the same file share one pipe, so that their order is kept."""
        found = os.fstat(target)
        key = (found.st_dev, found.st_ino)
        if key not in self._by_file:
            reader, writer = os.pipe()
            self.child_fds.append(writer)
            self._by_file[key] = writer
            self._outputs.append(_thread(lambda: _copy_out(reader, target)))
        return self._by_file[key]

    def handed_over(self) -> None:
        """Close our copies of what the child has now. May be called again."""
        while self.child_fds:
            os.close(self.child_fds.pop())

    def finish(self, timeout: float | None) -> None:
        """After the guest's end: wait for its last output, for up to ``timeout`` seconds (a reader may be slow)."""
        self.handed_over()
        if self._stop >= 0:
            os.close(self._stop)
            self._stop = -1
        for thread in self._outputs:
            thread.join(timeout)
        for thread in self._inputs:
            thread.join(timeout)
        if self._stop_reader >= 0 and not any(thread.is_alive() for thread in self._inputs):
            os.close(self._stop_reader)
            self._stop_reader = -1


def _thread(action: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=action, name="gvx-stdio", daemon=True)
    thread.start()
    return thread


def _in_background_of(fd: int) -> bool:
    """Whether ``fd`` is our controlling terminal and another process group has it (``gvx-launch run … &``)."""
    try:
        return os.isatty(fd) and os.tcgetpgrp(fd) != os.getpgrp()
    except OSError:  # a terminal, but not our controlling one
        return False


def _copy_in(source: int, writer: int, stop: int) -> None:
    """Copy until ``source`` ends, the guest closes its stdin, or ``stop`` is closed on the other side."""
    poller = select.poll()
    poller.register(source, select.POLLIN)
    poller.register(stop, select.POLLIN)
    full = select.poll()
    full.register(writer, select.POLLOUT)
    full.register(stop, select.POLLIN)
    os.set_blocking(writer, False)
    # In the background of a terminal, reading is refused (EIO) with this signal blocked, else it would stop us.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTIN])
    stopped = select.poll()
    stopped.register(stop, select.POLLIN)
    with contextlib.suppress(OSError):  # EPIPE: the guest reads no more; EIO: our terminal has hung up
        chunk = b""
        while True:
            ready = dict((full if chunk else poller).poll())
            if stop in ready:
                break
            if not chunk and _in_background_of(source):
                stopped.poll(_FOREGROUND_MS)
                continue
            if chunk:
                chunk = chunk[os.write(writer, chunk) :]
                continue
            with contextlib.suppress(BlockingIOError):
                chunk = os.read(source, _CHUNK)
                if not chunk:
                    break
    os.close(writer)


def _copy_out(reader: int, target: int) -> None:
    """Copy until every writer is gone. Once ``target`` is closed, the guest gets SIGPIPE as it would there."""
    with contextlib.suppress(OSError):
        while chunk := os.read(reader, _CHUNK):
            while chunk:
                try:
                    chunk = chunk[os.write(target, chunk) :]
                except BlockingIOError:  # whoever shares the target made it non-blocking
                    poller = select.poll()
                    poller.register(target, select.POLLOUT)
                    poller.poll()
    os.close(reader)
