"""The inodes of a volume that is being built: 52 bytes each, and what few of them have in a heap.

Here lies what the records on disk are made of at the end (:mod:`ext4lite.building.records`): until then everything can
change, and much of it (a directory's blocks, who shares an attribute block) is not known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from struct import Struct, error

from ext4lite.errors import Unsupported
from ext4lite.extents import Extent
from ext4lite.inode import decode_time, encode_time
from ext4lite.layout import constants as c

# mode and _INDEXED, links, uid, gid, mtime (seconds, extra word), size, three words by type (Body); extra.
_RECORD = Struct("<IIIIlIQQIII")
_SIZE = _RECORD.size
_U32 = Struct("<I")
_TYPE_AT = 1  # the byte of the mode with the type, never 0 of an inode that is there
_LINKS_AT = 4
_HEAP_START = 4
_META = Struct("<IIIIlI")
_BODY = Struct("<QQII")
_BODY_AT = _META.size
_EXTRA_AT = _BODY_AT + _BODY.size
_INDEXED = 1 << 16
_SEVERAL = 0xFFFFFFFF  # as the count of a file's only extent: there are several, in the heap
_RUN = Struct("<IQI")  # logical, physical, count
_TIME = Struct("<lI")
_PAIR = Struct("<II")  # length of an attribute's name and of its value
_HAS_ATIME, _HAS_CTIME = 1, 2
_REMEMBERED = 1024
_ID_LIMIT = 1 << 32


Body = tuple[int, int, int, int]
"""An inode's size and three words with what its type has of its own."""
NO_BODY: Body = (0, 0, 0, 0)


@dataclass(slots=True)
class Meta:
    """What an inode says about itself. Times are nanoseconds since 1970; None for atime and ctime means the mtime."""

    mode: int = 0o755
    """The 12 permission bits (setuid, setgid and sticky among them)."""
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    """Full names (``b"trusted.overlay.opaque"``) and values as the system calls give them."""
    atime_ns: int | None = None
    ctime_ns: int | None = None


@dataclass(slots=True)
class Known:
    """All that is known of an inode. Times as stored: (seconds, extra word)."""

    type: int
    mode: int
    """Type and permissions."""
    links: int
    uid: int
    gid: int
    size: int
    """Bytes; 0 of a directory not yet written."""
    mtime: tuple[int, int]
    atime: tuple[int, int]
    ctime: tuple[int, int]
    indexed: bool
    body: tuple[int, int, int]
    extra: int
    """Number of the piece with attributes and times of its own, 0 for none."""


def directory_body(parent: int) -> Body:
    """Return the body of a directory that is not written yet."""
    return 0, parent, 0, 0


def device_body(major: int, minor: int) -> Body:
    """Return the body of a device."""
    return 0, 0, major, minor


class Inodes:
    """Inodes by number. KeyError for one that is not there."""

    def __init__(self) -> None:
        self._records = bytearray()
        self._heap = bytearray(_HEAP_START)
        self._pieces: dict[bytes, int] = {}  # of lately added extras, which many inodes share

    def add(self, ino: int, kind: int, meta: Meta, body: Body = NO_BODY, links: int = 1) -> None:
        """Note a new inode; ``kind`` are its type bits, ``body`` is what this type has of its own.

        Unsupported when an owner is not a 32-bit number.
        """
        at = ino * _SIZE
        plain = not meta.xattrs and meta.atime_ns is None and meta.ctime_ns is None
        try:
            packed = _RECORD.pack(
                kind | meta.mode & 0o7777,
                links,
                meta.uid,
                meta.gid,
                *encode_time(meta.mtime_ns, wide=True),
                *body,
                0 if plain else self._extra(meta),
            )
        except error:
            _check_owner(meta)
            raise
        records = self._records
        if at == len(records):
            records += packed
            return
        if at > len(records):
            records += bytes(at - len(records))
        records[at : at + _SIZE] = packed

    def drop(self, ino: int) -> None:
        """Forget an inode."""
        at = self._at(ino)
        self._records[at : at + _SIZE] = bytes(_SIZE)

    def type(self, ino: int) -> int:
        """Return the type bits of an inode's mode."""
        return (self._records[self._at(ino) + _TYPE_AT] & 0xF0) << 8

    def links(self, ino: int) -> int:
        """Return the number of links."""
        count: int = _U32.unpack_from(self._records, self._at(ino) + _LINKS_AT)[0]
        return count

    def set_links(self, ino: int, count: int) -> None:
        """Set the number of links."""
        _U32.pack_into(self._records, self._at(ino) + _LINKS_AT, count)

    def meta(self, ino: int) -> Meta:
        """Return what an inode says about itself; times are those that ext4 can hold."""
        mode, _, uid, gid, *mtime = _META.unpack_from(self._records, self._at(ino))
        extra = self.extra(ino)
        atime, ctime, attributes = self._read_extra(extra) if extra else (None, None, {})
        return Meta(
            mode & 0o7777,
            uid,
            gid,
            decode_time(*mtime),
            attributes,
            None if atime is None else decode_time(*atime),
            None if ctime is None else decode_time(*ctime),
        )

    def set_meta(self, ino: int, meta: Meta) -> None:
        """Replace what an inode says about itself. Unsupported as in :meth:`add`."""
        at = self._at(ino)
        _check_owner(meta)
        mode, links = _PAIR.unpack_from(self._records, at)
        mode = mode & ~0o7777 | meta.mode & 0o7777
        extra = self._extra(meta)
        _META.pack_into(self._records, at, mode, links, meta.uid, meta.gid, *encode_time(meta.mtime_ns, wide=True))
        _U32.pack_into(self._records, at + _EXTRA_AT, extra)

    # -- what the types have of their own ---------------------------------------------------------------------------

    def set_content(self, ino: int, size: int, extents: list[Extent], *, indexed: bool = False) -> None:
        """Note size and extents of a file, directory or long symlink."""
        at = self._at(ino)
        if not extents:
            body = size, 0, 0, 0
        elif len(extents) == 1:
            (e,) = extents
            body = size, e.physical, e.logical, e.count
        else:
            packed = b"".join([_RUN.pack(e.logical, e.physical, e.count) for e in extents])
            body = size, self._keep(packed), 0, _SEVERAL
        _BODY.pack_into(self._records, at + _BODY_AT, *body)
        if indexed:
            _U32.pack_into(self._records, at, _U32.unpack_from(self._records, at)[0] | _INDEXED)

    def extents(self, body: tuple[int, int, int]) -> list[Extent]:
        """Return the extents of a file, a written directory or a written long symlink."""
        physical, logical, count = body
        if count == _SEVERAL:
            return [Extent(*run) for run in _RUN.iter_unpack(self._piece(physical))]
        return [Extent(logical, physical, count)] if count else []

    def symlink_body(self, target: bytes) -> Body:
        """Return the body of a new symlink."""
        return len(target), self._keep(target), 0, 0

    def target(self, body: tuple[int, int, int]) -> bytes:
        """Return the target of a symlink whose block is not written."""
        return self._piece(body[0])

    def body(self, ino: int) -> tuple[int, int, int]:
        """Return what an inode's type has of its own, in three words: see the methods that take it.

        The first is a directory's parent, until it is written; the others are a device's numbers.
        """
        _, first, second, third = _BODY.unpack_from(self._records, self._at(ino) + _BODY_AT)
        return first, second, third

    # -- all of them ------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[int]:
        """Yield the numbers of all inodes, ascending; they may change meanwhile."""
        records = self._records
        for at in range(0, len(records), _SIZE):
            if records[at + _TYPE_AT]:
                yield at // _SIZE

    def directories(self) -> Iterator[int]:
        """Yield the numbers of the directories, ascending; they may change meanwhile."""
        records = self._records
        for at in range(0, len(records), _SIZE):
            if records[at + _TYPE_AT] & 0xF0 == c.S_IFDIR >> 8:
                yield at // _SIZE

    def extras(self) -> Iterator[int]:
        """Yield what :meth:`extra` returns of each inode where it is not 0."""
        if len(self._heap) > _HEAP_START:
            for *_, extra in _RECORD.iter_unpack(self._records):
                if extra:
                    yield extra

    def known(self, ino: int) -> Known:
        """Return all that is known of an inode."""
        mode, links, uid, gid, low, word, size, first, second, third, extra = _RECORD.unpack_from(
            self._records, self._at(ino)
        )
        mtime = atime = ctime = low, word
        if extra:
            own_atime, own_ctime, _ = self._read_extra(extra)
            atime, ctime = own_atime or mtime, own_ctime or mtime
        return Known(
            mode & c.S_IFMT,
            mode & 0xFFFF,
            links,
            uid,
            gid,
            size,
            mtime,
            atime,
            ctime,
            bool(mode & _INDEXED),
            (first, second, third),
            extra,
        )

    def extra(self, ino: int) -> int:
        """Return the number of the piece with an inode's attributes and times of its own, 0 for none.

        Inodes with the same piece have the same attributes.
        """
        extra: int = _U32.unpack_from(self._records, self._at(ino) + _EXTRA_AT)[0]
        return extra

    def attributes(self, extra: int) -> dict[bytes, bytes]:
        """Return the extended attributes in a piece."""
        return self._read_extra(extra)[2] if extra else {}

    def _at(self, ino: int) -> int:
        at = ino * _SIZE
        records = self._records
        if 0 <= at < len(records) and records[at + _TYPE_AT]:
            return at
        raise KeyError(ino)

    def _extra(self, meta: Meta) -> int:
        if not meta.xattrs and meta.atime_ns is None and meta.ctime_ns is None:
            return 0
        parts = [b""]
        flags = 0
        for bit, ns in ((_HAS_ATIME, meta.atime_ns), (_HAS_CTIME, meta.ctime_ns)):
            if ns is not None:
                flags |= bit
                parts.append(_TIME.pack(*encode_time(ns, wide=True)))
        parts[0] = bytes([flags])
        for name, value in meta.xattrs.items():
            parts += (_PAIR.pack(len(name), len(value)), name, value)
        packed = b"".join(parts)
        pieces = self._pieces
        number = pieces.get(packed)
        if number is None:
            if len(pieces) >= _REMEMBERED:
                pieces.clear()
            number = pieces[packed] = self._keep(packed)
        return number

    def _read_extra(self, extra: int) -> tuple[tuple[int, int] | None, tuple[int, int] | None, dict[bytes, bytes]]:
        packed = self._piece(extra)
        flags, at = packed[0], 1
        times: list[tuple[int, int] | None] = []
        for bit in (_HAS_ATIME, _HAS_CTIME):
            if flags & bit:
                low, word = _TIME.unpack_from(packed, at)
                times.append((low, word))
                at += _TIME.size
            else:
                times.append(None)
        attributes = {}
        while at < len(packed):
            name, value = _PAIR.unpack_from(packed, at)
            at += _PAIR.size
            attributes[packed[at : at + name]] = packed[at + name : at + name + value]
            at += name + value
        return times[0], times[1], attributes

    def _keep(self, data: bytes) -> int:
        """Put a piece into the heap and return its number."""
        heap = self._heap
        at = len(heap)
        heap += _U32.pack(len(data))
        heap += data
        heap += bytes(-len(data) & 3)
        return at >> 2

    def _piece(self, number: int) -> bytes:
        at = number << 2
        return bytes(self._heap[at + 4 : at + 4 + _U32.unpack_from(self._heap, at)[0]])


def _check_owner(meta: Meta) -> None:
    if not (0 <= meta.uid < _ID_LIMIT and 0 <= meta.gid < _ID_LIMIT):
        raise Unsupported(f"owner {meta.uid}:{meta.gid} is out of range", hint="IDs have 32 bits")
