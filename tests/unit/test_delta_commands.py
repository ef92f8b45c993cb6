"""Every command on a delta, and what is refused."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ext4lite import backing, flatten, rebase
from ext4lite.blockdev import open_for_guest
from ext4lite.cli import run
from ext4lite.clone import clone
from ext4lite.compact import compact
from ext4lite.delta import as_delta
from ext4lite.diff import diff
from ext4lite.errors import BackingError, CorruptImage, HostError, Unsupported, VolumeBusy
from ext4lite.hostfs import copy_run
from ext4lite.inspect import inspect
from ext4lite.manifest import entries
from ext4lite.mkfs import mkfs
from ext4lite.resize import resize
from ext4lite.volume import Volume
from support.ext4_judges import fsck

MIB = 1 << 20
SIZE = 16 * MIB
TRAILER = 16384


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    path = tmp_path / "golden.ext4"
    mkfs(path, size=SIZE)
    r = random.Random(1)
    with Volume.open(path, mode="rw") as v:
        for number in range(20):
            ino = v.create(f"/file{number}")
            v.pwrite(ino, 0, r.randbytes(r.randrange(200_000)))
    return path


def _manifest(path: Path) -> list[dict[str, object]]:
    with Volume.open(path) as v:
        return list(entries(v))


def _change(path: Path) -> None:
    with Volume.open(path, mode="rw") as v:
        ino = v.create("/new")
        v.pwrite(ino, 0, b"n" * 100_000)
        v.unlink("/file3")
        found = v.lookup("/file4")
        assert found is not None
        v.pwrite(found, 1000, b"changed")


def test_a_clone_over_a_backing_file_is_a_volume(golden: Path, tmp_path: Path) -> None:
    before, episode = golden.read_bytes(), tmp_path / "e"
    result = clone(golden, episode, backing="always")
    assert (result.method, result.bytes, result.base) == ("backing", 0, str(golden))
    assert episode.stat().st_blocks * 512 <= 16384
    assert _manifest(episode) == _manifest(golden)
    assert diff(golden, episode).same
    _change(episode)
    names = {entry["path"] for entry in _manifest(episode)}
    assert "/new" in names and "/file3" not in names
    report = inspect(episode)
    assert report.backing is not None and report.backing.path == str(golden)
    assert 100_000 < report.backing.private_bytes < 4 * MIB
    found = diff(golden, episode, names=True)
    assert found.names is not None and {"/new", "/file4"} < set(found.names) and "/file5" not in found.names
    plain = tmp_path / "plain"
    clone(episode, plain, reflink="never")
    fsck(plain)
    assert _manifest(plain) == _manifest(episode)
    assert diff(plain, episode).same, "compared without the short cut"
    assert golden.read_bytes() == before


def test_the_clone_of_a_delta_is_a_delta_over_the_same_file(golden: Path, tmp_path: Path) -> None:
    episode = tmp_path / "e"
    clone(golden, episode, backing="always")
    _change(episode)
    (tmp_path / "deep").mkdir()
    second = tmp_path / "deep" / "second"
    result = clone(episode, second)
    assert result.base == str(golden) and result.bytes < 4 * MIB
    assert _manifest(second) == _manifest(episode)
    _change_more(second)
    assert _manifest(second) != _manifest(episode)


def _change_more(path: Path) -> None:
    with Volume.open(path, mode="rw") as v:
        v.unlink("/new")


def test_flatten(golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    episode = tmp_path / "e"
    clone(golden, episode, backing="always")
    _change(episode)
    expected = _manifest(episode)
    assert run(["flatten", "--json", str(episode)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["flattened"] and told["base"] == str(golden) and told["bytes"] > MIB
    golden.unlink()
    fsck(episode)
    assert _manifest(episode) == expected and inspect(episode).backing is None
    assert run(["flatten", str(episode)]) == 0
    assert "nothing to do" in capsys.readouterr().out


def test_flatten_killed_anywhere(golden: Path, tmp_path: Path) -> None:
    """What is left is the delta, or the plain image; both show the same."""
    episode = tmp_path / "e"
    clone(golden, episode, backing="always")
    _change(episode)
    expected = _manifest(episode)
    code = "import sys, time; from ext4lite.flatten import flatten; print(1, flush=True);"
    code += "flatten(sys.argv[1], progress=lambda _: time.sleep(0.01))"
    for delay in (0.0, 0.03, 0.1):
        child = subprocess.Popen([sys.executable, "-c", code, str(episode)], stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline()
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert _manifest(episode) == expected
    flatten.flatten(episode)
    assert _manifest(episode) == expected
    fsck(episode)


def test_a_full_disk_leaves_the_delta(golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    episode = tmp_path / "e"
    clone(golden, episode, backing="always")
    _change(episode)
    expected, blocks = _manifest(episode), episode.stat().st_blocks
    calls = 0

    def full(target: int, source: int, start: int, length: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(28, "No space left on device")
        copy_run(target, source, start, length)

    monkeypatch.setattr(flatten, "copy_run", full)
    with pytest.raises(HostError, match="no space left"):
        flatten.flatten(episode)
    assert _manifest(episode) == expected
    assert episode.stat().st_blocks <= blocks + 16, "what was copied for nothing is given back"


def test_a_missing_changed_or_swapped_base_is_refused(golden: Path, tmp_path: Path) -> None:
    episode = tmp_path / "e"
    clone(golden, episode, backing="always")
    kept = golden.stat()

    def refused(why: str) -> None:
        with pytest.raises(BackingError, match=why):
            Volume.open(episode)
        with pytest.raises(BackingError, match=why):
            open_for_guest(episode)
        with pytest.raises(BackingError, match=why):
            clone(episode, tmp_path / "c")
        assert run(["ls", str(episode)]) == 11

    moved = golden.rename(tmp_path / "moved")
    refused("no such file")
    mkfs(golden, size=SIZE)
    refused("UUID")
    moved.replace(golden)
    Volume.open(episode).close()
    os.utime(golden, ns=(kept.st_atime_ns, kept.st_mtime_ns + 1))
    refused("modification time")
    assert run(["label", str(golden), "later"]) == 0
    os.utime(golden, ns=(kept.st_atime_ns, kept.st_mtime_ns))
    refused("superblock")
    golden.write_bytes(b"nothing")
    refused("no ext4 image")


def test_moving(golden: Path, tmp_path: Path) -> None:
    """Both moved together, and one alone, are found; a symlink's target counts."""
    home = tmp_path / "home"
    home.mkdir()
    episode = home / "e"
    clone(golden, episode, backing="always")
    expected = _manifest(golden)
    there = tmp_path / "elsewhere"
    there.mkdir()
    alone = episode.rename(there / "e")
    assert _manifest(alone) == expected
    alone.rename(home / "e")
    other = tmp_path / "other"
    other.mkdir()
    home.rename(other / "home")
    golden.rename(other / "golden.ext4")
    (tmp_path / "link").symlink_to(other / "home" / "e")
    assert _manifest(tmp_path / "link") == expected


def test_rebase(golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    episode = tmp_path / "e"
    clone(golden, episode, backing="always")
    _change(episode)
    expected = _manifest(episode)
    # The same content elsewhere: nothing to take over.
    same = tmp_path / "same"
    clone(golden, same, reflink="never")
    assert rebase.rebase(episode, same).bytes == 0
    golden_bytes = golden.read_bytes()
    golden.unlink()
    assert _manifest(episode) == expected
    # A later golden volume: what it has other is taken over.
    later = tmp_path / "later"
    later.write_bytes(golden_bytes)
    with Volume.open(later, mode="rw") as v:
        found = v.lookup("/file5")
        assert found is not None
        v.pwrite(found, 0, b"later")
        v.unlink("/file6")
    assert run(["rebase", "--json", "--base", str(later), str(episode)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["base"] == str(later) and 0 < told["bytes"] < MIB
    same.unlink()
    assert _manifest(episode) == expected
    # Touched, or copied without its time: the caller's word is needed, and once given counts.
    os.utime(later)
    with pytest.raises(BackingError, match="modification time"):
        rebase.rebase(episode)
    rebase.rebase(episode, unsafe=True)
    assert _manifest(episode) == expected
    plain = tmp_path / "plain"
    clone(episode, plain, reflink="never")
    fsck(plain)
    with pytest.raises(BackingError, match="no delta"):
        rebase.rebase(plain, later)
    with pytest.raises(BackingError, match="delta itself"):
        rebase.rebase(episode, _another_delta(later, tmp_path))


def _another_delta(base: Path, tmp_path: Path) -> Path:
    clone(base, tmp_path / "another", backing="always")
    return tmp_path / "another"


def test_a_torn_header_leaves_the_other(golden: Path, tmp_path: Path) -> None:
    episode, same = tmp_path / "e", tmp_path / "same"
    clone(golden, episode, backing="always")
    clone(golden, same, reflink="never")
    before = episode.read_bytes()[-8192:]
    rebase.rebase(episode, same)
    after = episode.read_bytes()[-8192:]
    changed = [i for i in range(8192) if before[i] != after[i]]
    with episode.open("r+b") as f:  # half of the write got through
        for i in changed[: len(changed) // 2]:
            f.seek(i - 8192, os.SEEK_END)
            f.write(before[i : i + 1])
    with Volume.open(episode) as v:
        found = as_delta(v.device)
        assert found is not None and found.base_where == str(golden)


def test_compact_writes_a_plain_image_and_resize_refuses(golden: Path, tmp_path: Path) -> None:
    episode = tmp_path / "e"
    clone(golden, episode, backing="always")
    _change(episode)
    expected = _manifest(episode)
    with pytest.raises(Unsupported, match="delta"):
        resize(episode, 2 * SIZE)
    compact(episode)
    golden.unlink()
    fsck(episode)
    assert sorted(map(str, _manifest(episode))) == sorted(map(str, expected))


def test_locks(golden: Path, tmp_path: Path) -> None:
    """The backing file is locked while a delta is open, for guests too; many deltas share it."""
    episode, second = tmp_path / "e", tmp_path / "f"
    clone(golden, episode, backing="always")
    clone(golden, second, backing="always")
    with open_for_guest(episode) as guest, Volume.open(second, mode="rw"):
        assert guest.base_fd >= 0
        with pytest.raises(VolumeBusy):
            Volume.open(golden, mode="rw")
        with pytest.raises(VolumeBusy):
            Volume.open(episode)
    with Volume.open(golden, mode="rw"), pytest.raises(VolumeBusy, match="golden"):
        Volume.open(episode)


def test_a_guest_cannot_make_its_volume_a_delta(golden: Path, tmp_path: Path) -> None:
    """A plain image whose last blocks are those of a delta, as a guest's file may be."""
    episode, image = tmp_path / "e", tmp_path / "image"
    clone(golden, episode, backing="always")
    trailer = episode.read_bytes()[SIZE:]
    mkfs(image, size=SIZE + len(trailer))
    size = image.stat().st_size
    with image.open("r+b") as f:
        f.seek(size - len(trailer))
        f.write(trailer)
    with image.open("rb") as f:
        assert backing.read_header(f.fileno(), "image") is None


def test_damaged_trailers(golden: Path, tmp_path: Path) -> None:
    episode = tmp_path / "e"
    clone(golden, episode, backing="always")
    _change(episode)
    length = episode.stat().st_size
    with episode.open("rb") as f:
        f.seek(length - TRAILER)
        whole = f.read()
    r = random.Random(3)
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(r.randint(1, 3)):
            data[len(data) - 1 - int(r.random() ** 2 * TRAILER)] ^= 1 << r.randrange(8)
        if r.random() < 0.2:
            del data[len(data) - r.randint(1, TRAILER) :]
        with episode.open("r+b") as f:
            f.truncate(length - TRAILER)
            f.seek(length - TRAILER)
            f.write(data)
        with contextlib.suppress(CorruptImage, BackingError, Unsupported, HostError), Volume.open(episode) as v:
            v.lookup("/file5")


def test_exit_codes_of_diff(golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    episode = tmp_path / "e"
    clone(golden, episode, backing="always")
    assert run(["diff", "--exit-code", str(golden), str(episode)]) == 0
    _change(episode)
    assert run(["diff", str(golden), str(episode)]) == 0
    assert run(["diff", "--exit-code", "--json", "--names", str(golden), str(episode)]) == 12
    told = json.loads(capsys.readouterr().out.split("\n", 2)[2])
    assert not told["same"] and "/new" in told["names"] and told["metadata_bytes"] > 0
