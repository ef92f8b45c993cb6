"""The image builder.

What it promises beyond a correct format (the kernel judges that in conformance/test_ext4_kernel.py).
"""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from uuid import UUID

import pytest

from ext4lite import hostfs, manifest
from ext4lite.blockdev import open_for_guest
from ext4lite.builder import ImageBuilder, Meta, encode_rdev, encode_time
from ext4lite.errors import HostError, Unsupported, VolumeBusy, VolumeFull
from ext4lite.geometry import plan
from ext4lite.inode import decode_rdev, decode_time
from ext4lite.mkfs import mkfs
from ext4lite.volume import Volume
from support.samples import build_sample

MIB = 1 << 20


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_same_input_same_bytes(tmp_path: Path) -> None:
    build_sample(tmp_path / "a")
    build_sample(tmp_path / "b")
    assert digest(tmp_path / "a") == digest(tmp_path / "b")


def test_same_bytes_in_another_process(tmp_path: Path) -> None:
    """Nothing may depend on the order of sets, which changes with PYTHONHASHSEED."""
    code = "import sys; from pathlib import Path; from support.samples import build_sample;"
    code += "build_sample(Path(sys.argv[1]))"
    for seed in ("1", "2"):
        where = Path(__file__).parent.parent
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(where)}
        subprocess.run([sys.executable, "-c", code, str(tmp_path / seed)], env=environment, cwd=where, check=True)
    assert digest(tmp_path / "1") == digest(tmp_path / "2")


def test_another_uuid_gives_other_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with ImageBuilder(tmp_path / name, size=4 * MIB, timestamp=0) as b:
            b.finish()
    assert digest(tmp_path / "a") != digest(tmp_path / "b")


def test_files_are_contiguous_and_follow_one_another(tmp_path: Path) -> None:
    data = random.Random(1).randbytes(100_000)
    with ImageBuilder(tmp_path / "i", size=16 * MIB) as b:
        inos = []
        for i in range(20):
            with b.add_file(b.root, b"f%d" % i, Meta()) as f:
                f.write(data)
            inos.append(f.ino)
        b.finish()
    with Volume.open(tmp_path / "i") as v:
        runs = [v.extents(ino) for ino in inos]
        assert [len(r) for r in runs] == [1] * 20
        for before, after in pairwise(runs):
            assert after[0].physical == before[0].physical + before[0].count


def test_a_large_file_has_extents_of_32768_blocks(tmp_path: Path) -> None:
    """Data runs on through the groups whose metadata lies with their flex group's leader."""
    piece = b"\1" * MIB
    with ImageBuilder(tmp_path / "i", size=2 << 30, durable=False) as b:
        with b.add_file(b.root, b"f", Meta()) as f:
            for _ in range(520):
                f.write(piece)
        b.finish()
    with Volume.open(tmp_path / "i") as v:
        runs = v.extents(f.ino)
    # Only the backup superblocks of groups 1 and 3 lie in between.
    assert len([1 for a, b in pairwise(runs) if a.physical + a.count != b.physical]) <= 3
    assert max(r.count for r in runs) == 32768


@pytest.mark.parametrize("step", [1000, 4096, 65_536, 70_000, 10**7])
def test_holes_do_not_depend_on_how_data_is_cut(tmp_path: Path, step: int) -> None:
    data = b"a" * 100 + bytes(300_000) + b"b" * 70_000 + bytes(400_000)
    with ImageBuilder(tmp_path / "i", size=8 * MIB) as b:
        with b.add_file(b.root, b"f", Meta()) as f:
            for at in range(0, len(data), step):
                f.write(data[at : at + step])
        b.finish()
    with Volume.open(tmp_path / "i") as v:
        assert v.read(f.ino, 0, len(data) + 1) == data
        runs = [(r.logical, r.count) for r in v.extents(f.ino)]
    assert runs == [(0, 16), (64, 32), (176, 13)]  # the end is less than a piece


def test_freed_blocks_serve_again_when_the_rest_is_taken(tmp_path: Path) -> None:
    r = random.Random(4)
    with ImageBuilder(tmp_path / "i", size=8 * MIB, journal_size=0) as b:
        with b.add_file(b.root, b"first", Meta()) as f:
            f.write(r.randbytes(3 * MIB))
        with b.add_file(b.root, b"second", Meta()) as f:
            f.write(r.randbytes(3 * MIB))
        b.remove(b.root, b"first")
        data = r.randbytes(4 * MIB)
        with b.add_file(b.root, b"third", Meta()) as f:
            f.write(data)
        b.finish()
    with Volume.open(tmp_path / "i") as v:
        assert v.lookup("/first") is None
        ino = v.lookup("/third")
        assert ino is not None
        assert v.read(ino, 0, 5 * MIB) == data
        assert len(v.extents(ino)) == 2


def test_blocks_of_the_last_removed_file_are_taken_over(tmp_path: Path) -> None:
    with ImageBuilder(tmp_path / "i", size=8 * MIB) as b:
        free = b.free_blocks
        with b.add_file(b.root, b"gone", Meta()) as f:
            f.write(b"x" * 3 * MIB)
        b.remove(b.root, b"gone")
        assert b.free_blocks == free
        with b.add_file(b.root, b"kept", Meta()) as f:
            f.write(b"y" * 10_000)
        b.finish()
    with Volume.open(tmp_path / "i") as v:
        ino = v.lookup("/kept")
        assert ino is not None
        assert v.read(ino, 0, 20_000) == b"y" * 10_000


def test_blocks_run_out_exactly_at_the_last_one(tmp_path: Path) -> None:
    with ImageBuilder(tmp_path / "i", size=4 * MIB) as b:
        free = b.free_blocks
        f = b.add_file(b.root, b"f", Meta())
        piece = b"x" * 65_536
        with pytest.raises(VolumeFull, match="blocks"):
            for _ in range(free * 4096 // 65_536 + 1):
                f.write(piece)
    with ImageBuilder(tmp_path / "i", size=4 * MIB) as b:
        with b.add_file(b.root, b"f", Meta()) as f:
            f.write(b"x" * 4096 * free)
        with pytest.raises(VolumeFull):
            b.finish()  # no block is left for the directories
    assert list(tmp_path.iterdir()) == []


def test_inodes_run_out_exactly_at_the_last_one(tmp_path: Path) -> None:
    inodes = plan(4 * MIB).inodes
    with ImageBuilder(tmp_path / "i", size=4 * MIB) as b:
        for i in range(inodes - 11):
            b.add_symlink(b.root, b"l%d" % i, b"x", Meta())
        with pytest.raises(VolumeFull, match="inodes"):
            b.add_symlink(b.root, b"one more", b"x", Meta())
        b.finish()
    with Volume.open(tmp_path / "i") as v:
        assert v.super.raw.s_free_inodes_count == 0
        assert sum(1 for _ in manifest.entries(v)) == inodes - 11


def _nothing(b: ImageBuilder) -> None:
    pass


def _interrupt(b: ImageBuilder) -> None:
    raise KeyboardInterrupt


def _fail_in_sink(b: ImageBuilder) -> None:
    with b.add_file(b.root, b"f", Meta()) as f:
        f.write(b"x" * 10_000)
        raise KeyboardInterrupt


@pytest.mark.parametrize("action", [_nothing, _interrupt, _fail_in_sink])
def test_nothing_is_left_without_finish(tmp_path: Path, action: Callable[[ImageBuilder], None]) -> None:
    try:
        with ImageBuilder(tmp_path / "i", size=4 * MIB) as b:
            action(b)
    except KeyboardInterrupt:
        pass
    assert list(tmp_path.iterdir()) == []


def test_an_existing_target_is_kept_until_the_new_image_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "i"
    target.write_bytes(b"old")
    with pytest.raises(HostError, match="exists"):
        ImageBuilder(target, size=4 * MIB)
    with ImageBuilder(target, size=4 * MIB, force=True):
        pass
    assert target.read_bytes() == b"old"
    with ImageBuilder(target, size=4 * MIB, force=True) as b:
        b.finish()
    assert target.stat().st_size == 4 * MIB
    assert [p.name for p in tmp_path.iterdir()] == ["i"]


def test_a_target_in_use_is_not_replaced(tmp_path: Path) -> None:
    build_sample(tmp_path / "i", size=64 * MIB)
    with open_for_guest(tmp_path / "i"), pytest.raises(VolumeBusy, match=r"in use by .*\(pid"):
        ImageBuilder(tmp_path / "i", size=4 * MIB, force=True)


def test_namespace_errors(tmp_path: Path) -> None:
    with ImageBuilder(tmp_path / "i", size=4 * MIB) as b:
        d = b.add_dir(b.root, b"d", Meta())
        with pytest.raises(FileExistsError):
            b.add_symlink(b.root, b"d", b"x", Meta())
        for name in (b"", b".", b"..", b"a/b", b"a\0", b"n" * 256):
            with pytest.raises(Unsupported):
                b.add_dir(d, name, Meta())
        with pytest.raises(ValueError, match="one name"):
            b.add_link(b.root, b"e", d)
        with pytest.raises(FileNotFoundError):
            b.remove(b.root, b"none")
        b.add_dir(d, b"inner", Meta())
        with pytest.raises(OSError, match="not empty"):
            b.remove(b.root, b"d", recursive=False)
        with pytest.raises(Unsupported, match="target"):
            b.add_symlink(d, b"s", b"", Meta())
        first = b.add_file(d, b"f", Meta())
        with pytest.raises(ValueError, match="still open"):
            b.add_file(d, b"g", Meta())
        first.close()
        assert b.kind(first.ino) == "file"
        assert dict(b.children(d)) == {b"inner": d + 1, b"f": first.ino}
        assert b.lookup(d, b"none") is None


def test_links_are_counted_and_limited(tmp_path: Path) -> None:
    with ImageBuilder(tmp_path / "i", size=32 * MIB) as b:
        f = b.add_file(b.root, b"f", Meta())
        f.close()
        d = b.add_dir(b.root, b"d", Meta())
        for i in range(64_999):
            b.add_link(d, b"%d" % i, f.ino)
        with pytest.raises(Unsupported, match="65000"):
            b.add_link(d, b"more", f.ino)
        b.remove(d, b"0")
        b.finish()
    with Volume.open(tmp_path / "i") as v:
        assert v.stat(f.ino).nlink == 64_999


def test_metadata_can_change_until_the_end(tmp_path: Path) -> None:
    with ImageBuilder(tmp_path / "i", size=4 * MIB) as b:
        d = b.add_dir(b.root, b"d", Meta())
        b.set_meta(d, Meta(0o1700, 5, 6, 7, {b"user.a": b"b"}, atime_ns=8, ctime_ns=9))
        assert b.meta(d).uid == 5
        b.set_meta(b.root, Meta(0o711))
        b.finish()
    with Volume.open(tmp_path / "i") as v:
        s = v.stat(d)
        assert (s.mode, s.uid, s.gid, s.mtime_ns, s.atime_ns, s.ctime_ns) == (0o1700, 5, 6, 7, 8, 9)
        assert v.xattrs(d) == {b"user.a": b"b"}
        assert v.stat(2).mode == 0o711


def test_equal_attribute_sets_share_blocks(tmp_path: Path) -> None:
    with ImageBuilder(tmp_path / "i", size=16 * MIB) as b:
        inos = [b.add_dir(b.root, b"d%d" % i, Meta(xattrs={b"user.x": b"v" * 200})) for i in range(1030)]
        b.finish()
    with Volume.open(tmp_path / "i") as v:
        assert len({v.inode(ino).file_acl for ino in inos}) == 2  # one block serves 1024 inodes


def test_attributes_that_cannot_be_stored_are_refused(tmp_path: Path) -> None:
    for attributes in ({b"other.x": b""}, {b"user.": b""}, {b"user." + b"n" * 256: b""}, {b"user.x": b"v" * 4100}):
        with ImageBuilder(tmp_path / "i", size=4 * MIB) as b:
            b.add_dir(b.root, b"d", Meta(xattrs=attributes))
            with pytest.raises(Unsupported):
                b.finish()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "ns", [0, 1, -1, -(2**31) * 10**9, 2**31 * 10**9 - 1, 2**31 * 10**9, 15_032_385_535 * 10**9 + 999_999_999]
)
def test_times_survive(ns: int) -> None:
    assert decode_time(*encode_time(ns)) == ns


def test_times_out_of_range_are_clamped() -> None:
    assert decode_time(*encode_time(-(2**40) * 10**9)) == -(2**31) * 10**9
    assert decode_time(*encode_time(2**40 * 10**9)) == 15_032_385_535 * 10**9


@pytest.mark.parametrize("pair", [(0, 0), (1, 3), (255, 255), (256, 0), (0, 256), (4095, 1048575), (300, 70_000)])
def test_device_numbers_survive(pair: tuple[int, int]) -> None:
    assert decode_rdev(encode_rdev(*pair)) == pair


def test_label_and_uuid(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="16 bytes"):
        ImageBuilder(tmp_path / "i", size=4 * MIB, label="n" * 17)
    with ImageBuilder(tmp_path / "i", size=4 * MIB, label="größe", uuid=UUID(int=7)) as b:
        b.finish()
    with Volume.open(tmp_path / "i") as v:
        assert (v.super.label, v.super.uuid) == ("größe", UUID(int=7))


@pytest.mark.parametrize("size", [1, 1024, 4096 * 1023])
def test_a_journal_too_small_is_refused_and_not_left_out(tmp_path: Path, size: int) -> None:
    with pytest.raises(Unsupported, match="too small"):
        ImageBuilder(tmp_path / "i", size=64 * MIB, journal_size=size)
    assert list(tmp_path.iterdir()) == []


def test_a_full_volume_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(VolumeFull, match=f"{tmp_path}/i: no free blocks are left"),
        ImageBuilder(tmp_path / "i", size=4 * MIB) as b,
        b.add_file(b.root, b"f", Meta()) as f,
    ):
        f.write(b"x" * (5 * MIB))
    assert list(tmp_path.iterdir()) == []


def test_what_came_to_the_name_meanwhile_is_not_lost(tmp_path: Path) -> None:
    """A file that somebody else made is kept without force; a volume that somebody began to use also with it."""
    with ImageBuilder(tmp_path / "i", size=4 * MIB) as b:
        (tmp_path / "i").write_bytes(b"somebody else's")
        with pytest.raises(HostError, match="exists"):
            b.finish()
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("i", b"somebody else's")]
    mkfs(tmp_path / "i", size=4 * MIB, force=True)
    before = (tmp_path / "i").read_bytes()
    with ImageBuilder(tmp_path / "i", size=8 * MIB, force=True) as b, open_for_guest(tmp_path / "i"):
        with pytest.raises(VolumeBusy):
            b.finish()
        assert (tmp_path / "i").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["i"]


@pytest.mark.parametrize("durable", [True, False])
def test_data_is_on_its_way_to_the_disk_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    """What is handed to the host early is all of it but the last 16 MiB, each byte once; without fsync nothing is."""
    begun: list[tuple[int, int]] = []

    def record(fd: int, offset: int, length: int) -> None:
        start_writeback(fd, offset, length)
        begun.append((offset, length))

    start_writeback = hostfs.start_writeback
    monkeypatch.setattr(hostfs, "start_writeback", record)
    with ImageBuilder(tmp_path / "i", size=512 * MIB, durable=durable) as b:
        with b.add_file(b.root, b"f", Meta()) as f:
            for _ in range(200):
                f.write(b"x" * MIB)
        b.finish()
    assert bool(begun) == durable
    if durable:
        assert all(a + n <= b for (a, n), (b, _) in pairwise(sorted(begun)))
        assert 200 * MIB - 2 * (16 * MIB + 2 * MIB) <= sum(n for _, n in begun) <= 201 * MIB
