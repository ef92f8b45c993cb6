"""Compaction: what it keeps, what it refuses, where it puts things, and what is there when it is killed."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ext4lite.blockdev import _lock as lock
from ext4lite.blockdev import lock_exclusive, open_for_guest, open_image, record_path, replacing
from ext4lite.builder import ImageBuilder, Meta
from ext4lite.clone import clone
from ext4lite.compact import compact
from ext4lite.errors import CorruptImage, HostError, NeedsRecovery, Unsupported, VolumeBusy, VolumeFull
from ext4lite.extents import Extent, read_tree
from ext4lite.indirect import read_map
from ext4lite.layout import constants as c
from ext4lite.mkfs import mkfs
from ext4lite.rebuild import maps, plan, rebuild
from ext4lite.rebuild.target import OutOfSpace, Space
from ext4lite.super import read_super
from ext4lite.volume import Volume
from support.ext4_judges import assert_same, fsck, ours, run, tool
from support.rebuilt import kept_of_inodes, kept_of_super
from support.samples import build_sample

MIB = 1 << 20
_KILLS = 10


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "volume.ext4"
    build_sample(path, many=800)
    return path


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def only(path: Path) -> None:
    """Assert that nothing but the image lies in its directory."""
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_everything_is_kept(image: Path) -> None:
    before, content = image.stat(), ours(image)
    with Volume.open(image) as volume:
        inodes, raw = kept_of_inodes(volume), kept_of_super(volume)
    image.chmod(0o640)
    report = compact(image)
    fsck(image)
    assert_same(ours(image), content)
    with Volume.open(image) as volume:
        assert kept_of_inodes(volume) == inodes
        assert kept_of_super(volume) == raw
        assert volume.super.free_blocks < 64
    after = image.stat()
    assert after.st_mode & 0o7777 == 0o640
    assert (after.st_uid, after.st_gid) == (before.st_uid, before.st_gid)
    assert after.st_size == report.volume.size_after < before.st_size
    assert (report.volume.size_before, report.recovered) == (64 * MIB, False)
    only(image)


def test_a_compact_volume_stays_as_it_is(image: Path) -> None:
    compact(image)
    once = digest(image)
    report = compact(image).volume
    assert digest(image) == once
    assert report.size_before == report.size_after
    assert not report.renumbered


@pytest.mark.root
def test_owner_and_attributes_of_the_file(image: Path) -> None:
    os.chown(image, 1234, 4321)
    os.setxattr(image, "user.note", b"golden")
    compact(image)
    info = image.stat()
    assert (info.st_uid, info.st_gid) == (1234, 4321)
    assert os.getxattr(image, "user.note") == b"golden"


def test_the_least_size_is_named_and_works(image: Path) -> None:
    before = digest(image)
    with pytest.raises(VolumeFull, match=r"at least \d+ are needed") as e:
        compact(image, size=MIB)
    assert digest(image) == before
    only(image)
    least = int(str(e.value).split("at least ")[1].split(" ")[0])
    other = image.with_name("other")
    report = compact(image, size=least, output=other).volume
    assert (report.size_after, report.journal_after) == (least, 4 * MIB)
    fsck(other)
    assert_same(ours(other), ours(image))
    with pytest.raises(VolumeFull):
        compact(image, size=least - 64 * 4096, output=image.with_name("smaller"))
    assert digest(image) == before


def test_a_smaller_journal_where_the_old_one_does_not_fit(tmp_path: Path) -> None:
    image = tmp_path / "volume"
    mkfs(image, size=512 * MIB, journal_size=32 * MIB)
    report = compact(image, size=24 * MIB).volume
    assert report.journal_before == 32 * MIB
    assert 4 * MIB <= report.journal_after < 24 * MIB
    fsck(image)
    with Volume.open(image, mode="rw") as volume:
        volume.pwrite(volume.create("/f"), 0, b"x" * 100_000)
    fsck(image)


@pytest.mark.parametrize("options", ["-t ext4 -b 1024", "-t ext4 -b 4096", "-t ext3 -b 2048"])
def test_numbers_of_transactions_go_on(tmp_path: Path, options: str) -> None:
    image = tmp_path / "volume"
    run(tool("mke2fs"), "-q", "-F", *options.split(), image, "64M")
    for i in range(5):
        with Volume.open(image, mode="rw") as volume:
            volume.mkdir(f"/d{i}")
            assert volume.journal is not None
            before = volume.journal.log.super.s_sequence
    compact(image)
    with Volume.open(image, mode="rw") as volume:
        assert volume.journal is not None
        assert volume.journal.log.super.s_sequence >= before > 1
        volume.rmdir("/d0")
    fsck(image)


def test_inodes_keep_their_numbers_where_they_fit(tmp_path: Path) -> None:
    image = tmp_path / "volume"
    mkfs(image, size=256 * MIB)
    with Volume.open(image, mode="rw") as volume:
        for i in range(300):
            volume.mkdir(f"/d{i}")
            volume.link(volume_file(volume, i), f"/d{i}/again")
        for i in range(0, 300, 2):
            volume.unlink(f"/d{i}/again")
            volume.rmdir(f"/d{i}")
            volume.unlink(f"/f{i}")
        numbers = dict(volume.walk())
    content = ours(image)
    kept, other = tmp_path / "kept", tmp_path / "other"
    for target, keep, size in ((kept, True, None), (kept, False, 256 * MIB), (other, False, None)):
        report = rebuild(image, target, keep_numbers=keep, size=size, force=True)
        fsck(target)
        assert_same(ours(target), content)
        with Volume.open(target) as volume:
            assert (dict(volume.walk()) == numbers) is not report.renumbered
    assert report.renumbered
    assert other.stat().st_size < 20 * MIB < kept.stat().st_size
    with Volume.open(other) as volume:
        assert volume.lookup("/lost+found") == c.FIRST_INO


def volume_file(volume: object, i: int) -> str:
    volume.pwrite(volume.create(f"/f{i}"), 0, b"%d" % i)  # type: ignore[attr-defined]
    return f"/f{i}"


def test_a_directorys_files_lie_together(tmp_path: Path) -> None:
    """Directories first, then the files in the order of the tree, each in one piece."""
    image = tmp_path / "volume"
    with ImageBuilder(image, size=64 * MIB) as b:
        dirs = [b.add_dir(b.root, b"d%d" % i, Meta()) for i in range(5)]
        for i in range(40):  # in turns
            with b.add_file(dirs[i % 5], b"f%d" % i, Meta()) as f:
                f.write(b"%d" % i * 3000)
        b.finish()
    compact(image)
    with Volume.open(image) as volume:
        starts = [
            [volume.extents(n)[0].physical for _, n in volume.walk(volume.lookup(f"/d{d}") or 0)] for d in range(5)
        ]
        of_dirs = [volume.extents(volume.lookup(f"/d{d}") or 0)[0].physical for d in range(5)]
    assert all(sorted(s) == s for s in starts)
    assert [s for group in starts for s in group] == sorted(s for group in starts for s in group)
    assert max(of_dirs) < min(s[0] for s in starts)


def test_a_volume_that_needs_recovery_is_recovered_first(tmp_path: Path) -> None:
    image = tmp_path / "volume"
    mkfs(image, size=64 * MIB)
    volume = Volume.open(image, mode="rw")
    volume.pwrite(volume.create("/synced"), 0, b"s" * 10_000)
    volume.sync()
    volume.abandon()
    dirty = tmp_path / "dirty"
    dirty.write_bytes(image.read_bytes())
    with pytest.raises(NeedsRecovery):
        rebuild(image, tmp_path / "target")
    report = compact(image)
    assert report.recovered
    fsck(image)
    report = compact(dirty, output=tmp_path / "output")
    assert report.recovered
    for path in (image, dirty, tmp_path / "output"):
        assert [e["path"] for e in ours(path)] == ["/synced"]


def test_a_volume_that_grows_has_room_for_files(tmp_path: Path) -> None:
    """A compacted volume has hardly an inode to spare; it gets its share with its new size."""
    image = tmp_path / "volume"
    mkfs(image, size=64 * MIB)
    compact(image)
    with Volume.open(image) as volume:
        assert volume.super.raw.s_free_inodes_count < 32
    report = compact(image, size=4 << 30).volume
    assert report.inodes_after >= (4 << 30) // 16384 // 2
    fsck(image)


def test_refusals(image: Path, tmp_path: Path) -> None:
    before = digest(image)
    os.link(image, tmp_path / "second")
    with pytest.raises(HostError, match="2 names"):
        compact(image)
    (tmp_path / "second").unlink()
    with Volume.open(image), pytest.raises(VolumeBusy):
        compact(image)
    with pytest.raises(HostError, match="exists"):
        compact(image, output=make_file(tmp_path / "there"))
    with pytest.raises(HostError, match=r"same file|in use|volume itself"):
        rebuild(image, image, force=True)
    with pytest.raises(HostError, match="no such file"):
        compact(tmp_path / "missing")
    with pytest.raises(HostError, match="directory"):
        compact(tmp_path)
    assert digest(image) == before
    assert not record_path(image).exists()


def make_file(path: Path) -> Path:
    path.write_bytes(b"something")
    return path


def set_feature(path: Path, field: str, bit: int) -> None:
    from ext4lite.checksum import superblock_checksum
    from ext4lite.layout._codecs import SuperBlock

    with path.open("r+b") as f:
        f.seek(1024)
        raw = SuperBlock.unpack(f.read(1024))
        setattr(raw, field, getattr(raw, field) | bit)
        raw.s_checksum = superblock_checksum(raw.pack())
        f.seek(1024)
        f.write(raw.pack())


@pytest.mark.parametrize(
    ("field", "bit", "name"),
    [
        ("s_feature_ro_compat", 0x4000, "shared_blocks"),
        ("s_feature_ro_compat", 1 << 25, "FEATURE_R25"),
        ("s_feature_compat", 1 << 20, "FEATURE_C20"),
    ],
)
def test_unknown_features_are_refused_by_name(image: Path, field: str, bit: int, name: str) -> None:
    set_feature(image, field, bit)
    before = digest(image)
    with pytest.raises(Unsupported, match=name):
        compact(image)
    assert digest(image) == before
    only(image)


def debugged(image: Path, *requests: str) -> None:
    run(tool("debugfs"), "-w", "-f", "-", image, stdin="\n".join(requests))


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        (("sif /etc/hostname links_count 7",), "7 links and 2 names"),
        (("unlink /etc/hostname", "unlink /etc/hostname-again"), "2 links and 0 names"),
        (("freei /etc/hostname",), "not in use"),
        (("sif /etc/hostname links_count 0",), "no links"),
        (("link /etc /second",), "second name"),
    ],
)
def test_what_e2fsck_must_repair_is_refused(image: Path, requests: tuple[str, ...], message: str) -> None:
    """A damaged volume is left alone, not written afresh with its damage, or with less than it had."""
    debugged(image, *requests)
    before = digest(image)
    with pytest.raises(CorruptImage, match=message) as e:
        compact(image)
    assert "e2fsck" in str(e.value)
    assert digest(image) == before
    only(image)


# -- in place of the old file ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [False, True])
def test_who_opened_the_old_file_gets_the_new_one(image: Path, write: bool) -> None:
    """Between opening and locking, the file may be replaced: the lock must be on the one with the name."""
    fd = open_image(image, write=write)
    compact(image)
    old = os.fstat(fd).st_ino
    lock(fd, image, 1 if write else 0)
    assert os.fstat(fd).st_ino == image.stat().st_ino != old
    assert read_super(fd, "x").blocks * 4096 == image.stat().st_size
    assert not os.get_inheritable(fd)
    with pytest.raises(VolumeBusy):
        lock_exclusive(open_image(image, write=True), image)
    os.close(fd)
    open_for_guest(image).close()


def test_a_name_that_is_gone(image: Path) -> None:
    fd = open_image(image)
    image.unlink()
    with pytest.raises(HostError, match="no such file"):
        lock(fd, image, 0)
    os.close(fd)


def test_what_replaces_a_file_holds_its_lock(image: Path, tmp_path: Path) -> None:
    with replacing(image), pytest.raises(VolumeBusy):
        open_for_guest(image)
    with open_for_guest(image), pytest.raises(VolumeBusy), replacing(image):
        raise AssertionError("not reached")
    with replacing(tmp_path / "nothing"):
        pass
    target = tmp_path / "clone"
    clone(image, target, reflink="never")
    fd = open_image(target, write=True)
    clone(image, target, reflink="never", force=True)
    lock(fd, target, 1)
    assert os.fstat(fd).st_ino == target.stat().st_ino
    os.close(fd)


def test_no_write_is_lost_beside_compactions(tmp_path: Path) -> None:
    """One process writes, another compacts, both as soon as they can: each file that was made is there at the end."""
    image = tmp_path / "image"
    mkfs(image, size=8 * MIB, journal_size=0)
    code = (
        "import sys, time; from ext4lite.compact import compact; from ext4lite.errors import VolumeBusy\n"
        "end, done = time.monotonic() + 60, 0\n"
        "print('ready', flush=True)\n"
        "while time.monotonic() < end and not sys.argv[2] in open(sys.argv[3]).read():\n"
        "    try: compact(sys.argv[1], size=8 << 20); done += 1\n"
        "    except VolumeBusy: time.sleep(0.001)\n"
        "print(done)"
    )
    flag = tmp_path / "flag"
    flag.touch()
    words = [sys.executable, "-c", code, str(image), "stop", str(flag)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        made, end = 0, time.monotonic() + 50
        while made < 60 and time.monotonic() < end:
            try:
                with Volume.open(image, mode="rw") as volume:
                    volume.pwrite(volume.create(f"/f{made}"), 0, b"%d" % made)
                made += 1
                time.sleep(0.002)
            except VolumeBusy:
                time.sleep(0.001)
        flag.write_text("stop")
        compactions = int(other.stdout.read())
    assert made > 10
    assert compactions > 3
    fsck(image)
    with Volume.open(image) as volume:
        assert [volume.read(volume.lookup(f"/f{i}") or 0, 0, 9) for i in range(made)] == [
            b"%d" % i for i in range(made)
        ]


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """The name is the old volume's or the new one's, whole; nobody holds a lock; nothing else is left."""
    image, old = tmp_path / "work" / "image", tmp_path / "old"
    image.parent.mkdir()
    build_sample(old, size=48 * MIB, many=50)
    fsck(old)
    content, size, r = ours(old), old.stat().st_size, random.Random(1)
    seen = set()
    command = [sys.executable, "-c", "import sys; from ext4lite.cli import main; main(sys.argv[1:])", "compact"]
    begin = time.monotonic()
    image.write_bytes(old.read_bytes())
    subprocess.run([*command, image], check=True, capture_output=True)
    whole = time.monotonic() - begin
    for i in range(_KILLS):
        image.unlink(missing_ok=True)
        with image.open("wb") as f:
            f.write(old.read_bytes())
        child = subprocess.Popen([*command, image], stdout=subprocess.DEVNULL)
        time.sleep(whole * (0.25 + 0.75 * (i + r.random()) / _KILLS))
        child.send_signal(signal.SIGKILL)
        child.wait()
        seen.add(image.stat().st_size == size)
        fsck(image)
        assert_same(ours(image), content)
        with open_for_guest(image):
            pass
        left = {p.name for p in image.parent.iterdir()} - {image.name, record_path(image).name}
        assert all(name.endswith(".tmp") for name in left), left
        assert len(left) < 2
    assert True in seen  # some were killed in time


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(tmp_path: Path, number: int) -> None:
    image = tmp_path / "work" / "image"
    image.parent.mkdir()
    build_sample(image)
    before = digest(image)
    code = (
        "import sys, os, ext4lite.rebuild.engine as e\n"
        "old = e.Engine._write_quotas\n"
        f"e.Engine._write_quotas = lambda self: os.kill(os.getpid(), {int(number)})\n"
        "from ext4lite.cli import main; main(sys.argv[1:])"
    )
    done = subprocess.run([sys.executable, "-c", code, "compact", image], capture_output=True, text=True, check=False)
    assert done.returncode == 128 + number
    assert "Traceback" not in done.stderr
    assert digest(image) == before
    only(image)


def test_a_full_host_disk(tmp_path: Path) -> None:
    """HostError; the old volume as it was, nothing beside it."""
    image = tmp_path / "work" / "image"
    image.parent.mkdir()
    build_sample(image)
    before = digest(image)
    code = (
        "import sys, resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))\n"
        "from ext4lite.cli import main; main(sys.argv[1:])"
    )
    done = subprocess.run([sys.executable, "-c", code, "compact", image], capture_output=True, text=True, check=False)
    assert (done.returncode, "file too large" in done.stderr) == (6, True), done.stderr
    assert digest(image) == before
    only(image)


# -- the command ----------------------------------------------------------------------------------------------------


def test_the_command(image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ext4lite.cli import run as command

    assert command(["compact", "--json", "--output", str(tmp_path / "new"), str(image)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["path"] == str(tmp_path / "new")
    assert report["volume"]["size_after"] == (tmp_path / "new").stat().st_size
    assert report["host_bytes_after"] == (tmp_path / "new").stat().st_blocks * 512
    assert command(["compact", "--size", "1M", str(image)]) == 9
    assert "at least" in capsys.readouterr().err
    assert command(["compact", "--output", str(tmp_path / "new"), str(image)]) == 6
    assert command(["compact", "--output", str(tmp_path / "new"), "--force", "--keep-inodes", str(image)]) == 0
    assert command(["compact", "--size", "lots", str(image)]) == 2
    capsys.readouterr()
    assert command(["compact", str(image)]) == 0
    assert "compacted in" in capsys.readouterr().out
    fsck(image)


def test_progress(image: Path) -> None:
    with ImageBuilder(image, size=256 * MIB, force=True) as b:
        with b.add_file(b.root, b"large", Meta()) as f:
            for i in range(60):
                f.write(b"%d" % (i % 10) * MIB)
        b.finish()
    calls: list[tuple[int, int]] = []
    compact(image, progress=lambda done, total: calls.append((done, total)))
    assert len(calls) >= 3
    assert calls == sorted(calls)
    assert all(0 < done <= total < 80 * MIB for done, total in calls)


# -- where things lie -----------------------------------------------------------------------------------------------

SHAPES = st.builds(
    lambda log, **k: plan.Shape(
        block_size=1024 << log,
        first_data_block=0 if log or k["ratio"] > 1 else 1,
        blocks_per_group=(8 << log) * k.pop("per") * k["ratio"],
        first_meta_bg=k.pop("meta"),
        **k,
    ),
    st.integers(0, 3),
    per=st.sampled_from([128, 256, 1024]),
    ratio=st.sampled_from([1, 1, 1, 4, 16]),
    inode_size=st.sampled_from([128, 256, 1024]),
    desc_size=st.sampled_from([32, 64, 128]),
    flex=st.sampled_from([1, 2, 16, 64]),
    sparse=st.booleans(),
    sparse2=st.booleans(),
    backups=st.integers(0, 2),
    meta=st.sampled_from([None, None, 0, 1]),
    descriptor_room=st.sampled_from([0, 0, 5, 40]),
    wide=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(SHAPES, st.integers(0, 60_000), st.integers(11, 20_000))
def test_metadata_of_any_shape(shape: plan.Shape, need: int, inodes: int) -> None:
    """Nothing overlaps or lies outside; the free space is what was asked for, and hardly more."""
    need -= need % shape.ratio
    if shape.first_meta_bg is not None and shape.descriptor_room:
        return
    try:
        layout = plan.smallest(shape, need, plan.Inodes(inodes))
    except plan.DoesNotFit:
        return
    assert layout.free_blocks >= need
    assert layout.inodes >= inodes
    taken = []
    for g in range(layout.groups):
        taken += [(layout.group_first(g), layout.fixed(g))] if layout.fixed(g) else []
        own = [(layout.block_bitmaps[g], 1), (layout.inode_bitmaps[g], 1), (layout.tables[g], layout.table_blocks)]
        taken += own
        if shape.flex == 1:
            assert all(
                layout.group_first(g) <= s and s + n <= layout.group_first(g) + layout.group_size(g) for s, n in own
            )
    taken.sort()
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(taken))
    assert taken[-1][0] + taken[-1][1] <= layout.blocks
    runs = list(layout.free_runs())
    assert all(s % shape.ratio == n % shape.ratio == 0 < n for s, n in runs)
    for s, n in runs:
        assert not any(a < s + n and s < a + m for a, m in taken)
    smaller = layout.blocks - shape.ratio * (3 * len(runs) + 60) - 2 * shape.descriptor_room
    if layout.groups == 1 and smaller > shape.first_data_block and need:
        with_less = plan.Layout(shape, smaller, layout.per_group) if smaller > layout.end_of_metadata else None
        assert with_less is None or with_less.free_blocks < need + 60 * shape.ratio


@pytest.mark.parametrize("flex", [1, 2])
@pytest.mark.parametrize("density", [None, 8192])
def test_tables_larger_than_a_group_come_to_an_end(flex: int, density: int | None) -> None:
    """A superblock in every group and a table that no group has room for: more groups, or none."""
    shape = plan.Shape(
        block_size=1024,
        first_data_block=1,
        blocks_per_group=1024,
        ratio=1,
        inode_size=1024,
        desc_size=32,
        flex=flex,
        sparse=False,
        sparse2=False,
        backups=0,
        first_meta_bg=None,
        descriptor_room=0,
        wide=False,
    )
    if density is not None:
        with pytest.raises(plan.DoesNotFit):
            plan.smallest(shape, 369, plan.Inodes(1852, density))
    else:
        assert plan.smallest(shape, 369, plan.Inodes(1852)).groups > 1


@pytest.mark.parametrize("size", ["9M", "64M", "600M"])
@pytest.mark.parametrize(
    "options",
    [
        "-t ext4 -b 1024", "-t ext4 -b 4096", "-t ext3 -b 1024", "-t ext2 -b 2048 -I 128",
        "-t ext4 -b 1024 -O ^flex_bg,meta_bg,^resize_inode", "-t ext4 -b 1024 -O sparse_super2",
        "-t ext4 -b 1024 -g 1024 -G 8 -O ^resize_inode,^sparse_super", "-t ext4 -b 4096 -C 16384 -O bigalloc",
    ],
)  # fmt: skip
def test_mke2fs_plans_the_same(tmp_path: Path, options: str, size: str) -> None:
    """A fresh volume of mke2fs has as many blocks free as our plan of its size, and as many blocks before files."""
    image = tmp_path / "image"
    run(tool("mke2fs"), "-q", "-F", *options.split(), image, size)
    with Volume.open(image) as volume:
        sb = volume.super
        shape = plan.Shape.of(sb)
        layout = plan.Layout(shape, sb.blocks, sb.raw.s_inodes_per_group)
        assert plan.fitted(shape, sb.blocks, sb.raw.s_inodes_per_group).blocks == sb.blocks
        used = 0
        for ino in (2, 11, sb.raw.s_journal_inum):
            if ino:
                record = volume.inode(ino)
                runs, own = volume.map(record)
                used += (maps.clusters_of(runs, shape.ratio) + own) * shape.ratio
        used += shape.ratio if shape.descriptor_room else 0
        if shape.descriptor_room and shape.ratio == 1:
            assert layout.reserved == sb.raw.s_reserved_gdt_blocks
        if shape.ratio == 1:
            assert layout.free_blocks - used == sb.free_blocks
        else:  # mke2fs leaves gaps between bitmaps and tables, and gives the blocks in them away
            assert sb.free_blocks - 64 <= layout.free_blocks - used <= sb.free_blocks + 64
        assert [volume.has_super(g) for g in range(sb.groups)] == [layout.has_super(g) for g in range(sb.groups)]


RUNS = st.lists(
    st.tuples(st.integers(0, 3000), st.integers(1, 700), st.booleans()), min_size=1, max_size=40
)  # gap, count, unwritten


class Memory:
    """Blocks in memory, for reading back what was built."""

    first_data_block = 0
    blocks = 1 << 40

    def __init__(self, size: int) -> None:
        self.size = size
        self.content: dict[int, bytes] = {}

    def put(self, number: int, data: bytes) -> None:
        assert number not in self.content
        assert len(data) == self.size
        self.content[number] = data

    def block(self, number: int, where: str) -> bytes:
        return self.content[number]


class Endless:
    """A space that breaks now and then."""

    def __init__(self, breaks: list[int]) -> None:
        self.at, self.breaks = 1000, breaks

    def take(self, clusters: int) -> list[tuple[int, int]]:
        out = []
        while clusters:
            room = self.breaks.pop() if self.breaks else clusters
            got = min(room, clusters)
            out.append((self.at, got))
            self.at += got + 7 * (got == room)
            clusters -= got
        return out

    def take_each(self, clusters: int) -> list[int]:
        return [s + i for s, n in self.take(clusters) for i in range(n)]


def logical(runs: list[Extent]) -> list[tuple[int, int, bool]]:
    return [(r.logical, r.count, r.unwritten) for r in maps.joined(runs)]


@settings(max_examples=150, deadline=None)
@given(RUNS, st.lists(st.integers(1, 900), max_size=20), st.sampled_from([1024, 4096]), st.booleans(), st.booleans())
def test_maps_say_where_blocks_lie(
    parts: list[tuple[int, int, bool]], breaks: list[int], size: int, tree: bool, far: bool
) -> None:
    """What is placed and mapped is read back, by the readers of volumes, with every block copied once."""
    runs, at, physical = [], 0, 5_000_000
    for i, (gap, count, unwritten) in enumerate(parts):
        at += gap * (300 if far and i % 7 == 3 else 1)
        physical += gap % 5
        runs.append(Extent(at, physical, count, tree and unwritten))
        at, physical = at + count, physical + count
    copies: dict[int, int] = {}

    def copy(old: int, new: int, count: int) -> None:
        copies.update({old + i: new + i for i in range(count)})

    space, memory = Endless(list(breaks)), Memory(size)
    placed = maps.place(runs, space, 1, copy)  # type: ignore[arg-type]
    if tree:
        root, own = maps.tree(placed, space, size, 77, memory.put)  # type: ignore[arg-type]
        found, read = read_tree(root, memory, 77, "x")
    else:
        root, own = maps.block_map(placed, space, size, memory.put)  # type: ignore[arg-type]
        found, read = read_map(root, memory, size, at, "x")
    assert own == read == len(memory.content)
    assert logical(found) == logical(runs)
    where = {r.logical + i: r.physical + i for r in found for i in range(r.count)}
    wanted = {r.logical + i: copies[r.physical + i] for r in runs if not r.unwritten for i in range(r.count)}
    assert all(where[block] == new for block, new in wanted.items())
    assert len(set(where.values())) == len(where)


def test_unwritten_extents_are_cut_at_32767_blocks() -> None:
    whole = maps.split([Extent(0, 10, 100_000, True), Extent(100_000, 200_000, 100_000, False)])
    assert [e.count for e in whole] == [32767, 32767, 32767, 1699, 32768, 32768, 32768, 1696]
    memory = Memory(4096)
    root, _ = maps.tree([Extent(0, 10, 100_000, True)], Endless([]), 4096, None, memory.put)  # type: ignore[arg-type]
    assert logical(read_tree(root, memory, None, "x")[0]) == [(0, 100_000, True)]


def test_space_runs_out(tmp_path: Path) -> None:
    shape_of: Callable[[Path], plan.Shape] = lambda p: plan.Shape.of(Volume.open(p).super)  # noqa: E731
    image = tmp_path / "image"
    mkfs(image, size=16 * MIB)
    layout = plan.Layout(shape_of(image), 4096, 1024)
    space = Space(layout)
    assert sum(n for _, n in space.take(layout.free_blocks - 3)) == layout.free_blocks - 3
    space.take(3)
    with pytest.raises(OutOfSpace):
        space.take(1)


# -- memory ---------------------------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_volume(tmp_path: Path) -> None:
    """30,000 inodes, 100 MiB of data: the peak is that of an empty volume and a little."""
    image = tmp_path / "image"
    with ImageBuilder(image, size=2 << 30, durable=False) as b:
        for i in range(30):
            d = b.add_dir(b.root, b"d%d" % i, Meta())
            for j in range(1000):
                b.add_symlink(d, b"l%d" % j, b"target", Meta())
        with b.add_file(b.root, b"large", Meta()) as f:
            for i in range(100):
                f.write(b"%d" % (i % 10) * MIB)
        b.finish()
    code = (
        "import sys; from pathlib import Path; from ext4lite.compact import compact; compact(sys.argv[1])\n"
        "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])"
    )
    peak = int(subprocess.run([sys.executable, "-c", code, image], capture_output=True, text=True, check=True).stdout)
    assert peak < 80_000
