"""Inodes without a name that still have content, and files being cut: what recovery has to finish.

They form a list on disk: ``s_last_orphan`` is the first, ``i_dtime`` of each the next (source:
Documentation/filesystems/ext4/orphan.rst). Volumes with an orphan file have a second place; every reader knows the list
there, too.

Erasing what is too large for one transaction goes in steps: on the list first, then piece by piece from its end.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from ext4lite.attrwrite import AttributeVolume
from ext4lite.errors import CorruptImage
from ext4lite.extent_tree import FILE_END
from ext4lite.extents import Extent
from ext4lite.inode import InodeRecord
from ext4lite.jbd2.transaction import TransactionTooLarge
from ext4lite.layout import constants as c

_RUNS_A_STEP = 32
_BLOCKS_A_STEP = 64  # of directories, each of which is revoked
_GROUPS_A_STEP = 16


class OrphanVolume(AttributeVolume):
    """Adds deletion; see :class:`ext4lite.writer.WritableVolume`."""

    def add_orphan(self, record: InodeRecord) -> None:
        """Put an inode at the head of the list; the caller stores it."""
        raw = self.super.raw
        record.fields.i_dtime, raw.s_last_orphan = raw.s_last_orphan, record.ino

    def remove_orphan(self, record: InodeRecord) -> None:
        """Take an inode out of the list; the caller stores it."""
        raw = self.super.raw
        following = record.fields.i_dtime
        record.fields.i_dtime = 0
        if raw.s_last_orphan == record.ino:
            raw.s_last_orphan = following
            return
        seen = set()
        ino = raw.s_last_orphan
        while ino and ino not in seen:
            seen.add(ino)
            other = self.inode(ino)
            if other.fields.i_dtime == record.ino:
                other.fields.i_dtime = following
                self.put_inode(other)
                return
            ino = other.fields.i_dtime
        raise CorruptImage(f"inode {record.ino} is not in the list of orphans", where=self.where)

    def erase_orphan(self, ino: int) -> None:
        """Erase an inode that is in the list, in steps where one would be too large."""

        def whole() -> None:
            record = self.inode(ino)
            self.remove_orphan(record)
            self.erase(record)

        try:
            self._run(whole)
        except TransactionTooLarge:
            self._release_in_steps(ino, 0, self.map(self.inode(ino))[0])
            self._run(whole)

    def _release_in_steps(self, ino: int, start: int, runs: list[Extent]) -> None:
        """Free the blocks of an orphan from file block ``start`` on, from the end, a piece a transaction.

        ``runs`` is its map, read while its size covered it.
        """
        record = self.inode(ino)
        most = _BLOCKS_A_STEP if record.type == c.S_IFDIR else _GROUPS_A_STEP * self.super.raw.s_blocks_per_group
        while runs and runs[-1].logical + runs[-1].count > start:
            first = runs[-1].logical + runs[-1].count
            taken = 0
            for run in reversed(runs[-_RUNS_A_STEP:]):
                first = max(start, run.logical, run.logical + run.count - (most - taken))
                taken += run.logical + run.count - first
                if first > run.logical or taken >= most:
                    break
            self._run(partial(self._release_step, ino, first))
            while runs and runs[-1].logical >= first:
                runs.pop()
            if runs and runs[-1].logical + runs[-1].count > first:
                runs[-1].count = first - runs[-1].logical

    def _release_step(self, ino: int, first: int) -> None:
        record = self.inode(ino)
        self._release(record, first, FILE_END)
        self.put_inode(record)

    def truncate(self, ino: int, size: int) -> None:
        """Make a regular file ``size`` bytes long; new bytes are a hole. FileTooLarge, IsADirectory, Invalid."""
        try:
            super().truncate(ino, size)
        except TransactionTooLarge:
            self._truncate_in_steps(ino, size)

    def _truncate_in_steps(self, ino: int, size: int) -> None:
        start = -(-size // self.block_size)
        runs = self.map(self.inode(ino))[0]

        def begin() -> None:
            record = self.inode(ino)
            self.set_size(record, size)  # first, so that nobody ever sees a file half cut
            self.add_orphan(record)
            self.put_inode(record)

        def end() -> None:
            record = self.inode(ino)
            self._truncate(ino, size)
            self.remove_orphan(record)
            self.put_inode(record)

        self._run(begin)
        self._release_in_steps(ino, start, runs)
        self._run(end)

    def _finish(self) -> None:
        self._release_all()
        if self._in_use or self.cache.dirty:
            self._settle_orphans()
        super()._finish()

    def _settle_orphans(self) -> None:
        """Finish what was interrupted between its steps. What is too large even now stays listed, which is legal."""
        seen: set[int] = set()
        while (ino := self.super.raw.s_last_orphan) and ino not in seen:
            seen.add(ino)
            if self.inode(ino).fields.i_links_count:
                with suppress(TransactionTooLarge):
                    self._run(partial(self._end_truncation, ino))
            else:
                self.erase_orphan(ino)

    def _end_truncation(self, ino: int) -> None:
        record = self.inode(ino)
        self._truncate(ino, record.size)
        self.remove_orphan(record)
        self.put_inode(record)
