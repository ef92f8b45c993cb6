"""The content of a volume as JSON Lines: one object an entry, sorted by path.

Comparable with a manifest of a mounted tree.

Fields: ``path type mode uid gid nlink mtime_ns``, ``size`` and ``sha256`` for files, ``target`` for symlinks, ``rdev``
[major, minor] for devices, ``xattrs`` {name: base64} when there are any. ``mode`` is the 12 permission bits; ``/`` and
``/lost+found`` are left out. Bytes that are not UTF-8 become lone surrogates (``\\udc80`` to ``\\udcff``), as Python
decodes file names.

A file beyond 16 GiB, which is sparse as a rule, has ``data_sha256`` instead: the SHA-256 of its pieces that are not all
zeros, each as its offset (8 bytes, little-endian) and 4096 bytes, zeros filling up the last. So nobody hashes holes for
hours, and where holes are and where zeros makes no difference.
"""

from __future__ import annotations

import json
import os
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

from ext4lite.errors import Unsupported
from ext4lite.inode import InodeRecord
from ext4lite.volume import Volume
from ext4lite.walking import in_order

Entry = dict[str, Any]
_LEFT_OUT = b"/lost+found"
HASHED_WHOLE = 16 << 30
"""Larger files have ``data_sha256``."""
MOST_ZEROS = 64
"""Holes may be hashed as long as all of them are together this many times as large as the volume,"""
ZEROS_ALLOWED = 64 << 30
"""or have this many bytes. Only damage makes more."""
PIECE = 4096
_CHUNK = 4 << 20


def entries(volume: Volume) -> Iterator[Entry]:
    """Yield the manifest's objects of an open volume in order. CorruptImage for damage."""
    hashes: dict[int, tuple[str, str]] = {}
    hasher = _Hasher(volume)
    for path, ino in in_order(volume, skip=(_LEFT_OUT,)):
        stat = volume.stat(ino)
        record = volume.inode(ino)
        entry: Entry = {
            "path": os.fsdecode(path),
            "type": stat.kind,
            "mode": stat.mode,
            "uid": stat.uid,
            "gid": stat.gid,
            "nlink": stat.nlink,
            "mtime_ns": stat.mtime_ns,
        }
        if stat.kind == "file":
            entry["size"] = stat.size
            known = hashes.get(ino) if stat.nlink > 1 else None
            name, digest = known or hasher.hash(record)
            entry[name] = digest
            if stat.nlink > 1:
                hashes[ino] = name, digest
        elif stat.kind == "symlink":
            entry["target"] = os.fsdecode(volume.readlink(ino))
        elif stat.kind in ("char", "block"):
            entry["rdev"] = list(stat.rdev)
        attributes = volume.xattrs_of(record)
        if attributes:
            entry["xattrs"] = {os.fsdecode(n): b64encode(attributes[n]).decode() for n in sorted(attributes)}
        yield entry


class _Hasher:
    """Hashes files, and gives up on a volume that pretends to have far more zeros than anybody would hash."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._zeros_left = max(ZEROS_ALLOWED, MOST_ZEROS * volume.blocks * volume.block_size)

    def hash(self, record: InodeRecord) -> tuple[str, str]:
        """Return the field's name and the hash of a regular file. CorruptImage, Unsupported."""
        digest = sha256()
        if record.size > HASHED_WHOLE:
            for offset, piece in self._pieces(record):
                digest.update(offset.to_bytes(8, "little") + piece)
            return "data_sha256", digest.hexdigest()
        held = sum(run.count for run in self._volume.map(record)[0]) * self._volume.block_size
        self._zeros_left -= max(0, record.size - held)
        if self._zeros_left < 0:
            where = f"{self._volume.where}: inode {record.ino}"
            raise Unsupported(f"a file of {record.size} bytes is one hole too many to hash", where=where)
        for chunk in self._volume.chunks(record.ino):
            digest.update(chunk)
        return "sha256", digest.hexdigest()

    def _pieces(self, record: InodeRecord) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, content) of the pieces that are not all zeros."""
        v = self._volume
        zeros = bytes(PIECE)
        at = 0  # up to here it is done
        for run in v.map(record)[0]:
            if run.unwritten:
                continue
            start = max(at, run.logical * v.block_size // PIECE * PIECE)
            at = end = min(record.size, -(-(run.logical + run.count) * v.block_size // PIECE) * PIECE)
            for position in range(start, end, _CHUNK):
                data = v.read(record.ino, position, min(_CHUNK, end - position))
                for inside in range(0, len(data), PIECE):
                    piece = data[inside : inside + PIECE].ljust(PIECE, b"\0")
                    if piece != zeros:
                        yield position + inside, piece


def to_line(entry: Entry) -> str:
    """Return an entry as its line, without the newline."""
    return json.dumps(entry, separators=(",", ":"))
