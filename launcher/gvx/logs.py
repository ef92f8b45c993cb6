"""Bounded logs: the output of an episode in a file that cannot grow without end."""

from __future__ import annotations

import os
import threading
from pathlib import Path

_CHUNK = 65536


class BoundedLog:
    """A pipe into a file of at most ``limit`` bytes: when half is full, the older half makes room (``FILE.1``).

    Give it to a child as its stdout or stderr. Reading goes on past the limit, so a chatty guest is never blocked.
    """

    def __init__(self, path: Path, limit: int = 16 << 20) -> None:
        """Open the file, replacing an older one, and start reading."""
        self.path, self._half = path, max(limit // 2, 1)
        self._older.unlink(missing_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        reader, self._writer = os.pipe()
        self._thread = threading.Thread(target=self._pump, args=(reader,), name=f"gvx-log-{reader}", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return the write end of the pipe."""
        return self._writer

    def close(self, timeout: float = 1.0) -> None:
        """Close our write end and wait up to ``timeout`` seconds for the last output. May be called again."""
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1
        self._thread.join(timeout)

    def text(self) -> str:
        """Return what is kept, oldest first."""
        kept = [self._older, self.path]
        return b"".join(path.read_bytes() for path in kept if path.exists()).decode(errors="replace")

    @property
    def _older(self) -> Path:
        return self.path.with_name(self.path.name + ".1")

    def _pump(self, reader: int) -> None:
        size = 0
        try:
            while chunk := os.read(reader, min(_CHUNK, self._half)):
                if size + len(chunk) > self._half:
                    os.close(self._file)
                    self.path.replace(self._older)
                    self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                    size = 0
                size += len(chunk)
                os.write(self._file, chunk)
        finally:
            os.close(reader)
            os.close(self._file)
