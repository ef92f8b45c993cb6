"""Attributes of inodes in a writable volume: mode, owner, times, flags."""

from __future__ import annotations

from ext4lite.errors import Invalid
from ext4lite.layout import constants as c
from ext4lite.xattrwrite import XattrVolume

_KEPT_FLAGS = c.INDEX_FL | c.HUGE_FILE_FL | c.EXTENTS_FL | c.VERITY_FL | c.EA_INODE_FL | c.INLINE_DATA_FL
_KEPT_FLAGS |= c.CASEFOLD_FL | c.ENCRYPT_FL
_SETTABLE_FLAGS = 0x604BDFFF
"""Flags that ``chattr`` may change in general (EXT4_FL_USER_MODIFIABLE)."""


class AttributeVolume(XattrVolume):
    """Adds attributes; see :class:`ext4lite.writer.WritableVolume`."""

    def set_attributes(
        self,
        ino: int,
        *,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        atime_ns: int | None = None,
        mtime_ns: int | None = None,
        flags: int | None = None,
    ) -> None:
        """Change what an inode says about itself; the change time becomes now.

        ``mode`` is the 12 permission bits. Times are nanoseconds since 1970, clamped to what the inode can hold.
        ``flags`` are those of ``chattr``; others stay as they are. Invalid for values out of range.
        """
        if mode is not None and mode & ~0o7777:
            raise Invalid(f"mode {mode:#o} has other bits than permissions")
        if any(owner is not None and not 0 <= owner < 0xFFFFFFFF for owner in (uid, gid)):
            raise Invalid("a user or group number is out of range")

        def change() -> None:
            record = self.changeable(ino)
            f = record.fields
            self._changed = True
            if mode is not None:
                f.i_mode = record.type | mode
            if uid is not None:
                f.i_uid, f.l_i_uid_high = uid & 0xFFFF, uid >> 16
            if gid is not None:
                f.i_gid, f.l_i_gid_high = gid & 0xFFFF, gid >> 16
            if flags is not None:
                free = _SETTABLE_FLAGS & ~_KEPT_FLAGS
                f.i_flags = f.i_flags & ~free | flags & free
            self.set_times(record, atime=atime_ns, mtime=mtime_ns, ctime=self.clock())
            self.put_inode(record)

        self._run(change)
