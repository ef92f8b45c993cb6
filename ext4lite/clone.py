"""Copies of a golden volume, one an episode.

By sharing blocks where the host file system can, else as a delta over the golden volume, else as sparse copies.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ext4lite import backing as backing_file
from ext4lite import hostfs
from ext4lite.blockdev import StrPath, check_target, open_device, replacing, target_path
from ext4lite.delta import DeltaDevice, as_delta
from ext4lite.device import Device
from ext4lite.errors import BackingError, HostError, ReflinkUnavailable, Unsupported
from ext4lite.flatten import copy_flat
from ext4lite.super import read_super

When = Literal["auto", "always", "never"]
Method = Literal["reflink", "backing", "copy"]


@dataclass(slots=True, frozen=True)
class CloneResult:
    """How a clone came about: ``seconds`` all in all, ``bytes`` copied."""

    method: Method
    """``reflink``: it shares the host's blocks; ``backing``: it is a delta that reads from :attr:`base`; ``copy``."""
    seconds: float
    bytes: int
    base: str | None = None
    """The backing file, which must stay as it is."""

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain data for JSON."""
        return asdict(self)


def clone(
    golden: StrPath,
    episode: StrPath,
    *,
    reflink: When = "auto",
    backing: When | None = None,
    force: bool = False,
) -> CloneResult:
    """Make ``episode`` a copy of ``golden``, which must be clean and not in use for writing.

    The target appears whole or not at all.

    Args:
        golden: a plain image or a delta. The clone of a delta is a delta over the same backing file, with the private
            blocks copied (or shared).
        episode: what to make.
        reflink: ``always`` shares blocks or fails, ``never`` does not, ``auto`` does where possible.
        backing: a delta over ``golden`` instead of a copy, in an instant on any file system (docs/delta.md): ``always``
            without trying to share blocks, ``never`` not at all, ``auto`` where blocks cannot be shared. By default
            ``auto``, but ``never`` with ``reflink="never"``, which asks for a copy that stands alone.
        force: replace an existing target that is not in use.

    Raises VolumeBusy, NeedsRecovery, CorruptImage, Unsupported, BackingError, ReflinkUnavailable, HostError.
    """
    if reflink not in ("auto", "always", "never"):
        raise ValueError(f"reflink must be auto, always or never, not {reflink!r}")
    if backing not in (None, "auto", "always", "never"):
        raise ValueError(f"backing must be auto, always or never, not {backing!r}")
    if reflink == backing == "always":
        raise ValueError("a clone shares blocks or has a backing file, not both")
    if backing is None:
        backing = "never" if reflink == "never" else "auto"
    begin = time.perf_counter()
    with contextlib.closing(open_device(golden)) as image:
        source, target = Path(golden), target_path(episode)
        read_super(image, str(source)).require_clean()
        if target.exists() and target.samefile(source):
            raise HostError("is the golden volume itself", where=str(target))
        exists = check_target(target, force=force)
        maker = _Maker(image, source, target, reflink, backing)
        maker.run(replace=exists or force)
    return CloneResult(maker.method, time.perf_counter() - begin, maker.copied, maker.base)


class _Maker:
    """One clone on its way."""

    def __init__(self, image: Device, source: Path, target: Path, reflink: When, backing: When) -> None:
        self.image, self.source, self.target = image, source, target
        self.reflink, self.backing = reflink, backing
        self.delta = as_delta(image)
        self.method: Method = "copy"
        self.copied = 0
        self.base: str | None = None

    def run(self, *, replace: bool) -> None:
        """Make the file and give it its name."""
        shares = self.delta is None and self.reflink != "never" and self.backing != "always"
        if sys.platform == "darwin" and shares and _clonefile(self.source, self.target, self.reflink):
            self.method = "reflink"
            return
        new = hostfs.NewFile(self.target)
        try:
            self._fill(new.fd)
            with replacing(self.target) if replace else contextlib.nullcontext():
                new.publish(replace=replace)
        except FileExistsError as e:
            raise HostError("the target exists", where=str(self.target), hint="--force replaces it") from e
        except OSError as e:
            raise HostError.from_os(e, str(self.target)) from e
        finally:
            new.discard()

    def _fill(self, fd: int) -> None:
        if self.delta is not None and (self.backing != "never" or self.reflink != "never"):
            self._fill_from_delta(fd, self.delta)
        elif self.delta is not None:
            self.copied = copy_flat(fd, self.delta)
        elif self.backing != "always" and self._share(fd):
            self.method = "reflink"
        elif self.backing != "never" and self._over_backing(fd):
            self.method, self.base = "backing", os.path.realpath(self.source)
        else:
            self.copied = hostfs.copy_sparse(fd, self.image.fd, self.image.size())

    def _share(self, fd: int) -> bool:
        return self.reflink != "never" and _try_ficlone(fd, self.image.fd, self.target, self.reflink)

    def _over_backing(self, fd: int) -> bool:
        try:
            backing_file.create(fd, self.image.fd, self.source, self.target)
        except (BackingError, Unsupported):  # a block device, a path of thousands of bytes
            if self.backing == "always":
                raise
            return False
        return True

    def _fill_from_delta(self, fd: int, delta: DeltaDevice) -> None:
        """Copy the delta's own file; the copy finds the backing file from where it will be."""
        header = delta.header
        self.base = os.path.realpath(delta.base_where)
        if self.backing != "always" and self._share(fd):
            self.method = "reflink"
        else:
            self.method = "backing"
            self.copied = hostfs.copy_sparse(fd, delta.fd, backing_file.file_size(header.d_size))
        moved = backing_file.make_header(
            header.d_size,
            Path(self.base),
            backing_file.identity_of(header),
            self.target.parent,
            own_id=header.d_id,
            sequence=header.d_sequence + 1,
        )
        backing_file.write_header(fd, moved)


def _try_ficlone(out: int, fd: int, target: Path, reflink: When) -> bool:
    try:
        hostfs.ficlone(out, fd)
    except OSError as e:
        if e.errno not in hostfs.NO_REFLINK:
            raise
        if reflink == "always":
            raise _unavailable(e, target) from e
        return False
    return True


def _clonefile(source: Path, target: Path, reflink: When) -> bool:
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
