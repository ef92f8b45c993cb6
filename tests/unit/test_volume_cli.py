"""The commands on a writable volume: ls, cat, stat, cp-in, cp-out, rm, mkdir, mv, ln, xattr, label, uuid."""

from __future__ import annotations

import json
import os
import pty
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ext4lite.cli import progress
from ext4lite.cli import run as command
from ext4lite.mkfs import mkfs
from ext4lite.volume import Volume
from support.ext4_judges import fsck

MIB = 1 << 20


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "image"
    mkfs(path, size=16 * MIB)
    return path


class Cli:
    """Runs commands and returns what they print."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self.capfd = capfd

    def __call__(self, *words: object, code: int = 0) -> str:
        self.capfd.readouterr()
        got = command([str(w) for w in words])
        out, err = self.capfd.readouterr()
        assert got == code, f"{words}: {got}\n{out}{err}"
        assert code == 0 or err.startswith("ext4lite") or "Usage" in err
        return out if code == 0 else err

    def json(self, *words: object) -> Any:
        return json.loads(self(*words))


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capfd)


def test_a_tree_goes_in_and_out(image: Path, tmp_path: Path, cli: Cli) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "file").write_bytes(b"content\n" * 1000)
    (source / "file").chmod(0o640)
    os.utime(source / "file", ns=(1_600_000_000_000_000_001, 1_600_000_000_000_000_001))
    (source / "link").symlink_to("file")
    os.link(source / "file", source / "sub" / "same")
    with (source / "sparse").open("wb") as f:
        f.seek(5 * MIB)
        f.write(b"end")
    done = cli.json("cp-in", "-r", "--json", image, source, "/in")
    assert (done["files"], done["symlinks"], done["directories"]) == (3, 1, 2)
    fsck(image)
    (row,) = [json.loads(line) for line in cli("stat", "--json", image, "/in/file").splitlines()]
    assert (row["size"], row["mode"], row["nlink"], row["uid"]) == (8000, 0o640, 2, 0)
    assert row["mtime_ns"] == 1_600_000_000_000_000_001
    assert cli.json("stat", "--json", image, "/in/sparse")["blocks512"] <= 16
    assert cli("cat", image, "/in/link") == "content\n" * 1000
    assert cli("ls", image, "/in").split() == ["file", "link", "sparse", "sub"]
    assert "lrwxrwxrwx" in cli("ls", "-l", image, "/in")
    assert "sub/same" in cli("ls", "-R", image, "/in").split()
    back = tmp_path / "back"
    cli("cp-out", "-r", image, "/in", back)
    assert (back / "file").read_bytes() == (source / "file").read_bytes()
    assert (back / "sub" / "same").stat().st_ino == (back / "file").stat().st_ino
    assert (back / "file").stat().st_mtime_ns == 1_600_000_000_000_000_001
    assert (back / "link").readlink() == Path("file")
    assert (back / "sparse").stat().st_blocks < 100
    assert (back / "sparse").read_bytes() == (source / "sparse").read_bytes()


def test_names_are_made_moved_and_removed(image: Path, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "x").write_text("x")
    cli("mkdir", "-p", image, "/a/b/c", "/a")
    assert cli("mkdir", image, "/a", code=10).strip().endswith("/a: is there already")
    cli("cp-in", image, tmp_path / "x", "/a")
    cli("ln", image, "/a/x", "/y")
    cli("ln", "-s", image, "a/x", "/s")
    assert cli("cat", image, "/s", "/y") == "xx"
    assert cli.json("mv", "--json", image, "/y", "/a/b")["moved"] == [["/y", "/a/b/y"]]
    cli("mv", "-n", "-T", image, "/a/x", "/a/b/y", code=10)
    cli("mv", "--exchange", image, "/a/b", "/s")
    assert cli("ls", image, "/s").split() == ["c", "y"]
    cli("rm", image, "/a", code=10)
    cli("rm", image, "/nothing", code=10)
    cli("rm", "-f", image, "/nothing")
    assert cli.json("rm", "-r", "--json", image, "/a", "/s")["removed"] == 6
    assert cli("ls", image).split() == ["lost+found"]
    cli("rm", "-r", image, "/", code=10)
    cli("ls", image, "/nothing", code=10)
    cli("mv", image, "/one", code=2)
    fsck(image)


def test_attributes(image: Path, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "x").write_text("x")
    cli("cp-in", image, tmp_path / "x", "/x")
    cli("xattr", image, "/x", "-s", "user.text=hello", "-s", "user.hex=0x00ff", "-s", "trusted.b=0saGk=")
    assert cli("xattr", image, "/x") == "trusted.b=hi\nuser.hex=0x00ff\nuser.text=hello\n"
    assert cli("xattr", "-g", "user.text", image, "/x") == "hello"
    assert cli.json("xattr", "--json", "-r", "user.hex", image, "/x")["xattrs"] == {
        "trusted.b": "aGk=",
        "user.text": "aGVsbG8=",
    }
    cli("xattr", "-r", "user.hex", image, "/x", code=10)
    cli("xattr", "-g", "user.hex", image, "/x", code=10)
    cli("xattr", "-s", "no-value", image, "/x", code=2)
    fsck(image)


def test_name_and_uuid(image: Path, cli: Cli) -> None:
    cli("label", image, "golden")
    assert cli("label", image) == "golden\n"
    cli("label", image, "x" * 17, code=10)
    cli("uuid", image, "00112233-4455-6677-8899-aabbccddeeff")
    assert cli.json("uuid", "--json", image)["uuid"] == "00112233-4455-6677-8899-aabbccddeeff"
    cli("uuid", image, "nonsense", code=2)
    fsck(image)


def test_a_full_volume_has_its_own_exit_code(image: Path, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "large").write_bytes(b"x" * (20 * MIB))
    assert "no free blocks" in cli("cp-in", image, tmp_path / "large", "/", code=9)
    fsck(image)


def test_copying_out_follows_no_symlink_of_the_host(image: Path, tmp_path: Path, cli: Cli) -> None:
    victim = tmp_path / "victim"
    victim.write_text("keep")
    (tmp_path / "x").write_text("new")
    cli("cp-in", image, tmp_path / "x", "/x")
    out = tmp_path / "out"
    out.mkdir()
    (out / "x").symlink_to(victim)
    cli("cp-out", image, "/x", out)
    assert victim.read_text() == "keep"
    assert (out / "x").read_text() == "new"
    assert not (out / "x").is_symlink()


def test_a_bar_is_drawn_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """How much there is to do is only asked where somebody sees the bar; it goes away in the end."""
    monkeypatch.setattr(progress, "_AFTER", 0.0)
    monkeypatch.setattr(progress, "_EVERY", 0.0)
    asked = []

    def total() -> int:
        asked.append(1)
        return 200

    for terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        with progress.steps("removing", total) as add:
            for _ in range(100):
                add(1)
        with progress.steps("removing", total, shown=False) as add:
            add(1)
        shown = capsys.readouterr().err
        assert bool(shown) == terminal
    assert asked == [1]
    assert "removing [" in shown
    assert "50%" in shown
    assert shown.endswith("\r\x1b[K")


@pytest.mark.parametrize("value", ["0xff", "0xc3", "0x00", "ü", "plain", "0x307831"])
def test_a_value_shown_can_be_set_again(image: Path, cli: Cli, value: str) -> None:
    """What is no text is shown in hexadecimal, not with a replacement for what is no UTF-8."""
    cli("xattr", "-s", f"user.a={value}", image, "/")
    assert cli("xattr", image, "/").strip() == f"user.a={value}"
    fsck(image)


def test_what_ext4_has_no_place_for_is_told_with_where(image: Path, cli: Cli) -> None:
    for name in ("bad", "system.posix_acl_access"):
        assert cli("xattr", "-s", f"{name}=0x00", image, "/", code=5).startswith(f"ext4lite: {image}: inode 2: ")
    fsck(image)


def test_what_has_no_room_is_not_left_half(image: Path, tmp_path: Path, cli: Cli) -> None:
    """Neither in the volume nor on the host, where what was there before stays."""
    (tmp_path / "large").write_bytes(os.urandom(20 * MIB))
    (tmp_path / "small").write_bytes(os.urandom(3 * MIB))
    cli("cp-in", image, tmp_path / "small", "/small")
    cli("cp-in", image, tmp_path / "large", "/large", code=9)
    assert cli("ls", image).split() == ["lost+found", "small"]
    fsck(image)

    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("as it was")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIB, hard))  # as on a full disk
    try:
        cli("cp-out", image, "/small", out / "old", code=6)
        cli("cp-out", image, "/small", out / "new", code=6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [(f.name, f.read_text()) for f in out.iterdir()] == [("old", "as it was")]


def test_names_are_bytes_for_a_pipe_and_harmless_on_a_terminal(image: Path) -> None:
    name = b"steer\x1b[2J\xff"
    with Volume.open(image, mode="rw") as volume:
        volume.create(b"/" + name)
    words = [sys.executable, "-m", "ext4lite", "ls", str(image)]
    assert name + b"\n" in subprocess.run(words, capture_output=True, check=True).stdout
    ours, theirs = pty.openpty()
    subprocess.run(words, stdout=theirs, check=True)
    os.close(theirs)
    shown = os.read(ours, 1000)
    os.close(ours)
    assert b"steer" in shown
    assert b"\x1b" not in shown
