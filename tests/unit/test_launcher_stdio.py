"""gvx.stdio: what is copied between our standard streams and the guest's, and when it ends."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gvx.stdio import Relays


@pytest.fixture
def relays() -> Relays:
    return Relays()


def test_output_arrives_whole_and_in_order(relays: Relays, tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        log.write(b"before\n")
        log.flush()
        stdout, stderr = relays.output(log.fileno()), relays.output(log.fileno())
        assert stdout == stderr  # one file, one pipe: the order is kept
        code = "import sys; [(print(i, flush=True), print(-i, file=sys.stderr, flush=True)) for i in range(9)]"
        subprocess.run([sys.executable, "-c", code], stdout=stdout, stderr=stderr, check=True)
        relays.finish(10)
        os.write(log.fileno(), b"after\n")
    lines = [str(sign * number) for number in range(9) for sign in (1, -1)]
    assert (tmp_path / "log").read_text().split() == ["before", *lines, "after"]


def test_different_files_stay_apart(relays: Relays, tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        subprocess.run(
            ["sh", "-c", "echo 1; echo 2 >&2"],
            stdout=relays.output(out.fileno()),
            stderr=relays.output(err.fileno()),
            check=True,
        )
        relays.finish(10)
    assert ((tmp_path / "out").read_text(), (tmp_path / "err").read_text()) == ("1\n", "2\n")


def test_input_ends_where_ours_ends(relays: Relays, tmp_path: Path) -> None:
    data = os.urandom(1_000_000)
    (tmp_path / "in").write_bytes(data)
    with (tmp_path / "in").open("rb") as source:
        os.lseek(source.fileno(), 1000, os.SEEK_SET)
        child = subprocess.Popen(["cat"], stdin=relays.input(source.fileno()), stdout=subprocess.PIPE)
        relays.handed_over()
        assert child.communicate(timeout=20)[0] == data[1000:]
    relays.finish(10)


def test_a_guest_that_does_not_read_does_not_hold_us_up(relays: Relays) -> None:
    reader, writer = os.pipe()
    child = subprocess.Popen(["true"], stdin=relays.input(reader))
    relays.handed_over()
    os.write(writer, b"x" * 60_000)
    child.wait(10)
    started = time.monotonic()
    relays.finish(None)
    assert time.monotonic() - started < 5
    os.close(writer)
    os.close(reader)


def test_a_closed_reader_is_the_guests_broken_pipe(relays: Relays) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    code = "import os, sys, time\ntry:\n    while True: os.write(1, b'x' * 4096)\nexcept BrokenPipeError: sys.exit(9)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=relays.output(writer))
    relays.handed_over()
    assert child.wait(20) == 9
    relays.finish(10)
    os.close(writer)


BACKGROUND = """
import os, signal, sys, time
from gvx.stdio import Relays
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    os.setpgid(0, 0)  # a background job of this terminal
    relays = Relays(); relays.input(0)
    os.write(writer, b"!"); time.sleep(60)
os.read(reader, 1)
time.sleep(0.3)
print("line", sys.stdin.readline().strip())
time.sleep(0.5)
print("state", open(f"/proc/{child}/stat").read().rpartition(")")[2].split()[0])
os.kill(child, signal.SIGKILL)
"""


def test_a_background_job_neither_stops_nor_takes_what_is_typed() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        os.execv(sys.executable, [sys.executable, "-c", BACKGROUND])
    try:
        time.sleep(1)
        os.write(terminal, b"typed\n")
        shown = b""
        while b"state " not in shown or not shown.endswith(b"\n"):
            shown += os.read(terminal, 1000)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)
    assert b"line typed" in shown
    assert b"state S" in shown
