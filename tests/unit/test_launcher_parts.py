"""The launcher's parts that need no runtime: events, logs, runtime directories, the image cache, lazy imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gvx import runtime
from gvx.errors import CommandNotFound, ConfigError, GvxError, ImageError, InfraError, SandboxTimeout
from gvx.events import EventReader, parse_event
from gvx.images import ImageCache, familiar
from gvx.logs import BoundedLog
from gvx.runtime import RuntimeDir

DIGEST = "ab" * 32


def test_errors_are_one_line_and_know_their_exit_code() -> None:
    assert str(ImageError("bad", where="a.tar", hint="try b")) == "a.tar: bad (try b)"
    codes = [kind.exit_code for kind in (GvxError, ConfigError, InfraError, SandboxTimeout, CommandNotFound)]
    assert codes == [125, 125, 125, 124, 127]


def test_events_come_in_order_until_the_pipe_closes() -> None:
    reader, writer = os.pipe()
    events = EventReader(reader)
    os.write(writer, b'{"event":"supervisor","t_ns":5}\nnot json\n[1]\n{"event":"exit",')
    assert events.wait("exit", 0.05) is None
    os.write(writer, b'"code":3}\n')
    ended = events.wait("exit", 5)
    assert ended is not None
    assert ended.data == {"code": 3}
    assert [event.name for event in events.all()] == ["supervisor", "exit"]
    assert not events.join(0)
    os.close(writer)
    assert events.join(5)
    assert events.wait("started") is None  # without a timeout, too: nobody is left to say it


def test_a_line_that_is_no_event() -> None:
    assert parse_event(b"{}") is None
    assert parse_event(b'{"event": 1}') is None
    assert parse_event(b"\xff") is None
    event = parse_event(b'{"event": "x", "t_ns": 7, "a": 1}')
    assert event is not None
    assert (event.name, event.t_ns, event.data) == ("x", 7, {"a": 1})


def test_a_log_stays_bounded_and_keeps_the_end(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "log", limit=1000)
    subprocess.run([sys.executable, "-c", "for i in range(2000): print(i)"], stdout=log.fileno(), check=True)
    log.close(10)
    log.close()
    kept = log.text().split()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1000
    assert kept[-1] == "1999"
    assert len(kept) >= 100


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "gvx"


def test_a_runtime_directory_is_private_and_goes_away(base: Path) -> None:
    first, second = RuntimeDir("one"), RuntimeDir("two")
    assert first.path == base / "one"
    assert first.path.stat().st_mode & 0o777 == base.stat().st_mode & 0o777 == 0o700
    (first.path / "control.sock").touch()
    first.remove()
    first.remove()
    assert base.is_dir()
    second.remove()
    assert not base.exists()


def test_an_id_in_use_is_refused(base: Path) -> None:
    box = RuntimeDir("one")
    with pytest.raises(InfraError):
        RuntimeDir("one")
    assert box.path.is_dir()
    box.remove()


def test_what_dead_episodes_left_is_swept_up(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = RuntimeDir("live")
    (base / "dead" / "sub").mkdir(parents=True)
    (base / "young").mkdir()
    for name in ("dead", "live"):
        os.utime(base / name, (time.time() - 3600, time.time() - 3600))
    other = RuntimeDir("other")
    assert sorted(path.name for path in base.iterdir()) == ["live", "other", "young"]
    for box in (live, other):
        box.remove()


def test_a_base_that_is_open_to_others_is_refused(base: Path) -> None:
    base.mkdir(mode=0o755)
    with pytest.raises(InfraError, match="0700"):
        RuntimeDir("one")
    base.rmdir()
    base.symlink_to("/tmp")
    with pytest.raises(InfraError, match="0700"):
        RuntimeDir("one")


def test_without_a_session_directory_it_is_in_tmp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert runtime.base_dir() == Path(f"/tmp/gvx-{os.getuid()}")


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("docker:dind", "docker:dind"),
        ("docker.io/library/docker:dind", "docker:dind"),
        ("docker", "docker:latest"),
        ("host:5000/a/b", "host:5000/a/b:latest"),
        ("a@sha256:00", "a@sha256:00"),
    ],
)
def test_names_are_shown_as_docker_does(name: str, short: str) -> None:
    assert familiar(name) == short


@pytest.fixture
def cache(tmp_path: Path) -> ImageCache:
    home = tmp_path / "images" / DIGEST
    home.mkdir(parents=True)
    (home / "root.erofs").touch()
    (home / "config.json").write_text(json.dumps({"config": {"Cmd": ["sh"]}}))
    (tmp_path / "images" / "names.json").write_text(json.dumps({"docker:dind": DIGEST}))
    return ImageCache(tmp_path / "images")


@pytest.mark.parametrize(
    "reference", ["docker:dind", "docker.io/library/docker:dind", DIGEST, DIGEST[:12], f"sha256:{DIGEST}"]
)
def test_cached_images_are_found(cache: ImageCache, reference: str) -> None:
    image = cache.resolve(reference)
    assert (image.digest, image.config.cmd) == (DIGEST, ("sh",))
    assert image.root.name == "root.erofs"


@pytest.mark.parametrize("reference", ["docker", "./docker:dind", "abababababab0", "abab", "nothing.tar"])
def test_unknown_images_are_refused(cache: ImageCache, reference: str) -> None:
    with pytest.raises(ImageError, match="neither a name"):
        cache.resolve(reference)


def test_a_broken_cache_entry_is_said_to_be_one(cache: ImageCache) -> None:
    (cache.path / DIGEST / "root.erofs").unlink()
    with pytest.raises(ImageError, match="not usable"):
        cache.resolve("docker:dind")
    (cache.path / "names.json").write_text("{")
    with pytest.raises(ImageError, match=r"names\.json: unreadable"):
        cache.resolve("docker:dind")
    assert ImageCache(cache.path / "absent").names() == {}


def test_importing_gvx_imports_nothing_else() -> None:
    code = (
        "import sys, gvx; heavy = {'typer', 'rich', 'construct', 'subprocess', 'ext4lite'} & set(sys.modules); "
        "print(sorted(heavy)); gvx.Sandbox; print('typer' in sys.modules, 'construct' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, env=_pythonpath()
    )
    assert done.stdout.splitlines() == ["[]", "False False"]


def _pythonpath() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _launch(*words: str) -> subprocess.CompletedProcess[str]:
    code = "import gvx.cli; gvx.cli.main()"
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, env=_pythonpath(), timeout=60
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--no-such-option", "x"], "--no-such-option"),
        (["run"], "IMAGE"),
        (["run", "--cpus", "1.5", "x"], "gvx-launch: '1.5' is no number of CPUs"),
        (["run", "--net", "host", "x"], "gvx-launch: unknown network mode 'host'"),
        (["run", "./no-such-image", "--tls=false"], "gvx-launch: ./no-such-image: neither a name"),
    ],
)
def test_a_run_that_cannot_begin_ends_with_125(words: list[str], message: str) -> None:
    done = _launch(*words)
    assert (done.returncode, done.stdout) == (125, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_the_other_commands_answer_wrong_usage_with_2() -> None:
    assert _launch("images", "no-such").returncode == 2
    version = _launch("--version")
    assert (version.returncode, version.stdout.split()[0]) == (0, "gvx-launch")
