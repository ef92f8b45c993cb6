"""The command line: help, exit codes, one-line errors, what it imports."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ext4lite import __version__
from ext4lite.cli import COMMANDS, run
from support.samples import build_sample


def call(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ext4lite", *map(str, words)], capture_output=True, text=True, timeout=60, check=False
    )


def test_help_lists_the_commands_and_imports_nothing() -> None:
    code = (
        "import sys; from ext4lite.cli import run; run(['--help']);"
        "print([m for m in ('typer', 'rich', 'construct') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.endswith("[]\n")
    assert all(name in out for name in COMMANDS)


def test_version_and_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"ext4lite {__version__}\n"
    assert run([]) == 2
    assert run(["nonsense"]) == 2
    assert "no such command" in capsys.readouterr().err


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([name, "--help"]) == 0
    assert f"ext4lite {name}" in capsys.readouterr().out


def test_short_commands_import_only_what_they_need(tmp_path: Path) -> None:
    assert run(["mkfs", "--size", "4M", "-q", str(tmp_path / "i")]) == 0
    code = (
        "import sys; from ext4lite.cli import run; run(['inspect', sys.argv[1]]);"
        "print([m for m in ('rich', 'construct', 'cffi') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path / "i")], capture_output=True, text=True, check=True)
    assert out.stdout.endswith("[]\n")


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image, text = tmp_path / "i", tmp_path / "text"
    text.write_text("hello")
    assert run(["mkfs", "--size", "8M", str(image)]) == 0
    for words, code in (
        (("mkfs", "--size", "8M", image), 6),
        (("mkfs", "--size", "8Q", tmp_path / "j"), 2),
        (("mkfs", "--uuid", "x", tmp_path / "j"), 2),
        (("mkfs", "--size", "1M", tmp_path / "j"), 5),
        (("inspect", tmp_path / "none"), 6),
        (("inspect", text), 4),
        (("manifest", text), 4),
        (("clone", image), 2),
        (("clone", "--reflink=sometimes", image, tmp_path / "j"), 2),
    ):
        capsys.readouterr()
        assert run([str(word) for word in words]) == code, words
        error = capsys.readouterr().err
        assert error.startswith("ext4lite: ")
        assert error.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["i", "text"]


def test_names_that_are_no_files_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = tmp_path / "i"
    assert run(["mkfs", "--size", "4M", "-q", str(image)]) == 0
    for words in (
        ("inspect", ""),
        ("clone", "", tmp_path / "j"),
        ("clone", image, ""),
        ("clone", image, f"{tmp_path}/new/"),
        ("mkfs", ""),
        ("mkfs", f"{tmp_path}/new/"),
    ):
        assert run([str(word) for word in words]) == 6, words
        error = capsys.readouterr().err
        assert "empty path" in error or "name of a directory" in error
    assert run(["inspect", f"{tmp_path}/a\nb\x1b[31m"]) == 6
    assert capsys.readouterr().err == f"ext4lite: {tmp_path}/a b\\x1b[31m: no such file or directory\n"
    assert [p.name for p in tmp_path.iterdir()] == ["i"]


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("--help >/dev/full", 6),
        ("mkfs --help >/dev/full", 6),
        ("inspect i >/dev/full", 6),
        ("manifest i >/dev/full", 6),
        ("mkfs --help >&-", 0),
        ("inspect i >&-", 0),
        ("inspect i <&-", 0),
        ("inspect none 2>&-", 6),
        ("mkfs -f --size 4M new <&- >&- 2>&-", 0),
    ],
)
def test_standard_streams_that_are_full_or_closed(tmp_path: Path, command: str, code: int) -> None:
    build_sample(tmp_path / "i")
    done = subprocess.run(
        ["sh", "-c", f'"$0" -m ext4lite {command}', sys.executable],
        capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
    )  # fmt: skip
    error = "ext4lite: output: no space left on device\n" if "/dev/full" in command else ""
    assert (done.returncode, done.stderr) == (code, error)


def test_help_into_a_pipe_that_nobody_reads(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    for words in (["--help"], ["mkfs", "--help"], ["--version"]):
        done = subprocess.run(
            [sys.executable, "-m", "ext4lite", *words], stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (0, b"")
    os.close(writer)


def test_a_symlink_as_target_stays(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    for name, target in (("link", "disk/a"), ("new", "disk/b"), ("loop", "loop"), ("lost", "none/a")):
        (tmp_path / name).symlink_to(target)
    image = tmp_path / "i"
    assert run(["mkfs", "--size", "4M", "-q", str(image)]) == 0
    assert run(["clone", "--reflink=never", str(image), str(tmp_path / "link")]) == 0
    assert run(["clone", str(image), str(tmp_path / "link")]) == 6
    assert run(["clone", "--reflink=never", "-f", str(image), str(tmp_path / "link")]) == 0
    assert run(["mkfs", "--size", "4M", "-q", str(tmp_path / "new")]) == 0
    assert run(["mkfs", "--size", "4M", "-q", str(tmp_path / "loop")]) == 6
    assert run(["clone", str(image), str(tmp_path / "lost")]) == 6
    assert all((tmp_path / name).is_symlink() for name in ("link", "new", "loop", "lost"))
    assert (tmp_path / "disk/a").read_bytes() == image.read_bytes()
    assert sorted(p.name for p in (tmp_path / "disk").iterdir()) == ["a", "b"]


def test_errors_of_the_process_itself(tmp_path: Path) -> None:
    done = call("inspect", tmp_path / "none")
    assert done.returncode == 6
    assert done.stderr == f"ext4lite: {tmp_path / 'none'}: no such file or directory\n"


def test_mkfs_fills_an_empty_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``truncate -s 32M image; ext4lite mkfs image`` works as with mke2fs; a file with data needs --force."""
    image = tmp_path / "i"
    image.touch()
    os.truncate(image, 32 << 20)
    assert run(["mkfs", str(image)]) == 0
    assert "32.0 MiB" in capsys.readouterr().out
    assert run(["mkfs", str(image)]) == 6
    assert run(["mkfs", "--force", "--size", "8M", str(image)]) == 0
    assert image.stat().st_size == 8 << 20


def test_mkfs_is_reproducible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    for name in ("a", "b"):
        words = ["mkfs", "--size", "32M", "--uuid", "12345678-1234-5678-1234-567812345678", "--label", "x"]
        assert run([*words, str(tmp_path / name)]) == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    for wrong in ("yesterday", "²", "-1", "9" * 5000, "15032385536"):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", wrong)
        assert run(["mkfs", "--size", "32M", str(tmp_path / "c")]) == 2
        assert run(["mkgolden", "--image", "none", str(tmp_path / "c")]) == 2
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "15032385535")
    assert run(["mkfs", "--size", "32M", str(tmp_path / "c")]) == 0


def test_manifest_and_inspect_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = tmp_path / "i"
    build_sample(image, many=50)
    assert run(["manifest", str(image)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [e["path"] for e in lines] == sorted(e["path"] for e in lines)
    by_path = {e["path"]: e for e in lines}
    assert "/lost+found" not in by_path
    assert by_path["/etc/hostname"] == {
        "path": "/etc/hostname",
        "type": "file",
        "mode": 0o4755,
        "uid": 70_000,
        "gid": 80_000,
        "nlink": 2,
        "mtime_ns": -5_000_000_001,
        "size": 4,
        "sha256": "9d8f48dbb150f0403fe850ddeace30e2844a311d05e9bd232c7a0e99388773d1",
    }
    assert by_path["/wide"]["rdev"] == [300, 70_000]
    assert by_path["/opaque"]["xattrs"] == {"trusted.overlay.opaque": "eQ=="}
    assert run(["inspect", "--json", str(image)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["block_size"] == 4096
    assert report["state"] == "clean"
    assert report["journal"]["state"] == "clean"
    assert "metadata_csum" in report["features"]
    assert report["fragmentation"]["max"] == 400
    assert report["usage"]["kinds"]["symlink"] == 6
    assert report["images"] == []
    assert run(["inspect", str(image)]) == 0
    assert "64.0 MiB" in capsys.readouterr().out


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    image = tmp_path / "i"
    build_sample(image)
    child = subprocess.Popen(
        [sys.executable, "-m", "ext4lite", "manifest", str(image)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.readline()
    child.stdout.close()
    error = child.stderr.read()
    child.stderr.close()
    assert (child.wait(), error) == (0, b"")


def _has_open(pid: int, directory: Path) -> bool:
    """Tell whether a process has a file in a directory open, named or not."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(link.readlink()).startswith(f"{directory}/"):
                return True
    return False


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_signals_leave_nothing(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """A 15 TiB volume has 122,880 descriptors to make: time enough to be interrupted."""
    child = subprocess.Popen(
        [sys.executable, "-m", "ext4lite", "mkfs", "--size", "15T", str(tmp_path / "i")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 30
    while not _has_open(child.pid, tmp_path) and time.monotonic() < until:
        time.sleep(0.01)
    child.send_signal(number)
    _, error = child.communicate(timeout=30)
    assert child.returncode == code
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_a_volume_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["mkfs", "--size", "4M", "-q", "--label", "\x1b[31mred\x07\n", str(tmp_path / "i")]) == 0
    assert run(["inspect", str(tmp_path / "i")]) == 0
    out = capsys.readouterr().out
    assert "\\x1b[31mred\\x07" in out
    assert "\x1b" not in out
