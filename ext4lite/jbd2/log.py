"""The log of a journal: where its blocks lie, its superblock, its features, its checksums.

Both recovery and transactions stand on it. Source of all rules: Documentation/filesystems/ext4/journal.rst.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from ext4lite.checksum import crc32c
from ext4lite.device import Handle, as_device
from ext4lite.errors import CorruptImage, Unsupported
from ext4lite.extents import Extent
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import JournalHeader, JournalSuperBlock

_KNOWN_INCOMPAT = sum(c.JBD2_INCOMPAT)
_ALL = 0xFFFFFFFF
_SUPER_CSUM = JournalSuperBlock.OFFSET_s_checksum
HEADER = JournalHeader.STRUCT
MAGIC_BYTES = c.JBD2_MAGIC.to_bytes(4, "big")
_FIELDS_OF_V1 = 36
_LEAST_BLOCKS = 4  # superblock, descriptor, a block, commit


class Blocks(Protocol):
    """A volume as whole blocks. Whoever wants to see or cut off what the journal writes puts one of his own below."""

    @property
    def block_size(self) -> int:
        """Bytes a block."""
        ...

    def read(self, block: int, count: int = 1) -> bytes:
        """Return ``count`` blocks from ``block`` on. CorruptImage outside the image, HostError."""
        ...

    def write(self, block: int, data: bytes | memoryview) -> None:
        """Write whole blocks from ``block`` on. HostError."""
        ...

    def flush(self) -> None:
        """Return when everything written before is durable. HostError."""
        ...


class FileBlocks:
    """The blocks of an image: a device, or an open descriptor."""

    __slots__ = ("_device", "_where", "block_size")

    def __init__(self, image: Handle, block_size: int, where: str) -> None:
        self._device, self.block_size, self._where = as_device(image, where), block_size, where

    def read(self, block: int, count: int = 1) -> bytes:
        """See :class:`Blocks`."""
        want = count * self.block_size
        data = self._device.read(want, block * self.block_size)
        if len(data) != want:
            raise CorruptImage(f"the image ends before block {block + count}", where=self._where)
        return data

    def write(self, block: int, data: bytes | memoryview) -> None:
        """See :class:`Blocks`."""
        self._device.write(data, block * self.block_size)

    def flush(self) -> None:
        """See :class:`Blocks`."""
        self._device.flush()


class _Layered(Mapping[int, bytes]):
    """Two mappings as one; the upper one wins."""

    def __init__(self, upper: Mapping[int, bytes], lower: Mapping[int, bytes]) -> None:
        self._upper, self._lower = upper, lower

    def __getitem__(self, number: int) -> bytes:
        return self._upper[number] if number in self._upper else self._lower[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._upper.keys() | self._lower.keys())

    def __len__(self) -> int:
        return len(self._upper.keys() | self._lower.keys())


class Overlay:
    """Blocks in memory above others that are never written to: what a volume would look like.

    ``base`` holds what a log brings, ``dirty`` what was changed on top of that.
    """

    __slots__ = ("_below", "base", "block_size", "dirty")

    def __init__(self, below: Blocks, base: Mapping[int, bytes]) -> None:
        self._below = below
        self.block_size = below.block_size
        self.base = base
        self.dirty: dict[int, bytes] = {}

    def read(self, block: int, count: int = 1) -> bytes:
        """See :class:`Blocks`."""
        if count == 1:
            found = self.changed(block)
            return self._below.read(block) if found is None else found
        return b"".join(self.read(block + i) for i in range(count))

    def changed(self, block: int) -> bytes | None:
        """Return a block that differs from what lies below, else None."""
        found = self.dirty.get(block)
        return self.base.get(block) if found is None else found

    def everything(self) -> Mapping[int, bytes]:
        """Return all blocks that differ, without copying them."""
        return _Layered(self.dirty, self.base)

    def patch(self, data: bytes, offset: int) -> bytes:
        """Return ``data``, read from byte ``offset`` below, as it is in the overlay."""
        size = self.block_size
        first, last = offset // size, (offset + len(data) - 1) // size
        out: bytearray | None = None
        for block in range(first, last + 1):
            if block in self.dirty or block in self.base:
                out = bytearray(data) if out is None else out
                found = self.changed(block) or b""
                start = block * size - offset
                out[max(start, 0) : start + size] = found[max(-start, 0) :][: len(data) - max(start, 0)]
        return data if out is None else bytes(out)

    def write(self, block: int, data: bytes | memoryview) -> None:
        """See :class:`Blocks`."""
        size = self.block_size
        for i in range(len(data) // size):
            self.dirty[block + i] = bytes(data[i * size : (i + 1) * size])

    def flush(self) -> None:
        """Do nothing: memory is all there is."""


def write_back(blocks: Blocks, dirty: Mapping[int, bytes] | Mapping[int, bytes | memoryview]) -> None:
    """Write ``dirty`` blocks in place, neighbours together (up to 1 MiB), without a flush."""
    most = (1 << 20) // blocks.block_size
    numbers = sorted(dirty)
    start = 0
    while start < len(numbers):
        end = start + 1
        while end < len(numbers) and numbers[end] == numbers[end - 1] + 1 and end - start < most:
            end += 1
        alone = end == start + 1
        blocks.write(
            numbers[start], dirty[numbers[start]] if alone else b"".join([dirty[n] for n in numbers[start:end]])
        )
        start = end


class Log:
    """The blocks of one journal, numbered from 0 (its superblock). Made by :meth:`open`.

    The log proper is ``first`` to ``last`` (exclusive, where it wraps); fast commits lie in ``fc_first`` to ``maxlen``.
    """

    def __init__(self, blocks: Blocks, runs: Sequence[Extent], where: str, raw: bytes) -> None:
        self.blocks = blocks
        self.block_size = blocks.block_size
        self.where = where
        self._runs = [(r.logical, r.count, r.physical) for r in runs]
        self._logicals = [r.logical for r in runs]
        self._raw = raw
        self.super = sb = JournalSuperBlock.unpack(raw)
        v2 = sb.h_blocktype == c.JBD2_SUPERBLOCK_V2
        self.compat = sb.s_feature_compat if v2 else 0
        self.incompat = sb.s_feature_incompat if v2 else 0
        self._derive()

    def _derive(self) -> None:
        """Work out what follows from features and sizes."""
        sb = self.super
        self.wide = bool(self.incompat & c.JBD2_INCOMPAT_64BIT)
        self.csum = (
            3 if self.incompat & c.JBD2_INCOMPAT_CSUM_V3 else 2 if self.incompat & c.JBD2_INCOMPAT_CSUM_V2 else 0
        )
        """Version of the checksums: 3, 2, or 0 for none (a commit block may still have a crc32)."""
        self.commit_crc = bool(self.compat & c.JBD2_COMPAT_CHECKSUM) and not self.csum
        self.seed = crc32c(_ALL, sb.s_uuid)
        self.tail = 4 if self.csum else 0
        """Bytes at the end of descriptor and revoke blocks that hold their checksum."""
        self.tag_size = 16 if self.csum == 3 else 8 + 4 * self.wide + 2 * (self.csum == 2)
        self.maxlen = sb.s_maxlen
        self.first, self.last = sb.s_first, sb.s_maxlen
        self.fc_first = self.maxlen
        if self.incompat & c.JBD2_INCOMPAT_FAST_COMMIT:
            count = sb.s_num_fc_blks or c.JBD2_DEFAULT_FC_BLOCKS
            if count >= self.maxlen or self.maxlen - count <= self.first:
                raise CorruptImage(f"{count} of {self.maxlen} blocks are for fast commits", where=self.where)
            self.last = self.maxlen - count
            self.fc_first = self.last + 1

    @classmethod
    def open(cls, blocks: Blocks, runs: Sequence[Extent], where: str) -> Log:
        """Read and check the superblock of the journal that lies in ``runs`` (of the journal's inode) of a volume.

        CorruptImage, Unsupported (by the feature's name), HostError.
        """
        if not runs or runs[0].logical != 0:
            raise CorruptImage("the journal has no superblock", where=where)
        raw = blocks.read(runs[0].physical)
        sb = JournalSuperBlock.unpack(raw)
        if sb.h_magic != c.JBD2_MAGIC or sb.h_blocktype not in (c.JBD2_SUPERBLOCK_V1, c.JBD2_SUPERBLOCK_V2):
            raise CorruptImage(f"its superblock has magic {sb.h_magic:#010x}, type {sb.h_blocktype}", where=where)
        if sb.s_blocksize != blocks.block_size:
            raise CorruptImage(f"the journal has blocks of {sb.s_blocksize} bytes", where=where)
        if sb.h_blocktype == c.JBD2_SUPERBLOCK_V2:
            unknown = sb.s_feature_incompat & ~_KNOWN_INCOMPAT
            if unknown or sb.s_feature_ro_compat:
                names = c.feature_names(unknown, c.JBD2_INCOMPAT, "I")
                names += c.feature_names(sb.s_feature_ro_compat, {}, "R")
                raise Unsupported(f"the journal uses unknown features: {', '.join(names)}", where=where)
            if sb.s_feature_incompat & (c.JBD2_INCOMPAT_CSUM_V2 | c.JBD2_INCOMPAT_CSUM_V3):
                if sb.s_checksum_type != c.JBD2_CRC32C:
                    raise Unsupported(f"the journal has checksums of type {sb.s_checksum_type}", where=where)
                if super_checksum(raw) != sb.s_checksum:
                    raise CorruptImage("its superblock has a wrong checksum", where=where)
        there = 0
        for run in runs:
            if there >= sb.s_maxlen:
                break  # behind it nothing is used: what a crash left of blocks that were being cut off may have holes
            if run.logical != there or run.unwritten:
                raise CorruptImage(f"the journal has a hole at its block {there}", where=where)
            there += run.count
        if not (_LEAST_BLOCKS <= sb.s_maxlen <= there and 0 < sb.s_first < sb.s_maxlen - 2):
            what = f"the journal has {there} blocks; its superblock says {sb.s_maxlen}, the log from {sb.s_first} on"
            raise CorruptImage(what, where=where)
        log = cls(blocks, runs, where, raw)
        if sb.s_start and not sb.s_first <= sb.s_start < log.last:
            raise CorruptImage(f"the log starts at block {sb.s_start}, outside the journal", where=where)
        return log

    def _run(self, number: int) -> tuple[int, int]:
        """Return (block of the volume, blocks that follow without a gap, it included) of a block of the journal."""
        i = bisect_right(self._logicals, number) - 1
        logical, count, physical = self._runs[max(i, 0)]
        if not logical <= number < logical + count:
            raise CorruptImage(f"the journal has no block {number}", where=self.where)
        return physical + number - logical, logical + count - number

    def physical(self, number: int) -> int:
        """Return the block of the volume that holds block ``number`` of the journal."""
        return self._run(number)[0]

    def contiguous(self, number: int) -> int:
        """Return how many blocks of the journal from ``number`` on lie one behind the other in the volume."""
        return self._run(number)[1]

    def own_blocks(self) -> list[tuple[int, int]]:
        """Return (start, count) of the blocks of the volume that the journal takes."""
        return [(physical, count) for _, count, physical in self._runs]

    def read(self, number: int) -> bytes:
        """Return one block of the journal."""
        return self.blocks.read(self.physical(number))

    def write(self, number: int, data: bytes) -> None:
        """Write blocks of the journal from ``number`` on; they must not go beyond its end."""
        size, at = self.block_size, 0
        while at < len(data):
            physical, together = self._run(number + at // size)
            self.blocks.write(physical, data[at : at + together * size])
            at += together * size

    def after(self, number: int, step: int = 1) -> int:
        """Return the block ``step`` (less than the log's length) behind ``number``, round the log's end."""
        number += step
        return number if number < self.last else number - (self.last - self.first)

    def length(self, start: int, end: int) -> int:
        """Return how many blocks lie from ``start`` to before ``end``, round the log's end: all where they meet."""
        return (end - start - 1) % (self.last - self.first) + 1

    def write_super(self, *, start: int, sequence: int) -> None:
        """Note in the superblock where the log begins (0: it is empty) and with which transaction. No flush."""
        sb = self.super
        sb.s_start, sb.s_sequence = start, sequence
        head = sb.pack()
        if self.csum:
            sb.s_checksum = super_checksum(head)
            head = sb.pack()
        self._raw = head + self._raw[len(head) :]
        self.blocks.write(self.physical(0), self._raw)

    def set_incompat(self, bits: int) -> None:
        """Add incompatible features (revoke, 64bit, …); the superblock must be written afterwards."""
        if self.super.h_blocktype == c.JBD2_SUPERBLOCK_V1:  # has no features; what follows s_errno is undefined in it
            at = _FIELDS_OF_V1
            self._raw = self._raw[:at] + bytes(len(self._raw) - at)
            self.super = JournalSuperBlock.unpack(self._raw)
            self.super.h_blocktype, self.super.s_nr_users = c.JBD2_SUPERBLOCK_V2, 1
        self.super.s_feature_incompat |= bits
        self.incompat |= bits
        self._derive()

    # -- checksums --------------------------------------------------------------------------------------------------

    def block_checksum(self, data: bytes, at: int) -> int:
        """Checksum of a descriptor, revoke or commit block whose own field lies at byte ``at``, counted as zero."""
        return crc32c(self.seed, data[:at] + b"\0\0\0\0" + data[at + 4 :])

    def tail_ok(self, data: bytes) -> bool:
        """Tell whether a descriptor or revoke block has the right checksum (or needs none)."""
        at = len(data) - 4
        return not self.csum or self.block_checksum(data, at) == int.from_bytes(data[at:], "big")

    def with_tail(self, data: bytes) -> bytes:
        """Return a descriptor or revoke block, filled up with zeros and sealed."""
        body = data + bytes(self.block_size - len(data))
        if not self.csum:
            return body
        at = len(body) - 4
        return body[:at] + self.block_checksum(body, at).to_bytes(4, "big")

    def data_checksum(self, sequence: int, stored: bytes) -> int:
        """Checksum that a tag has of its block as it is stored; with csum v2 only the lower half is kept."""
        value = crc32c(crc32c(self.seed, sequence.to_bytes(4, "big")), stored)
        return value if self.csum == 3 else value & 0xFFFF


def super_checksum(raw: bytes) -> int:
    """Checksum of the 1024 bytes of a journal superblock."""
    return crc32c(_ALL, raw[:_SUPER_CSUM] + b"\0\0\0\0" + raw[_SUPER_CSUM + 4 : JournalSuperBlock.SIZE])


def later_or_same(a: int, b: int) -> bool:
    """Tell whether transaction ``a`` is ``b`` or later: numbers go round at 2**32."""
    return (a - b) & _ALL < 1 << 31


def next_sequence(sequence: int) -> int:
    """Return the number of the transaction after ``sequence``."""
    return (sequence + 1) & _ALL
