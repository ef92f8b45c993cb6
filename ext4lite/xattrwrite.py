"""Extended attributes of a writable volume.

They lie in the inode while all of them fit, else in a block, or in both. A value that is too large for a block has an
inode of its own where the volume has the feature ea_inode (source: Documentation/filesystems/ext4/attributes.rst).
Files with equal blocks share one, equal values an inode, as far as one that the volume has met since it was opened is
remembered; a shared block is left alone and a new one written when an attribute changes.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Literal

from ext4lite import xattrs
from ext4lite.checksum import crc32c, xattr_block_checksum
from ext4lite.device import Handle
from ext4lite.errors import (
    CorruptImage,
    Exists,
    NoAttribute,
    NoRoomForAttribute,
    NotPermitted,
    Unsupported,
    ValueTooLong,
)
from ext4lite.extent_tree import FILE_END
from ext4lite.filedata import DataVolume
from ext4lite.inode import InodeRecord
from ext4lite.jbd2.log import Blocks
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import XattrHeader
from ext4lite.super import Super
from ext4lite.xattrs import Outside, StoredEntry

_MAX_VALUE = 65536
_REMEMBERED = 4096
_LONGEST_NAME_INSIDE = 20  # an entry with a name of three bytes: the kernel's measure of a value too large for a block
_M = 0xFFFFFFFF
_MAGIC = c.XATTR_MAGIC.to_bytes(4, "little")
_CAPABILITY = xattrs.split_name(b"security.capability")


class _Twins:
    """Where content lies that others may share, by checksum and length; the ones noted last are remembered.

    Who finds one compares it: nothing is lost by two contents of the same checksum but that they are not both found.
    """

    def __init__(self) -> None:
        self._places: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._digests: dict[int, tuple[int, int]] = {}

    @staticmethod
    def _digest(content: bytes) -> tuple[int, int]:
        return crc32c(0, content), len(content)

    def find(self, content: bytes) -> int | None:
        """Return the number of the block or inode that had this content when it was noted."""
        return self._places.get(self._digest(content))

    def note(self, content: bytes, number: int) -> None:
        """Remember where content lies; it may be found from now on."""
        self.drop(number)
        digest = self._digest(content)
        old = self._places.pop(digest, None)
        if old is not None:
            del self._digests[old]
        self._places[digest] = number
        self._digests[number] = digest
        if len(self._places) > _REMEMBERED:
            _, gone = self._places.popitem(last=False)
            del self._digests[gone]

    def drop(self, number: int) -> None:
        """The block or inode is no more, or holds something else."""
        digest = self._digests.pop(number, None)
        if digest is not None:
            del self._places[digest]

    def clear(self) -> None:
        """Forget everything."""
        self._places.clear()
        self._digests.clear()


class XattrVolume(DataVolume):
    """Adds extended attributes; see :class:`ext4lite.writer.WritableVolume`."""

    def __init__(
        self, image: Handle, sb: Super, where: str, *, blocks: Blocks, clock: Callable[[], int] = time.time_ns
    ) -> None:
        super().__init__(image, sb, where, blocks=blocks, clock=clock)
        self._twin_blocks = _Twins()
        self._twin_values = _Twins()

    def set_xattr(
        self, ino: int, name: bytes, value: bytes, *, how: Literal["set", "create", "replace"] = "set"
    ) -> None:
        """Set an extended attribute by its full name (``b"user.comment"``); a POSIX ACL in its system call form.

        ``create`` demands that it is new (Exists), ``replace`` that it is there (NoAttribute). NoRoomForAttribute,
        VolumeFull; Unsupported for a prefix that ext4 has no place for.
        """
        if len(value) > _MAX_VALUE:
            raise ValueTooLong(f"a value of {len(value)} bytes is too long", where=self._at(f"inode {ino}"))
        entry = self.as_entry(ino, name, value)

        def change() -> None:
            record = self.changeable(ino)
            self.require_no_flags(record, c.IMMUTABLE_FL | c.APPEND_FL)
            if name.startswith(b"user.") and record.type not in (c.S_IFREG, c.S_IFDIR):
                raise NotPermitted("only files and directories have user attributes", where=self._at(f"inode {ino}"))
            entries = self._entries_of(record)
            there = [e for e in entries if e[:2] == entry[:2]]
            if there and how == "create":
                raise Exists(f"the attribute {name!r} is there already", where=self._at(f"inode {ino}"))
            if not there and how == "replace":
                raise NoAttribute(f"there is no attribute {name!r}", where=self._at(f"inode {ino}"))
            self._add_entry(record, [e for e in entries if e[:2] != entry[:2]], entry)

        self._run(change)

    def key_of(self, ino: int, name: bytes) -> tuple[int, bytes]:
        """Return what an attribute is stored under; Unsupported for a prefix that ext4 has no place for."""
        try:
            return xattrs.split_name(name)
        except Unsupported as e:
            raise Unsupported(e.what, where=self._at(f"inode {ino}")) from e

    def as_entry(self, ino: int, name: bytes, value: bytes) -> xattrs.RawEntry:
        """Return an attribute as it will be stored; Unsupported for what ext4 has no place for."""
        try:
            return xattrs.to_entries({name: value})[0]
        except Unsupported as e:
            raise Unsupported(e.what, where=self._at(f"inode {ino}")) from e

    def remove_xattr(self, ino: int, name: bytes) -> None:
        """Remove an extended attribute by its full name. NoAttribute."""
        key = self.key_of(ino, name)

        def change() -> None:
            record = self.changeable(ino)
            self.require_no_flags(record, c.IMMUTABLE_FL | c.APPEND_FL)
            entries = self._entries_of(record)
            rest = [e for e in entries if e[:2] != key]
            if len(rest) == len(entries):
                raise NoAttribute(f"there is no attribute {name!r}", where=self._at(f"inode {ino}"))
            self._store_entries(record, rest)

        self._run(change)

    # -- reading as stored ------------------------------------------------------------------------------------------

    def _may_have_xattrs(self, record: InodeRecord) -> bool:
        """Tell cheaply whether an inode may have attributes at all."""
        at = 128 + record.extra_isize
        return bool(record.file_acl) or record.raw[at : at + 4] == _MAGIC

    def _content_changes(self, record: InodeRecord) -> None:
        self._drop_capability(record)

    def _drop_capability(self, record: InodeRecord) -> None:
        """Take file capabilities from what is not the same any more, as the kernel does."""
        if self._may_have_xattrs(record):
            entries = self._entries_of(record)
            rest = [e for e in entries if e[:2] != _CAPABILITY]
            if len(rest) < len(entries):
                self._store_entries(record, rest)

    def _entries_of(self, record: InodeRecord) -> list[StoredEntry]:
        found = self._inside_of(record)
        if record.file_acl:
            found += self._block_entries(record.file_acl, record)
        return found

    def _inside_of(self, record: InodeRecord) -> list[StoredEntry]:
        return self._stored(self._inode_area(record), record) if self._inode_size > 128 else []

    def _block_entries(self, number: int, record: InodeRecord) -> list[StoredEntry]:
        found = self._xattr_block(number, f"inode {record.ino}, attribute block {number}")  # verifies it
        self._twin_blocks.note(self._content(self.cache.get(number)), number)
        return self._stored(found, record)

    def _stored(self, found: list[tuple[int, bytes, bytes, int, int]], record: InodeRecord) -> list[StoredEntry]:
        return [
            (index, name, self._outside(ino, size, record) if ino else value) for index, name, value, ino, size in found
        ]

    def _outside(self, ino: int, size: int, user: InodeRecord) -> Outside:
        """Return what an entry says about a value's inode, which must be one."""
        holder = self._value_inode(ino, user)
        return Outside(ino, size, holder.fields.i_atime & _M)

    def _value_inode(self, ino: int, user: InodeRecord | None = None) -> InodeRecord:
        holder = self._live(ino)
        f = holder.fields
        where = self._at(f"attribute value in inode {ino}")
        if not f.i_flags & c.EA_INODE_FL or holder.type != c.S_IFREG:
            raise CorruptImage("is not the inode of a value", where=where)
        if user is not None and f.i_mtime & _M == user.ino and f.i_generation == user.fields.i_generation:
            # Lustre's older form: it points back to its one user, and has neither hash nor count.
            value = b"".join(self._chunks(holder, 0, _MAX_VALUE))
            self._set_count(holder, self._value_hash(value), 1)
            f.i_mtime = 0
            self.put_inode(holder)
        return holder

    # -- storing ----------------------------------------------------------------------------------------------------

    @property
    def _has_value_inodes(self) -> bool:
        return bool(self.super.incompat & c.INCOMPAT_EA_INODE)

    def _add_entry(self, record: InodeRecord, others: list[StoredEntry], entry: xattrs.RawEntry) -> None:
        """Store ``others`` and one more: outside when it is too large for a block, or when there is no room else.

        The kernel stops there; here other large values make room, too.
        """
        too_large = self.block_size - _LONGEST_NAME_INSIDE - XattrHeader.SIZE - 4
        entries: list[StoredEntry] = [entry, *others]
        outside = set[int]()
        if self._has_value_inodes and len(entry[2]) + 3 & ~3 > too_large:
            outside.add(0)
        while not self._fit(record, self._planned(entries, outside)):
            here = {k: len(e[2]) for k, e in enumerate(entries) if isinstance(e[2], bytes) and e[2]}
            here = {k: size for k, size in here.items() if k not in outside}
            if not here or not self._has_value_inodes:
                break  # storing them says what is wrong
            outside.add(0 if 0 in here else max(here, key=lambda k: here[k]))  # the new one first, then the largest
        if self._fit(record, self._planned(entries, outside)):
            entries = [self._moved_outside(record, e) if k in outside else e for k, e in enumerate(entries)]
        self._store_entries(record, entries)

    @staticmethod
    def _planned(entries: list[StoredEntry], outside: set[int]) -> list[StoredEntry]:
        """The entries as they would be with some values outside, which nothing has been done for yet."""
        nowhere = Outside(0, 0, 0)
        return [(e[0], e[1], nowhere) if k in outside else e for k, e in enumerate(entries)]

    def _fit(self, record: InodeRecord, entries: list[StoredEntry]) -> bool:
        try:
            self._split(record, entries)
        except NoRoomForAttribute:
            return False
        return True

    def _inside_room(self, record: InodeRecord) -> int:
        at = 128 + record.extra_isize
        return len(record.raw) - at - 4 if len(record.raw) > at + 8 else 0

    def _split(self, record: InodeRecord, entries: list[StoredEntry]) -> tuple[list[StoredEntry], list[StoredEntry]]:
        """Share entries between inode and block. NoRoomForAttribute."""
        if not entries:
            return [], []
        # e2fsck takes a symlink with i_blocks but without an attribute block for one with a block of its own.
        to_block = bool(self._holders(entries)) and self._is_fast_symlink(record)
        room = 0 if to_block else self._inside_room(record)
        try:
            return xattrs.split_for_inode(entries, room, self.block_size - XattrHeader.SIZE)
        except Unsupported as e:
            raise NoRoomForAttribute(e.what, where=self._at(f"inode {record.ino}")) from e

    def _moved_outside(self, record: InodeRecord, entry: StoredEntry) -> StoredEntry:
        index, name, value = entry
        return (index, name, self._value_for(record, value)) if isinstance(value, bytes) else entry

    def _store_entries(self, record: InodeRecord, entries: list[StoredEntry]) -> None:
        entries.sort(key=lambda e: (e[0], len(e[1]), e[1]))
        at, inside_room = 128 + record.extra_isize, self._inside_room(record)
        inside, outside = self._split(record, entries)
        self._changed = True
        before, after = self._entries_of(record), inside + outside
        users = Counter[int]()
        users.subtract(self._holders(self._inside_of(record)))
        users.update(self._holders(inside))
        self._store_block(record, outside, users)
        if inside_room:
            area = bytes(inside_room + 4)
            if inside:
                area = _MAGIC + xattrs.pack_area(inside, inside_room)[0]
            record.raw = record.raw[:at] + area
        # Each user's i_blocks counts its values, shared or not: so the kernel charges them to its owner.
        self.add_blocks(record, self._blocks_outside(after) - self._blocks_outside(before))
        self._count_users(users)
        self.set_times(record, ctime=self.clock())
        self.put_inode(record)

    @staticmethod
    def _holders(entries: list[StoredEntry]) -> list[int]:
        return [value.ino for *_, value in entries if isinstance(value, Outside)]

    def _blocks_outside(self, entries: list[StoredEntry]) -> int:
        return sum(-(-value.size // self.block_size) for *_, value in entries if isinstance(value, Outside))

    def _store_block(self, record: InodeRecord, entries: list[StoredEntry], users: Counter[int]) -> None:
        """Make ``entries`` the content of the attribute block; none gives it up. Notes in ``users`` what that does."""
        old = record.file_acl
        if not entries:
            self._drop_block(record, users)
            return
        content = xattrs.pack_block(entries, self.block_size, 1)
        body = content[XattrHeader.SIZE :]
        if old:
            before = self._block_entries(old, record)
            data = self.cache.get(old)
            if self._content(data) == body:
                return
            if XattrHeader.unpack(data).h_refcount == 1 and self._twin_block(body) is None:
                users.subtract(self._holders(before))
                users.update(self._holders(entries))
                self._write_block(old, content)
                return
            self._drop_block(record, users)
        twin = self._twin_block(body)
        if twin is not None:
            self._set_refcount(twin, XattrHeader.unpack(self.cache.get(twin)).h_refcount + 1)
            self._set_block(record, twin)
            self.add_blocks(record, 1)
            return
        users.update(self._holders(entries))
        number = self.new_metadata_block(record)
        self.cache.create(number)
        self._write_block(number, content)
        self._set_block(record, number)

    def _twin_block(self, body: bytes) -> int | None:
        """Return a block with this content that may have one more user."""
        number = self._twin_blocks.find(body)
        if number is None:
            return None
        data = self.cache.get(number)
        fits = self._content(data) == body and XattrHeader.unpack(data).h_refcount < c.XATTR_REFCOUNT_MAX
        return number if fits else None

    @staticmethod
    def _content(data: bytearray) -> bytes:
        return bytes(data[XattrHeader.SIZE :])

    @staticmethod
    def _set_block(record: InodeRecord, number: int) -> None:
        record.fields.i_file_acl_lo, record.fields.l_i_file_acl_high = number & _M, number >> 32

    def _write_block(self, number: int, content: bytes) -> None:
        data = self.cache.change(number)
        data[:] = content
        self._twin_blocks.note(content[XattrHeader.SIZE :], number)
        self._seal_block(number, data)

    def _seal_block(self, number: int, data: bytearray) -> None:
        if self._seed is not None:
            data[16:20] = xattr_block_checksum(self._seed, number, bytes(data)).to_bytes(4, "little")

    def _set_refcount(self, number: int, count: int) -> None:
        data = self.cache.change(number)
        data[4:8] = count.to_bytes(4, "little")
        self._seal_block(number, data)

    def _drop_block(self, record: InodeRecord, users: Counter[int]) -> None:
        """Give up an inode's attribute block, or its share of one. Notes in ``users`` whose values went with it."""
        number = record.file_acl
        if not number:
            return
        entries = self._block_entries(number, record)
        count = XattrHeader.unpack(self.cache.get(number)).h_refcount
        self._set_block(record, 0)
        if count > 1:
            self._set_refcount(number, count - 1)
            self.add_blocks(record, -1)
        else:
            users.subtract(self._holders(entries))
            self._twin_blocks.drop(number)
            self.free_metadata_block(record, number)

    def drop_xattrs(self, record: InodeRecord) -> None:
        """Give up all that an inode's attributes have outside of it."""
        if not self._has_value_inodes:
            self._drop_block(record, Counter())
            return
        users = Counter[int]()
        entries = self._entries_of(record)
        users.subtract(self._holders(self._inside_of(record)))
        self._drop_block(record, users)
        self.add_blocks(record, -self._blocks_outside(entries))
        at = 128 + record.extra_isize
        record.raw = record.raw[:at] + bytes(max(0, len(record.raw) - at))
        self._count_users(users)

    # -- values in inodes of their own ------------------------------------------------------------------------------

    def _value_hash(self, value: bytes) -> int:
        return crc32c(self.super.seed, value)

    def _value_for(self, record: InodeRecord, value: bytes) -> Outside:
        """Return an inode with this value: one that is there, or a new one, which nobody uses yet."""
        total = self._value_hash(value)
        twin = self._twin_values.find(value)
        if twin is not None and b"".join(self._chunks(self._value_inode(twin), 0, _MAX_VALUE + 1)) == value:
            return Outside(twin, len(value), total)
        f = record.fields
        uid, gid = f.i_uid | f.l_i_uid_high << 16, f.i_gid | f.l_i_gid_high << 16
        ino = self.alloc.allocate_inode(record.ino, directory=False)
        holder = self.new_record(ino, c.S_IFREG | 0o600, uid=uid, gid=gid, links=1)
        self._give_map(holder)
        holder.fields.i_flags |= c.EA_INODE_FL
        self._put_content(holder, 0, value)
        self.set_size(holder, len(value))
        self._set_count(holder, total, 0)
        self.put_inode(holder)
        self._twin_values.note(value, ino)
        return Outside(ino, len(value), total)

    @staticmethod
    def _set_count(holder: InodeRecord, total: int, users: int) -> None:
        """Note a value's hash and users where the kernel has them: access time; change time and version."""
        f = holder.fields
        f.i_atime, f.i_atime_extra = (total + 0x80000000 & _M) - 0x80000000, 0
        f.i_ctime, f.i_ctime_extra = ((users >> 32) + 0x80000000 & _M) - 0x80000000, 0
        f.l_i_version = users & _M

    def _count_users(self, changes: Counter[int]) -> None:
        """Change how many inodes and blocks use values; erase those that nobody uses any more."""
        for ino, change in changes.items():
            if not change:
                continue
            holder = self._value_inode(ino)
            users = ((holder.fields.i_ctime & _M) << 32 | holder.fields.l_i_version) + change
            if users < 0:
                raise CorruptImage("has more users than it counts", where=self._at(f"attribute value in inode {ino}"))
            if users:
                self._set_count(holder, holder.fields.i_atime & _M, users)
                self.put_inode(holder)
            else:
                self._twin_values.drop(ino)
                self.erase(holder)

    # -- the end of an inode ----------------------------------------------------------------------------------------

    def erase(self, record: InodeRecord) -> None:
        """Free all that belongs to an inode without links, and the inode."""
        directory = record.type == c.S_IFDIR
        self.alloc.drop_window(record.ino)
        if self._has_blocks(record):
            self._release(record, 0, FILE_END)
        self.drop_xattrs(record)
        self.set_size(record, 0)
        record.fields.i_links_count = 0
        record.fields.i_dtime = max(1, self.clock() // 1_000_000_000 & _M)
        self.put_inode(record)
        self.alloc.free_inode(record.ino, directory=directory)
        self._records.pop(record.ino, None)
        self._maps.pop(record.ino, None)
        self._names_gone(record.ino)

    def _names_gone(self, ino: int) -> None:
        """A directory is no more; a subclass drops what it knows of it."""

    def _has_blocks(self, record: InodeRecord) -> bool:
        if record.type in (c.S_IFREG, c.S_IFDIR):
            return True
        return record.type == c.S_IFLNK and not self._is_fast_symlink(record)

    def _forget_all(self) -> None:
        super()._forget_all()
        self._twin_blocks.clear()
        self._twin_values.clear()
