"""Quotas while recovery changes a volume: what inodes cost their owners before and after, entered into the files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ext4lite.errors import CorruptImage, Unsupported
from ext4lite.extents import Extent
from ext4lite.inode import InodeRecord
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import Inode
from ext4lite.quota import BLOCK, QuotaFile

if TYPE_CHECKING:
    from ext4lite.jbd2.patch import Patch


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
                quota = quota_file(self._patch, file, kind)
                for owner, (space, inodes) in changed.items():
                    quota.add(owner, space, inodes)
                quota.store()
        self._before = {}


class _FileBlocks:
    """The blocks of a quota file of a volume being changed: see :class:`ext4lite.quota.Blocks`."""

    def __init__(self, patch: Patch, ino: int, where: str) -> None:
        self._patch, self._where = patch, where
        self._record = patch.volume.inode(ino)
        if self._record.type != c.S_IFREG or not self._record.fields.i_links_count:
            raise CorruptImage("is not a regular file", where=self._where)
        self._runs, self._own = patch.whole_map(self._record)
        self.count = self._record.size // BLOCK

    def _place(self, number: int) -> tuple[int, int]:
        """Return (block of the volume, byte in it)."""
        logical, at = divmod(number * BLOCK, self._patch.volume.block_size)
        for run in self._runs:
            if run.logical <= logical < run.logical + run.count and not run.unwritten:
                return run.physical + logical - run.logical, at
        raise CorruptImage(f"has a hole at its block {number}", where=self._where)

    def read(self, number: int) -> bytes:
        """See :meth:`ext4lite.quota.Blocks.read`."""
        block, at = self._place(number)
        return self._patch.overlay.read(block)[at : at + BLOCK]

    def write(self, number: int, data: bytes) -> None:
        """See :meth:`ext4lite.quota.Blocks.write`."""
        block, at = self._place(number)
        self._patch.put(block * self._patch.volume.block_size + at, data)

    def grow(self) -> None:
        """Add a cluster to the file's end."""
        patch, size = self._patch, self._patch.volume.block_size
        if not self._record.fields.i_flags & c.EXTENTS_FL:
            what = "has a block map and no room for another owner"
            raise Unsupported(what, where=self._where, hint="run e2fsck -fy on the volume")
        there = -(-self.count * BLOCK // size)
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
        self.count = (there + patch.ratio) * size // BLOCK
        total = self.count * BLOCK
        self._record.fields.i_size_lo, self._record.fields.i_size_high = total & 0xFFFFFFFF, total >> 32
        patch.put_inode(self._record)


def quota_file(patch: Patch, ino: int, kind: int) -> QuotaFile:
    """Return a volume's quota file, for changing; ``kind`` as for :class:`QuotaFile`. CorruptImage, Unsupported."""
    where = f"{patch.volume.where}: quota file, inode {ino}"
    return QuotaFile(_FileBlocks(patch, ino, where), kind, where)
