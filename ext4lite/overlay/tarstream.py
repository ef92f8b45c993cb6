"""A streaming tar reader made for layers: bounded, strict, and far cheaper a member than :mod:`tarfile`.

It reads what container layers hold: V7, ustar (POSIX 1003.1-1988), PAX (POSIX 1003.1-2001, with ``SCHILY.xattr.*``,
``hdrcharset`` and sub-second times), GNU long names and links, star prefixes, base-256 numbers. What it reads and
what it refuses follows Go's ``archive/tar``, since dockerd reads layers with that. GNU sparse members are refused:
dockerd's tar-split cannot store them, so no Docker layer has them.

Beside the parsed member it hands out the *raw* bytes of everything that is not file content (headers, extended headers,
padding, the end marker), which tar-split records so that the very same tar can be put together again.

Every malformed header is an :class:`~ext4lite.errors.ImageError` that names the layer and the byte offset. Nothing is
trusted: extended headers are at most 1 MiB, numbers are checked, and memory is bounded by the size of a chunk.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from struct import Struct
from zlib import adler32

from ext4lite.errors import ImageError

BLOCK = 512
ZERO_BLOCK = bytes(BLOCK)
#: Largest extended header (PAX records, GNU long name) accepted; the bound of Go's archive/tar.
MAX_EXTENDED = 1 << 20
#: Contents up to this size are handed out as one piece even when they cross a chunk.
WHOLE = 256 << 10
#: Pieces of the raw bytes behind the end marker.
TAIL_PIECE = 1 << 20

# Type flags. A NUL is the V7 way of saying "regular file".
REGULAR, LINK, SYMLINK, CHAR, BLOCKDEV, DIRECTORY, FIFO, CONTIGUOUS = b"01234567"
PAX_GLOBAL = ord("g")
_PAX, _LONG_NAME, _LONG_LINK, _GNU_SPARSE = ord("x"), ord("L"), ord("K"), ord("S")
_V7_REGULAR = 0
_HEADER_ONLY = frozenset((LINK, SYMLINK, CHAR, BLOCKDEV, DIRECTORY, FIFO))
_KNOWN = _HEADER_ONLY | {REGULAR, CONTIGUOUS, PAX_GLOBAL}

# name mode uid gid size mtime chksum type linkname magic(6+2) uname gname devmajor devminor prefix(155) + 12
_HEADER = Struct("100s8s8s8s12s12s8sB100s8s32s32s8s8s155s8s4s")
_SPACES = b" " * 8
_ENDS = b"\0 "
_PAX_TIME = re.compile(rb"(-?)(\d{1,19})(?:\.(\d*))?")
_NUMBER = re.compile(rb"-?\d{1,19}")
_INT64 = 1 << 63


@dataclass(slots=True)
class Member:
    """One member of a tar.

    ``name`` and ``linkname`` are the raw bytes as the archive has them (not cleaned), ``type`` is a type flag with
    V7's NUL already turned into REGULAR or DIRECTORY, ``mode`` has the 12 permission bits, ``size`` is the length of
    the content that follows (0 for links, directories, devices, whatever the header claims), ``mtime_ns`` nanoseconds
    since 1970, ``xattrs`` full names and values or None. ``raw``: the bytes between the previous member's content and
    this one's. ``offset``: where this member's own header begins in the (uncompressed) tar.
    """

    name: bytes
    type: int
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    linkname: bytes
    major: int
    minor: int
    xattrs: dict[bytes, bytes] | None
    raw: bytes
    offset: int


class TarReader:
    """Reads members one after another from an iterator of chunks (``bytes`` of any length, best about 1 MiB).

    ``where`` names the layer in errors. ``skip(n)``, if the source can seek, passes over the n bytes after the last
    chunk and returns how many there were; content not asked for is then not even read (for archives of layers). Use:
    ``while (m := reader.next()) is not None: for piece in reader.data(): …``; content not asked for is skipped. After
    the last member, :meth:`tail` gives the raw rest.
    """

    def __init__(
        self, chunks: Iterator[bytes], *, where: str = "tar", skip: Callable[[int], int] | None = None
    ) -> None:
        self._chunks = chunks
        self._skip = skip
        self.where = where
        self._buf = b""
        self._pos = 0
        self._base = 0  # offset in the stream of _buf[0]
        self._spare, self._spare_at = b"", 0
        self._left = 0  # bytes of the current member's content not handed out yet
        self._pad = 0  # padding after that content
        self._name = b""
        self._ended = False
        # uid, gid, mode and device fields repeat endlessly: parse each spelling once.
        self._numbers: dict[bytes, int] = {}

    # -- errors and buffering ---------------------------------------------------------------------------------------

    def error(self, what: str, offset: int | None = None) -> ImageError:
        """An error that says where in this tar it is (``offset`` in bytes; by default the current position)."""
        at = self._base + self._pos if offset is None else offset
        return ImageError(f"{what}, at byte {at} of the tar", where=self.where)

    def _take(self) -> tuple[bytes, int]:
        """The next chunk and where in it to go on; (b"", 0) at the stream's end."""
        if self._spare:
            chunk, self._spare = self._spare, b""
            return chunk, self._spare_at
        return next(self._chunks, b""), 0

    def _fill(self, keep: int, size: int) -> tuple[int, int]:
        """Make ``size`` bytes available from index ``keep`` on; return that index afterwards, and how many bytes
        there are.

        Fewer than asked means the stream has ended. Chunks are megabytes and not copied: the buffer is either a chunk
        as it came, or, across two chunks, just the bytes asked for; :attr:`_spare` is then what is left of the second.
        """
        if keep == len(self._buf):
            self._base += keep
            self._buf, start = self._take()
            self._base -= start
            self._pos += start - keep
            keep = start
            if len(self._buf) - start >= size:
                return start, len(self._buf) - start
        parts = [self._buf[keep:]]
        have = len(parts[0])
        while have < size:
            chunk, start = self._take()
            if not chunk:
                break
            piece = chunk[start : start + size - have]
            if start + len(piece) < len(chunk):
                self._spare, self._spare_at = chunk, start + len(piece)
            parts.append(piece)
            have += len(piece)
        self._base += keep
        self._pos -= keep
        self._buf = b"".join(parts)
        return 0, have

    # -- content ----------------------------------------------------------------------------------------------------

    def data(self) -> Iterator[memoryview]:
        """The current member's content, in pieces; small contents come whole."""
        left = self._left
        if not left:
            return
        if left <= WHOLE and len(self._buf) - self._pos < left:
            self._fill(self._pos, left)
        while True:
            pos = self._pos
            have = len(self._buf) - pos
            if have >= left:
                self._pos = pos + left
                self._left = 0
                yield memoryview(self._buf)[pos : pos + left]
                return
            if have:
                self._pos = pos + have
                left -= have
                self._left = left
                yield memoryview(self._buf)[pos:]
            if not self._fill(self._pos, 1)[1]:
                raise self.error(f"truncated: the content of {show(self._name)} ends {left} bytes early")

    def whole(self) -> memoryview | None:
        """The current member's content as one piece if it is small or buffered, else None (use :meth:`data`)."""
        left, pos = self._left, self._pos
        if len(self._buf) - pos < left:
            if left > WHOLE:
                return None
            pos, have = self._fill(pos, left)
            if have < left:
                raise self.error(f"truncated: the content of {show(self._name)} ends {left - have} bytes early")
        self._pos = pos + left
        self._left = 0
        return memoryview(self._buf)[pos : pos + left]

    @property
    def position(self) -> int:
        """Offset in the stream of what comes next: right after :meth:`next`, where the member's content begins."""
        return self._base + self._pos

    def _pass_over(self) -> None:
        """Skip what is left of the current member's content, by seeking where the source can."""
        spare = len(self._spare) - self._spare_at if self._spare else 0
        beyond = self._left - (len(self._buf) - self._pos) - spare
        if self._skip is None or beyond <= 0:
            for _ in self.data():
                pass
            return
        skipped = self._skip(beyond)
        self._base += len(self._buf) + spare + skipped
        self._buf, self._spare, self._pos, self._left = b"", b"", 0, 0
        if skipped < beyond:
            raise self.error(f"truncated: the content of {show(self._name)} ends {beyond - skipped} bytes early")

    # -- members ----------------------------------------------------------------------------------------------------

    def next(self) -> Member | None:
        """The next member, or None at the end of the archive (two zero blocks, or the stream's end at a header)."""
        if self._ended:
            return None
        if self._left:
            self._pass_over()
        raw_start = self._pos
        size = 0
        records: dict[bytes, bytes] | None = None
        long_name = long_link = None
        pos = raw_start + self._pad
        while True:
            # _buf[raw_start:] is everything since the last content; the header in question is at pos.
            end = pos + BLOCK
            if len(self._buf) < end:
                pos -= raw_start
                raw_start, have = self._fill(raw_start, pos + BLOCK)
                if have < pos + BLOCK:
                    self._at_end(raw_start, have, pos, in_header=bool(records or long_name or long_link))
                    return None
                pos += raw_start
                end = pos + BLOCK
            buf = self._buf
            (
                name, mode, uid, gid, size_field, mtime_field, chksum, kind, linkname, magic, _uname, _gname, major,
                minor, prefix, _gap, trailer,
            ) = _HEADER.unpack_from(buf, pos)  # fmt: skip
            if not kind and chksum == b"\0\0\0\0\0\0\0\0" and buf[pos:end] == ZERO_BLOCK:
                self._zero_block(raw_start, pos)
                return None
            offset = self._base + pos
            self._verify(buf, pos, chksum, offset)
            try:
                # The usual spelling; anything else goes the long way.
                size = int(size_field[:11], 8) if size_field[:11].isdigit() and size_field[11] in _ENDS else -1
            except ValueError:
                size = -1
            if size < 0 and (size := self._number(size_field, offset, "size")) < 0:
                raise self.error("bad tar header: negative size", offset)
            if kind in (_PAX, _LONG_NAME, _LONG_LINK):
                if size > MAX_EXTENDED:
                    raise self.error(f"bad tar header: extended header of {size} bytes", offset)
                body = end + size
                full = body + (-size % BLOCK)
                if len(buf) < full:
                    before = raw_start
                    raw_start, have = self._fill(raw_start, full - raw_start)
                    if have < body - before:
                        raise self.error("truncated in an extended header", offset)
                    buf, moved = self._buf, raw_start - before
                    end, body, full = end + moved, body + moved, full + moved
                content = buf[end:body]
                if kind == _PAX:
                    records = self._pax(content, offset)
                elif kind == _LONG_NAME:
                    long_name = content.partition(b"\0")[0]
                else:
                    long_link = content.partition(b"\0")[0]
                pos = full
                continue
            break

        name = name.partition(b"\0")[0]
        linkname = linkname.partition(b"\0")[0]
        known, number = self._numbers.get, self._small
        if magic[:6] == b"ustar\0":
            if trailer == b"tar\0":
                prefix = prefix[:131]
            if prefix[0]:
                name = prefix.partition(b"\0")[0] + b"/" + name
        member = Member(
            name=name,
            type=kind,
            mode=known(mode) or number(mode, offset),
            uid=known(uid) or number(uid, offset),
            gid=known(gid) or number(gid, offset),
            size=size,
            mtime_ns=self._number(mtime_field, offset, "time") * 1_000_000_000,
            linkname=linkname,
            major=0,
            minor=0,
            xattrs=None,
            raw=b"",
            offset=offset,
        )
        member.mode &= 0o7777
        if kind in (CHAR, BLOCKDEV) and magic[:5] == b"ustar":
            member.major, member.minor = number(major, offset), number(minor, offset)
        if kind == PAX_GLOBAL:
            # Go's reader hands global headers out and applies them to nothing; dockerd skips them, tar-split names
            # them.
            if size > MAX_EXTENDED:
                raise self.error(f"bad tar header: extended header of {size} bytes", offset)
            return self._global(member, raw_start, end, size)
        if records is not None:
            self._merge(member, records, offset)
        if long_name:
            member.name = long_name
        if long_link:
            member.linkname = long_link
        if kind == _V7_REGULAR:
            member.type = DIRECTORY if member.name.endswith(b"/") else REGULAR
        elif kind not in _KNOWN:
            what = "GNU sparse file" if kind == _GNU_SPARSE else f"member type {chr(kind)!r}"
            raise self.error(f"{show(member.name)}: {what} is not supported in a layer", offset)
        if member.type in _HEADER_ONLY:
            member.size = 0
        size = member.size
        if member.uid < 0 or member.gid < 0 or member.uid >= 1 << 32 or member.gid >= 1 << 32:
            raise self.error(f"bad tar header: owner {member.uid}:{member.gid} of {show(member.name)}", offset)
        member.raw = buf[raw_start:end]
        self._pos = end
        self._left = size
        self._pad = -size % BLOCK
        self._name = member.name
        return member

    def _global(self, member: Member, raw_start: int, end: int, size: int) -> Member:
        """Hand out a global PAX header as a member without content; its records are part of ``raw``."""
        length = end - raw_start + size
        if len(self._buf) - raw_start < length:
            raw_start, have = self._fill(raw_start, length)
            if have < length:
                raise self.error("truncated in a global extended header", member.offset)
        end = raw_start + length
        self._pax(self._buf[end - size : end], member.offset)
        member.raw = self._buf[raw_start:end]
        member.size = 0
        self._pos = end
        self._left = 0
        self._pad = -size % BLOCK
        return member

    def _at_end(self, start: int, have: int, wanted: int, *, in_header: bool) -> None:
        """The stream ended at a header that should be ``wanted`` bytes behind ``start``: right there, or it is
        truncated."""
        if in_header or have != wanted:
            what = "a header" if in_header or have > wanted else "the padding of the last file"
            raise self.error(f"truncated in {what}", self._base + start + min(have, wanted))
        self._end(start)

    def _zero_block(self, raw_start: int, pos: int) -> None:
        """A zero block: the end, if another one or nothing follows."""
        if len(self._buf) < pos + 2 * BLOCK:
            pos -= raw_start
            raw_start, _ = self._fill(raw_start, pos + 2 * BLOCK)
            pos += raw_start
        second = self._buf[pos + BLOCK : pos + 2 * BLOCK]
        if second and (len(second) < BLOCK or second != ZERO_BLOCK):
            raise self.error("bad tar header: a lone zero block", self._base + pos)
        self._end(raw_start)

    def _end(self, raw_start: int) -> None:
        self._ended = True
        self._pos = raw_start

    def tail(self) -> Iterator[bytes]:
        """After the last member: the raw rest of the stream (padding, end marker, trailing bytes), in pieces."""
        if not self._ended:
            raise ValueError("tail() before the end of the archive")
        rest = self._buf[self._pos :]
        self._base += self._pos
        self._buf, self._pos = b"", 0
        while True:
            for at in range(0, len(rest), TAIL_PIECE):
                yield rest[at : at + TAIL_PIECE]
            self._base += len(rest)
            chunk, start = self._take()
            if not chunk:
                return
            rest = chunk[start:]

    # -- fields -----------------------------------------------------------------------------------------------------

    def _verify(self, buf: bytes, pos: int, chksum: bytes, offset: int) -> None:
        """Check the header checksum: the sum of all bytes, the field itself as spaces; signed bytes in some old tars.

        adler32's low half is 1 + the sum modulo 65521, at C speed; the sum itself is below 2 · 65521.
        """
        try:
            stored = int(chksum.strip(b" \0") or b"0", 8)
        except ValueError:
            raise self.error("not a tar header: bad checksum field", offset) from None
        block = buf[pos : pos + 148] + _SPACES + buf[pos + 156 : pos + BLOCK]
        low = (adler32(block) - 1 & 0xFFFF) % 65521
        if stored in (low, low + 65521):
            return
        if stored != sum(block) - 256 * sum(byte > 127 for byte in block):
            raise self.error("not a tar header: the checksum does not match", offset)

    def _small(self, field: bytes, offset: int) -> int:
        value = self._numbers.get(field)
        if value is None:
            value = self._number(field, offset, "number")
            if len(self._numbers) < 4096:
                self._numbers[field] = value
        return value

    def _number(self, field: bytes, offset: int, what: str) -> int:
        """A numeric field: octal digits between spaces and NULs, or base-256 when the first bit is set (GNU)."""
        first = field[0]
        if first & 0x80:
            value = int.from_bytes(field, "big") & ((1 << (8 * len(field) - 1)) - 1)
            if first & 0x40:  # two's complement without the marker bit
                value -= 1 << (8 * len(field) - 1)
            if not -_INT64 <= value < _INT64:
                raise self.error(f"bad tar header: {what} out of range", offset)
            return value
        digits = field.strip(b" \0").partition(b"\0")[0]
        if not digits:
            return 0
        if digits.isdigit():
            try:
                return int(digits, 8)
            except ValueError:
                pass
        raise self.error(f"bad tar header: {what} {field!r}", offset)

    def _pax(self, content: bytes, offset: int) -> dict[bytes, bytes]:
        """PAX records: ``"%d %s=%s\\n" % (length of the whole record, key, value)``."""
        records: dict[bytes, bytes] = {}
        pos, end = 0, len(content)
        while pos < end:
            space = content.find(b" ", pos, pos + 21)
            digits = content[pos:space] if space > 0 else b""
            if not digits.isdigit():
                raise self.error("bad PAX record: no length", offset)
            stop = pos + int(digits)
            equals = content.find(b"=", space + 1, stop)
            if stop > end or equals < 0 or content[stop - 1] != 0x0A:
                raise self.error("bad PAX record", offset)
            key, value = content[space + 1 : equals], content[equals + 1 : stop - 1]
            if not key or b"\0" in key or (b"\0" in value and key in (b"path", b"linkpath", b"uname", b"gname")):
                raise self.error(f"bad PAX record {key!r}", offset)
            records[key] = value
            pos = stop
        return records

    def _merge(self, member: Member, records: dict[bytes, bytes], offset: int) -> None:
        """Let PAX records override the header's fields; an empty value keeps the header's (as Go's reader does)."""
        for key, value in records.items():
            if key.startswith(b"SCHILY.xattr."):
                if member.xattrs is None:
                    member.xattrs = {}
                member.xattrs[key[13:]] = value
                continue
            if not value:
                continue
            setter = _PAX_FIELDS.get(key)
            if setter is not None:
                try:
                    setter(member, value)
                except ValueError:
                    raise self.error(f"bad PAX record {key.decode()}={value[:40]!r}", offset) from None
            elif key.startswith(b"GNU.sparse."):
                raise self.error(f"{show(member.name)}: GNU sparse file is not supported in a layer", offset)
            elif key == b"hdrcharset" and value not in (b"BINARY", b"ISO-IR 10646 2000 UTF-8"):
                raise self.error(f"unknown hdrcharset {value[:40]!r}", offset)
        # "BINARY" means names are raw bytes, and raw bytes is what they are here anyway.


def _pax_int(value: bytes) -> int:
    if not _NUMBER.fullmatch(value):
        raise ValueError(value)
    number = int(value)
    if not -_INT64 <= number < _INT64:
        raise ValueError(value)
    return number


def _pax_time(value: bytes) -> int:
    """Decimal seconds with any number of fraction digits → nanoseconds, cut (not rounded) towards zero."""
    match = _PAX_TIME.fullmatch(value)
    if match is None:
        raise ValueError(value)
    sign, seconds, fraction = match.groups()
    ns = int(seconds) * 1_000_000_000 + int((fraction or b"")[:9].ljust(9, b"0"))
    return -ns if sign else ns


def _set_path(member: Member, value: bytes) -> None:
    member.name = value


def _set_linkpath(member: Member, value: bytes) -> None:
    member.linkname = value


def _set_size(member: Member, value: bytes) -> None:
    member.size = _pax_int(value)
    if member.size < 0:
        raise ValueError(value)


def _set_uid(member: Member, value: bytes) -> None:
    member.uid = _pax_int(value)


def _set_gid(member: Member, value: bytes) -> None:
    member.gid = _pax_int(value)


def _set_mtime(member: Member, value: bytes) -> None:
    member.mtime_ns = _pax_time(value)


def _check_time(_member: Member, value: bytes) -> None:
    _pax_time(value)  # atime and ctime are not kept, but must be times


_PAX_FIELDS: dict[bytes, Callable[[Member, bytes], None]] = {
    b"path": _set_path,
    b"linkpath": _set_linkpath,
    b"size": _set_size,
    b"uid": _set_uid,
    b"gid": _set_gid,
    b"mtime": _set_mtime,
    b"atime": _check_time,
    b"ctime": _check_time,
}


def clean_name(name: bytes) -> bytes:
    """A member's name cleaned lexically, without a leading slash; b"" for the root. May still begin with ``../``."""
    if b"//" not in name and b"/." not in name and name[:1] not in b"/." and name[-1:] != b"/":
        return name  # the common case, spelt cleanly already
    clean = posixpath.normpath(name)
    # POSIX lets exactly two leading slashes stand, and normpath with it.
    return b"" if clean == b"." else clean.lstrip(b"/")


def show(name: bytes) -> str:
    """A member's name for an error message: one line, whatever the bytes are."""
    return ascii(name.decode("utf-8", "backslashreplace"))[1:-1]
