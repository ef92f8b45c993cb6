"""The content of files in a writable volume: write, truncate, allocate, punch, zero, collapse and insert.

Data goes straight to its blocks. That of new blocks is there before the transaction that names them commits (ordered
mode); a crash before it leaves the file as it was, except for bytes overwritten in place.
"""

from __future__ import annotations

from dataclasses import dataclass

from ext4lite.alloc import Run
from ext4lite.block_map import BlockMap
from ext4lite.errors import FileTooLarge, Invalid, IsADirectory, NotPermitted, NotSupported
from ext4lite.extent_tree import FILE_END, ExtentTree, empty_root
from ext4lite.extents import Extent
from ext4lite.inode import InodeRecord
from ext4lite.layout import constants as c
from ext4lite.writable import WritableBase

_UNWRITTEN_MOST = 32767
_BYTES_AHEAD = 2 << 20


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

    def _content_changes(self, record: InodeRecord) -> None:
        """The content of a file is about to change; a subclass drops what does not outlive that."""

    def _changing(self, ino: int, flags: int = c.IMMUTABLE_FL | c.APPEND_FL) -> InodeRecord:
        """Return a regular file whose content may change."""
        record = self._regular(ino)
        self.require_no_flags(record, flags)
        self._changed = True
        self._content_changes(record)
        return record

    def pwrite(self, ino: int, offset: int, data: bytes) -> int:
        """Write all of ``data`` at byte ``offset`` of a regular file, which grows as needed; return its length.

        VolumeFull, FileTooLarge, IsADirectory, NotPermitted, Invalid; then nothing has changed.
        """
        if offset < 0:
            raise Invalid("a negative offset")
        return self._run(lambda: self._pwrite(ino, offset, data))

    def _pwrite(self, ino: int, offset: int, data: bytes) -> int:
        record = self._regular(ino)
        self.require_no_flags(record, c.IMMUTABLE_FL if offset == record.size else c.IMMUTABLE_FL | c.APPEND_FL)
        if not data:
            return 0
        self._content_changes(record)
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
            following = fmap.next_after(at)
            hole = min(following, end)
            while at < hole:
                # Only what grows at its end, and has grown before, is going to: most files are written once.
                ahead = min(at, self._most_ahead) if following >= FILE_END else 0
                run = self.alloc.allocate_growing(record.ino, self._data_goal(record, at), hole - at, ahead)
                self.add_blocks(record, run.count)
                fmap.insert(Extent(at, run.start, run.count))
                add(at, run.start, run.count, True)
                at += run.count
        return pieces

    @property
    def _most_ahead(self) -> int:
        """Blocks kept at most behind a file that grows."""
        return max(8, _BYTES_AHEAD // self.block_size)

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

    def _zero_edges(self, record: InodeRecord, start: int, end: int) -> None:
        """Zero the parts of blocks at both ends of bytes ``[start, end)``."""
        size = self.block_size
        if start // size == end // size:
            self._zero_range(record, start, end)
            return
        if start % size:
            self._zero_range(record, start, -(-start // size) * size)
        if end % size:
            self._zero_range(record, end // size * size, end)

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
        record = self._changing(ino)
        if size > self._most_bytes(record):
            raise FileTooLarge(f"a file cannot have {size} bytes", where=self._at(f"inode {ino}"))
        if size > record.size:
            self._zero_tail(record)
        elif size < record.size or record.fields.i_blocks_lo:
            self.alloc.drop_window(ino)
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

        The file grows to their end unless ``keep_size``. VolumeFull, FileTooLarge, Invalid; NotSupported for files with
        block maps (they have no unwritten blocks).
        """
        self._run(lambda: self._fallocate(ino, offset, length, keep_size))

    def _with_extents(self, record: InodeRecord) -> ExtentTree:
        fmap = self.file_map(record)
        if isinstance(fmap, BlockMap):
            raise NotSupported(
                "a file with a block map cannot have unwritten blocks", where=self._at(f"inode {record.ino}")
            )
        return fmap

    def _range(self, record: InodeRecord, offset: int, length: int) -> int:
        """Return the end of a range of bytes that fits the file. FileTooLarge, Invalid."""
        if offset < 0 or length <= 0:
            raise Invalid("an empty or negative range")
        end = offset + length
        if end > self._most_bytes(record):
            raise FileTooLarge(f"a file cannot have {end} bytes", where=self._at(f"inode {record.ino}"))
        return end

    def _fallocate(self, ino: int, offset: int, length: int, keep_size: bool) -> None:
        record = self._changing(ino, c.IMMUTABLE_FL)
        fmap = self._with_extents(record)
        end = self._range(record, offset, length)
        self._reserve(record, fmap, offset // self.block_size, -(-end // self.block_size))
        self._grown(record, end, keep_size=keep_size)
        self.put_inode(record)

    def _reserve(self, record: InodeRecord, fmap: ExtentTree, first: int, last: int) -> None:
        """Give the holes of file blocks ``[first, last)`` unwritten blocks."""
        at = first
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

    def _grown(self, record: InodeRecord, end: int, *, keep_size: bool) -> None:
        """Note that a range up to ``end`` was allocated: the size, unless it is to stay, and the times."""
        now = self.clock()
        if not keep_size and end > record.size:
            self._zero_tail(record)
            self.set_size(record, end)
            self.set_times(record, mtime=now)
        self.set_times(record, ctime=now)

    def zero_range(self, ino: int, offset: int, length: int, *, keep_size: bool = False) -> None:
        """Make bytes ``[offset, offset + length)`` zeros with space: whole blocks become unwritten, edges are zeroed.

        The file grows to their end unless ``keep_size``. Errors as :meth:`fallocate`.
        """
        self._run(lambda: self._zeroed(ino, offset, length, keep_size))

    def _zeroed(self, ino: int, offset: int, length: int, keep_size: bool) -> None:
        record = self._changing(ino)
        fmap = self._with_extents(record)
        end, size = self._range(record, offset, length), self.block_size
        first, last = -(-offset // size), end // size
        self._reserve(record, fmap, offset // size, -(-end // size))
        self._zero_edges(record, offset, end)
        if first < last:
            at = first
            for run in fmap.remove(first, last):
                fmap.insert(Extent(at, run.start, run.count, unwritten=True))
                at += run.count
        self._grown(record, end, keep_size=keep_size)
        self.set_times(record, mtime=self.clock())
        self.put_inode(record)

    def collapse_range(self, ino: int, offset: int, length: int) -> None:
        """Take bytes ``[offset, offset + length)`` out of a file: what lies behind moves up, it is shorter.

        Both are multiples of the block size, and the range ends before the file does: else Invalid. NotSupported for
        files with block maps.
        """
        self._run(lambda: self._shift(ino, offset, length, forward=False))

    def insert_range(self, ino: int, offset: int, length: int) -> None:
        """Put a hole of ``length`` bytes into a file at ``offset``: what lies behind moves down, it is longer.

        Both are multiples of the block size, and the hole begins before the file's end: else Invalid. FileTooLarge;
        NotSupported for files with block maps.
        """
        self._run(lambda: self._shift(ino, offset, length, forward=True))

    def _shift(self, ino: int, offset: int, length: int, *, forward: bool) -> None:
        record = self._changing(ino)
        fmap = self._with_extents(record)
        size = self.block_size
        if offset < 0 or length <= 0 or offset % size or length % size:
            raise Invalid("a range that is not whole blocks", where=self._at(f"inode {ino}"))
        if offset >= record.size or (not forward and offset + length >= record.size):
            raise Invalid("the range reaches the file's end", where=self._at(f"inode {ino}"))
        if forward and record.size + length > self._most_bytes(record):
            raise FileTooLarge(f"a file cannot have {record.size + length} bytes", where=self._at(f"inode {ino}"))
        first, by = offset // size, length // size if forward else -(length // size)
        if not forward:
            self._release(record, first, first - by)
        # A block behind the end may be moved over the last possible one: nobody sees it, it goes.
        self._release(record, FILE_END - max(by, 0), FILE_END)
        moved = [run for run in self.map(record)[0] if run.logical + run.count > first]
        fmap.remove(first, FILE_END)
        for run in moved:
            skip = max(0, first - run.logical)
            fmap.insert(Extent(run.logical + skip + by, run.physical + skip, run.count - skip, run.unwritten))
        self.set_size(record, record.size + by * size)
        now = self.clock()
        self.set_times(record, mtime=now, ctime=now)
        self.put_inode(record)

    def punch(self, ino: int, offset: int, length: int) -> None:
        """Make bytes ``[offset, offset + length)`` a hole: whole blocks are freed, the edges zeroed. Invalid."""
        if offset < 0 or length <= 0:
            raise Invalid("an empty or negative range")
        self._run(lambda: self._punch(ino, offset, length))

    def _punch(self, ino: int, offset: int, length: int) -> None:
        record = self._changing(ino)
        size, end = self.block_size, offset + length
        first, last = -(-offset // size), end // size
        if end >= record.size:
            last = max(last, min(-(-end // size), FILE_END))
        self._zero_edges(record, offset, max(end, last * size))
        if first < last:
            self._release(record, first, last)
        now = self.clock()
        self.set_times(record, mtime=now, ctime=now)
        self.put_inode(record)
