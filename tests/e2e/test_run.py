"""gvx-launch run: exit codes, stdio, settings, signals, and that nothing is left, by an ordinary user."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e.conftest import User, descendants, wait_for

from fixtures import image_path
from gvx.residue import running

pytestmark = [pytest.mark.sentry, pytest.mark.images, pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(180)]


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 7", 7), ("exit 125", 125), ("kill -KILL $$", 137), ("kill -TERM $$", 143), ("false", 1)],
)
def test_the_exit_code_is_the_guests(user: User, script: str, code: int) -> None:
    done = user.sh(script)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        (["no-such-command"], 127, "no-such-command"),
        (["/no/such/file"], 127, "no such file"),
        (["/etc/passwd"], 126, "permission denied"),
        (["/etc"], 126, "/etc"),
    ],
)
def test_commands_that_cannot_run(user: User, command: list[str], code: int, message: str) -> None:
    done = user.launch("run", "--entrypoint", "", "docker:dind", *command)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "words", [["no-such:image"], ["-u", "nobody-here", "docker:dind"], ["--mount", "src=/no,dst=/v", "docker:dind"]]
)
def test_gvx_own_errors_are_125_and_one_line(user: User, words: list[str]) -> None:
    done = user.launch("run", *words)
    assert (done.returncode, done.stdout) == (125, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("gvx-launch: ")


def test_stdin_stdout_and_stderr(user: User) -> None:
    done = user.sh("cat; echo problem >&2", input=b"hello\n")
    assert (done.stdout, done.stderr) == ("hello\n", "problem\n")


def test_big_output_and_input_arrive_whole(user: User) -> None:
    data = os.urandom(1 << 20) * 24
    there = user.sh("sha256sum", input=data)
    assert there.stdout.split()[0] == hashlib.sha256(data).hexdigest()
    back = user.sh("head -c 25000000 /dev/zero | tr '\\0' x")
    assert (len(back.stdout), set(back.stdout)) == (25_000_000, {"x"})


def test_a_log_shared_with_others_is_not_overwritten(user: User, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as file:
        file.write("before\n")
        file.flush()
        user.start(
            "run", "--entrypoint", "", "docker:dind", "sh", "-c", "echo one; echo two >&2", stdout=file, stderr=file
        ).wait(60)
        os.write(file.fileno(), b"after\n")
    assert log.read_text().splitlines() == ["before", "one", "two", "after"]


def test_our_pipe_stays_blocking(user: User) -> None:
    reader, writer = os.pipe()
    user.start("run", "--entrypoint", "", "docker:dind", "echo", "x", stdout=writer).wait(60)
    assert not fcntl.fcntl(writer, fcntl.F_GETFL) & os.O_NONBLOCK
    os.close(writer)
    with open(reader) as file:
        assert file.read() == "x\n"


def test_a_reader_that_goes_away_ends_the_guest(user: User) -> None:
    process = user.start("run", "--entrypoint", "", "docker:dind", "yes")
    assert process.stdout is not None
    assert process.stdout.read(2) == b"y\n"
    process.stdout.close()
    assert process.wait(30) in (1, 141)  # yes says why and ends with 1, where SIGPIPE is ignored
    assert process.stderr is not None
    process.stderr.close()


def test_everything_after_the_image_is_the_guests(user: User) -> None:
    done = user.launch("run", "--entrypoint", "echo", "docker:dind", "--tls=false", "-p", "x", "--", "--help")
    assert done.stdout == "--tls=false -p x -- --help\n"


def test_settings_reach_the_guest(user: User) -> None:
    done = user.sh(
        "echo $A; echo $DOCKER_VERSION; pwd; hostname; nproc; id -u; id -g; awk '/MemTotal/{print $2}' /proc/meminfo",
        *("-e", "A=b c", "-w", "/made/for/this", "--hostname", "box", "--cpus", "1", "-m", "512m", "-u", "daemon"),
    )
    assert done.stdout.splitlines() == ["b c", "20.10.24", "/made/for/this", "box", "1", "1", "1", str(512 << 10)], (
        done.stderr
    )


def test_the_root_is_writable_and_private(user: User) -> None:
    assert user.sh("echo x > /etc/made && cat /etc/made && touch /usr/bin/x").stdout == "x\n"
    assert user.sh("cat /etc/made").returncode == 1


def test_a_timeout_asks_first(user: User) -> None:
    started = time.monotonic()
    done = user.sh("trap 'echo bye; exit 3' TERM; while :; do sleep 0.1; done", "--timeout", "1")
    assert (done.returncode, done.stdout) == (124, "bye\n")
    assert "ended after 1 s" in done.stderr
    assert time.monotonic() - started < 9


def test_a_timeout_ends_who_does_not_listen(user: User) -> None:
    started = time.monotonic()
    assert (
        user.sh("trap '' TERM; while :; do sleep 0.1; done", "--timeout", "1", "--stop-timeout", "1").returncode == 124
    )
    assert 2 <= time.monotonic() - started < 9


@pytest.mark.parametrize("seconds", ["0", "0.02"])
def test_a_timeout_before_the_guest_runs(user: User, seconds: str) -> None:
    done = user.sh("exec sleep 100", "--timeout", seconds)
    assert (done.returncode, len(done.stderr.splitlines())) == (124, 1), done.stderr


@pytest.mark.parametrize("seconds", ["nan", "inf"])
def test_a_timeout_is_a_number(user: User, seconds: str) -> None:
    done = user.sh("true", "--timeout", seconds)
    assert (done.returncode, done.stderr) == (125, f"gvx-launch: {seconds} is no number of seconds\n")


def test_a_very_long_timeout(user: User) -> None:
    assert user.sh("exit 3", "--timeout", "1e9").returncode == 3


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "WINCH"])
def test_signals_are_forwarded(user: User, name: str) -> None:
    script = f"trap 'echo got {name}; exit 9' {name}; echo ready; while :; do sleep 0.05; done"
    process = user.start("run", "--entrypoint", "", "docker:dind", "sh", "-c", script)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.Signals[f"SIG{name}"])
    stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout, stderr) == (9, f"got {name}\n".encode(), b"")


def test_the_second_interrupt_kills(user: User) -> None:
    process = user.start(
        "run",
        "--entrypoint",
        "",
        "docker:dind",
        "sh",
        "-c",
        "trap '' INT TERM; echo ready; while :; do sleep 0.05; done",
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 137


def start_published(user: User, name: str) -> tuple[subprocess.Popen[bytes], Path]:
    path = user.home / f"{name}.sock"
    process = user.start(
        "run", "-p", f"unix:{path}:80", "--entrypoint", "", "docker:dind", "sh", "-c", "echo ready; sleep 1000"
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    assert path.is_socket()
    assert path.stat().st_mode & 0o777 == 0o600
    return process, path


def test_a_killed_launcher_leaves_nothing(user: User, nothing_left: Callable[[], None]) -> None:
    process, path = start_published(user, "launcher")
    process.kill()
    process.communicate(timeout=10)
    wait_for(lambda: not path.exists() and not running(user.sentry), 10)
    nothing_left()


def test_a_killed_supervisor_leaves_nothing(user: User, nothing_left: Callable[[], None]) -> None:
    process, path = start_published(user, "supervisor")
    os.kill(descendants(process.pid)[0], signal.SIGKILL)
    _, stderr = process.communicate(timeout=10)
    assert process.returncode == 125
    assert b"killed by SIGKILL" in stderr
    assert not path.exists()
    nothing_left()


def test_a_killed_sentry_leaves_nothing(user: User, nothing_left: Callable[[], None]) -> None:
    process, path = start_published(user, "sentry")
    os.kill(descendants(process.pid)[1], signal.SIGKILL)
    _, stderr = process.communicate(timeout=10)
    assert (process.returncode, stderr) == (125, b"gvx-sentry: the Sentry died with signal 9 (killed)\n")
    assert not path.exists()
    nothing_left()


def test_without_a_network_there_is_only_lo(user: User) -> None:
    assert user.sh("ls /sys/class/net 2>/dev/null || ip -br link | cut -d' ' -f1", "--net", "none").stdout.split() == [
        "lo"
    ]


def test_eth0_is_as_promised(user: User) -> None:
    done = user.sh("ip -4 -br address show eth0; ip route")
    assert "10.0.2.15/24" in done.stdout
    assert "default via 10.0.2.2" in done.stdout


SERVER = (
    "import http.server as s\n"
    "class H(s.BaseHTTPRequestHandler):\n"
    "    def do_GET(self):\n"
    "        self.send_response(200); self.end_headers(); self.wfile.write(b'guest')\n"
    "    def log_message(self, *a): pass\n"
    "v = s.HTTPServer(('0.0.0.0', 80), H); print('ready', flush=True); v.serve_forever()\n"
)


def get(connection: socket.socket) -> bytes:
    connection.settimeout(10)
    connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
    answer = b""
    while part := connection.recv(65536):
        answer += part
    return answer.rpartition(b"\r\n\r\n")[2]


def test_published_ports_reach_the_guest(user: User) -> None:
    path = user.home / "web.sock"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = user.start(
        *(
            "run",
            "-p",
            f"unix:{path}:80",
            "-p",
            f"{port}:80",
            "--entrypoint",
            "",
            "docker:dind",
            "python3",
            "-c",
            SERVER,
        )
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    for family, address in ((socket.AF_UNIX, str(path)), (socket.AF_INET, ("127.0.0.1", port))):
        with socket.socket(family) as connection:
            connection.connect(address)
            assert get(connection) == b"guest"
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 143


def test_a_taken_address_is_an_error_and_is_left_alone(user: User) -> None:
    path = user.home / "taken.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        path.chmod(0o777)
        done = user.sh("true", "-p", f"unix:{path}:80")
        assert done.returncode == 125
        assert "in use" in done.stderr
        assert path.exists()
    path.unlink()


def test_nat_reaches_what_is_allowed_and_nothing_else_here(user: User) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        threading.Thread(target=_answer_once, args=(server,), daemon=True).start()
        code = f"import socket; s = socket.create_connection(('10.0.2.2', {port}), 5); print(s.recv(99).decode())"
        words = ("--entrypoint", "", "docker:dind", "python3", "-c", code)
        refused = user.launch("run", *words)
        assert (refused.returncode, refused.stdout) == (1, "")
        allowed = user.launch("run", "--net-allow", f"127.0.0.1:{port}", *words)
        assert allowed.stdout == "host\n", allowed.stderr


def _answer_once(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        connection.sendall(b"host")


RESTARTED = """
import ctypes, os, signal, sys, threading, time
call = ctypes.CDLL(None, use_errno=True).open
os.mkfifo("/tmp/fifo")
signal.signal(signal.SIGURG, lambda *_: None)
for restarts in True, False:
    signal.siginterrupt(signal.SIGURG, not restarts)
    if not os.fork():
        time.sleep(0.3); os.kill(os.getppid(), signal.SIGURG); time.sleep(0.3)
        os.close(os.open("/tmp/fifo", os.O_RDONLY | (0 if restarts else os.O_NONBLOCK))); os._exit(0)
    fd = call(b"/tmp/fifo", os.O_WRONLY)
    print("open" if fd >= 0 else os.strerror(ctypes.get_errno()))
"""


def test_an_open_that_waits_goes_on_after_a_signal(user: User) -> None:
    # As on Linux: Go programs get SIGURG at any moment, and runc's init waits in such an open for its start.
    done = user.launch("run", "--entrypoint", "", "docker:dind", "python3", "-c", RESTARTED)
    assert done.stdout.splitlines() == ["open", "Interrupted system call"], done.stderr


def test_an_image_by_path_and_by_digest(user: User) -> None:
    listed = user.launch("images", "ls", "--json")
    assert "docker:dind" in listed.stdout
    table = user.launch("images", "ls")
    digest = table.stdout.splitlines()[1].split()[0]
    assert user.launch("run", "--entrypoint", "", digest, "echo", "by digest").stdout == "by digest\n"


def test_images_in_every_form_are_one(user: User) -> None:
    cache = user.home / "other-cache"
    user.extra["XDG_CACHE_HOME"] = str(cache)
    try:
        layout = str(image_path("python", "oci-zstd"))
        done = user.launch("run", layout, "python", "-c", "print(6*7)", timeout=120)
        assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr
        forms = [str(image_path("python", form)) for form in ("oci-gzip", "docker")]
        imported = user.launch("images", "import", "--json", *forms, timeout=120)
        assert imported.returncode == 0, imported.stderr
        images = [json.loads(line) for line in imported.stdout.splitlines()]
        assert len({image["digest"] for image in images}) == 1
        assert "python:3.11-slim" in images[0]["names"]
        assert len(user.launch("images", "ls", "--json").stdout.splitlines()) == 1
        assert user.launch("images", "rm", "python:3.11-slim").returncode == 0
        assert user.launch("images", "ls", "--json").stdout == ""
        assert user.launch("run", "python:3.11-slim", "true").returncode == 125
        assert user.launch("images", "rm", "python:3.11-slim").returncode == 125
    finally:
        del user.extra["XDG_CACHE_HOME"]
        shutil.rmtree(cache)
