"""Attributes of inodes in a writable volume: mode, owner, times, flags, and the ACLs tied to the mode."""

from __future__ import annotations

from typing import Literal

from ext4lite import acl
from ext4lite.errors import AccessDenied, CorruptImage, Invalid, NotSupported
from ext4lite.inode import InodeRecord
from ext4lite.layout import constants as c
from ext4lite.xattrs import StoredEntry
from ext4lite.xattrwrite import XattrVolume

_KEPT_FLAGS = c.INDEX_FL | c.HUGE_FILE_FL | c.EXTENTS_FL | c.VERITY_FL | c.EA_INODE_FL | c.INLINE_DATA_FL
_KEPT_FLAGS |= c.CASEFOLD_FL | c.ENCRYPT_FL
_SETTABLE_FLAGS = 0x604BC0FF
"""Flags that ``chattr`` may change in general (EXT4_FL_USER_MODIFIABLE)."""
_DIRECTORY_FLAGS = 0x10000 | 0x20000 | 0x20000000 | c.CASEFOLD_FL  # dirsync, topdir, project hierarchy
_OTHER_FLAGS = 0x40 | 0x80  # nodump, noatime: all that devices and the like can have
_SUID, _SGID, _GROUP_RUNS = 0o4000, 0o2000, 0o010
_ACCESS, _DEFAULT = (c.XATTR_INDEX_ACL_ACCESS, b""), (c.XATTR_INDEX_ACL_DEFAULT, b"")


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

        ``mode`` is the 12 permission bits; an access ACL follows it (its owner, mask and others). A new owner without a
        mode takes set-user-id, set-group-id and file capabilities from what is no directory, as chown(2) does; with a
        mode, both are simply set. Times are nanoseconds since 1970, clamped to what the inode can hold. ``flags`` are
        those of ``chattr``; others stay as they are. Invalid for values out of range; NotSupported for flags that this
        kind of inode cannot have; NotPermitted for an immutable or append-only one, unless its flags are what changes.
        """
        if mode is not None and mode & ~0o7777:
            raise Invalid(f"mode {mode:#o} has other bits than permissions")
        if any(owner is not None and not 0 <= owner < 0xFFFFFFFF for owner in (uid, gid)):
            raise Invalid("a user or group number is out of range")

        def change() -> None:
            record = self.changeable(ino)
            if not (mode is uid is gid is atime_ns is mtime_ns is None):
                self.require_no_flags(record, c.IMMUTABLE_FL | c.APPEND_FL)
            self._changed = True
            if flags is not None:
                self._set_flags(record, flags)
            if uid is not None or gid is not None:
                self._set_owner(record, uid, gid, drop_privileges=mode is None)
            if mode is not None:
                self._set_mode(record, mode)
            self.set_times(record, atime=atime_ns, mtime=mtime_ns, ctime=self.clock())
            self.put_inode(record)

        self._run(change)

    def _set_flags(self, record: InodeRecord, flags: int) -> None:
        free = _SETTABLE_FLAGS & ~_KEPT_FLAGS
        possible = {c.S_IFDIR: ~0, c.S_IFREG: ~_DIRECTORY_FLAGS}.get(record.type, _OTHER_FLAGS)
        if flags & free & ~possible:
            raise NotSupported(
                f"flags {flags & free & ~possible:#x} are not for this kind", where=self._at(f"inode {record.ino}")
            )
        record.fields.i_flags = record.fields.i_flags & ~free | flags & free

    def _set_owner(self, record: InodeRecord, uid: int | None, gid: int | None, *, drop_privileges: bool) -> None:
        f = record.fields
        if uid is not None:
            f.i_uid, f.l_i_uid_high = uid & 0xFFFF, uid >> 16
        if gid is not None:
            f.i_gid, f.l_i_gid_high = gid & 0xFFFF, gid >> 16
        if drop_privileges and record.type != c.S_IFDIR:
            f.i_mode &= ~(_SUID | (_SGID if f.i_mode & _GROUP_RUNS else 0))
            self._drop_capability(record)

    def _set_mode(self, record: InodeRecord, mode: int) -> None:
        record.fields.i_mode = record.type | mode
        found = self._acl(record, _ACCESS)
        if found is not None:
            self._replace_entry(record, _ACCESS, acl.pack(acl.with_mode(found, mode)))

    # -- ACLs -------------------------------------------------------------------------------------------------------

    def _acl(self, record: InodeRecord, which: tuple[int, bytes]) -> acl.Acl | None:
        """Return an inode's access or default ACL, None if it has none."""
        if not self._may_have_xattrs(record):
            return None
        for index, name, value in self._entries_of(record):
            if (index, name) == which and isinstance(value, bytes):
                found = acl.parse(value, self._at(f"inode {record.ino}"))
                try:
                    acl.check(found)
                except Invalid as e:
                    raise CorruptImage(e.what, where=self._at(f"inode {record.ino}")) from e
                return found
        return None

    def _replace_entry(self, record: InodeRecord, key: tuple[int, bytes], value: bytes | None) -> None:
        """Store an attribute in its stored form, or remove it."""
        rest = [e for e in self._entries_of(record) if e[:2] != key]
        if value is None:
            self._store_entries(record, rest)
        else:
            self._add_entry(record, rest, (*key, value))

    def _inherit_acl(self, above: InodeRecord, record: InodeRecord) -> None:
        """Give a new inode, which has its mode, what its directory's default ACL says. The caller stores it."""
        if record.type == c.S_IFLNK:
            return
        default = self._acl(above, _DEFAULT)
        if default is None:
            return
        access, mode = acl.inherited(default, record.fields.i_mode)
        record.fields.i_mode = mode
        entries: list[StoredEntry] = []
        if acl.is_extended(access):
            entries.append((*_ACCESS, acl.pack(access)))
        if record.type == c.S_IFDIR:
            entries.append((*_DEFAULT, acl.pack(default)))
        if entries:
            self._store_entries(record, entries)

    def set_xattr(
        self, ino: int, name: bytes, value: bytes, *, how: Literal["set", "create", "replace"] = "set"
    ) -> None:
        """Set an extended attribute by its full name (``b"user.comment"``); a POSIX ACL in its system call form.

        An access ACL sets the mode's permission bits, and is not stored when these say it all; one without entries is
        removed. ``create`` demands that it is new (Exists), ``replace`` that it is there (NoAttribute).
        NoRoomForAttribute, VolumeFull, ValueTooLong, Invalid for an ACL that is not valid, AccessDenied for a default
        ACL of what is no directory, NotPermitted; Unsupported for a prefix that ext4 has no place for.
        """
        key = self.key_of(ino, name)
        if key not in (_ACCESS, _DEFAULT):
            super().set_xattr(ino, name, value, how=how)
            return
        _, _, stored = self.as_entry(ino, name, value or b"\x02\0\0\0")
        found = acl.parse(stored)

        def change() -> None:
            record = self.changeable(ino)
            where = self._at(f"inode {ino}")
            self.require_no_flags(record, c.IMMUTABLE_FL | c.APPEND_FL)
            if record.type == c.S_IFLNK:
                raise NotSupported("a symlink has no ACL", where=where)
            if found:
                acl.check(found)
            if found and key == _DEFAULT and record.type != c.S_IFDIR:
                raise AccessDenied("only a directory has a default ACL", where=where)
            self._changed = True
            if found and key == _ACCESS:
                record.fields.i_mode = record.fields.i_mode & ~0o777 | acl.mode_of(found)
            keep = acl.is_extended(found) or (key == _DEFAULT and bool(found))
            self._replace_entry(record, key, stored if keep else None)

        self._run(change)
