"""What an episode could leave on the host: processes, mounts, sockets, files. Taken before and after, and compared.

Used by the demo and the tests; an ordinary user sees his own things, root sees everything.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gvx.runtime import base_dir

_TMP = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))
_OURS = re.compile(r"gvx-(\d+|demo-.*)")
"""Names in :data:`_TMP` that the launcher and the demo use."""
_NAMES = ("gvx-sentry", "gvx-boot", "exe")
"""What gvx-sentry's processes are called; "exe" is one that was started through /proc/self/exe just now."""
_TCP_LISTEN = "0A"
"""State of a listening socket in /proc/net/tcp (include/net/tcp_states.h)."""


@dataclass(slots=True, frozen=True)
class HostState:
    """Everything at one moment, each as one line that a person can read."""

    processes: frozenset[str]
    mounts: frozenset[str]
    sockets: frozenset[str]
    files: frozenset[str]

    @classmethod
    def take(cls, binary: Path, trees: Iterable[Path] = ()) -> HostState:
        """Look around.

        Args:
            binary: the gvx-sentry whose processes count, whoever started them.
            trees: directories whose whole content counts, beside what the launcher and the demo make in /tmp.
        """
        trees = [*trees, base_dir()]
        return cls(
            frozenset(_processes(binary.resolve())),
            frozenset(Path("/proc/self/mountinfo").read_text().splitlines()),
            frozenset(_sockets(trees)),
            frozenset(_files(trees)),
        )

    def new_in(self, later: HostState) -> list[str]:
        """Return what is in ``later`` and was not here, as ``kind: line``."""
        kinds = ("processes", "mounts", "sockets", "files")
        return [f"{kind}: {line}" for kind in kinds for line in sorted(getattr(later, kind) - getattr(self, kind))]


def left_behind(before: HostState, look: Callable[[], HostState], patience: float = 5.0) -> list[str]:
    """Compare until nothing new is left, or ``patience`` seconds are over (other people's things come and go)."""
    deadline = time.monotonic() + patience
    while (left := before.new_in(look())) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def running(binary: Path) -> list[str]:
    """Return the processes that run ``binary``, those that nobody waited for yet included."""
    return list(_processes(binary.resolve()))


def _processes(binary: Path) -> Iterator[str]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # pid (comm) state ppid …: the name may hold blanks and brackets (proc(5)).
            head, _, tail = (entry / "stat").read_text().rpartition(")")
            name, fields = head.partition("(")[2], tail.split()
            try:
                ours = str((entry / "exe").readlink()).removesuffix(" (deleted)") == str(binary)
            except PermissionError:  # not dumpable: go by the name
                ours = name in _NAMES
            except FileNotFoundError:  # a zombie has no executable any more
                ours = fields[0] == "Z" and name in _NAMES
            if ours:
                yield f"{entry.name} {name}, started at {fields[19]}"


def _sockets(trees: list[Path]) -> Iterator[str]:
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        path = line.split(maxsplit=7)[7:]
        if path and any(path[0].startswith(f"{tree}/") for tree in trees):
            yield f"unix {path[0]}"
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _TCP_LISTEN and os.getuid() in (0, int(fields[7])):
                    yield f"{table} {fields[1]}, uid {fields[7]}"


def _files(trees: list[Path]) -> Iterator[str]:
    for directory in _TMP:
        with contextlib.suppress(OSError):
            yield from (str(path) for path in directory.iterdir() if _OURS.fullmatch(path.name))
    for tree in trees:
        for parent, directories, names in os.walk(tree):
            yield from (os.path.join(parent, name) for name in (*directories, *names))  # noqa: PTH118 (many thousands)
