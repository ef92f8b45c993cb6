"""The content of a volume as JSON Lines: one object an entry, sorted by path.

Comparable with a manifest of a mounted tree.

Fields: ``path type mode uid gid nlink mtime_ns``, ``size`` and ``sha256`` for files, ``target`` for symlinks, ``rdev``
[major, minor] for devices, ``xattrs`` {name: base64} when there are any. ``mode`` is the 12 permission bits; ``/`` and
``/lost+found`` are left out. Bytes that are not UTF-8 become lone surrogates (``\\udc80`` to ``\\udcff``), as Python
decodes file names.
"""

from __future__ import annotations

import json
import os
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

from ext4lite.errors import Unsupported
from ext4lite.inode import stat_of
from ext4lite.layout import constants as c
from ext4lite.volume import Volume

Entry = dict[str, Any]
_LEFT_OUT = b"/lost+found"
MOST_SPARSE = 64
"""A file may be this many times as large as its volume,"""
ALWAYS_HASHED = 4 << 30
"""or have this many bytes, and is still hashed."""


def entries(volume: Volume) -> Iterator[Entry]:
    """Yield the manifest's objects of an open volume in order. CorruptImage for damage."""
    names = [found for found in volume.walk() if found[0] != _LEFT_OUT and not found[0].startswith(_LEFT_OUT + b"/")]
    names.sort()
    hashes: dict[int, str] = {}
    huge = bool(volume.super.ro_compat & c.RO_HUGE_FILE)
    for path, ino in names:
        record = volume.inode(ino)
        stat = stat_of(record, volume.block_size, huge)
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
            entry["sha256"] = digest = known or _hash(volume, ino, stat.size)
            if stat.nlink > 1:
                hashes[ino] = digest
        elif stat.kind == "symlink":
            entry["target"] = os.fsdecode(volume.readlink(ino))
        elif stat.kind in ("char", "block"):
            entry["rdev"] = list(stat.rdev)
        attributes = volume.xattrs_of(record)
        if attributes:
            entry["xattrs"] = {os.fsdecode(n): b64encode(attributes[n]).decode() for n in sorted(attributes)}
        yield entry


def _hash(volume: Volume, ino: int, size: int) -> str:
    # A sparse file may be far larger than the volume, and a damaged size pretends that; hashing zeros for hours helps
    # nobody.
    if size > max(ALWAYS_HASHED, MOST_SPARSE * volume.blocks * volume.block_size):
        raise Unsupported(f"a file of {size} bytes is too large to hash", where=f"{volume.where}: inode {ino}")
    digest = sha256()
    for chunk in volume.chunks(ino):
        digest.update(chunk)
    return digest.hexdigest()


def to_line(entry: Entry) -> str:
    """Return an entry as its line, without the newline."""
    return json.dumps(entry, separators=(",", ":"))
