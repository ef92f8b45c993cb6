"""One episode in the foreground: :class:`Sandbox` starts ``gvx-sentry``, waits for it, and leaves nothing behind.

Python → supervisor → Sentry. What ties them together is the lifeline, a pipe whose write end only this process holds:
however it ends, the supervisor reads EOF, removes its sockets, kills the Sentry and exits. (PDEATHSIG would fire when
the *thread* that started the supervisor ends.)
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import socket
import stat
import subprocess
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from gvx.config import Config, Mount
from gvx.errors import CommandNotExecutable, CommandNotFound, GvxError, InfraError, SandboxTimeout, VolumeError
from gvx.events import Event, EventReader
from gvx.images import CachedImage, ImageCache, sentry_binary
from gvx.runtime import RuntimeDir
from gvx.spec import Descriptors, build_spec, encode_spec
from gvx.stdio import Relays

if TYPE_CHECKING:
    from ext4lite.blockdev import GuestVolume

STOP_TIMEOUT = 10.0
"""Seconds between the stop signal and SIGKILL, as in ``docker stop``."""
_KILL_TIMEOUT = 2.0
"""Seconds that a supervisor has to clean up after its lifeline was cut, before it is killed itself."""
_FORCEFUL = 3
"""So many SIGTERMs make the supervisor kill the guest from inside, with volumes closed cleanly (docs/episode.md)."""
_LISTEN_TIMEOUT = 5.0
"""Seconds that a supervisor may take until it listens to signals."""
_CLOSE_TIMEOUT = 10.0
"""Seconds for a killed guest's volumes to be written and closed."""
FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH")
"""Signals that a supervisor hands on to the guest's first process."""
_LONGEST_POLL_MS = 1 << 30
"""poll(2) takes 24 days at most."""
_NOT_FOUND = ("no such file or directory", "error finding executable")
_NOT_EXECUTABLE = ("permission denied", "exec format error", "is a directory", "not a directory")
"""What the guest's kernel says of a command that cannot be started. Docker tells 126 and 127 apart by such words, too
(setExitCodeFromError in moby/daemon/start.go)."""


class HasFileno(Protocol):
    """A file, a pipe, a log: anything with a descriptor."""

    def fileno(self) -> int:
        """Return the descriptor."""
        ...


Stdio = int | HasFileno | None
"""As in subprocess: None is our own, or a descriptor, PIPE or DEVNULL (negative), or an object with fileno()."""


@dataclass(slots=True, frozen=True)
class ExitStatus:
    """How the guest's first process ended: ``code`` as a shell says it (128+n for signal n), ``signal`` n or None."""

    code: int
    signal: int | None = None


class Sandbox:
    """An episode. Use it as a context manager, or call :meth:`close`; both may be done any number of times.

    >>> with Sandbox(Config(image="docker:dind", command=("sh", "-c", "exit 3"))) as box:  # doctest: +SKIP
    ...     box.wait().code
    3

    Attributes:
        config: as given.
        id: twelve hex digits, unique on this host, unless the config names it.
        stdin, stdout, stderr: our ends of the pipes, where PIPE was asked for.
    """

    def __init__(
        self,
        config: Config,
        *,
        cache: ImageCache | None = None,
        stdin: Stdio = None,
        stdout: Stdio = None,
        stderr: Stdio = None,
    ) -> None:
        """Only remember; nothing is opened before :meth:`start`."""
        self.config, self.id = config, config.name or secrets.token_hex(6)
        self._cache = cache or ImageCache.default()
        self._stdio = (stdin, stdout, stderr)
        self._lock = threading.RLock()
        self._relays = Relays()
        self._cleanup = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self._events: EventReader | None = None
        self._pidfd = self._lifeline = -1
        self._outcome: ExitStatus | GvxError | None = None
        self._closed = self._killed = False
        self._exec_ns = 0
        self._stop_signal = signal.SIGTERM

    def start(self) -> Self:
        """Start the supervisor. Returns as soon as it was executed: :meth:`wait_started` waits for the guest.

        Raises:
            ConfigError, ImageError, VolumeError, InfraError: nothing is left then.
        """
        with self._lock:
            if self._closed:
                raise InfraError("this sandbox is closed")
            if self._process is None:
                try:
                    self._start()
                except BaseException:
                    self.close()
                    raise
        return self

    def _start(self) -> None:
        image = self._cache.resolve(self.config.image)
        binary = sentry_binary()
        self._stop_signal = _stop_signal(image.config.stop_signal)
        with ExitStack() as handed_over:  # what the supervisor has copies of, once it is started
            rootfs = _own(handed_over, _open_root(image))
            opened = [_open_volume(self._cleanup, mount) for mount in self.config.mounts if mount.kind == "volume"]
            volumes = [volume.fd for volume in opened]
            bases = {volume.fd: volume.base_fd for volume in opened if volume.base_fd >= 0}
            lifeline_reader, self._lifeline = os.pipe()
            _own(handed_over, lifeline_reader)
            self._cleanup.callback(self._cut_lifeline)
            events, events_writer = os.pipe()
            _own(handed_over, events_writer)
            self._events = EventReader(events)
            runtime = RuntimeDir(self.id)
            self._cleanup.callback(runtime.remove)
            fds = Descriptors(rootfs, lifeline_reader, events_writer, volumes, bases)
            spec = build_spec(self.config, image.config, fds, id=self.id, runtime_dir=str(runtime.path))
            spec_fd = _own(handed_over, os.memfd_create("gvx-episode", os.MFD_CLOEXEC))
            with open(spec_fd, "wb", closefd=False) as file:
                file.write(encode_spec(spec))
            os.lseek(spec_fd, 0, os.SEEK_SET)
            stdin, stdout, stderr = self._child_stdio()
            self._exec_ns = time.monotonic_ns()
            try:
                # A session of its own: Ctrl-C reaches us alone, and is forwarded.
                self._process = subprocess.Popen(
                    [str(binary), "run", "--spec-fd", str(spec_fd)],
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    pass_fds=(spec_fd, rootfs, lifeline_reader, events_writer, *volumes, *bases.values()),
                    start_new_session=True,
                    cwd="/",
                )
            except OSError as error:
                raise InfraError(f"cannot start: {error.strerror}", where=str(binary)) from error
            self._relays.handed_over()
            self._pidfd = os.pidfd_open(self._process.pid)
            self._cleanup.callback(self._close_pidfd)
            self.stdin, self.stdout, self.stderr = self._process.stdin, self._process.stdout, self._process.stderr

    @property
    def pid(self) -> int | None:
        """The supervisor's process id; None before :meth:`start`."""
        return self._process.pid if self._process else None

    @property
    def exec_ns(self) -> int:
        """When the supervisor was executed, on CLOCK_MONOTONIC in ns; 0 before :meth:`start`."""
        return self._exec_ns

    @property
    def events(self) -> list[Event]:
        """What the supervisor told so far."""
        return self._events.all() if self._events else []

    def wait_started(self, timeout: float | None = None) -> Event:
        """Wait until the guest's first process runs. Returns the event that says so.

        Raises:
            SandboxTimeout: it does not within ``timeout`` seconds.
            GvxError: it never will: the reason.
        """
        events, _ = self._running()
        event = events.wait("started", timeout)
        if event is not None:
            return event
        if self._poll(0.0 if timeout is not None else None) or events.join(0):
            self.wait(_KILL_TIMEOUT)
            raise InfraError("the episode ended before its first process ran")
        raise SandboxTimeout(f"the guest did not start within {timeout:g} s", where=self.id)

    def wait(self, timeout: float | None = None) -> ExitStatus:
        """Wait until the episode has ended and everything of it is gone.

        Raises:
            SandboxTimeout: it still runs after ``timeout`` seconds (and goes on running).
            GvxError: gvx failed; the guest's own end is an ExitStatus, whatever it is.
        """
        self._running()
        if self._outcome is None and not self._poll(timeout):
            raise SandboxTimeout(f"the episode did not end within {timeout:g} s", where=self.id)
        outcome = self._finish()
        if isinstance(outcome, GvxError):
            raise outcome
        return outcome

    def poll(self) -> ExitStatus | None:
        """Return the exit status, or None while the episode runs."""
        try:
            return self.wait(0)
        except SandboxTimeout:
            return None

    def send_signal(self, number: int) -> None:
        """Send one of :data:`FORWARDED` to the guest's first process. Nothing happens once it has ended.

        Before the guest runs, the signal waits for it. Until the supervisor listens, a matter of milliseconds, we wait:
        the signal would end the supervisor itself.
        """
        events, _ = self._running()
        events.wait("supervisor", _LISTEN_TIMEOUT)
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, number)

    def stop(self, timeout: float = STOP_TIMEOUT) -> ExitStatus:
        """Ask the guest to end (by the image's stop signal), and kill it after ``timeout`` seconds.

        Volumes are closed cleanly either way, unless the Sentry itself hangs and :meth:`kill` has to end it.
        """
        self.send_signal(self._stop_signal)
        try:
            return self.wait(timeout)
        except SandboxTimeout:
            for _ in range(_FORCEFUL):
                self.send_signal(signal.SIGTERM)
                time.sleep(0.001)  # two equal signals that are both pending would be one
        try:
            return self.wait(_CLOSE_TIMEOUT)
        except SandboxTimeout:
            return self.kill()

    def kill(self) -> ExitStatus:
        """End the episode at once, as a power failure would: volumes are not unmounted. Returns when all is gone."""
        _, process = self._running()
        with self._lock:
            if self._outcome is None and not self._poll(0):
                self._killed = True
                with contextlib.suppress(BrokenPipeError):
                    os.write(self._lifeline, b"k")  # says that it is meant, and no accident to report
                self._cut_lifeline()
                if not self._poll(_KILL_TIMEOUT):
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
            return self.wait()

    def close(self) -> None:
        """End the episode if it runs, and free everything. Never fails on the episode's account."""
        with self._lock:
            self._closed = True
            if self._process is not None and self._outcome is None:
                with contextlib.suppress(GvxError):
                    self.kill()
            self._release()

    def __enter__(self) -> Self:
        """Start."""
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close, without a chance for the guest to end by itself: :meth:`stop` or :meth:`wait` before does that."""
        self.close()

    def _running(self) -> tuple[EventReader, subprocess.Popen[bytes]]:
        if self._events is None or self._process is None:
            raise InfraError("this sandbox was not started")
        return self._events, self._process

    def _poll(self, timeout: float | None) -> bool:
        """Wait for the supervisor's end. Unlike Popen.wait, it neither sleeps nor reaps."""
        with self._lock:
            if self._outcome is not None:
                return True
            pidfd = os.dup(self._pidfd)  # another thread may close ours meanwhile
        try:
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            if timeout is None:
                return bool(poller.poll())
            deadline = time.monotonic() + timeout
            while True:
                left = max(deadline - time.monotonic(), 0) * 1000
                if poller.poll(min(left, _LONGEST_POLL_MS)):
                    return True
                if left <= _LONGEST_POLL_MS:
                    return False
        finally:
            os.close(pidfd)

    def _finish(self) -> ExitStatus | GvxError:
        """Reap the supervisor, learn how the guest ended, free everything."""
        with self._lock:
            if self._outcome is None:
                events, process = self._running()
                code = process.wait()
                events.join(_KILL_TIMEOUT)
                self._outcome = self._judge(events, code)
                self._relays.finish(_KILL_TIMEOUT if self._killed else None)
                self._release()
            return self._outcome

    def _child_stdio(self) -> tuple[int, int, int]:
        """Make the child's stdin, stdout and stderr; see gvx.stdio for why ours are not given away."""
        stdin, stdout, stderr = (
            number if given is None else given if isinstance(given, int) else given.fileno()
            for number, given in enumerate(self._stdio)
        )
        return (
            stdin if stdin < 0 else self._relays.input(stdin),
            stdout if stdout < 0 else self._relays.output(stdout),
            stderr if stderr < 0 else self._relays.output(stderr),
        )

    def _cut_lifeline(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def _close_pidfd(self) -> None:
        os.close(self._pidfd)
        self._pidfd = -1

    def _judge(self, events: EventReader, code: int) -> ExitStatus | GvxError:
        ended = events.first("exit")
        if ended is not None:
            number = ended.data.get("signal") or None
            told = ended.data.get("code")
            return ExitStatus(128 + number if number else int(code if told is None else told), number)
        if self._killed:
            return ExitStatus(128 + signal.SIGKILL, signal.SIGKILL)
        failed = events.first("error")
        if failed is not None:
            return _failure(str(failed.data.get("kind")), str(failed.data.get("message", "failed")))
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return InfraError(
            f"gvx-sentry ended without a word about the guest ({how})", where=self.id, reported=code == 125
        )

    def _release(self) -> None:
        with self._lock:
            self._relays.finish(_KILL_TIMEOUT)
            self._cleanup.close()
            for port in self.config.publish:
                if port.path is not None:
                    _remove_dead_socket(port.path)


def _failure(kind: str, message: str) -> GvxError:
    """Make the error that a supervisor's ``error`` event stands for."""
    if kind == "volume":
        return VolumeError(message, reported=True)
    if kind == "start" and any(words in message for words in _NOT_FOUND):
        return CommandNotFound(message, reported=True)
    if kind == "start" and any(words in message for words in _NOT_EXECUTABLE):
        return CommandNotExecutable(message, reported=True)
    return InfraError(message, reported=True)


def _own(stack: ExitStack, fd: int) -> int:
    stack.callback(os.close, fd)
    return fd


def _open_root(image: CachedImage) -> int:
    try:
        return os.open(image.root, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise InfraError(f"cannot open the image: {error.strerror}", where=str(image.root)) from error


def _stop_signal(name: str) -> signal.Signals:
    """Read an image's StopSignal, a name or a number; what a supervisor cannot hand on becomes SIGTERM."""
    for candidate in FORWARDED:
        number = signal.Signals[candidate]
        if name.upper() in (candidate, candidate.removeprefix("SIG"), str(number.value)):
            return number
    return signal.SIGTERM


def _open_volume(cleanup: ExitStack, mount: Mount) -> GuestVolume:
    """Open, lock and check a volume; it stays ours until the cleanup.

    Raises:
        VolumeError: in use, not clean, damaged, or not there.
    """
    from ext4lite import blockdev
    from ext4lite.errors import Ext4LiteError

    path = mount.source or Path()
    try:
        opened = blockdev.open_for_guest(path, mount.readonly)
    except Ext4LiteError as error:
        raise VolumeError(error.what, where=error.where or str(path), hint=error.hint) from error
    cleanup.callback(opened.close)
    return opened


def _remove_dead_socket(path: Path) -> None:
    """Remove a published socket that nobody listens on any more: a killed supervisor could not do it."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(0.1)
            probe.connect(os.fspath(path))
    except ConnectionRefusedError:
        with contextlib.suppress(OSError):
            path.unlink()
    except OSError:
        return
