"""Attributes of inodes in a writable volume: mode, owner, times, flags, and extended attributes.

Extended attributes lie in the inode while all of them fit, else in a block, or in both. Files with equal blocks share
one when it was made since the volume was opened; a shared block is left alone and a new one written when an attribute
changes.
"""

from __future__ import annotations

from typing import Literal

from ext4lite import xattrs
from ext4lite.checksum import xattr_block_checksum
from ext4lite.errors import Exists, Invalid, NoAttribute, NoRoomForAttribute, NotPermitted, Unsupported
from ext4lite.filedata import DataVolume
from ext4lite.inode import InodeRecord
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import XattrHeader

_MAX_VALUE = 65536
_KEPT_FLAGS = c.INDEX_FL | c.HUGE_FILE_FL | c.EXTENTS_FL | c.VERITY_FL | c.EA_INODE_FL | c.INLINE_DATA_FL
_KEPT_FLAGS |= c.CASEFOLD_FL | c.ENCRYPT_FL
_SETTABLE_FLAGS = 0x604BDFFF
"""Flags that ``chattr`` may change in general (EXT4_FL_USER_MODIFIABLE)."""


class AttributeVolume(DataVolume):
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

    def set_xattr(
        self, ino: int, name: bytes, value: bytes, *, how: Literal["set", "create", "replace"] = "set"
    ) -> None:
        """Set an extended attribute by its full name (``b"user.comment"``); a POSIX ACL in its system call form.

        ``create`` demands that it is new (Exists), ``replace`` that it is there (NoAttribute). NoRoomForAttribute,
        VolumeFull; Unsupported for a prefix that ext4 has no place for.
        """
        if len(value) > _MAX_VALUE:
            raise Invalid(f"a value of {len(value)} bytes is too long")
        (entry,) = xattrs.to_entries({name: value})

        def change() -> None:
            record = self.changeable(ino)
            if name.startswith(b"user.") and record.type not in (c.S_IFREG, c.S_IFDIR):
                raise NotPermitted("only files and directories have user attributes", where=self._at(f"inode {ino}"))
            entries = self._entries_of(record)
            there = [e for e in entries if e[:2] == entry[:2]]
            if there and how == "create":
                raise Exists(f"the attribute {name!r} is there already", where=self._at(f"inode {ino}"))
            if not there and how == "replace":
                raise NoAttribute(f"there is no attribute {name!r}", where=self._at(f"inode {ino}"))
            self._store_entries(record, [e for e in entries if e[:2] != entry[:2]] + [entry])

        self._run(change)

    def remove_xattr(self, ino: int, name: bytes) -> None:
        """Remove an extended attribute by its full name. NoAttribute."""
        key = xattrs.split_name(name)

        def change() -> None:
            record = self.changeable(ino)
            entries = self._entries_of(record)
            rest = [e for e in entries if e[:2] != key]
            if len(rest) == len(entries):
                raise NoAttribute(f"there is no attribute {name!r}", where=self._at(f"inode {ino}"))
            self._store_entries(record, rest)

        self._run(change)

    # -- storing ----------------------------------------------------------------------------------------------------

    def _entries_of(self, record: InodeRecord) -> list[xattrs.RawEntry]:
        found = self._inode_area(record) if self._inode_size > 128 else []
        if record.file_acl:
            found = found + self._xattr_block(record.file_acl, f"inode {record.ino}")
        if any(outside for *_, outside, _ in found):
            raise Unsupported(
                "values in inodes of their own are not written yet", where=self._at(f"inode {record.ino}")
            )
        return [(index, name, value) for index, name, value, _, _ in found]

    def _store_entries(self, record: InodeRecord, entries: list[xattrs.RawEntry]) -> None:
        self._changed = True
        entries.sort(key=lambda e: (e[0], len(e[1]), e[1]))
        at = 128 + record.extra_isize
        inside_room = len(record.raw) - at - 4 if len(record.raw) > at + 8 else 0
        block_room = self.block_size - XattrHeader.SIZE
        try:
            inside, outside = xattrs.split_for_inode(entries, inside_room, block_room)
        except Unsupported as e:
            raise NoRoomForAttribute(e.what, where=self._at(f"inode {record.ino}")) from e
        if not entries:
            inside, outside = [], []
        self._store_block(record, outside)
        if inside_room:
            area = bytes(inside_room + 4)
            if inside:
                area = c.XATTR_MAGIC.to_bytes(4, "little") + xattrs.pack_area(inside, inside_room)[0]
            record.raw = record.raw[:at] + area
        self.set_times(record, ctime=self.clock())
        self.put_inode(record)

    def _store_block(self, record: InodeRecord, entries: list[xattrs.RawEntry]) -> None:
        """Make ``entries`` the content of the attribute block; none gives it up."""
        old = record.file_acl
        if not entries:
            if old:
                self.drop_xattr_block(record)
            return
        content = xattrs.pack_block(entries, self.block_size, 1)
        if old:
            head = XattrHeader.unpack(self.cache.get(old))
            if self._content(self.cache.get(old)) == content[XattrHeader.SIZE :]:
                return
            if head.h_refcount == 1 and content[XattrHeader.SIZE :] not in self._shared_blocks:
                self._shared_blocks.pop(self._content(self.cache.get(old)), None)
                self._write_block(old, content)
                return
            self.drop_xattr_block(record)
        twin = self._shared_blocks.get(content[XattrHeader.SIZE :])
        if twin is not None:
            data = self.cache.get(twin)
            count = XattrHeader.unpack(data).h_refcount
            if count < c.XATTR_REFCOUNT_MAX:
                self._set_refcount(twin, count + 1)
                self._set_block(record, twin)
                self.add_blocks(record, 1)
                return
        number = self.new_metadata_block(record)
        self.cache.create(number)
        self._write_block(number, content)
        self._set_block(record, number)

    @staticmethod
    def _content(data: bytearray) -> bytes:
        return bytes(data[XattrHeader.SIZE :])

    @staticmethod
    def _set_block(record: InodeRecord, number: int) -> None:
        record.fields.i_file_acl_lo, record.fields.l_i_file_acl_high = number & 0xFFFFFFFF, number >> 32

    def _write_block(self, number: int, content: bytes) -> None:
        data = self.cache.change(number)
        data[:] = content
        self._shared_blocks[content[XattrHeader.SIZE :]] = number
        self._seal_block(number, data)

    def _seal_block(self, number: int, data: bytearray) -> None:
        if self._seed is not None:
            data[16:20] = xattr_block_checksum(self._seed, number, bytes(data)).to_bytes(4, "little")

    def _set_refcount(self, number: int, count: int) -> None:
        data = self.cache.change(number)
        data[4:8] = count.to_bytes(4, "little")
        self._seal_block(number, data)

    def drop_xattr_block(self, record: InodeRecord) -> None:
        """Give up an inode's attribute block, or its share of one."""
        number = record.file_acl
        if not number:
            return
        self._xattr_block(number, f"inode {record.ino}")  # verifies it
        count = XattrHeader.unpack(self.cache.get(number)).h_refcount
        self._set_block(record, 0)
        if count > 1:
            self._set_refcount(number, count - 1)
            self.add_blocks(record, -1)
        else:
            self._shared_blocks.pop(self._content(self.cache.get(number)), None)
            self.free_metadata_block(record, number)

    def _forget_all(self) -> None:
        super()._forget_all()
        self._shared_blocks.clear()
