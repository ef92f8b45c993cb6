"""Crashes as the kernel leaves them, journals as debugfs writes them: recovered by us, by e2fsck, by the kernel."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ext4lite.blockdev import open_for_guest
from ext4lite.builder import ImageBuilder, Meta
from ext4lite.cli import run as cli
from ext4lite.clone import clone
from ext4lite.errors import CorruptImage, Ext4LiteError, NeedsRecovery, Unsupported, VolumeBusy
from ext4lite.inspect import inspect
from ext4lite.jbd2.log import Blocks, FileBlocks
from ext4lite.jbd2.transaction import Journal
from ext4lite.recover import recover
from ext4lite.volume import Volume
from support.ext4_judges import assert_same, debugfs, fsck, mounted, ours, run, tool
from support.journals import Trace, fill_journal
from support.kernel_manifest import manifest as kernel_manifest
from support.memory import in_memory

SHUTDOWN = 0x8004587D
LOG_FLUSH, NO_LOG_FLUSH = 1, 2

FEATURES = {
    "ext4-4k": ["-t", "ext4", "-b", "4096"],
    "ext4-1k": ["-t", "ext4", "-b", "1024"],
    "ext3": ["-t", "ext3", "-b", "4096"],
    "no-checksums": ["-t", "ext4", "-O", "^metadata_csum,^64bit"],
    "64bit-seed": ["-t", "ext4", "-O", "64bit,metadata_csum_seed"],
    "orphan_file": ["-t", "ext4", "-O", "orphan_file"],
    "ext4-2k": ["-t", "ext4", "-b", "2048"],
    "meta_bg": ["-t", "ext4", "-O", "meta_bg,^resize_inode", "-b", "1024"],
    "encrypt": ["-t", "ext4", "-O", "encrypt"],
    "bigalloc": ["-t", "ext4", "-O", "bigalloc"],
    "ea_inode-inline": ["-t", "ext4", "-O", "ea_inode,inline_data", "-I", "512"],
}


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is room: hundreds of flushes to a disk that others use take minutes."""
    yield from in_memory(tmp_path, "recovery-")


@contextmanager
def crashing(image: Path, where: Path, *, flush: int, options: str = "rw", sync: bool = True) -> Iterator[Path]:
    """Mount an image; at the block's end the file system is shut down as if the machine had stopped.

    Before that, files ``open-…`` are deleted while they are open, and a full commit is made with ``sync``.
    """
    if os.geteuid() != 0:
        pytest.skip("needs root for loop mounts")
    where.mkdir(exist_ok=True)
    run("mount", "-o", f"loop,{options}", image, where)
    kept: list[int] = []
    left = image.with_name("left")
    try:
        yield where
        kept = [os.open(p, os.O_RDWR) for p in sorted(where.glob("open-*"))]
        for path in sorted(where.glob("open-*")):
            path.unlink()
        fd = os.open(where, os.O_RDONLY)
        if sync:
            os.fsync(fd)
        fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", flush))
        os.close(fd)
        # Unmounting would write what the kernel has in its cache; a machine that stops does not.
        shutil.copyfile(image, left)
    finally:
        for fd in kept:
            os.close(fd)
        run("umount", where)
    left.replace(image)


def mke2fs(image: Path, options: list[str], size: str = "24M") -> None:
    run(tool("mke2fs"), "-q", "-F", *options, image, size)


def fsync(path: Path) -> None:
    """Make a file or directory durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def churn(root: Path, seed: int, steps: int = 60) -> None:
    """Create, rename, remove, truncate, attribute; sync now and then. Leaves files ``open-…`` to be orphaned."""
    r = random.Random(seed)
    for i in range(steps):
        d = root / f"d{r.randrange(6)}"
        d.mkdir(exist_ok=True)
        f = d / f"f{seed}-{i}{'x' * r.randrange(40)}"
        f.write_bytes(r.randbytes(r.randrange(90_000)))
        action = r.randrange(8)
        if action == 0:
            fsync(root)
        elif action == 1:
            f.rename(root / f"moved{seed}-{i}")
        elif action == 2:
            shutil.rmtree(root / f"d{r.randrange(6)}", ignore_errors=True)
        elif action == 3:
            os.setxattr(f, "user.x", r.randbytes(300))
        elif action == 4:
            os.truncate(f, r.randrange(50_000))
        elif action == 5:
            os.link(f, root / f"link{seed}-{i}")
    with (root / "open-fragmented").open("wb") as out:
        for i in reversed(range(0, 120, 2)):
            out.seek(i * 4096)
            out.write(b"piece")
    (root / "open-dir").write_bytes(b"o" * 5000)
    os.setxattr(root / "open-dir", "user.big", b"a" * 400)


def by_e2fsck(image: Path) -> None:
    """Let e2fsck replay the journal; its exit code 1 says that it has changed something."""
    run("sh", "-c", f"{tool('e2fsck')} -p {image} || test $? = 1")


def by_kernel(image: Path, where: Path) -> list[dict[str, Any]]:
    with mounted(image, where) as root:
        return kernel_manifest(root)


MODES = [
    ("ext4-1k", "data=journal"),
    ("ext3", "data=journal"),
    ("ext4-4k", "data=writeback"),
    ("ext4-4k", "journal_async_commit,data=writeback"),  # not with data=ordered
    ("no-checksums", "journal_checksum"),  # version 1: a crc32 of the whole transaction
    ("no-checksums", "journal_async_commit,data=journal"),
    ("orphan_file", "journal_async_commit,data=writeback"),
]


@pytest.mark.root
@pytest.mark.parametrize(
    ("features", "flush", "options"),
    [
        *((name, LOG_FLUSH, "rw") for name in FEATURES),
        ("ext4-4k", NO_LOG_FLUSH, "rw"),
        ("ext3", NO_LOG_FLUSH, "rw"),
        *((name, LOG_FLUSH, options) for name, options in MODES),
    ],
)
def test_a_crash_is_recovered_as_by_kernel_and_e2fsck(tmp_path: Path, features: str, flush: int, options: str) -> None:
    image, copy = tmp_path / "image", tmp_path / "copy"
    mke2fs(image, FEATURES[features])
    with crashing(image, tmp_path / "mnt", flush=flush, options=options) as root:
        churn(root, seed=len(features) + flush)
    before = image.read_bytes()
    expected = ours(image)
    assert image.read_bytes() == before, "reading writes nothing"
    assert len(expected) > 30
    assert inspect(image).state == "needs recovery"
    shutil.copyfile(image, copy)
    by_e2fsck(copy)
    assert_same(ours(copy), expected)
    shutil.copyfile(image, copy)
    assert_same(by_kernel(copy, tmp_path / "mnt"), expected)

    result = recover(image)
    assert result.recovered
    assert result.transactions > 1
    assert result.blocks > 10
    assert result.orphans_deleted == 2
    fsck(image)
    assert_same(ours(image), expected)
    assert inspect(image).state == "clean"
    assert recover(image).recovered is False
    assert_same(by_kernel(image, tmp_path / "mnt"), expected)
    fsck(image)


def metadata_differs(left: Path, right: Path) -> list[int]:
    """Return the blocks in which two images differ, without those of the journal and the superblock's copies."""
    with Volume.open(left) as v:
        size = v.block_size
        journal = {r.physical + i for r in v.extents(8) for i in range(r.count)}
    a, b = left.read_bytes(), right.read_bytes()
    blocks = (n for n in range(len(a) // size) if a[n * size : (n + 1) * size] != b[n * size : (n + 1) * size])
    return [n for n in blocks if n not in journal and n * size // 1024 not in (0, 1)]


@pytest.mark.root
def test_every_byte_is_as_e2fsck_leaves_it(tmp_path: Path) -> None:
    """Without orphans nothing depends on taste: beside journal and superblock the images are the same."""
    image, copy = tmp_path / "image", tmp_path / "copy"
    mke2fs(image, FEATURES["ext4-4k"])
    with crashing(image, tmp_path / "mnt", flush=LOG_FLUSH) as root:
        churn(root, seed=11)
        for path in root.glob("open-*"):
            path.unlink()
    shutil.copyfile(image, copy)
    by_e2fsck(copy)
    recover(image)
    assert metadata_differs(image, copy) == []
    a, b = (Volume.open(p) for p in (image, copy))
    with a, b:
        for name in type(a.super.raw).__slots__:
            if name not in ("s_checksum", "s_wtime", "s_mtime", "s_kbytes_written", "s_lastcheck", "s_mnt_count"):
                assert getattr(a.super.raw, name) == getattr(b.super.raw, name), name


@pytest.mark.root
def test_copies_of_a_mounted_image(tmp_path: Path) -> None:
    """What was synced before the copy began is in it, however it was torn by being taken while others write."""
    image, copy = tmp_path / "image", tmp_path / "copy"
    mke2fs(image, FEATURES["ext4-4k"])
    with mounted(image, tmp_path / "mnt") as root:
        for n in range(3):
            churn(root, seed=n, steps=25)
            for path in root.glob("open-*"):
                path.unlink()
            run("sync", "-f", root)
            shutil.copyfile(image, copy)
            expected = kernel_manifest(root)
            assert_same(ours(copy), expected)
            assert recover(copy).recovered
            fsck(copy)
            assert_same(ours(copy), expected)


@pytest.mark.root
def test_the_log_wraps(tmp_path: Path) -> None:
    image = tmp_path / "image"
    mke2fs(image, ["-t", "ext4", "-b", "1024", "-J", "size=1"])
    with crashing(image, tmp_path / "mnt", flush=LOG_FLUSH) as root:
        for n in range(300):
            (root / f"d{n % 20}").mkdir(exist_ok=True)
            path = root / f"d{n % 20}" / f"f{n}"
            path.touch()
            fsync(path)
        expected = kernel_manifest(root)
    assert inspect(image).journal.sequence > 100
    assert_same(ours(image), expected)
    recover(image)
    fsck(image)
    assert_same(ours(image), expected)


@pytest.mark.root
@pytest.mark.parametrize("options", [FEATURES["ext4-4k"], FEATURES["bigalloc"], FEATURES["no-checksums"]])
def test_journalled_data(tmp_path: Path, options: list[str]) -> None:
    """data=journal puts file content into the log, where a block may begin with the journal's magic."""
    image = tmp_path / "image"
    mke2fs(image, options)
    with crashing(image, tmp_path / "mnt", flush=LOG_FLUSH, options="data=journal") as root:
        (root / "escaped").write_bytes(bytes.fromhex("c03b3998") * 5000)
        (root / "plain").write_bytes(b"plain" * 5000)
        expected = kernel_manifest(root)
    assert_same(ours(image), expected)
    recover(image)
    fsck(image)
    assert_same(ours(image), expected)


# -- truncations under way -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [*FEATURES.values()], ids=[*FEATURES])
def test_interrupted_truncations(tmp_path: Path, options: list[str]) -> None:
    """An orphan that has a name is cut to its size: here one whose size was set back, and put on the list."""
    image, source = tmp_path / "image", tmp_path / "source"
    source.mkdir()
    r = random.Random(5)
    (source / "plain").write_bytes(r.randbytes(300_000))
    with (source / "holes").open("wb") as f:
        for i in reversed(range(0, 200, 2)):
            f.seek(i * 8192)
            f.write(r.randbytes(5000))
    (source / "other").write_bytes(b"other" * 9000)
    mke2fs(image, [*options, "-d", str(source)])
    content = {name: (source / name).read_bytes() for name in ("plain", "holes")}
    with Volume.open(image) as v:
        inodes = {name: v.lookup(name) for name in content}
    sizes = {"plain": 70_001, "holes": 400_000}
    requests = [f"sif <{inodes[name]}> size {sizes[name]}" for name in content]
    requests += [f"sif <{inodes['plain']}> dtime {inodes['holes']}", f"ssv last_orphan {inodes['plain']}"]
    requests += ["feature needs_recovery"]
    run(tool("debugfs"), "-w", "-f", "-", image, stdin="\n".join(requests) + "\n")
    result = recover(image)
    assert (result.orphans_truncated, result.orphans_deleted) == (2, 0)
    fsck(image)
    with Volume.open(image) as v:
        for name, data in content.items():
            ino = v.lookup(name)
            assert ino
            assert v.read(ino, 0, 1 << 30) == data[: sizes[name]]
            assert sum(e.count for e in v.extents(ino)) * v.block_size < sizes[name] + 65536


# -- journals that debugfs writes ------------------------------------------------------------------------------------


def write_journal(image: Path, *requests: str) -> None:
    """Have debugfs write transactions, as e2fsprogs' own tests do."""
    run(tool("debugfs"), "-w", "-f", "-", image, stdin="\n".join(requests) + "\n")


@pytest.mark.parametrize(
    ("features", "opening", "journal"),
    [
        ("^metadata_csum,^64bit", "jo", "journal_incompat_revoke"),
        ("^metadata_csum,^64bit", "jo -c", "journal_checksum"),
        ("metadata_csum,^64bit", "jo -c -v 2", "journal_checksum_v2"),
        ("metadata_csum,^64bit", "jo -c -v 3", "journal_checksum_v3"),
        ("metadata_csum,64bit", "jo -c -v 2", "journal_checksum_v2"),
        ("metadata_csum,64bit", "jo -c -v 3", "journal_checksum_v3"),
    ],
)
def test_journals_of_debugfs(tmp_path: Path, features: str, opening: str, journal: str) -> None:
    """Blocks written, revoked, written again; the last transaction has no commit block."""
    image, copy, block = tmp_path / "image", tmp_path / "copy", tmp_path / "block"
    mke2fs(image, ["-t", "ext4", "-b", "1024", "-O", f"{features},^resize_inode"], size="16M")
    block.write_bytes((b"\xc0\x3b\x39\x98" + b"new" * 340) * 3)  # as many blocks as the longest request names
    free = [15001, 15002, 15003, 15004]
    first = f"jw -b {free[0]},{free[1]},{free[2]} {block}"
    # debugfs gets the crc32 of a transaction of revokes wrong; e2fsck and we agree that it is.
    revoke = f"jw -r {free[1]}" if journal != "journal_checksum" else f"jw -b {free[1]} {block}"
    write_journal(image, opening, first, revoke, f"jw -b {free[3]} {block}", f"jw -b {free[1]} -c {block}", "jc")
    assert journal in debugfs(image, "logdump -S")
    assert debugfs(image, "logdump -a").count("commit block") == 3
    shutil.copyfile(image, copy)
    by_e2fsck(copy)
    result = recover(image)
    assert result.recovered
    data = {path: path.read_bytes() for path in (image, copy)}
    for number in free:
        at = slice(number * 1024, number * 1024 + 1024)
        assert data[image][at] == data[copy][at], number
    assert data[image][free[0] * 1024 :].startswith(b"\xc0\x3b\x39\x98new")
    assert metadata_differs(image, copy) == []
    fsck(image)


@pytest.mark.root
@pytest.mark.parametrize(
    ("features", "csum"),
    [
        ("^metadata_csum,^64bit", 0),
        ("^metadata_csum,64bit", 0),
        ("^metadata_csum,^64bit", 1),
        ("metadata_csum,^64bit", 2),
        ("metadata_csum,64bit", 2),
        ("metadata_csum,^64bit", 3),
        ("metadata_csum,64bit", 3),
    ],
)
def test_others_replay_our_journal(tmp_path: Path, features: str, csum: int) -> None:
    """Escapes, revokes, blocks used again, a log that wraps: debugfs lists it, kernel and e2fsck replay it as we do."""
    image = tmp_path / "image"
    mke2fs(image, ["-t", "ext4", "-b", "1024", "-O", f"{features},^resize_inode", "-J", "size=1"], size="32M")
    if csum:
        write_journal(image, f"jo -c -v {csum}", "jc")
    with Volume.open(image, replay=False) as v:
        extents = v.extents(8)
    fd, r = os.open(image, os.O_RDWR), random.Random(features)
    blocks = FileBlocks(fd, 1024, "image")
    journal = Journal.open(blocks, extents, "image")
    assert (journal.log.csum, journal.log.commit_crc) == (csum if csum > 1 else 0, csum == 1)
    places = range(25_000, 26_200)
    revoked = set()
    for n in range(60):
        with journal.begin() as h:
            for number in r.sample(places, 40):
                start = b"\xc0\x3b\x39\x98" if r.random() < 0.2 else r.randbytes(4)
                h.write(number, start + r.randbytes(1020))
        with journal.begin() as h:
            gone = r.sample(places, 12 if n % 20 else 150)
            for number in gone:
                h.revoke(number)
        journal.commit()
        for number in gone:  # data now: no replay may touch it
            if not journal.pending(number):
                blocks.write(number, b"data" * 256)
                revoked.add(number)
    used = journal.log.super.s_start, journal._head
    assert used[0] > used[1], "it wraps"
    os.close(fd)
    run(tool("debugfs"), "-w", "-R", "feature needs_recovery", image)
    listed = debugfs(image, "logdump -a")
    assert listed.count("type 2 (commit block)") >= 5
    assert listed.count("type 5 (revoke table)") >= 5
    by = {name: tmp_path / name for name in ("e2fsck", "kernel")}
    for copy in by.values():
        shutil.copyfile(image, copy)
    by_e2fsck(by["e2fsck"])
    by_kernel(by["kernel"], tmp_path / "mnt")
    result = recover(image)
    assert result.revoked > 10
    data = {name: path.read_bytes() for name, path in (("ours", image), *by.items())}
    for name in by:
        for number in places:
            at = slice(number * 1024, number * 1024 + 1024)
            assert data["ours"][at] == data[name][at], (name, number)
    assert metadata_differs(image, by["e2fsck"]) == []
    fsck(image)


# -- fast commits ----------------------------------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.parametrize(
    "options",
    [
        ["-b", "1024"],
        ["-b", "4096"],
        ["-O", "^metadata_csum"],
        ["-O", "bigalloc"],
        ["-O", "inline_data", "-I", "512"],
        ["-O", "orphan_file"],
        ["-b", "2048", "-O", "ea_inode"],
    ],
    ids=" ".join,
)
def test_fast_commits(tmp_path: Path, options: list[str]) -> None:
    """Files created, linked, renamed, removed, truncated and written, each fsynced, with no full commit after them.

    The judge is the tree as it was just before the crash; times and links of directories alone are not logged. (Kernel
    and e2fsck replay the same to volumes in which e2fsck then finds errors, so that they can be no judges here.)
    """
    image = tmp_path / "image"
    mke2fs(image, ["-t", "ext4", "-O", "fast_commit", *options])
    r = random.Random(3)
    with crashing(image, tmp_path / "mnt", flush=NO_LOG_FLUSH, sync=False) as root:
        (root / "d").mkdir()
        (root / "e").mkdir()
        (root / "d" / "first").mkdir()
        for i in range(300):  # an index, where blocks are small
            (root / "d" / f"indexed{i}-{'y' * 30}").touch()
        for i in range(10):
            (root / "d" / f"old{i}").write_bytes(r.randbytes(20_000))
        run("sync", "-f", root)
        for i in range(60):
            path = root / "d" / f"new{i}-{'x' * r.randrange(60)}"
            path.write_bytes(r.randbytes(r.randrange(30_000)))
            action = r.randrange(6)
            if action == 0:
                os.link(path, root / "e" / f"link{i}")
            elif action == 1:
                path = path.rename(root / "e" / f"moved{i}")
            elif action == 2:
                (root / "d" / f"old{r.randrange(10)}").unlink(missing_ok=True)
            elif action == 3:
                os.truncate(path, r.randrange(5000))
            elif action == 4:
                with path.open("r+b") as f:
                    f.seek(50_000)
                    f.write(b"far away")
            fsync(path)
        expected = kernel_manifest(root)

    def plain(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{k: v for k, v in e.items() if e["type"] != "dir" or k not in ("mtime_ns", "nlink")} for e in entries]

    if "inline_data" in options:  # the kernel logs names in a directory inside its inode without the inode
        with pytest.raises(Unsupported, match=r"inside its inode .*e2fsck"):
            recover(image)
        return
    assert_same(plain(ours(image)), plain(expected))
    result = recover(image)
    assert result.fast_commits > 20
    fsck(image)
    assert_same(plain(ours(image)), plain(expected))


# -- killed half-way -------------------------------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.parametrize("kind", ["ext4-4k", "ext4-1k", "orphan_file", "fast_commit"])
def test_recovery_may_be_cut_off_anywhere(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any write the power may fail, and what was not flushed may be there, lost or torn: nothing is lost by that."""
    image, copy = tmp_path / "image", tmp_path / "copy"
    mke2fs(image, FEATURES.get(kind, ["-t", "ext4", "-b", "4096", "-O", "fast_commit"]), size="8M")
    full = kind != "fast_commit"
    with crashing(image, tmp_path / "mnt", flush=LOG_FLUSH if full else NO_LOG_FLUSH, sync=full) as root:
        if kind == "fast_commit":
            run("sync", "-f", root)
            for i in range(20):
                (root / f"f{i}").write_bytes(b"f" * 9000)
                fsync(root / f"f{i}")
        else:
            churn(root, seed=2, steps=20)
    expected = ours(image)
    before = image.read_bytes()
    with Volume.open(image) as v:
        trace = Trace(v.block_size, bytearray())
    real_write, real_flush = FileBlocks.write, FileBlocks.flush

    def write(self: FileBlocks, block: int, data: bytes) -> None:
        trace.events.append((block, bytes(data)))
        real_write(self, block, data)

    def flush(self: FileBlocks) -> None:
        trace.events.append(None)
        real_flush(self)

    shutil.copyfile(image, copy)
    with monkeypatch.context() as m:
        m.setattr(FileBlocks, "write", write)
        m.setattr(FileBlocks, "flush", flush)
        recover(copy)
    assert trace.events[-1] is None
    r = random.Random(kind)
    last = len(trace.events)
    flushes = [i for i, event in enumerate(trace.events) if event is None]  # before one, most is in doubt
    for at in [last, *flushes, *flushes, *flushes, *(r.randrange(last) for _ in range(6))]:
        copy.write_bytes(trace.cut(before, at, r).data)
        assert_same(ours(copy), expected)
        recover(copy)
        fsck(copy)
        assert_same(ours(copy), expected)


# -- commands and refusals -------------------------------------------------------------------------------------------


def dirty(image: Path) -> None:
    """Make a small volume that says that its journal must be replayed."""
    with ImageBuilder(image, size=16 << 20, timestamp=1, force=True) as b:
        with b.add_file(b.root, b"file", Meta()) as f:
            f.write(b"content")
        b.finish()
    run(tool("debugfs"), "-w", "-R", "feature needs_recovery", image)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = tmp_path / "image"
    dirty(image)
    assert cli(["manifest", str(image)]) == 0
    assert cli(["manifest", "--no-replay", str(image)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0] == lines[1]
    with pytest.raises(NeedsRecovery, match="ext4lite recover"):
        clone(image, tmp_path / "clone")
    assert cli(["recover", "--json", str(image)]) == 0
    assert json.loads(capsys.readouterr().out)["recovered"] is True
    assert cli(["recover", str(image)]) == 0
    assert "clean, nothing to do" in capsys.readouterr().out
    clone(image, tmp_path / "clone")
    fsck(image)


def test_a_volume_in_use_is_left_alone(tmp_path: Path) -> None:
    image = tmp_path / "image"
    dirty(image)
    with Volume.open(image), pytest.raises(VolumeBusy):
        recover(image)
    open_for_guest(image).close()
    assert inspect(image).state == "clean"


def test_unclean_without_a_journal_is_for_e2fsck(tmp_path: Path) -> None:
    image = tmp_path / "image"
    dirty(image)
    recover(image)
    run(tool("debugfs"), "-w", "-R", "ssv state 0", image)
    before = image.read_bytes()
    with pytest.raises(NeedsRecovery, match=r"not closed cleanly.*e2fsck"):
        recover(image)
    assert image.read_bytes() == before


def test_impossible_journals(tmp_path: Path) -> None:
    image = tmp_path / "image"
    mke2fs(image, ["-t", "ext4", "-O", "^has_journal"], size="16M")
    run(tool("debugfs"), "-w", "-R", "feature needs_recovery", image)
    with pytest.raises(CorruptImage, match="there is none"):
        recover(image)
    dirty(image)
    run(tool("debugfs"), "-w", "-R", "ssv journal_inum 0", image)
    with pytest.raises(Unsupported, match="another device"):
        recover(image)


def test_orphans_that_cannot_be(tmp_path: Path) -> None:
    image = tmp_path / "image"
    for requests, what in (
        ("ssv last_orphan 5", "cannot be an orphan"),
        ("ssv last_orphan 99", "is free"),
        ("ssv last_orphan 12\nsif <12> dtime 12", "inode 12 twice"),
    ):
        image.unlink(missing_ok=True)
        dirty(image)
        run(tool("debugfs"), "-w", "-f", "-", image, stdin=requests + "\n")
        with pytest.raises(CorruptImage, match=what):
            recover(image)
        assert len(ours(image)) == 1, "reading does without"


def test_interrupted_by_ctrl_c(tmp_path: Path) -> None:
    """Wherever it is interrupted, recovery leaves a volume that can be recovered, and nothing beside it."""
    image, copy = tmp_path / "image", tmp_path / "copy"
    fill_journal(image, journal_mib=4, volume_mib=1200)
    expected = ours(image)

    class Impatient:
        """Blocks that somebody interrupts at the n-th write."""

        def __init__(self, below: Blocks, left: int) -> None:
            self.below, self.left, self.block_size = below, left, below.block_size

        def read(self, block: int, count: int = 1) -> bytes:
            return self.below.read(block, count)

        def write(self, block: int, data: bytes | memoryview) -> None:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
            self.below.write(block, data)

        def flush(self) -> None:
            self.below.flush()

    for left in (1, 100, 400):
        run("cp", "--sparse=always", image, copy)
        with pytest.raises(KeyboardInterrupt):
            recover(copy, device=lambda blocks, left=left: Impatient(blocks, left))  # type: ignore[misc]
        assert inspect(copy).state == "needs recovery"
        assert not copy.with_name("copy.lock").exists()
        done: list[int] = []
        assert recover(copy, progress=done.append).recovered
        assert sum(done) > 4 << 20
        fsck(copy)
        assert_same(ours(copy), expected)


# -- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.parametrize("kind", ["no-checksums", "orphan_file", "fast_commit"])
def test_damaged_journals_of_images(tmp_path: Path, kind: str) -> None:
    """Bytes of the log are changed: recovery ends in an Ext4LiteError if at all, and the image keeps its size."""
    image, copy = tmp_path / "image", tmp_path / "copy"
    mke2fs(image, FEATURES.get(kind, ["-t", "ext4", "-O", "fast_commit,^metadata_csum"]), size="8M")
    full = kind != "fast_commit"
    with crashing(image, tmp_path / "mnt", flush=LOG_FLUSH if full else NO_LOG_FLUSH, sync=full) as root:
        churn(root, seed=4, steps=15)
        run("sync", "-f", root)
        for i in range(5):
            (root / f"f{i}").write_bytes(b"f" * 9000)
            fsync(root / f"f{i}")
    with Volume.open(image, replay=False) as v:
        size = v.block_size
        blocks = [r.physical + i for r in v.extents(8) for i in range(r.count)]
    used = [b for b in blocks if any(image.read_bytes()[b * size : (b + 1) * size])]
    r = random.Random(kind)
    errors = 0
    for _ in range(25):
        shutil.copyfile(image, copy)
        with copy.open("r+b") as f:
            for _ in range(r.randrange(1, 5)):
                f.seek(r.choice(used) * size + r.randrange(r.choice((64, size))))
                f.write(r.randbytes(r.randrange(1, 5)))
        for attempt in (ours, recover):
            try:
                attempt(copy)
            except Ext4LiteError as e:
                assert str(e)
                errors += 1
        assert copy.stat().st_size == image.stat().st_size
    assert errors
