"""The content of files in a writable volume: write, truncate, fallocate, punch.

Data goes straight to its blocks. That of new blocks is there before the transaction that names them commits (ordered
mode); a crash before it leaves the file as it was, except for bytes overwritten in place.
"""

from __future__ import annotations

from dataclasses import dataclass

from ext4lite.alloc import Run
from ext4lite.block_map import BlockMap
from ext4lite.errors import FileTooLarge, Invalid, IsADirectory, NotPermitted, Unsupported
from ext4lite.extent_tree import FILE_END, empty_root
from ext4lite.extents import Extent
from ext4lite.inode import InodeRecord
from ext4lite.layout import constants as c
from ext4lite.writable import WritableBase

_UNWRITTEN_MOST = 32767


@dataclass(slots=True)
class _Piece:
    """Blocks of a file to write to; ``fresh`` ones hold nothing that counts."""

    logical: int
    physical: int
    count: int
    fresh: bool


class DataVolume(WritableBase):
    """Adds the content of files; see :class:`ext4lite.writer.WritableVolume`."""

    def _regular(self, ino: int) -> InodeRecord:
        record = self.changeable(ino)
        if record.type == c.S_IFDIR:
            raise IsADirectory("is a directory", where=self._at(f"inode {ino}"))
        if record.type != c.S_IFREG:
            raise NotPermitted("is not a regular file", where=self._at(f"inode {ino}"))
        return record

    def _most_bytes(self, record: InodeRecord) -> int:
        """The largest size that a file's map allows."""
        fmap = self.file_map(record)
        if isinstance(fmap, BlockMap):
            return min(fmap.limit, FILE_END) * self.block_size
        return FILE_END * self.block_size

    def pwrite(self, ino: int, offset: int, data: bytes) -> int:
        """Write all of ``data`` at byte ``offset`` of a regular file, which grows as needed; return its length.

        VolumeFull, FileTooLarge, IsADirectory, NotPermitted, Invalid; then nothing has changed.
        """
        if offset < 0:
            raise Invalid("a negative offset")
        return self._run(lambda: self._pwrite(ino, offset, data))

    def _pwrite(self, ino: int, offset: int, data: bytes) -> int:
        record = self._regular(ino)
        if not data:
            return 0
        end = offset + len(data)
        if end > self._most_bytes(record):
            raise FileTooLarge(f"a file cannot have {end} bytes", where=self._at(f"inode {ino}"))
        self._put_content(record, offset, data)
        if end > record.size:
            self.set_size(record, end)
        now = self.clock()
        self.set_times(record, mtime=now, ctime=now)
        self.put_inode(record)
        return len(data)

    def _put_content(self, record: InodeRecord, offset: int, data: bytes) -> None:
        """Write to a record's blocks, which are allocated as needed; size and times are the caller's."""
        end = offset + len(data)
        pieces = self._blocks_for(record, offset // self.block_size, -(-end // self.block_size))
        if offset > record.size:
            self._zero_tail(record)
        for piece in pieces:
            self._write_piece(piece, offset, data)

    def _give_map(self, record: InodeRecord) -> None:
        """Give a new inode an empty map of the kind that the volume makes."""
        if self.super.incompat & c.INCOMPAT_EXTENTS:
            record.fields.i_flags |= c.EXTENTS_FL
            record.fields.i_block = empty_root()

    def _blocks_for(self, record: InodeRecord, first: int, end: int) -> list[_Piece]:
        """Return where file blocks ``[first, end)`` lie; allocate what is a hole, make written what is unwritten."""
        fmap = self.file_map(record)
        pieces: list[_Piece] = []

        def add(logical: int, physical: int, count: int, fresh: bool) -> None:
            last = pieces[-1] if pieces else None
            if last is not None and last.fresh == fresh and last.physical + last.count == physical:
                last.count += count
            else:
                pieces.append(_Piece(logical, physical, count, fresh))

        at = first
        while at < end:
            found = fmap.find(at)
            if found is not None:
                count = min(found.logical + found.count, end) - at
                physical = found.physical + at - found.logical
                if found.unwritten:
                    fmap.remove(at, at + count)
                    fmap.insert(Extent(at, physical, count))
                add(at, physical, count, found.unwritten)
                at += count
                continue
            hole = min(fmap.next_after(at), end)
            while at < hole:
                run = self.alloc.allocate(self._data_goal(record, at), hole - at)
                self.add_blocks(record, run.count)
                fmap.insert(Extent(at, run.start, run.count))
                add(at, run.start, run.count, True)
                at += run.count
        return pieces

    def _data_goal(self, record: InodeRecord, logical: int) -> int:
        """Return where file block ``logical`` should lie: behind the block before it."""
        neighbour = self.file_map(record).before(logical)
        if neighbour is None:
            return self.goal_of(record)
        return neighbour.physical + logical - neighbour.logical

    def _write_piece(self, piece: _Piece, offset: int, data: bytes) -> None:
        """Write the part of ``data`` (at byte ``offset`` of the file) that lies in a piece; partial blocks are kept."""
        size = self.block_size
        base = piece.logical * size
        low, high = max(offset, base), min(offset + len(data), base + piece.count * size)
        part = data[low - offset : high - offset]
        first, last = (low - base) // size, (high - base - 1) // size
        head, tail = (low - base) % size, -(high - base) % size
        if head:
            old = bytes(size) if piece.fresh else self._blocks.read(piece.physical + first)
            part = old[:head] + part
        if tail:
            old = bytes(size) if piece.fresh else self._blocks.read(piece.physical + last)
            part += old[size - tail :]
        self._blocks.write(piece.physical + first, part)

    def _zero_range(self, record: InodeRecord, start: int, end: int) -> None:
        """Zero bytes ``[start, end)`` of one block, if it is mapped and written."""
        logical = start // self.block_size
        found = self.file_map(record).find(logical)
        if found is not None and not found.unwritten:
            piece = _Piece(logical, found.physical + logical - found.logical, 1, False)
            self._write_piece(piece, start, bytes(end - start))

    def _zero_tail(self, record: InodeRecord) -> None:
        """Zero what lies behind the file's end in its last block, before the file grows over it."""
        rest = -record.size % self.block_size
        if rest:
            self._zero_range(record, record.size, record.size + rest)

    def truncate(self, ino: int, size: int) -> None:
        """Make a regular file ``size`` bytes long; new bytes are a hole. FileTooLarge, IsADirectory, Invalid."""
        if size < 0:
            raise Invalid("a negative size")
        self._run(lambda: self._truncate(ino, size))

    def _truncate(self, ino: int, size: int) -> None:
        record = self._regular(ino)
        if size > self._most_bytes(record):
            raise FileTooLarge(f"a file cannot have {size} bytes", where=self._at(f"inode {ino}"))
        self._changed = True
        if size > record.size:
            self._zero_tail(record)
        elif size < record.size or record.fields.i_blocks_lo:
            self._release(record, -(-size // self.block_size), FILE_END)
            self.set_size(record, size)
            self._zero_tail(record)
        self.set_size(record, size)
        now = self.clock()
        self.set_times(record, mtime=now, ctime=now)
        self.put_inode(record)

    def _release(self, record: InodeRecord, start: int, end: int) -> None:
        """Unmap file blocks and free them. Blocks of directories are metadata: an old log must not bring them back."""
        self._changed = True
        for run in self.file_map(record).remove(start, end):
            self._free_run(record, run)

    def _free_run(self, record: InodeRecord, run: Run) -> None:
        self.alloc.free(run.start, run.count)
        self.add_blocks(record, -run.count)
        if record.type == c.S_IFDIR:
            for number in range(run.start, run.start + run.count):
                self.cache.forget(number)

    def fallocate(self, ino: int, offset: int, length: int, *, keep_size: bool = False) -> None:
        """Reserve blocks for bytes ``[offset, offset + length)``: what was a hole reads as zeros and has space.

        The file grows to their end unless ``keep_size``. VolumeFull, FileTooLarge, Invalid; Unsupported for files with
        block maps (they have no unwritten blocks).
        """
        if offset < 0 or length <= 0:
            raise Invalid("an empty or negative range")
        self._run(lambda: self._fallocate(ino, offset, length, keep_size))

    def _fallocate(self, ino: int, offset: int, length: int, keep_size: bool) -> None:
        record = self._regular(ino)
        fmap = self.file_map(record)
        end = offset + length
        if isinstance(fmap, BlockMap):
            raise Unsupported("a file with a block map cannot have unwritten blocks", where=self._at(f"inode {ino}"))
        if end > self._most_bytes(record):
            raise FileTooLarge(f"a file cannot have {end} bytes", where=self._at(f"inode {ino}"))
        self._changed = True
        at, last = offset // self.block_size, -(-end // self.block_size)
        while at < last:
            found = fmap.find(at)
            if found is not None:
                at = found.logical + found.count
                continue
            hole = min(fmap.next_after(at), last)
            while at < hole:
                run = self.alloc.allocate(self._data_goal(record, at), min(hole - at, _UNWRITTEN_MOST))
                self.add_blocks(record, run.count)
                fmap.insert(Extent(at, run.start, run.count, unwritten=True))
                at += run.count
        now = self.clock()
        if not keep_size and end > record.size:
            self._zero_tail(record)
            self.set_size(record, end)
            self.set_times(record, mtime=now)
        self.set_times(record, ctime=now)
        self.put_inode(record)

    def punch(self, ino: int, offset: int, length: int) -> None:
        """Make bytes ``[offset, offset + length)`` a hole: whole blocks are freed, the edges zeroed. Invalid."""
        if offset < 0 or length <= 0:
            raise Invalid("an empty or negative range")
        self._run(lambda: self._punch(ino, offset, length))

    def _punch(self, ino: int, offset: int, length: int) -> None:
        record = self._regular(ino)
        self._changed = True
        size, end = self.block_size, offset + length
        first, last = -(-offset // size), end // size
        if end >= record.size:
            last = max(last, min(-(-end // size), FILE_END))
        if first > last:
            self._zero_range(record, offset, end)
        else:
            if offset % size:
                self._zero_range(record, offset, first * size)
            if end % size and last * size < end:
                self._zero_range(record, last * size, end)
            if first < last:
                self._release(record, first, last)
        now = self.clock()
        self.set_times(record, mtime=now, ctime=now)
        self.put_inode(record)
