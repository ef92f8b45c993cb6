"""Private runtime directories: one 0700 directory an episode, under ``$XDG_RUNTIME_DIR/gvx`` or else ``/tmp/gvx-UID``.

Whoever uses a directory holds a flock on it, so that the next episode can sweep up what nobody could remove (launcher
and supervisor both killed). The directory above goes away with the last episode.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import time
from pathlib import Path

from gvx.errors import InfraError

_SWEEP_AGE = 60.0
"""Seconds before an unlocked directory counts as left behind: its maker may not have locked it yet."""


def base_dir() -> Path:
    """Return the directory above all runtime directories of this user (it need not exist)."""
    session = os.environ.get("XDG_RUNTIME_DIR")
    if session and os.access(session, os.W_OK):
        return Path(session, "gvx")
    return Path(f"/tmp/gvx-{os.getuid()}")  # _make_base checks: ours, 0700, no symlink


class RuntimeDir:
    """An episode's private directory, locked while this object is open.

    Attributes:
        path: the directory; its parent is :func:`base_dir`.
    """

    __slots__ = ("_fd", "path")

    def __init__(self, id: str) -> None:
        """Make and lock ``base/id``.

        Raises:
            InfraError: the base belongs to somebody else or is open to others; the host refuses.
        """
        base = base_dir()
        try:
            for attempt in range(10):
                _make_base(base)
                try:
                    Path(base, id).mkdir(mode=0o700)
                    break
                except FileNotFoundError:  # another episode removed the empty base just now
                    if attempt == 9:
                        raise
            self.path = Path(base, id)
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InfraError(f"cannot make a runtime directory: {error.strerror}", where=str(base)) from error
        _sweep(base)

    def remove(self) -> None:
        """Remove the directory with all in it, and the base when it is empty. Never fails, may be called again."""
        if self._fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1
            with contextlib.suppress(OSError):
                self.path.parent.rmdir()


def _make_base(base: Path) -> None:
    with contextlib.suppress(FileExistsError):
        base.mkdir(mode=0o700)
    found = base.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise InfraError("the runtime directory must be a directory of yours with mode 0700", where=str(base))


def _sweep(base: Path) -> None:
    """Remove directories whose users are gone."""
    for entry in base.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - entry.lstat().st_mtime < _SWEEP_AGE:
                continue
            fd = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(entry, ignore_errors=True)
            finally:
                os.close(fd)
