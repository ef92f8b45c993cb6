"""Directories in memory, for tests that flush so often that a disk which others use would take minutes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_LEAST = 1 << 30  # bytes free, else the test's own directory must do


def in_memory(tmp_path: Path, prefix: str) -> Iterator[Path]:
    """Yield a directory in memory where there is room, else ``tmp_path``: for a fixture to yield from."""
    shm = Path("/dev/shm")
    if not shm.is_dir() or shutil.disk_usage(shm).free < _LEAST:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shm, prefix=prefix) as name:
        yield Path(name)
