"""tar-split: what dockerd keeps of a layer's tar beside its files, so that the very same tar can be put together again.

The format is that of github.com/vbatts/tar-split, ``tar/storage``: gzip over JSON lines, each one entry::

    {"type":2,"payload":"<base64 of raw bytes>","position":0}                       headers, padding, end marker
    {"type":1,"name":"etc/a","size":5,"payload":"<base64 of crc64>","position":1}   the content of the file etc/a

The checksum is CRC-64/GO-ISO (Go's ``crc64.ISO`` table, 8 bytes big endian) and is verified on ``docker save`` and
push; a name that is not UTF-8 goes into ``name_raw`` as base64. Two file entries with equal cleaned names make the
reader fail, so content that cannot be found under its name later is stored as raw segments instead (see
:class:`TarSplitWriter`).
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from binascii import b2a_base64
from collections.abc import Callable
from concurrent.futures import Executor, Future

from ext4lite.errors import ImageError

#: Go's gzip writer makes this header: no name, no time (mtime 0), unknown OS (255).
_GZIP_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
#: Twice as fast as Go's 6, and 6 % larger.
_LEVEL = 4
_PLAIN_NAME = re.compile(rb"[ !#-;=?-\[\]-~]*")  # printable ASCII that JSON (as Go writes it) leaves as it is
_FLUSH = 256 << 10
_AHEAD = 32  # pieces of that size waiting for the pool


def _crc64() -> Callable[..., int]:
    """CRC-64/GO-ISO as ``crc(data, previous=0)``, at C speed: anycrc (7 GB/s), else crcmod's C extension (95 MB/s)."""
    try:
        import anycrc

        calc: Callable[..., int] = anycrc.Model("CRC64-GO-ISO").calc
    except (ImportError, KeyError, ValueError):
        import crcmod

        calc = crcmod.mkCrcFun(0x1000000000000001B, initCrc=0, rev=True, xorOut=0xFFFFFFFFFFFFFFFF)
    return calc


crc64: Callable[..., int] = _crc64()


def _go_json_string(text: str) -> bytes:
    """``text`` as Go's encoding/json writes it: HTML characters and line separators escaped, other Unicode as UTF-8."""
    out = json.dumps(text, ensure_ascii=False)
    for char in "<>&\u2028\u2029":
        if char in out:
            out = out.replace(char, f"\\u{ord(char):04x}")
    return out.encode()


class TarSplitWriter:
    """Builds one ``tar-split.json.gz`` in memory.

    :meth:`segment` adds raw bytes, :meth:`file` a file entry. ``finish()`` closes the gzip stream (dockerd reads it
    to the end: an unclosed one breaks save and push) and returns the whole. Same calls, same bytes.
    With ``pool``, an executor of one thread, compressing goes on beside.
    """

    def __init__(self, pool: Executor | None = None) -> None:
        self._pool = pool
        self._running: list[Future[None]] = []
        self._lines: list[bytes] = []
        self._pending = 0
        self._position = 0
        self._crc = 0
        self._length = 0
        self._deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
        self._out: list[bytes] = [_GZIP_HEADER]

    def segment(self, raw: bytes | memoryview) -> None:
        """Add ``raw`` (headers, padding, or content that has no file to be read from)."""
        if not raw:
            return
        line = b'{"type":2,"payload":"%b","position":%d}\n' % (b2a_base64(raw, newline=False), self._position)
        self._position += 1
        self._add(line)

    def file(self, name: bytes, size: int, crc: int) -> None:
        """Add a member's entry: ``name`` as the header has it, size and CRC-64 of its content (0 if it has none)."""
        self._add(self._file_line(name, size, crc))

    def member(self, raw: bytes, name: bytes, size: int, crc: int) -> None:
        """:meth:`segment` of a member's ``raw`` and its :meth:`file` in one: what nearly every member needs."""
        line = b'{"type":2,"payload":"%b","position":%d}\n' % (b2a_base64(raw, newline=False), self._position)
        self._position += 1
        self._add(line + self._file_line(name, size, crc))

    def _file_line(self, name: bytes, size: int, crc: int) -> bytes:
        position = self._position
        self._position += 1
        if _PLAIN_NAME.fullmatch(name):
            named = b'"name":"%b",' % name if name else b""
        else:
            try:
                named = b'"name":%b,' % _go_json_string(name.decode())
            except UnicodeDecodeError:
                named = b'"name_raw":"%b",' % b2a_base64(name, newline=False)
        if size:
            checksum = b2a_base64(crc.to_bytes(8, "big"), newline=False)
            return b'{"type":1,%b"size":%d,"payload":"%b","position":%d}\n' % (named, size, checksum, position)
        return b'{"type":1,%b"payload":null,"position":%d}\n' % (named, position)

    def _add(self, line: bytes) -> None:
        self._lines.append(line)
        self._pending += len(line)
        if self._pending >= _FLUSH:
            self._compress()

    def _compress(self) -> None:
        lines, self._lines = self._lines, []
        self._pending = 0
        if self._pool is None:
            self._deflate_lines(lines)
            return
        self._running.append(self._pool.submit(self._deflate_lines, lines))
        if len(self._running) > _AHEAD:
            self._running.pop(0).result()

    def _deflate_lines(self, lines: list[bytes]) -> None:
        text = b"".join(lines)
        self._crc = zlib.crc32(text, self._crc)
        self._length += len(text)
        self._out.append(self._deflate.compress(text))

    def finish(self) -> bytes:
        """Close the stream and return the gzip file."""
        self._compress()
        for future in self._running:
            future.result()
        self._running.clear()
        self._out.append(self._deflate.flush())
        self._out.append(struct.pack("<II", self._crc, self._length & 0xFFFFFFFF))
        return b"".join(self._out)


def assemble(packed: bytes, read: Callable[[bytes], bytes], write: Callable[[bytes], object]) -> None:
    """Put a tar together again: the reverse of :class:`TarSplitWriter`, as dockerd's ``save`` does it.

    ``packed`` is a tar-split.json.gz, ``read(name)`` gives a file's content, ``write`` takes the pieces of the tar in
    order. Raises :class:`ImageError` where dockerd would fail: bad gzip or JSON, a duplicate path, a checksum that
    does not match.
    """
    import base64
    import posixpath

    stream = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        text = stream.decompress(packed)
    except zlib.error as error:
        raise ImageError(f"tar-split: {error}") from error
    if not stream.eof:
        raise ImageError("tar-split: the gzip stream is not closed")
    seen: set[bytes] = set()
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ImageError(f"tar-split: {error}") from error
        if entry["type"] == 2:
            write(base64.b64decode(entry["payload"]))
            continue
        name = base64.b64decode(entry["name_raw"]) if "name_raw" in entry else entry.get("name", "").encode()
        clean = posixpath.normpath(name)
        if clean in seen:
            raise ImageError(f"tar-split: duplicate path {name!r}")
        seen.add(clean)
        if entry.get("size"):
            content = read(name)
            if crc64(content).to_bytes(8, "big") != base64.b64decode(entry["payload"]):
                raise ImageError(f"tar-split: the content of {name!r} does not match its checksum")
            write(content)
