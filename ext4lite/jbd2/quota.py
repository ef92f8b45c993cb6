"""Quota files: who holds how much, kept true when recovery frees and takes what belongs to somebody.

With the feature ``quota`` three hidden files count bytes and inodes by user, group and project. Their format is "vfsv1"
(source: Documentation/filesystems/quota.rst; e2fsprogs' ``lib/support/quotaio_tree.c`` and ``quotaio_v2.c`` describe
it): blocks of 1 KiB, a header, a tree of references four levels deep, one byte of the id a level, and leaves of
14 entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING

from ext4lite.errors import CorruptImage, Unsupported
from ext4lite.extents import Extent
from ext4lite.inode import InodeRecord
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import Inode

if TYPE_CHECKING:
    from ext4lite.jbd2.patch import Patch

BLOCK = 1024
_MAGICS = (0xD9C01F11, 0xD9C01927, 0xD9C03F14)
"""Of user, group and project files."""
_VERSION = 1
_INFO = Struct("<6I")  # grace times of blocks and inodes, flags, blocks, first free block, first leaf with room
_INFO_AT = 8
_ROOT = 1
_DEPTH = 4
_LEAF = Struct("<IIHHI")  # next and previous leaf with room, entries, padding
_ENTRY = Struct("<IIQQQQQQQQ")  # id, padding, inode limits, inodes, block limits, bytes, times
_ENTRIES = (BLOCK - _LEAF.size) // _ENTRY.size
_INODES, _SPACE, _ITIME = 4, 7, 9


@dataclass(slots=True)
class Charge:
    """What an inode costs whom: ids of user, group and project, bytes, inodes."""

    owners: tuple[int, int, int]
    space: int = 0
    inodes: int = 0


class Quotas:
    """The quotas of a volume being changed. Inodes are announced before they change; :meth:`settle` does the rest."""

    def __init__(self, patch: Patch) -> None:
        self._patch = patch
        raw = patch.volume.super.raw
        on = patch.volume.super.ro_compat & c.RO_QUOTA
        self._files = [raw.s_usr_quota_inum, raw.s_grp_quota_inum, raw.s_prj_quota_inum] if on else [0, 0, 0]
        self._free = {*self._files, raw.s_orphan_file_inum}
        self._before: dict[int, Charge] = {}

    @property
    def kept(self) -> bool:
        """Whether the volume keeps any."""
        return any(self._files)

    def touch(self, ino: int) -> None:
        """Note what an inode costs before it is changed for the first time."""
        if self.kept and ino not in self._before:
            self._before[ino] = self._charge(ino)

    def _charge(self, ino: int) -> Charge:
        patch, v = self._patch, self._patch.volume
        first = c.FIRST_INO if v.super.raw.s_rev_level == 0 else v.super.raw.s_first_ino
        if ino in self._free or (ino < first and ino != c.ROOT_INO) or not patch.inode_in_use(ino):
            return Charge((0, 0, 0))
        raw = patch.raw_inode(ino)
        extra = int.from_bytes(raw[128:130], "little") if len(raw) > 128 else 0
        i = Inode.unpack(raw[: 128 + extra] + bytes(Inode.SIZE))
        if i.i_flags & c.EA_INODE_FL:
            return Charge((0, 0, 0))  # its users pay
        huge = bool(v.super.ro_compat & c.RO_HUGE_FILE)
        held = i.i_blocks_lo | (i.l_i_blocks_high << 32 if huge else 0)
        space = held * (v.block_size if huge and i.i_flags & c.HUGE_FILE_FL else 512)
        values = len(patch.outside_values(InodeRecord(ino, raw, i, extra)))
        owners = (i.i_uid | i.l_i_uid_high << 16, i.i_gid | i.l_i_gid_high << 16, i.i_projid)
        return Charge(owners, space, 1 + values)

    def settle(self) -> None:
        """Enter what has changed into the files. CorruptImage for a file that cannot be, VolumeFull."""
        for kind, file in enumerate(self._files):
            if not file:
                continue
            changes: dict[int, list[int]] = {}
            for ino, before in self._before.items():
                for charge, sign in ((before, -1), (self._charge(ino), 1)):
                    total = changes.setdefault(charge.owners[kind], [0, 0])
                    total[0] += sign * charge.space
                    total[1] += sign * charge.inodes
            changed = {owner: total for owner, total in sorted(changes.items()) if any(total)}
            if changed:
                quota = _File(self._patch, file, _MAGICS[kind])
                for owner, (space, inodes) in changed.items():
                    quota.add(owner, space, inodes)
                quota.store()
        self._before = {}


class _File:
    """One quota file, being changed."""

    def __init__(self, patch: Patch, ino: int, magic: int) -> None:
        self._patch = patch
        v = patch.volume
        self._where = f"{v.where}: quota file, inode {ino}"
        self._record = v.inode(ino)
        if self._record.type != c.S_IFREG or not self._record.fields.i_links_count:
            raise CorruptImage("is not a regular file", where=self._where)
        self._runs, self._own = patch.whole_map(self._record)
        self._size = self._record.size // BLOCK
        head = self._read(0)
        found = int.from_bytes(head[:4], "little"), int.from_bytes(head[4:8], "little")
        if found != (magic, _VERSION):
            raise CorruptImage(f"has magic {found[0]:#010x}, version {found[1]}", where=self._where)
        self._info: list[int] = list(_INFO.unpack_from(head, _INFO_AT))
        if not _ROOT < self._info[3] <= self._size:
            raise CorruptImage(f"says that it has {self._info[3]} of {self._size} blocks", where=self._where)

    # -- blocks of 1 KiB --------------------------------------------------------------------------------------------

    def _place(self, number: int) -> tuple[int, int]:
        """Return (block of the volume, byte in it)."""
        logical, at = divmod(number * BLOCK, self._patch.volume.block_size)
        for run in self._runs:
            if run.logical <= logical < run.logical + run.count and not run.unwritten:
                return run.physical + logical - run.logical, at
        raise CorruptImage(f"has a hole at its block {number}", where=self._where)

    def _read(self, number: int) -> bytes:
        if not 0 <= number < self._size:
            raise CorruptImage(f"refers to block {number} of {self._size}", where=self._where)
        block, at = self._place(number)
        return self._patch.overlay.read(block)[at : at + BLOCK]

    def _write(self, number: int, data: bytes) -> None:
        block, at = self._place(number)
        self._patch.put(block * self._patch.volume.block_size + at, data)

    def _new_block(self) -> int:
        """Take a block, from the list of free ones or at the file's end; it holds zeros."""
        free = self._info[4]
        if free:
            self._info[4] = int(_LEAF.unpack_from(self._read(free))[0])
            self._write(free, bytes(BLOCK))
            return free
        number = self._info[3]
        self._info[3] += 1
        if number >= self._size:
            self._grow()
        self._write(number, bytes(BLOCK))
        return number

    def _grow(self) -> None:
        """Add a cluster to the file's end."""
        patch, size = self._patch, self._patch.volume.block_size
        if not self._record.fields.i_flags & c.EXTENTS_FL:
            what = "has a block map and no room for another owner"
            raise Unsupported(what, where=self._where, hint="run e2fsck -fy on the volume")
        there = -(-self._size * BLOCK // size)
        last = self._runs[-1]
        first = patch.allocate(last.physical + last.count)
        patch.add_sectors(self._record, 1)
        before = len(self._own)
        if last.logical + last.count == there and last.physical + last.count == first:
            last.count += patch.ratio
        else:
            self._runs.append(Extent(there, first, patch.ratio))
        for i in range(patch.ratio):
            patch.overlay.write(first + i, bytes(size))
        self._own = patch.set_map(self._record, self._runs, self._own)
        patch.add_sectors(self._record, len(patch.clusters([(n, 1) for n in self._own[before:]])))
        self._size = (there + patch.ratio) * size // BLOCK
        total = self._size * BLOCK
        self._record.fields.i_size_lo, self._record.fields.i_size_high = total & 0xFFFFFFFF, total >> 32
        patch.put_inode(self._record)

    def store(self) -> None:
        """Write the header."""
        head = self._read(0)
        self._write(0, head[:_INFO_AT] + _INFO.pack(*self._info) + head[_INFO_AT + _INFO.size :])

    # -- the tree ---------------------------------------------------------------------------------------------------

    def add(self, owner: int, space: int, inodes: int) -> None:
        """Add to what an owner holds; usage does not become negative. An owner unknown so far gets an entry."""
        leaf = self._leaf_of(owner)
        if leaf is None:
            leaf = self._enter(owner)
        data = self._read(leaf)
        for index in range(_ENTRIES):
            at = _LEAF.size + index * _ENTRY.size
            entry = list(_ENTRY.unpack_from(data, at))
            if entry[0] != owner or not any(entry):
                continue
            entry[_SPACE] = max(0, entry[_SPACE] + space)
            entry[_INODES] = max(0, entry[_INODES] + inodes)
            if not any(entry):
                entry[_ITIME] = 1  # an entry of zeros alone would be none (root without anything)
            self._write(leaf, data[:at] + _ENTRY.pack(*entry) + data[at + _ENTRY.size :])
            return
        raise CorruptImage(f"block {leaf} has no entry of {owner}", where=self._where)

    def _leaf_of(self, owner: int) -> int | None:
        number = _ROOT
        for level in range(_DEPTH):
            number = self._child(self._read(number), owner, level)
            if not number:
                return None
        return number

    @staticmethod
    def _child(node: bytes, owner: int, level: int) -> int:
        at = (owner >> 8 * (_DEPTH - 1 - level) & 0xFF) * 4
        return int.from_bytes(node[at : at + 4], "little")

    def _enter(self, owner: int) -> int:
        """Make an entry for an owner, and the tree's nodes on the way to it; return its leaf."""
        leaf: int = self._info[5]
        if not leaf:
            leaf = self._info[5] = self._new_block()
        data = self._read(leaf)
        following, previous, count, *_ = _LEAF.unpack_from(data)
        places = [_LEAF.size + i * _ENTRY.size for i in range(_ENTRIES)]
        at = next((p for p in places if not any(data[p : p + _ENTRY.size])), None)
        if at is None or previous:
            raise CorruptImage(f"block {leaf} is said to have room", where=self._where)
        entry = [0] * 10
        entry[0], entry[_ITIME] = owner, 1
        if owner:
            entry[_ITIME] = 0
        if count + 1 >= _ENTRIES:  # full: out of the list of leaves with room
            self._info[5], following = following, 0
            if self._info[5]:
                after = self._read(self._info[5])
                self._write(self._info[5], after[:4] + bytes(4) + after[8:])
        head = _LEAF.pack(following, 0, count + 1, 0, 0)
        self._write(leaf, head + data[_LEAF.size : at] + _ENTRY.pack(*entry) + data[at + _ENTRY.size :])
        number = _ROOT
        for level in range(_DEPTH):
            node = self._read(number)
            below = self._child(node, owner, level)
            if not below:
                below = leaf if level == _DEPTH - 1 else self._new_block()
                at = (owner >> 8 * (_DEPTH - 1 - level) & 0xFF) * 4
                node = self._read(number)
                self._write(number, node[:at] + below.to_bytes(4, "little") + node[at + 4 :])
            number = below
        return leaf
