"""Walks over a tree that hold the directories on their way and nothing else, however many files there are.

:meth:`ext4lite.volume.Volume.walk` is the plain one; these give an order.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import TYPE_CHECKING

from ext4lite.errors import CorruptImage
from ext4lite.layout.constants import ROOT_INO, S_IFDIR

if TYPE_CHECKING:
    from ext4lite.directory import DirEntry
    from ext4lite.volume import Volume

_BELOW = -1
"""Instead of a file type: what is below a directory."""


def in_order(volume: Volume, start: int = ROOT_INO, skip: Container[bytes] = ()) -> Iterator[tuple[bytes, int]]:
    """Yield (path, inode number) of everything below a directory, sorted by path; paths begin with ``/``.

    What is below ``a`` comes where ``a/`` sorts among its neighbours: behind ``a-b``, before ``a0``. Paths in ``skip``
    are left out with all that is below them. CorruptImage when a directory turns up twice.
    """
    seen = {start}
    stack = [(b"/", iter(_keys(volume, start)))]
    while stack:
        above, keys = stack[-1]
        for key, ino, kind in keys:
            path = above + key
            if kind != _BELOW:
                if path not in skip:
                    yield path, ino
            elif path[:-1] not in skip:
                _enter(volume, ino, path[:-1], seen)
                stack.append((path, iter(_keys(volume, ino))))
                break
        else:
            stack.pop()


def _keys(volume: Volume, ino: int) -> list[DirEntry]:
    """Return a directory's entries and, for each directory among them, one more for what is below it, sorted."""
    keys = volume.iterdir(ino)
    keys += [(name + b"/", child, _BELOW) for name, child, _ in keys if volume.inode(child).type == S_IFDIR]
    keys.sort()
    return keys


def bottom_up(volume: Volume, start: int, path: bytes) -> Iterator[tuple[bytes, int, bool]]:
    """Yield (path, inode number, whether it is a directory) of everything below a directory, contents first.

    ``path`` is what paths begin with. A directory is listed when it is entered, so that what was yielded may be
    removed. CorruptImage when a directory turns up twice.
    """
    seen = {start}
    stack = [(path, start, iter(volume.iterdir(start)))]
    while stack:
        above, ino, entries = stack[-1]
        for name, child, _ in entries:
            inside = above + b"/" + name
            if volume.inode(child).type == S_IFDIR:
                _enter(volume, child, inside, seen)
                stack.append((inside, child, iter(volume.iterdir(child))))
                break
            yield inside, child, False
        else:
            stack.pop()
            if stack:
                yield above, ino, True


def _enter(volume: Volume, ino: int, path: bytes, seen: set[int]) -> None:
    if ino in seen:
        raise CorruptImage(f"has a second name, {path!r}", where=f"{volume.where}: directory inode {ino}")
    seen.add(ino)
