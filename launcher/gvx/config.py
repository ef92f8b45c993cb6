"""What an episode is made of: plain dataclasses, and parsers for the docker-like flags that fill them.

Names, units and defaults are those of ``docker run`` where the same thing exists there (docs/launcher.md: differences).
"""

from __future__ import annotations

import csv
import os
import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from gvx.errors import ConfigError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([bkmgtp]?)(?:i?b)?", re.IGNORECASE)
_UNITS = {"": 0, "b": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_HOSTNAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9.-]{0,62}")
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,63}")
_SUN_PATH = 107
"""Bytes that fit in sockaddr_un.sun_path beside the closing NUL (unix(7))."""
MIN_MEMORY = 64 << 20
"""Below this the guest kernel itself has no room to work in."""

NetworkMode = Literal["nat", "none"]
Durability = Literal["process", "host"]
"""What a guest's fsync survives: a killed episode, or the loss of the host, too."""


@dataclass(slots=True, frozen=True)
class Resources:
    """What the guest sees: ``memory_bytes`` of RAM (None: gvx-sentry's default, 4 GiB), ``cpus`` (None: the host's)."""

    memory_bytes: int | None = None
    cpus: int | None = None


@dataclass(slots=True, frozen=True)
class Mount:
    """A volume (``source``: an ext4 image) or an empty tmpfs (``size_bytes`` 0: no limit) at ``destination``.

    ``durability`` is a volume's: with "process" what the guest has fsynced survives whatever happens to the episode,
    with "host" the loss of the host as well, at the price of its fdatasync.
    """

    kind: Literal["volume", "tmpfs"]
    destination: str
    source: Path | None = None
    readonly: bool = False
    size_bytes: int = 0
    durability: Durability = "process"


@dataclass(slots=True, frozen=True)
class Publish:
    """A guest's TCP port made reachable from the host: at ``path`` (a unix socket), or else at ``address``:``port``."""

    guest_port: int
    path: Path | None = None
    address: str = "127.0.0.1"
    port: int = 0


@dataclass(slots=True, frozen=True, kw_only=True)
class Config:
    """One episode. ``image`` is an archive, an OCI layout or a name in the cache; None means what the image says.

    ``command`` are docker's ARGS; ``entrypoint`` "" resets the image's; ``env`` is laid over the image's; ``user`` is
    ``name|uid[:group|gid]``; ``allow`` are destinations beyond the public Internet that the guest may reach, each
    ``CIDR[:port]`` or ``name:port``.
    """

    image: str
    command: tuple[str, ...] = ()
    entrypoint: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    user: str | None = None
    hostname: str | None = None
    name: str | None = None
    resources: Resources = Resources()
    mounts: tuple[Mount, ...] = ()
    publish: tuple[Publish, ...] = ()
    network: NetworkMode = "nat"
    allow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what no episode can have.

        Raises:
            ConfigError: naming the setting.
        """
        if not self.image:
            raise ConfigError("no image given")
        if self.network not in ("nat", "none"):
            raise ConfigError(f"unknown network mode {self.network!r}", hint="nat or none")
        if self.publish and self.network == "none":
            raise ConfigError("a port cannot be published without a network", hint="drop -p or --net none")
        if self.allow and self.network == "none":
            raise ConfigError("nothing can be reached without a network", hint="drop --net-allow or --net none")
        if self.hostname is not None and not _HOSTNAME.fullmatch(self.hostname):
            raise ConfigError(f"{self.hostname!r} is no host name", hint="1 to 63 letters, digits, '.' and '-'")
        if self.name is not None and not _NAME.fullmatch(self.name):
            raise ConfigError(f"{self.name!r} is no name", hint="1 to 64 letters, digits, '_', '.' and '-'")
        if self.workdir is not None and not self.workdir.startswith("/"):
            raise ConfigError(f"the working directory {self.workdir!r} is not absolute")
        for word in (*self.command, self.entrypoint or "", *self.env, *self.env.values()):
            if "\0" in word:
                raise ConfigError("arguments and environment cannot hold NUL bytes")
        _refuse_twice((mount.destination for mount in self.mounts), "mount point")
        _refuse_twice((str(mount.source) for mount in self.mounts if mount.source), "volume")
        _refuse_twice((str(port.path) for port in self.publish if port.path), "published socket")


def _refuse_twice(values: Iterable[str], what: str) -> None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise ConfigError(f"the {what} {value} is given twice")
        seen.add(value)


def parse_size(text: str) -> int:
    """Turn docker's ``4g``, ``512m``, ``1.5GiB``, ``4096`` into bytes: units are powers of 1024, no unit means bytes.

    Raises:
        ConfigError: for anything else.
    """
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise ConfigError(f"{text!r} is no size", hint="like 512m or 4g")
    return int(float(found[1]) * 1024 ** _UNITS[found[2].lower()])


def parse_memory(text: str) -> int:
    """Turn ``--memory`` into bytes, as :func:`parse_size`, and refuse what no guest can start in."""
    size = parse_size(text)
    if size < MIN_MEMORY:
        raise ConfigError(f"{text!r} is too little memory for a guest", hint=f"at least {MIN_MEMORY >> 20}m")
    return size


def parse_cpus(text: str) -> int:
    """Turn ``--cpus`` into a number of CPUs.

    The guest's kernel has whole CPUs. A fraction is refused, rather than rounded to something that was not asked for.
    """
    try:
        cpus = float(text)
    except ValueError:
        cpus = 0.0
    if cpus < 1 or not cpus.is_integer():
        raise ConfigError(f"{text!r} is no number of CPUs", hint="a whole number, at least 1")
    return int(cpus)


def parse_env(words: Iterable[str], host: Mapping[str, str] | None = None) -> dict[str, str]:
    """Turn ``-e`` words into a dict: ``K=V``, or ``K`` for the host's value (left out where the host has none).

    Args:
        words: as given, a later one wins.
        host: where ``K`` alone is looked up; the process's environment by default.
    """
    host = os.environ if host is None else host
    env: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not key:
            raise ConfigError(f"{word!r} sets no variable", hint="-e NAME=VALUE")
        if equals:
            env[key] = value
        elif key in host:
            env[key] = host[key]
    return env


def parse_mount(text: str) -> Mount:
    """Turn ``type=volume,src=EP.ext4,dst=DIR[,readonly]`` or ``type=tmpfs,dst=DIR[,tmpfs-size=64m]`` into a Mount.

    Docker's own syntax: one line of CSV (so a value with a comma is quoted), keys ``type``, ``source|src``,
    ``destination|dst|target``, ``readonly|ro[=true|false]``. The type is ``volume`` when left out. ``durability`` is
    ours.
    """
    kind, source, destination, readonly, size = "volume", "", "", False, 0
    durability: str | None = None
    for part in next(csv.reader([text], strict=True), []):
        key, equals, value = part.partition("=")
        match key.lower():
            case "type":
                kind = value
            case "source" | "src":
                source = value
            case "destination" | "dst" | "target":
                destination = value
            case "readonly" | "ro":
                readonly = _parse_bool(value if equals else "true", text)
            case "tmpfs-size":
                size = parse_size(value)
            case "durability":
                durability = value
            case _:
                raise ConfigError(f"unknown key {key!r}", where=f"--mount {text}")
    if not destination.startswith("/"):
        raise ConfigError("dst= must be an absolute path in the guest", where=f"--mount {text}")
    destination = posixpath.normpath(destination)
    if destination in ("/", "//"):
        raise ConfigError("nothing can be mounted over the guest's root", where=f"--mount {text}")
    if kind == "tmpfs":
        if source:
            raise ConfigError("a tmpfs has no src=", where=f"--mount {text}")
        if durability is not None:
            raise ConfigError("a tmpfs has no durability=", where=f"--mount {text}")
        return Mount("tmpfs", destination, readonly=readonly, size_bytes=size)
    if kind != "volume":
        raise ConfigError(f"unknown type {kind!r}", where=f"--mount {text}", hint="volume or tmpfs")
    if not source:
        raise ConfigError("src= must name an ext4 image", where=f"--mount {text}", hint="make one with ext4lite clone")
    return Mount(
        "volume",
        destination,
        source=Path(source).absolute(),
        readonly=readonly,
        durability=_parse_durability("process" if durability is None else durability, text),
    )


def _parse_durability(text: str, where: str) -> Durability:
    for known in get_args(Durability):
        if text == known:
            return known  # type: ignore[no-any-return]
    raise ConfigError(f"unknown durability {text!r}", where=f"--mount {where}", hint="process or host")


def _parse_bool(text: str, where: str) -> bool:
    if text.lower() in ("true", "1"):
        return True
    if text.lower() in ("false", "0"):
        return False
    raise ConfigError(f"{text!r} is neither true nor false", where=f"--mount {where}")


def parse_publish(text: str) -> Publish:
    """Turn ``-p unix:SOCK:PORT`` or docker's ``[[IP:]HOSTPORT:]PORT[/tcp]`` into a Publish.

    Unlike docker, a port without an address is published on 127.0.0.1 only: what listens in an episode is an agent's.
    """
    front, _, last = text.rpartition(":")
    if text.startswith("unix:"):
        path = front.removeprefix("unix:") if front != "unix" else ""
        if not path:
            raise ConfigError(f"{text!r} publishes nothing", hint="-p unix:SOCKET:PORT")
        socket = Path(path).absolute()
        if len(os.fsencode(socket)) > _SUN_PATH:
            raise ConfigError(f"a unix socket's path has at most {_SUN_PATH} bytes", where=str(socket))
        return Publish(_parse_port(last, text), path=socket)
    guest_port = _parse_port(last.removesuffix("/tcp"), text)
    if not front:
        return Publish(guest_port)
    address, _, host_port = front.rpartition(":")
    address = address.removeprefix("[").removesuffix("]")
    return Publish(guest_port, address=address or "127.0.0.1", port=_parse_port(host_port or "0", text, lowest=0))


def _parse_port(text: str, where: str, lowest: int = 1) -> int:
    if not text.isascii() or not text.isdigit() or not lowest <= int(text) <= 65535:
        raise ConfigError(f"{text!r} is no TCP port", where=f"-p {where}")
    return int(text)
