"""Paths inside a volume, resolved as the kernel would with the volume's root as ``/``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ext4lite.errors import LoopOfLinks, NotADirectory, NotFound
from ext4lite.layout import constants as c

if TYPE_CHECKING:
    from ext4lite.volume import Volume

MAX_LINKS_FOLLOWED = 40


def split(path: bytes) -> list[bytes]:
    """Return the names of a path, empty ones and ``.`` left out."""
    return [part for part in path.split(b"/") if part not in (b"", b".")]


def resolve(volume: Volume, path: str | bytes, *, follow: bool = True) -> int:
    """Return the inode number of a path; symlinks on the way are followed, one at its end with ``follow``.

    NotFound, NotADirectory, LoopOfLinks.
    """
    raw = os.fsencode(path)
    where = f"{volume.where}: {os.fsdecode(raw)}"
    way = [c.ROOT_INO]
    parts = split(raw)[::-1]
    followed = 0
    while parts:
        part = parts.pop()
        if volume.inode(way[-1]).type != c.S_IFDIR:
            raise NotADirectory("something on the way is not a directory", where=where)
        if part == b"..":
            if len(way) > 1:
                way.pop()
            continue
        ino = volume.lookup(part, way[-1])
        if ino is None:
            raise NotFound("no such file or directory", where=where)
        if (parts or follow) and volume.inode(ino).type == c.S_IFLNK:
            followed += 1
            if followed > MAX_LINKS_FOLLOWED:
                raise LoopOfLinks("too many symlinks", where=where)
            target = volume.readlink(ino)
            if target.startswith(b"/"):
                way = [c.ROOT_INO]
            parts += split(target)[::-1]
            continue
        way.append(ino)
    if raw.endswith(b"/") and volume.inode(way[-1]).type != c.S_IFDIR:
        raise NotADirectory("is not a directory", where=where)
    return way[-1]
