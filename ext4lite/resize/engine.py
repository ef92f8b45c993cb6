"""One resizing: what is to be done, in which way, and what is tried when that does not go.

A volume with a journal is changed through it: see ``grow.py`` and ``shrink.py``. Without one, and when something does
not fit a transaction, the work is done on a copy (blocks shared where the host can), which then takes the name.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ext4lite import hostfs, journal
from ext4lite.blockdev import StrPath, lock_exclusive, open_image, remove_record
from ext4lite.errors import HostError, Unsupported, VolumeFull
from ext4lite.jbd2.log import Blocks
from ext4lite.jbd2.transaction import TransactionTooLarge
from ext4lite.layout import constants as c
from ext4lite.layout_volume import LayoutVolume
from ext4lite.resize.grow import Growth, wanted_for_descriptors, write_copies
from ext4lite.resize.move import JournalInTheWay
from ext4lite.resize.shrink import Shrinkage, smallest
from ext4lite.shape import (
    Shape,
    has_resize_inode,
    has_stable_inodes,
    require_possible,
    require_resizable,
    reshaped,
    shape_of,
)
from ext4lite.super import Super, read_super
from ext4lite.units import human

Device = Callable[[Blocks], Blocks]
Progress = Callable[[int], None]
_LARGEST = 16 << 40


@dataclass(slots=True)
class ResizeResult:
    """What became of a volume; sizes in bytes. ``method`` is ``none`` when it had the size already."""

    path: str
    old_size: int
    size: int
    block_size: int
    blocks: int
    groups: int
    inodes: int
    free_blocks: int
    method: Literal["none", "in place", "copy"]
    moved_bytes: int = 0
    moved_inodes: int = 0
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain data for JSON."""
        return asdict(self)


def resize(
    path: StrPath,
    size: int | None = None,
    *,
    minimum: bool = False,
    progress: Progress | None = None,
    command: str = "",
    device: Device | None = None,
) -> ResizeResult:
    """Give a volume another size in bytes: of the file by default, the smallest possible with ``minimum``.

    It may become a little smaller than asked for: whole blocks, and no last group without room for files. The file gets
    the volume's size. A volume that needs recovery is recovered first. ``progress`` is called with each number of bytes
    moved; ``device`` may put blocks between the image and all that is written to it (for tests).

    VolumeFull (which names the smallest size) when it would be too small, Unsupported (features by name, impossible
    sizes), VolumeBusy, NeedsRecovery, CorruptImage, HostError.
    """
    begin = time.perf_counter()
    fd = open_image(path, write=True)
    try:
        lock_exclusive(fd, path, command)
        try:
            result = _Resize(fd, path, progress, command, device).run(size, minimum)
        finally:
            remove_record(path)
    finally:
        os.close(fd)
    result.seconds = time.perf_counter() - begin
    return result


class _Resize:
    """One call of :func:`resize` on an open and locked file."""

    def __init__(self, fd: int, path: StrPath, progress: Progress | None, command: str, device: Device | None) -> None:
        self.fd, self.path, self.progress, self.command, self.device = fd, path, progress, command, device
        self.where = os.fspath(path)
        self.moved_blocks = self.moved_inodes = 0
        self.is_file = stat.S_ISREG(os.fstat(fd).st_mode)

    def run(self, size: int | None, minimum: bool) -> ResizeResult:
        """Find out what to do, and do it."""
        sb = self._ready()
        old = shape_of(sb)
        method: Literal["none", "in place", "copy"] = "none"
        if minimum:
            method, new = self._to_the_smallest(sb, old)
        else:
            new = self._wanted(sb, old, sb.file_size if size is None else size)
            if new.blocks != old.blocks:
                method = self._change(old, new)
        if method != "copy" and self.is_file:
            self._set_file_size(new.size)
        after = read_super(self.fd, self.where)
        return ResizeResult(
            self.where,
            old.size,
            new.size,
            new.block_size,
            new.blocks,
            new.groups,
            new.inodes,
            after.free_blocks,
            method,
            self.moved_blocks * new.block_size,
            self.moved_inodes,
        )

    def _ready(self) -> Super:
        """Return the superblock of the volume, recovered and fit for the purpose."""
        sb = read_super(self.fd, self.where, torn=True)
        require_resizable(sb)
        if sb.needs_recovery:
            from ext4lite.recover import recover_locked

            recover_locked(self.fd, self.where)
            sb = read_super(self.fd, self.where)
        sb.require_clean()
        return sb

    def _wanted(self, sb: Super, old: Shape, size: int) -> Shape:
        """Return the geometry for a size. Unsupported, VolumeFull."""
        blocks = size // old.block_size
        if blocks != old.blocks:
            if size > _LARGEST:
                raise Unsupported(f"a volume of {size} bytes cannot be made", hint="at most 16T", where=self.where)
            if blocks < 64:
                raise Unsupported(f"a volume of {size} bytes is too small", where=self.where)
        new = old
        if blocks != old.blocks:
            new = reshaped(old, blocks, keeps_room=has_resize_inode(sb))
        if blocks > old.blocks and new.blocks < old.blocks:
            new = old
        require_possible(new, wide=bool(sb.incompat & c.INCOMPAT_64BIT), where=self.where)
        if not self.is_file and new.size > sb.file_size:
            raise HostError(f"the device has only {sb.file_size} bytes", where=self.where)
        if new.blocks < old.blocks:
            with contextlib.closing(self._open()) as volume:
                least = smallest(volume, old)
            if new.blocks < least.blocks:
                raise self._too_small(new, least)
            if new.groups < old.groups and has_stable_inodes(sb):
                raise Unsupported("inodes keep their numbers in a volume with stable_inodes", where=self.where)
        return new

    def _too_small(self, new: Shape, least: Shape) -> VolumeFull:
        what = f"what the volume holds does not fit into {new.size} bytes"
        return VolumeFull(what, where=self.where, hint=f"the smallest size is {least.size} ({human(least.size)})")

    def _open(self, fd: int = -1, *, private: bool = False) -> LayoutVolume:
        """Open the volume; ``private``: a copy that nobody else sees."""
        device = None if private else self.device
        return LayoutVolume.open_locked(self.fd if fd < 0 else fd, self.path, journaled=not private, device=device)

    def _set_file_size(self, size: int, fd: int = -1) -> None:
        fd = self.fd if fd < 0 else fd
        try:
            if os.fstat(fd).st_size != size:
                os.ftruncate(fd, size)
                os.fsync(fd)
        except OSError as e:
            raise HostError.from_os(e, self.where) from e

    # -- the smallest -----------------------------------------------------------------------------------------------

    def _to_the_smallest(self, sb: Super, old: Shape) -> tuple[Literal["none", "in place", "copy"], Shape]:
        """Shrink as far as it goes: what is moved into more pieces than before needs a little room for their maps."""
        with contextlib.closing(self._open()) as volume:
            tries = [smallest(volume, old, slack=slack) for slack in (8, 64, 512, 4096, 32768)]
        for new in tries:
            if new.blocks >= old.blocks or (new.groups < old.groups and has_stable_inodes(sb)):
                break
            with contextlib.suppress(VolumeFull):
                return self._change(old, new), new
        return "none", old

    # -- ways -------------------------------------------------------------------------------------------------------

    def _change(self, old: Shape, new: Shape) -> Literal["in place", "copy"]:
        if read_super(self.fd, self.where).compat & c.COMPAT_HAS_JOURNAL:
            try:
                self._in_place(old, new)
                return "in place"
            except (TransactionTooLarge, JournalInTheWay) as e:
                if not self.is_file:
                    raise Unsupported(f"{e.what}, which takes a file", where=self.where) from e
            except VolumeFull as e:
                sums = read_super(self.fd, self.where).ro_compat & (c.RO_METADATA_CSUM | c.RO_GDT_CSUM)
                if new.blocks < old.blocks and (sums or not self.is_file):
                    what = f"what the volume holds does not fit into {new.size} bytes in the pieces that are free there"
                    raise VolumeFull(what, where=self.where, hint="--minimum finds the smallest size") from e
                if not self.is_file:
                    raise
        elif not self.is_file:
            raise Unsupported("a device with a volume without a journal cannot be resized safely", where=self.where)
        self._on_copy(old, new)
        return "copy"

    def _in_place(self, old: Shape, new: Shape) -> None:
        if new.blocks > old.blocks and self.is_file:
            self._set_file_size(old.size)  # what lies behind the volume's end is nobody's; from now on it is zeros
            self._set_file_size(new.size)
        work = self._grow if new.blocks > old.blocks else self._shrink
        try:
            with contextlib.suppress(JournalInTheWay):
                work(old, new)
                return
            length = self._move_journal(old, new)
            work(old, new)
            self._restore_journal(length)
        except BaseException:
            if new.blocks > old.blocks and self.is_file:
                with contextlib.suppress(HostError):
                    found = read_super(self.fd, self.where, torn=True)
                    if found.blocks == old.blocks and not found.needs_recovery:  # else the log may know of more
                        self._set_file_size(old.size)
            raise

    def _restore_journal(self, blocks: int) -> None:
        """Make the journal as long as it was, if there is room."""
        with contextlib.suppress(VolumeFull):
            journal.change_length(self.fd, self.path, blocks, device=self.device)
        self._hold()

    def _move_journal(self, old: Shape, new: Shape) -> int:
        """Move the journal, which may get shorter by that, out of the way; return its length. JournalInTheWay."""
        away = wanted_for_descriptors(old, new) if new.blocks > old.blocks else [(new.blocks, old.blocks)]
        with contextlib.closing(self._open()) as volume:
            length = volume.journal.log.maxlen if volume.journal is not None else 0
        if not journal.move(self.fd, self.path, away, device=self.device):
            raise JournalInTheWay("the journal is in the way", where=self.where)
        self._hold()
        return length

    def _hold(self) -> None:
        """Write the lock's record again: closing the volume has taken it away."""
        with contextlib.suppress(HostError):
            lock_exclusive(self.fd, self.path, self.command)

    def _grow(self, old: Shape, new: Shape) -> None:
        with self._session() as volume:
            growth = Growth(volume, old, new, zeros=self.is_file)
            with contextlib.suppress(TransactionTooLarge):
                growth.run()
                self._finish(volume, new, growth.mover.blocks)
                return
        # Too much to move for one transaction: first inside the volume as it is.
        with self._session() as volume:
            growth = Growth(volume, old, new, zeros=self.is_file)
            growth.make_room()
            self.moved_blocks += growth.mover.blocks
            volume.close()
        with self._session() as volume:
            growth = Growth(volume, old, new, zeros=self.is_file)
            growth.run()
            self._finish(volume, new, growth.mover.blocks)

    def _shrink(self, old: Shape, new: Shape) -> None:
        with self._session() as volume:
            shrinkage = Shrinkage(volume, old, new, self.progress)
            try:
                shrinkage.make_room()
            finally:
                self.moved_inodes += shrinkage.renumberer.inodes
            shrinkage.cut()
            self._finish(volume, new, shrinkage.mover.blocks)

    def _finish(self, volume: LayoutVolume, new: Shape, moved: int) -> None:
        write_copies(volume, new)
        self.moved_blocks += moved
        volume.close()
        self._hold()

    @contextlib.contextmanager
    def _session(self) -> Any:
        """Open the volume; when the block fails, what is not committed is forgotten, and the journal left empty."""
        volume = self._open()
        try:
            yield volume
        finally:
            if volume._fd >= 0:
                volume.give_up()

    # -- on a copy --------------------------------------------------------------------------------------------------

    def _on_copy(self, old: Shape, new: Shape) -> None:
        """Change a copy and put it in the volume's place. HostError (no room on the host), VolumeFull."""
        target = Path(os.path.realpath(self.where))
        if (names := os.fstat(self.fd).st_nlink) > 1:
            what = f"the file has {names} names (hard links), and only one would get the new volume"
            raise HostError(what, where=self.where)
        made = hostfs.NewFile(target)
        try:
            hostfs.take_over(self.fd, made.fd)  # first: it can be refused
            try:
                hostfs.ficlone(made.fd, self.fd)
            except OSError as e:
                if e.errno not in hostfs.NO_REFLINK:
                    raise
                hostfs.copy_sparse(made.fd, self.fd, old.size)
            self._set_file_size(old.size, made.fd)
            if new.blocks > old.blocks:
                self._set_file_size(new.size, made.fd)
            self._change_copy(made.fd, old, new)
            self._set_file_size(new.size, made.fd)
            kept = os.dup(made.fd)
            try:
                made.publish(durable=True)  # who waits for the old file's lock finds out that it has no name any more
                os.dup2(kept, self.fd)
            finally:
                os.close(kept)
        except OSError as e:
            raise HostError.from_os(e, self.where) from e
        finally:
            made.discard()

    def _change_copy(self, fd: int, old: Shape, new: Shape) -> None:
        volume = self._open(fd, private=True)
        try:
            if new.blocks > old.blocks:
                growth = Growth(volume, old, new, zeros=True)
                growth.run()
                self.moved_blocks += growth.mover.blocks
            else:
                shrinkage = Shrinkage(volume, old, new, self.progress)
                shrinkage.make_room()
                shrinkage.cut()
                self.moved_blocks += shrinkage.mover.blocks
                self.moved_inodes += shrinkage.renumberer.inodes
            write_copies(volume, new)
        except BaseException:
            volume.abandon()
            raise
        volume.close()
