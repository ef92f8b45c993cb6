"""Layers applied to a volume: whiteouts, opaque marks, links, order, names, metadata; read back by the core."""

from __future__ import annotations

import struct
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ext4lite.builder import ImageBuilder, Meta
from ext4lite.errors import ImageError
from ext4lite.overlay.layers import LayerApplier, LayerStats, split_again
from ext4lite.overlay.tarsplit import TarSplitWriter, assemble
from ext4lite.overlay.tarstream import TarReader, clean_name
from ext4lite.volume import Volume
from support.overlay_samples import MTIME, Entry, directory, hardlink, make_tar, symlink

NOW = 1_600_000_000
OPAQUE = {b"trusted.overlay.opaque": b"y"}


@dataclass(slots=True)
class Node:
    """What is at a path. ``content`` is a file's bytes or a symlink's target."""

    ino: int
    kind: str
    mode: int
    owner: tuple[int, int]
    mtime_ns: int
    nlink: int
    content: bytes
    rdev: tuple[int, int]
    xattrs: dict[bytes, bytes]


@dataclass(slots=True)
class Applied:
    """A layer as it is in a volume: ``tree`` by path (``b""`` is the layer's root)."""

    tree: dict[bytes, Node]
    stats: LayerStats
    split: bytes

    def __getitem__(self, path: str) -> Node:
        return self.tree[path.encode()]


def apply(directory_: Path, tar: bytes) -> Applied:
    """Apply one layer in a volume of its own and read the volume back."""
    path = directory_ / "layer.ext4"
    with ImageBuilder(path, size=64 << 20, timestamp=NOW, force=True, durable=False) as builder:
        root = builder.add_dir(builder.root, b"diff", Meta(0o755, mtime_ns=NOW * 10**9))
        applier = LayerApplier(builder, root, timestamp_ns=NOW * 10**9, where="layer")
        split = TarSplitWriter()
        applier.apply(TarReader(iter([tar]), where="layer"), split)
        if applier.stats.superseded:
            split = split_again(TarReader(iter([tar]), where="layer"), applier.stats.superseded)
        builder.finish()
    tree = {}
    with Volume.open(path) as volume:
        top = volume.lookup("diff")
        assert top is not None
        for name, ino in [(b"", top), *volume.walk(top)]:
            status = volume.stat(ino)
            content = b""
            if status.kind == "file":
                content = b"".join(volume.chunks(ino))
            elif status.kind == "symlink":
                content = volume.readlink(ino)
            tree[name.lstrip(b"/")] = Node(
                ino,
                status.kind,
                status.mode,
                (status.uid, status.gid),
                status.mtime_ns,
                status.nlink,
                content,
                status.rdev,
                volume.xattrs(ino),
            )
    applied = Applied(tree, applier.stats, split.finish())
    again: list[bytes] = []
    assemble(applied.split, lambda name: _follow(tree, name), again.append)
    assert b"".join(again) == tar, "docker save would not give the layer back"
    return applied


def _follow(tree: dict[bytes, Node], name: bytes) -> bytes:
    """The content under a name as dockerd finds it: cleaned, then by path, through relative symlinks."""
    parts: list[bytes] = []
    for part in clean_name(name).split(b"/"):
        if part == b"..":
            parts.pop()
        elif part not in (b"", b"."):
            parts.append(part)
            node = tree[b"/".join(parts)]
            if node.kind == "symlink":
                assert not node.content.startswith(b"/"), "would leave the layer"
                parts[-1:] = node.content.split(b"/")
    return tree[b"/".join(parts)].content


def refused(tmp_path: Path, message: str, *entries: Entry) -> None:
    with pytest.raises(ImageError, match=message) as caught:
        apply(tmp_path, make_tar(*entries))
    assert str(caught.value).startswith("layer: ")


def test_plain_things(tmp_path: Path) -> None:
    layer = apply(
        tmp_path,
        make_tar(
            directory("d/", 0o1777, uid=1, gid=2, mtime=MTIME + 0.25),
            Entry("d/f", b"content", mode=0o6755, uid=70_000, gid=80_000, mtime=MTIME + 0.5),
            Entry("d/empty", mtime=-5),
            symlink("l", "d/f", uid=3),
            Entry("null", kind=tarfile.CHRTYPE, device=(1, 3), mode=0o666),
            Entry("disk", kind=tarfile.BLKTYPE, device=(259, 70_000)),
            Entry("pipe", kind=tarfile.FIFOTYPE, mode=0o600),
        ),
    )
    assert (layer["d"].kind, layer["d"].mode, layer["d"].owner) == ("dir", 0o1777, (1, 2))
    assert layer["d"].mtime_ns == MTIME * 10**9 + 250_000_000
    assert (layer["d/f"].content, layer["d/f"].mode, layer["d/f"].owner) == (b"content", 0o6755, (70_000, 80_000))
    assert layer["d/f"].mtime_ns == MTIME * 10**9 + 500_000_000
    assert (layer["d/empty"].content, layer["d/empty"].mtime_ns) == (b"", -5 * 10**9)
    assert (layer["l"].kind, layer["l"].content, layer["l"].mode) == ("symlink", b"d/f", 0o777)
    assert (layer["null"].kind, layer["null"].rdev, layer["null"].mode) == ("char", (1, 3), 0o666)
    assert (layer["disk"].kind, layer["disk"].rdev) == ("block", (259, 70_000))
    assert layer["pipe"].kind == "fifo"
    assert layer.stats.members == 7
    assert layer.stats.size == len("content") + len("d/f")


def test_whiteouts(tmp_path: Path) -> None:
    layer = apply(tmp_path, make_tar(directory("d/"), Entry("d/.wh.gone", uid=5, gid=6, mode=0o777), Entry(".wh.top")))
    for path, owner in (("d/gone", (5, 6)), ("top", (0, 0))):
        node = layer[path]
        assert (node.kind, node.rdev, node.mode, node.owner) == ("char", (0, 0), 0, owner)
        assert node.mtime_ns == MTIME * 10**9
    assert layer.stats.whiteouts == 2
    assert layer.stats.size == 0


@pytest.mark.parametrize("first", [True, False])
def test_opaque_directories_keep_what_their_layer_has(tmp_path: Path, first: bool) -> None:
    content = [Entry("d/.wh..wh..opq"), Entry("d/f", b"1")]
    layer = apply(tmp_path, make_tar(directory("d/"), *(content if first else content[::-1])))
    assert layer["d"].xattrs == OPAQUE
    assert layer["d/f"].content == b"1"
    assert set(layer.tree) == {b"", b"d", b"d/f"}


def test_opaque_mark_survives_a_later_entry_of_the_directory(tmp_path: Path) -> None:
    layer = apply(tmp_path, make_tar(Entry("d/.wh..wh..opq"), directory("d/", 0o700, pax={"SCHILY.xattr.user.a": "b"})))
    assert layer["d"].xattrs == {**OPAQUE, b"user.a": b"b"}
    assert layer["d"].mode == 0o700


def test_opaque_root(tmp_path: Path) -> None:
    assert apply(tmp_path, make_tar(Entry(".wh..wh..opq"), Entry("f"))).tree[b""].xattrs == OPAQUE


def test_missing_parents_are_made(tmp_path: Path) -> None:
    layer = apply(tmp_path, make_tar(Entry("a/b/c", b"1", uid=9), directory("a/", 0o700, uid=4)))
    assert (layer["a/b"].mode, layer["a/b"].owner, layer["a/b"].mtime_ns) == (0o755, (0, 0), NOW * 10**9)
    assert (layer["a"].mode, layer["a"].owner, layer["a"].mtime_ns) == (0o700, (4, 0), MTIME * 10**9)


def test_the_root_keeps_its_metadata(tmp_path: Path) -> None:
    """dockerd ignores "./" and applies "/"."""
    assert apply(tmp_path, make_tar(directory("./", 0o700, uid=5))).tree[b""].mode == 0o755
    node = apply(tmp_path, make_tar(directory("/", 0o700, uid=5))).tree[b""]
    assert (node.mode, node.owner) == (0o700, (5, 0))


def test_later_entries_win(tmp_path: Path) -> None:
    layer = apply(
        tmp_path,
        make_tar(
            Entry("f", b"first"),
            Entry("./f", b"second"),
            directory("to-file/"),
            Entry("to-file/inside", b"x"),
            Entry("to-file", b"now a file"),
            Entry("to-dir", b"was a file"),
            directory("to-dir/"),
            Entry("to-dir/inside", b"y"),
            symlink("to-link", "f"),
            Entry("to-link", b"was a link"),
            directory("merged/", 0o700),
            Entry("merged/stays", b"s"),
            directory("merged/", 0o711),
        ),
    )
    assert layer["f"].content == b"second"
    assert layer["to-file"].content == b"now a file"
    assert b"to-file/inside" not in layer.tree
    assert layer["to-dir/inside"].content == b"y"
    assert layer["to-dir"].xattrs == OPAQUE
    assert layer["to-link"].content == b"was a link"
    assert (layer["merged"].mode, layer["merged"].xattrs) == (0o711, {})
    assert layer["merged/stays"].content == b"s"
    assert layer.stats.superseded == {0, 3, 5}
    assert layer.stats.size == sum(map(len, (b"second", b"now a file", b"y", b"was a link", b"s")))


def test_whiteout_and_entry_of_one_name(tmp_path: Path) -> None:
    layer = apply(
        tmp_path,
        make_tar(
            Entry(".wh.file"),
            Entry("file", b"new"),
            Entry(".wh.dir"),
            directory("dir/"),
            Entry("dir/f", b"1"),
            Entry(".wh.implicit"),
            Entry("implicit/f", b"2"),
            Entry("last", b"3"),
            Entry(".wh.last"),
            directory("tree/"),
            Entry("tree/f", b"4"),
            Entry(".wh.tree"),
        ),
    )
    assert layer["file"].content == b"new"
    assert (layer["dir"].kind, layer["dir"].xattrs) == ("dir", OPAQUE)
    assert (layer["implicit"].kind, layer["implicit"].xattrs) == ("dir", OPAQUE)
    assert (layer["last"].kind, layer["tree"].kind) == ("char", "char")
    assert b"tree/f" not in layer.tree


def test_hard_links(tmp_path: Path) -> None:
    layer = apply(
        tmp_path,
        make_tar(
            directory("d/"),
            Entry("d/f", b"12345", mode=0o644),
            hardlink("g", "d/f"),
            hardlink("h", "/d/f", mode=0o600, uid=8, mtime=MTIME + 1),
            symlink("s", "d/f"),
            hardlink("t", "s", uid=9, mode=0o600),
        ),
    )
    assert layer["g"].ino == layer["h"].ino == layer["d/f"].ino
    assert (layer["g"].nlink, layer["g"].mode, layer["g"].owner) == (3, 0o600, (8, 0))
    assert layer["g"].mtime_ns == (MTIME + 1) * 10**9
    assert layer["t"].ino == layer["s"].ino
    assert (layer["t"].kind, layer["t"].content, layer["t"].mode, layer["t"].owner) == (
        "symlink",
        b"d/f",
        0o777,
        (9, 0),
    )
    assert layer.stats.size == 5 + 3


def test_replacing_one_name_of_a_hard_link(tmp_path: Path) -> None:
    layer = apply(tmp_path, make_tar(Entry("a", b"old"), hardlink("b", "a"), Entry("a", b"newer")))
    assert (layer["a"].content, layer["b"].content) == (b"newer", b"old")
    assert (layer["a"].nlink, layer["b"].nlink) == (1, 1)
    assert layer.stats.size == 8


def test_paths_through_symlinks_stay_in_the_layer(tmp_path: Path) -> None:
    layer = apply(
        tmp_path,
        make_tar(
            directory("usr/"),
            directory("usr/lib/"),
            symlink("lib", "usr/lib"),
            Entry("lib/relative", b"1"),
            symlink("abs", "/usr/lib"),
            Entry("abs/absolute", b"2"),
            symlink("climb", "../../../usr"),
            Entry("climb/lib/climbed", b"3"),
            Entry("abs/new/deep", b"4"),
            hardlink("link", "lib/relative"),
        ),
    )
    assert layer["usr/lib/relative"].content == b"1"
    assert layer["usr/lib/absolute"].content == b"2"
    assert layer["usr/lib/climbed"].content == b"3"
    assert layer["usr/lib/new/deep"].content == b"4"
    assert layer["link"].ino == layer["usr/lib/relative"].ino
    assert layer["lib"].kind == layer["abs"].kind == "symlink"
    assert layer.stats.superseded == {5, 7, 8}


@pytest.mark.parametrize(
    ("message", "entries"),
    [
        ("climbs out", [Entry("../f")]),
        ("climbs out", [Entry("a/../../f")]),
        ("bad name", [Entry("..")]),
        ("bad name", [Entry("a" * 256)]),
        ("longer than 255", [Entry("a" * 256 + "/f")]),
        ("leaves the layer", [hardlink("h", "../../etc/passwd")]),
        ("which this layer does not have", [hardlink("h", "lower")]),
        ("which this layer does not have", [hardlink("h", "h")]),
        ("link to the directory", [directory("d/"), hardlink("h", "d")]),
        ("not a directory", [Entry("f"), Entry("f/g")]),
        ("too many levels", [symlink("a", "b"), symlink("b", "a"), Entry("a/f")]),
        ("whiteout of nothing", [Entry("d/.wh.")]),
        ("whiteout of nothing", [Entry(".wh...")]),
        ("bad device number", [Entry("c", kind=tarfile.CHRTYPE, device=(5000, 0))]),
        ("malformed POSIX ACL", [Entry("f", pax={"SCHILY.xattr.system.posix_acl_access": "\x01"})]),
    ],
)
def test_what_no_layer_may_do(tmp_path: Path, message: str, entries: list[Entry]) -> None:
    refused(tmp_path, message, *entries)


def test_extended_attributes(tmp_path: Path) -> None:
    caps = struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0).decode("latin-1")
    tar = make_tar(
        Entry("f", pax={"SCHILY.xattr.user.a": "1", "SCHILY.xattr.security.capability": caps}),
        Entry("odd", pax={"SCHILY.xattr.com.apple.quarantine": "1", "SCHILY.xattr.system.nfs4_acl": "1"}),
        symlink("l", "f", pax={"SCHILY.xattr.user.a": "1", "SCHILY.xattr.trusted.a": "2"}),
        directory("d/", pax={f"SCHILY.xattr.trusted.overlay.{name}": "y" for name in ("redirect", "opaque", "origin")}),
    )
    layer = apply(tmp_path, tar)
    assert layer["f"].xattrs == {b"user.a": b"1", b"security.capability": caps.encode("utf-8")}
    assert layer["odd"].xattrs == {}
    assert layer["l"].xattrs == {b"trusted.a": b"2"}
    assert layer["d"].xattrs == OPAQUE


def test_access_control_lists_follow_the_mode(tmp_path: Path) -> None:
    def acl(*entries: tuple[int, int, int]) -> str:
        return (b"\2\0\0\0" + b"".join(struct.pack("<HHI", *entry) for entry in entries)).decode("latin-1")

    nobody = 0xFFFFFFFF
    header = b"SCHILY.xattr.system.posix_acl_access="
    with_user = acl((1, 7, nobody), (2, 6, 1000), (4, 7, nobody), (16, 7, nobody), (32, 7, nobody)).encode("latin-1")
    only_mode = acl((1, 7, nobody), (4, 7, nobody), (32, 7, nobody)).encode("latin-1")

    def tar(value: bytes) -> bytes:
        record = header + value + b"\n"
        length = len(record) + 1
        length += len(str(length + len(str(length))))
        body = str(length).encode() + b" " + record
        data = bytearray(make_tar(Entry("pax"))[:512])
        data[156:157], data[124:136] = b"x", b"%011o\0" % len(body)
        data[148:156] = b"        "
        data[148:156] = b"%06o\0 " % sum(data)
        return bytes(data) + body + bytes(-len(body) % 512) + make_tar(Entry("f", mode=0o640))

    expected = acl((1, 6, nobody), (2, 6, 1000), (4, 7, nobody), (16, 4, nobody), (32, 0, nobody)).encode("latin-1")
    assert apply(tmp_path, tar(with_user))["f"].xattrs == {b"system.posix_acl_access": expected}
    assert apply(tmp_path, tar(only_mode))["f"].xattrs == {}


def test_times_beyond_the_format_are_cut(tmp_path: Path) -> None:
    layer = apply(
        tmp_path, make_tar(Entry("far", pax={"mtime": "99999999999"}), Entry("old", pax={"mtime": "-9999999999"}))
    )
    assert layer["far"].mtime_ns == ((1 << 34) - (1 << 31)) * 10**9 - 1
    assert layer["old"].mtime_ns == -(1 << 31) * 10**9


def test_large_contents_cross_chunks(tmp_path: Path) -> None:
    big = bytes(range(256)) * 8192
    tar = make_tar(Entry("big", big), Entry("after", b"1"))
    path = tmp_path / "v.ext4"
    with ImageBuilder(path, size=64 << 20, timestamp=NOW, durable=False) as builder:
        applier = LayerApplier(builder, builder.root, timestamp_ns=0, where="layer")
        chunks = iter([tar[start : start + 100_000] for start in range(0, len(tar), 100_000)])
        applier.apply(TarReader(chunks), TarSplitWriter())
        builder.finish()
    with Volume.open(path) as volume:
        assert b"".join(volume.chunks(volume.lookup("big") or 0)) == big
        assert b"".join(volume.chunks(volume.lookup("after") or 0)) == b"1"


NAMES = st.sampled_from(["a", "b", "a/b", "a/c", "b/a/c", "./a", "/b", "a/../b"])
ENTRIES = st.one_of(
    st.builds(Entry, NAMES, st.binary(max_size=20)),
    st.builds(directory, NAMES),
    st.builds(symlink, NAMES, st.sampled_from(["a", "../b", "/a/b", "gone"])),
    st.builds(hardlink, NAMES, NAMES),
    st.builds(lambda name: Entry(f"{name.rpartition('/')[0] or '.'}/.wh.{name.rpartition('/')[2]}"), NAMES),
    st.builds(lambda name: Entry(f"{name}/.wh..wh..opq"), NAMES),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ENTRIES, max_size=9))
def test_any_order_of_entries_is_refused_or_comes_back(tmp_path: Path, entries: list[Entry]) -> None:
    """Whatever replaces whatever: a clear refusal, or a consistent tree from which the same tar can be made again."""
    try:
        layer = apply(tmp_path, make_tar(*entries))
    except ImageError as error:
        assert str(error).startswith("layer: ")
        return
    nodes = {node.ino: node for path, node in layer.tree.items() if path and node.kind in ("file", "symlink")}
    assert layer.stats.size == sum(len(node.content) for node in nodes.values())
    for node in nodes.values():
        assert node.nlink == sum(1 for other in layer.tree.values() if other.ino == node.ino)
