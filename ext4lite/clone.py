"""Copies of a golden volume, one an episode.

By sharing blocks where the host file system can, else as sparse copies.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ext4lite import hostfs
from ext4lite.blockdev import StrPath, check_target, lock_shared, open_image, replacing, target_path
from ext4lite.errors import HostError, ReflinkUnavailable
from ext4lite.super import read_super

Reflink = Literal["auto", "always", "never"]


@dataclass(slots=True, frozen=True)
class CloneResult:
    """How a clone came about: ``seconds`` all in all, ``bytes`` copied (0 when blocks are shared)."""

    method: Literal["reflink", "copy"]
    seconds: float
    bytes: int


def clone(golden: StrPath, episode: StrPath, *, reflink: Reflink = "auto", force: bool = False) -> CloneResult:
    """Make ``episode`` a copy of ``golden``, which must be clean and not in use for writing.

    The target appears whole or not at all.

    ``reflink``: ``always`` shares blocks or fails, ``never`` copies, ``auto`` shares where possible. ``force`` replaces
    an existing target that is not in use. Raises VolumeBusy, NeedsRecovery, CorruptImage, Unsupported,
    ReflinkUnavailable, HostError.
    """
    if reflink not in ("auto", "always", "never"):
        raise ValueError(f"reflink must be auto, always or never, not {reflink!r}")
    begin = time.perf_counter()
    fd = open_image(golden)
    try:
        source, target = Path(golden), target_path(episode)
        lock_shared(fd, source)
        read_super(fd, str(source)).require_clean()
        if target.exists() and target.samefile(source):
            raise HostError("is the golden volume itself", where=str(target))
        exists = check_target(target, force=force)
        result = _clone_locked(fd, source, target, reflink, replace=exists or force)
    finally:
        os.close(fd)
    return CloneResult(result[0], time.perf_counter() - begin, result[1])


def _clone_locked(
    fd: int, source: Path, target: Path, reflink: Reflink, *, replace: bool
) -> tuple[Literal["reflink", "copy"], int]:
    if sys.platform == "darwin" and reflink != "never":
        done = _clonefile(source, target, reflink)
        if done:
            return "reflink", 0
    new = hostfs.NewFile(target)
    try:
        method: Literal["reflink", "copy"] = "copy"
        copied = 0
        if reflink != "never" and _try_ficlone(new.fd, fd, target, reflink):
            method = "reflink"
        else:
            copied = hostfs.copy_sparse(new.fd, fd, os.lseek(fd, 0, os.SEEK_END))  # fstat says 0 for a block device
        with replacing(target) if replace else contextlib.nullcontext():
            new.publish(replace=replace)
    except FileExistsError as e:
        raise HostError("the target exists", where=str(target), hint="--force replaces it") from e
    except OSError as e:
        raise HostError.from_os(e, str(target)) from e
    finally:
        new.discard()
    return method, copied


def _try_ficlone(out: int, fd: int, target: Path, reflink: Reflink) -> bool:
    try:
        hostfs.ficlone(out, fd)
    except OSError as e:
        if e.errno not in hostfs.NO_REFLINK:
            raise
        if reflink == "always":
            raise _unavailable(e, target) from e
        return False
    return True


def _clonefile(source: Path, target: Path, reflink: Reflink) -> bool:
    """macOS: clonefile wants a name that does not exist yet, so it makes the temporary file itself."""
    temp = hostfs.temp_name(target)
    try:
        hostfs.clonefile(source, temp)
        temp.rename(target)
    except OSError as e:
        hostfs.unlink_quietly(temp)
        if e.errno not in hostfs.NO_REFLINK:
            raise HostError.from_os(e, str(target)) from e
        if reflink == "always":
            raise _unavailable(e, target) from e
        return False
    return True


def _unavailable(e: OSError, target: Path) -> ReflinkUnavailable:
    if e.errno == errno.EXDEV:
        what, hint = "golden volume and clone lie on different file systems", "put them on the same XFS or Btrfs"
    else:
        what, hint = "the host file system cannot share blocks", "use XFS or Btrfs, or --reflink=auto to copy"
    return ReflinkUnavailable(what, where=str(target), hint=hint)
