"""A volume open for reading and writing: the tree of names.

    with Volume.open("image.ext4", mode="rw") as v:
        v.mkdir("/etc")
        ino = v.create("/etc/hostname", mode=0o644)
        v.pwrite(ino, 0, b"box\\n")
        v.rename("/etc/hostname", "/etc/name")
        v.sync()

Paths are bytes or text (encoded as file names), from the volume's root; symlinks on the way are followed inside the
volume, one at the end is not, unless a method says so. Every operation is all or nothing: when it raises, the volume is
as it was. Nobody's permissions are checked: the caller is root, who may use reserved blocks, too. What a directory
hands down is handed down: the group with the set-group-id bit, default ACLs, and the flags that ext4 inherits.
Immutable and append-only flags bind, as they bind root, unless ``flags_bind`` is set to False.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ext4lite.blockdev import StrPath, open_device, remove_record
from ext4lite.device import Handle
from ext4lite.dirwrite import DirWriter
from ext4lite.errors import (
    Busy,
    CorruptImage,
    Exists,
    Invalid,
    IsADirectory,
    NotADirectory,
    NotEmpty,
    NotFound,
    Unsupported,
)
from ext4lite.features import WRITE
from ext4lite.inode import InodeRecord, encode_rdev
from ext4lite.jbd2.log import Blocks, FileBlocks
from ext4lite.layout import constants as c
from ext4lite.names import SPECIAL, NamesVolume, Path
from ext4lite.super import Super, read_super

RenameHow = Literal["replace", "noreplace", "exchange", "whiteout"]


@dataclass(slots=True)
class StatFs:
    """Sizes of a volume: counts of blocks and inodes, ``block_size`` in bytes. ``reserved`` blocks are root's."""

    block_size: int
    blocks: int
    free_blocks: int
    reserved_blocks: int
    inodes: int
    free_inodes: int


def require_writable(sb: Super) -> None:
    """Raise Unsupported, naming the features, unless this version can write to such a volume."""
    if names := WRITE.beyond(sb):
        what = f"a volume with {', '.join(names)} can only be read"
        raise Unsupported(what, where=sb.where, hint="open it read-only")


class File:
    """An open regular file of a writable volume; a context manager. Deleted meanwhile, it lives until it is closed."""

    def __init__(self, volume: WritableVolume, ino: int) -> None:
        self.ino = ino
        self._volume: WritableVolume | None = volume

    @property
    def _open(self) -> WritableVolume:
        if self._volume is None:
            raise Invalid("the file is closed")
        return self._volume

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._open.inode(self.ino).size

    def pread(self, length: int, offset: int) -> bytes:
        """Return up to ``length`` bytes from ``offset``; short at the file's end."""
        record = self._open.inode(self.ino)
        return b"".join(self._open._chunks(record, offset, length))

    def pwrite(self, data: bytes, offset: int) -> int:
        """See :meth:`WritableVolume.pwrite`."""
        return self._open.pwrite(self.ino, offset, data)

    def truncate(self, size: int) -> None:
        """See :meth:`WritableVolume.truncate`."""
        self._open.truncate(self.ino, size)

    def close(self) -> None:
        """Close it. Harmless when called again."""
        volume, self._volume = self._volume, None
        if volume is not None:
            volume._file_closed(self)

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class WritableVolume(NamesVolume):
    """An image open for reading and writing, under an exclusive lock. Not thread-safe. Made by ``Volume.open``."""

    def __init__(
        self, image: Handle, sb: Super, where: str, *, blocks: Blocks, clock: Callable[[], int] | None = None
    ) -> None:
        if clock is None:
            super().__init__(image, sb, where, blocks=blocks)
        else:
            super().__init__(image, sb, where, blocks=blocks, clock=clock)
        self._files: dict[int, set[File]] = {}

    @classmethod
    def open_for_writing(
        cls,
        path: StrPath,
        *,
        clock: Callable[[], int] | None = None,
        device: Callable[[Blocks], Blocks] | None = None,
        command: str = "",
    ) -> WritableVolume:
        """See :meth:`ext4lite.volume.Volume.open`. ``device`` may wrap the blocks that are written to (for tests)."""
        where = os.fspath(path)
        image = open_device(path, write=True, command=command)
        try:
            sb = read_super(image, where, torn=True)
            require_writable(sb)
            if sb.needs_recovery:
                from ext4lite.recover import recover_locked

                recover_locked(image, where)
                sb = read_super(image, where)
            sb.require_clean()
            blocks: Blocks = FileBlocks(image, sb.block_size, where)
            volume = cls(image, sb, where, blocks=blocks if device is None else device(blocks), clock=clock)
            volume.start_journal()
            return volume
        except BaseException:
            remove_record(path)
            image.close()
            raise

    def __enter__(self) -> WritableVolume:
        return self

    # -- renaming ---------------------------------------------------------------------------------------------------

    def rename(self, old: Path, new: Path, *, how: RenameHow = "replace") -> None:
        """Give something another name, also in another directory; what had that name goes, if it may.

        A directory may only take the place of an empty one, anything else not that of a directory. ``noreplace``:
        Exists when the name is taken. ``exchange``: both names must be there and swap what they name. ``whiteout``: a
        device 0:0 takes the old name, which overlayfs takes for a deleted file. Two names of the same inode: nothing
        happens. NotFound, NotADirectory, IsADirectory, NotEmpty, TooManyLinks, VolumeFull; Invalid
        when a directory would come to lie in itself.
        """
        self._dropping(lambda later: self._rename(old, new, how, later))

    def _rename(self, old: Path, new: Path, how: RenameHow, later: bool) -> int:
        source, old_name, moved = self._taken_place(old)
        target_ino, new_name = self._place(new)
        where = self._name(os.fsencode(new))
        if new_name in SPECIAL:
            error = Exists if how == "noreplace" else Busy
            raise error("that name cannot be given", where=where)
        target = self._writer(target_ino)
        found = target.state.names.get(new_name)
        if found is None and how == "exchange":
            raise NotFound("no such file or directory", where=where)
        if found is not None and how == "noreplace":
            raise Exists("is there already", where=where)
        if found is not None and found.ino == moved.ino:
            return 0
        if moved.type == c.S_IFDIR and moved.ino in self._ancestors(target_ino):
            raise Invalid("a directory cannot be moved into itself", where=where)
        other = None if found is None else self._live(found.ino)
        if other is not None and how != "exchange" and other.type == c.S_IFDIR:
            self._require_not_above(other, source.record.ino, where)
        self._require_removable(source, moved)
        if other is None:
            self.require_no_flags(target.record, c.IMMUTABLE_FL)
        else:
            self._require_removable(target, other)
        if how == "exchange" and other is not None:
            self._exchange((source, old_name, moved), (target, new_name, other))
            return 0
        if other is not None:
            self._require_replaceable(moved, other, where)
        return self._move((source, old_name, moved), (target, new_name, other), later, whiteout=how == "whiteout")

    def _ancestors(self, ino: int) -> set[int]:
        """Return a directory and all above it."""
        out = set()
        while ino not in out:
            out.add(ino)
            if ino == c.ROOT_INO:
                return out
            ino = self._state(ino).parent
        raise CorruptImage(f"directory {ino} lies in itself", where=self.where)

    def _require_not_above(self, other: InodeRecord, source: int, where: str) -> None:
        if other.ino in self._ancestors(source):
            raise NotEmpty("the directory is not empty", where=where)

    def _require_replaceable(self, moved: InodeRecord, other: InodeRecord, where: str) -> None:
        if moved.type == c.S_IFDIR and other.type != c.S_IFDIR:
            raise NotADirectory("a directory cannot replace something else", where=where)
        if moved.type != c.S_IFDIR and other.type == c.S_IFDIR:
            raise IsADirectory("is a directory", where=where)
        if other.type == c.S_IFDIR and self._state(other.ino).names:
            raise NotEmpty("the directory is not empty", where=where)

    def _move(
        self,
        source: tuple[DirWriter, bytes, InodeRecord],
        target: tuple[DirWriter, bytes, InodeRecord | None],
        later: bool,
        *,
        whiteout: bool,
    ) -> int:
        here, old_name, moved = source
        there, new_name, other = target
        if here.record is there.record:
            there = here
        across = moved.type == c.S_IFDIR and here is not there
        if across and other is None:
            self._require_room_for_subdirectory(there)
        kind = c.FT_BY_MODE[moved.type]
        if other is not None:
            there.replace(new_name, moved.ino, kind)
        else:
            there.add(new_name, moved.ino, kind)
        if whiteout:
            left = self._new(here, c.S_IFCHR, 0, 0, None)
            left.fields.i_block = encode_rdev(0, 0)
            self.put_inode(left)
            here.replace(old_name, left.ino, c.FT_BY_MODE[c.S_IFCHR])
        else:
            here.remove(old_name)
        if across:
            self._writer(moved.ino).set_parent(there.record.ino)
            self._count_subdirectory(here, -1)
            self._count_subdirectory(there, 1)
        self.set_times(moved, ctime=self.clock())
        self.put_inode(moved)
        if other is not None:
            if other.type == c.S_IFDIR:
                self._count_subdirectory(there, -1)
            self._drop_link(other, later=later)
        self._touch(here)
        if there is not here:
            self._touch(there)
        return other.ino if other is not None else 0

    def _exchange(self, one: tuple[DirWriter, bytes, InodeRecord], two: tuple[DirWriter, bytes, InodeRecord]) -> None:
        (here, old_name, moved), (there, new_name, other) = one, two
        if here.record is there.record:
            there = here
        is_dir, other_is_dir = moved.type == c.S_IFDIR, other.type == c.S_IFDIR
        if other_is_dir and other.ino in self._ancestors(here.record.ino):
            raise Invalid("a directory cannot be moved into itself", where=there.where)
        if here is not there and is_dir != other_is_dir:
            self._require_room_for_subdirectory(there if is_dir else here)
        there.replace(new_name, moved.ino, c.FT_BY_MODE[moved.type])
        here.replace(old_name, other.ino, c.FT_BY_MODE[other.type])
        if here is not there:
            for record, left, entered in ((moved, here, there), (other, there, here)):
                if record.type == c.S_IFDIR:
                    self._writer(record.ino).set_parent(entered.record.ino)
                    if is_dir != other_is_dir:
                        self._count_subdirectory(left, -1)
                        self._count_subdirectory(entered, 1)
        for record in (moved, other):
            self.set_times(record, ctime=self.clock())
            self.put_inode(record)
        self._touch(here)
        if there is not here:
            self._touch(there)

    # -- open files -------------------------------------------------------------------------------------------------

    def open_file(self, path: Path, *, create: bool = False, mode: int = 0o644) -> File:
        """Open a regular file (through a symlink at the end, too); with ``create`` make it if it is not there.

        NotFound, IsADirectory, NotPermitted for other kinds.
        """
        try:
            ino = self.resolve(path)
        except NotFound:
            if not create:
                raise
            ino = self.create(path, mode=mode)
        self._regular(ino)
        made = File(self, ino)
        self._files.setdefault(ino, set()).add(made)
        return made

    def _is_open(self, ino: int) -> bool:
        return ino in self._files

    def _file_closed(self, closed: File) -> None:
        left = self._files[closed.ino]
        left.discard(closed)
        if not left:
            del self._files[closed.ino]
            self.alloc.begin()  # outside of an operation: nothing to take back
            self.alloc.drop_window(closed.ino)
            if not self._broken and self._fd >= 0 and not self.inode(closed.ino).fields.i_links_count:
                self.erase_orphan(closed.ino)

    def _release_all(self) -> None:
        for files in list(self._files.values()):
            for file in list(files):
                file.close()

    # -- the volume -------------------------------------------------------------------------------------------------

    def statfs(self) -> StatFs:
        """Return sizes and what is free."""
        raw = self.super.raw
        return StatFs(
            self.block_size,
            self.blocks,
            self.alloc.free_blocks,
            raw.s_r_blocks_count_lo | raw.s_r_blocks_count_hi << 32,
            raw.s_inodes_count,
            self.alloc.free_inodes,
        )
