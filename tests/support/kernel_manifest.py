"""The manifest of a mounted tree, by system calls only: the judge beside ``ext4lite manifest``.

Also a command: ``kernel_manifest.py DIR``.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from base64 import b64encode
from hashlib import sha256
from typing import Any

_TYPES = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "dir",
    stat.S_IFLNK: "symlink",
    stat.S_IFCHR: "char",
    stat.S_IFBLK: "block",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
}
_HASHED_WHOLE = 16 << 30


def manifest(root: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the entries of everything below ``root`` except ``lost+found`` at its top, sorted by path."""
    top = os.fsencode(root)
    found = []
    for directory, directories, files in os.walk(top):
        for name in [*directories, *files]:
            path = directory + b"/" + name
            inside = path[len(top) :]
            if inside == b"/lost+found" or inside.startswith(b"/lost+found/"):
                continue
            found.append((inside, path))
    return [_entry(inside, path) for inside, path in sorted(found)]


def _entry(inside: bytes, path: bytes) -> dict[str, Any]:
    s = os.lstat(path)
    kind = _TYPES[stat.S_IFMT(s.st_mode)]
    entry: dict[str, Any] = {
        "path": os.fsdecode(inside),
        "type": kind,
        "mode": stat.S_IMODE(s.st_mode),
        "uid": s.st_uid,
        "gid": s.st_gid,
        "nlink": s.st_nlink,
        "mtime_ns": s.st_mtime_ns,
    }
    if kind == "file":
        entry["size"] = s.st_size
        with open(path, "rb", buffering=0) as f:
            if s.st_size > _HASHED_WHOLE:
                entry["data_sha256"] = _hash_of_data(f.fileno(), s.st_size)
            else:
                digest = sha256()
                while chunk := f.read(1 << 20):
                    digest.update(chunk)
                entry["sha256"] = digest.hexdigest()
    elif kind == "symlink":
        entry["target"] = os.fsdecode(os.readlink(path))  # noqa: PTH115
    elif kind in ("char", "block"):
        entry["rdev"] = [os.major(s.st_rdev), os.minor(s.st_rdev)]
    names = os.listxattr(path, follow_symlinks=False)
    if names:
        entry["xattrs"] = {
            name: b64encode(os.getxattr(path, name, follow_symlinks=False)).decode() for name in sorted(names)
        }
    return entry


def _hash_of_data(fd: int, size: int) -> str:
    """Return the hash of a file's 4 KiB pieces that are not zeros, as the format says (ext4lite/manifest.py)."""
    digest = sha256()
    at = 0
    while at < size:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA) // 4096 * 4096
        except OSError:  # ENXIO: the rest is a hole
            break
        end = os.lseek(fd, os.lseek(fd, at, os.SEEK_DATA), os.SEEK_HOLE)
        while at < end:
            piece = os.pread(fd, 4096, at)
            if any(piece):
                digest.update(at.to_bytes(8, "little") + piece.ljust(4096, b"\0"))
            at += 4096
    return digest.hexdigest()


if __name__ == "__main__":
    for line in manifest(sys.argv[1]):
        print(json.dumps(line, separators=(",", ":")))
