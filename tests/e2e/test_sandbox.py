"""gvx.Sandbox in Python, by an ordinary user in a process of his own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
from e2e.conftest import User, wait_for

from gvx.residue import running

pytestmark = [pytest.mark.sentry, pytest.mark.images, pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(120)]

HEAD = """
import os, signal, subprocess, sys, threading, time
from pathlib import Path
from gvx import *
from gvx.errors import *
from gvx.logs import BoundedLog
def gone(box):  # by pid: others of this uid may run episodes beside the tests
    pids = [box.pid, *(event.data["pid"] for event in box.events if "pid" in event.data)]
    return not any(Path("/proc", str(pid)).exists() for pid in pids)
def sh(script, **more):
    return Config(image="docker:dind", entrypoint="", command=("sh", "-c", script), network="none", **more)
"""


def check(user: User, code: str) -> None:
    done = user.python(HEAD + code)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stdout + done.stderr


def test_times_and_pipes(user: User) -> None:
    code = """
with Sandbox(sh("read line; echo got $line; exit 4"), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as box:
    started = box.wait_started(30)
    assert 0 < started.t_ns - box.exec_ns < 30e9 and started.t_ns < time.monotonic_ns()
    assert box.poll() is None
    box.stdin.write(b"it\\n"); box.stdin.close()
    assert box.stdout.read() == b"got it\\n"
    assert box.wait(30) == ExitStatus(4) == box.wait() == box.poll()
    assert [e.name for e in box.events] == ["supervisor", "started", "exit"], box.events
print("fine")
"""
    check(user, code)


def test_stop_kill_and_close_may_be_repeated(user: User) -> None:
    code = """
box = Sandbox(sh("trap 'exit 5' TERM; while :; do sleep 0.05; done"))
for call in (box.wait, box.stop, box.kill, box.poll):
    try: call()
    except InfraError: pass
    else: raise AssertionError("it was not started")
box.start(); assert box.start() is box
box.wait_started(30); time.sleep(0.5)
assert box.stop() == ExitStatus(5) == box.stop() == box.kill()
box.send_signal(signal.SIGTERM)
box.close(); box.close()
try: Sandbox.start(box)
except InfraError: pass
else: raise AssertionError("it was closed")
with Sandbox(sh("sleep 1000")) as box:
    box.wait_started(30)
    assert not gone(box)
    assert box.kill() == ExitStatus(137, 9)
    assert gone(box)
with Sandbox(sh("sleep 1000")) as box: pass
assert gone(box)
print("fine")
"""
    check(user, code)


def test_timeouts_leave_the_episode_running(user: User) -> None:
    code = """
with Sandbox(sh("sleep 1000")) as box:
    box.wait_started(30)
    try: box.wait(0.2)
    except SandboxTimeout as error: assert "did not end within 0.2 s" in str(error)
    assert box.poll() is None
    ended = []
    thread = threading.Thread(target=lambda: ended.append(box.wait())); thread.start()
    time.sleep(0.1); box.kill(); thread.join(10)
    assert ended == [ExitStatus(137, 9)]
print("fine")
"""
    check(user, code)


def test_failures_are_typed_and_leave_nothing(user: User) -> None:
    code = """
def fails(kind, config):
    box = Sandbox(config, stderr=subprocess.DEVNULL)
    try:
        with box: box.wait_started(30)
    except GvxError as error: assert type(error) is kind, repr(error)
    else: raise AssertionError(kind)
    assert gone(box)
fails(CommandNotFound, Config(image="docker:dind", entrypoint="no-such"))
fails(CommandNotExecutable, Config(image="docker:dind", entrypoint="/etc/passwd"))
fails(ImageError, Config(image="no-such"))
fails(VolumeError, sh("true", mounts=(Mount("volume", "/v", Path("/no/such")),)))
fails(ConfigError, sh("true", user="nobody-here"))
fails(InfraError, Config(image="docker:dind", publish=(Publish(80, path=Path("/no/such/dir/socket")),)))
try:
    with Sandbox(sh("sleep 1000")) as box:
        box.wait_started(30)
        raise ZeroDivisionError
except ZeroDivisionError: pass
assert gone(box)
print("fine")
"""
    check(user, code)


def test_output_into_a_bounded_log(user: User) -> None:
    code = """
log = BoundedLog(Path("log"), 100_000)
with Sandbox(sh("seq 100000; echo problem >&2"), stdout=log, stderr=log) as box:
    assert box.wait(60) == ExitStatus(0)
log.close()
text = log.text()
assert text.endswith("99999\\n100000\\nproblem\\n") and 50_000 <= len(text) <= 100_000, (len(text), text[-100:])
for path in Path().glob("log*"): path.unlink()
print("fine")
"""
    check(user, code)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_program_takes_its_sandbox_along(user: User, nothing_left: Callable[[], None], end: signal.Signals) -> None:
    code = "box = Sandbox(sh('echo ready; sleep 1000')); box.start(); box.wait()"
    process = user.popen(user.ordinary.python, "-c", HEAD + code)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(end)
    process.communicate(timeout=20)
    wait_for(lambda: not running(user.sentry), 10)
    nothing_left()


def test_what_was_left_by_both_being_killed_is_swept_up(user: User) -> None:
    code = "box = Sandbox(sh('sleep 1000')); box.start(); box.wait_started(30); print(box.pid, box.id, flush=True)"
    process = user.popen(user.ordinary.python, "-c", HEAD + code + "; time.sleep(1000)")
    assert process.stdout is not None
    pid, name = process.stdout.readline().split()
    left = user.runtime / name.decode()
    assert left.is_dir()
    process.send_signal(signal.SIGSTOP)  # so that it cannot clean up in between
    os.kill(int(pid), signal.SIGKILL)
    process.kill()
    process.communicate(timeout=20)
    wait_for(lambda: not running(user.sentry), 10)
    assert left.is_dir()
    os.utime(left, (time.time() - 3600,) * 2)
    assert user.sh("true").returncode == 0
    assert not left.exists()
