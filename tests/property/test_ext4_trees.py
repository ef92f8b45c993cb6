"""Arbitrary trees: what the builder is told is what the volume says, and e2fsck has nothing to add."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ext4lite.builder import ImageBuilder, Meta
from ext4lite.volume import Volume
from support.ext4_judges import tool

NAME = st.binary(min_size=1, max_size=40).filter(
    lambda n: b"/" not in n and b"\0" not in n and n not in (b".", b"..", b"lost+found")
)
TIME = st.integers(-(2**31) * 10**9, 15_032_385_535 * 10**9)
VALUE = st.binary(max_size=300)
XATTRS = st.dictionaries(
    st.tuples(
        st.sampled_from([b"user.", b"trusted.", b"security."]),
        st.binary(min_size=1, max_size=20).filter(lambda n: b"\0" not in n),
    ).map(lambda pair: pair[0] + pair[1]),
    VALUE,
    max_size=4,
)
META = st.builds(
    Meta,
    mode=st.integers(0, 0o7777),
    uid=st.integers(0, 2**32 - 1),
    gid=st.integers(0, 2**32 - 1),
    mtime_ns=TIME,
    xattrs=XATTRS,
    atime_ns=st.none() | TIME,
    ctime_ns=st.none() | TIME,
)
PIECE = st.one_of(
    st.binary(max_size=200),
    st.integers(0, 200_000).map(bytes),
    st.integers(1, 100_000).map(lambda n: b"\1" * n),
)
ACTION = st.one_of(
    st.tuples(st.just("dir"), NAME, META),
    st.tuples(st.just("file"), NAME, META, st.lists(PIECE, max_size=5)),
    st.tuples(st.just("symlink"), NAME, META, st.binary(min_size=1, max_size=200).filter(lambda t: b"\0" not in t)),
    st.tuples(
        st.just("node"),
        NAME,
        META,
        st.sampled_from(["char", "block", "fifo", "socket"]),
        st.integers(0, 4095),
        st.integers(0, 2**20 - 1),
    ),
    st.tuples(st.just("link"), NAME),
    st.tuples(
        st.just("remove"),
    ),
)


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(actions=st.lists(st.tuples(st.integers(0, 1 << 16), ACTION), max_size=40))
def test_any_tree(tmp_path: Path, actions: list[tuple[int, tuple[Any, ...]]]) -> None:
    image = tmp_path / "image"
    # The model: inode number → (kind, meta, content); names: (directory, name) → inode number.
    inodes: dict[int, tuple[str, Meta, Any]] = {}
    names: dict[tuple[int, bytes], int] = {}
    with ImageBuilder(image, size=32 << 20, force=True, durable=False) as b:
        for pick, (action, *args) in actions:
            dirs = [b.root, *(i for i, (kind, _, _) in inodes.items() if kind == "dir")]
            parent = dirs[pick % len(dirs)]
            if action == "remove":
                if names:
                    key = list(names)[pick % len(names)]
                    b.remove(*key)
                    _forget(key, inodes, names)
                continue
            name = args[0]
            if (parent, name) in names:
                continue
            if action == "dir":
                ino = b.add_dir(parent, name, args[1])
                inodes[ino] = ("dir", args[1], None)
            elif action == "file":
                with b.add_file(parent, name, args[1]) as f:
                    for piece in args[2]:
                        f.write(piece)
                ino = f.ino
                inodes[ino] = ("file", args[1], b"".join(args[2]))
            elif action == "symlink":
                ino = b.add_symlink(parent, name, args[2], args[1])
                inodes[ino] = ("symlink", args[1], args[2])
            elif action == "node":
                ino = b.add_node(parent, name, args[1], args[2], args[3], args[4])
                inodes[ino] = (args[2], args[1], (args[3], args[4]) if args[2] in ("char", "block") else (0, 0))
            else:
                targets = [i for i, (kind, _, _) in inodes.items() if kind != "dir"]
                if not targets:
                    continue
                ino = targets[pick % len(targets)]
                b.add_link(parent, name, ino)
            names[parent, name] = ino
        b.finish()
    _compare(image, inodes, names)
    done = subprocess.run([tool("e2fsck"), "-fn", str(image)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout


def _forget(
    key: tuple[int, bytes], inodes: dict[int, tuple[str, Meta, Any]], names: dict[tuple[int, bytes], int]
) -> None:
    ino = names.pop(key)
    if inodes[ino][0] == "dir":
        for child in [k for k in names if k[0] == ino]:
            _forget(child, inodes, names)
    if ino not in names.values():
        del inodes[ino]


def _compare(image: Path, inodes: dict[int, tuple[str, Meta, Any]], names: dict[tuple[int, bytes], int]) -> None:
    with Volume.open(image) as v:
        found = {
            (parent, name): ino
            for parent in (2, *(i for i, (kind, _, _) in inodes.items() if kind == "dir"))
            for name, ino, _ in v.iterdir(parent)
            if name != b"lost+found"
        }
        assert found == names
        for ino, (kind, meta, content) in inodes.items():
            s = v.stat(ino)
            assert (s.kind, s.mode, s.uid, s.gid, s.mtime_ns) == (kind, meta.mode, meta.uid, meta.gid, meta.mtime_ns)
            assert s.atime_ns == (meta.mtime_ns if meta.atime_ns is None else meta.atime_ns)
            assert s.ctime_ns == (meta.mtime_ns if meta.ctime_ns is None else meta.ctime_ns)
            assert v.xattrs(ino) == meta.xattrs
            if kind == "file":
                assert v.read(ino, 0, 1 << 30) == content
                assert s.nlink == list(names.values()).count(ino)
            elif kind == "symlink":
                assert v.readlink(ino) == content
            elif kind == "dir":
                assert s.nlink == 2 + sum(1 for (p, _), i in names.items() if p == ino and inodes[i][0] == "dir")
            else:
                assert s.rdev == content
        assert sorted(p for p, _ in v.walk() if p != b"/lost+found") == sorted(_path(k, names) for k in names)


def _path(key: tuple[int, bytes], names: dict[tuple[int, bytes], int]) -> bytes:
    parent, name = key
    if parent == 2:
        return b"/" + name
    above = next(k for k, ino in names.items() if ino == parent)
    return _path(above, names) + b"/" + name
