"""From a :class:`Config` and an image's configuration to the document that ``gvx-sentry run`` reads (docs/episode.md).

The rules for entrypoint, command, environment, user and working directory are docker's: ``merge`` in
moby/daemon/commit.go, ``CreateDaemonEnvironment`` in moby/daemon/container/env.go, and moby/sys/user's GetExecUser.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gvx.config import Config, Publish
from gvx.errors import ConfigError

SCHEMA = "gvx.episode/1"
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MAX_ID = 2**31 - 1
"""Docker's own highest uid and gid (moby/sys/user: maxID)."""


@dataclass(slots=True, frozen=True)
class User:
    """Who runs the guest's first process: numbers only, as the kernel wants them."""

    uid: int = 0
    gid: int = 0
    additional_gids: tuple[int, ...] = ()


@dataclass(slots=True, frozen=True)
class ImageConfig:
    """What an image says about its containers (the ``config`` object of an OCI image configuration).

    ``passwd`` and ``group`` are the image's own /etc/passwd and /etc/group, "" where it has none.
    """

    digest: str
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    user: str = ""
    workdir: str = ""
    stop_signal: str = "SIGTERM"
    passwd: str = ""
    group: str = ""

    @classmethod
    def from_json(cls, digest: str, document: Mapping[str, Any], *, passwd: str = "", group: str = "") -> ImageConfig:
        """Read an OCI image configuration: absent and null mean the same there."""
        config: Mapping[str, Any] = document.get("config") or {}
        return cls(
            digest=digest,
            entrypoint=tuple(config.get("Entrypoint") or ()),
            cmd=tuple(config.get("Cmd") or ()),
            env=tuple(config.get("Env") or ()),
            user=config.get("User") or "",
            workdir=config.get("WorkingDir") or "",
            stop_signal=config.get("StopSignal") or "SIGTERM",
            passwd=passwd,
            group=group,
        )


@dataclass(slots=True)
class Descriptors:
    """The numbers under which the supervisor finds what it is handed: see docs/episode.md.

    ``volumes`` are in the order of the config's volume mounts; ``bases`` are the backing files of those that are
    deltas, by the volume's descriptor.
    """

    rootfs: int
    lifeline: int
    events: int
    volumes: Sequence[int] = field(default_factory=tuple)
    bases: Mapping[int, int] = field(default_factory=dict)


def build_spec(config: Config, image: ImageConfig, fds: Descriptors, *, id: str, runtime_dir: str) -> dict[str, Any]:
    """Make the episode document.

    Args:
        config: what the user wants.
        image: what the image says.
        fds: descriptors that the supervisor inherits.
        id: the episode's id, also its default hostname.
        runtime_dir: a private directory (0700) for the supervisor's sockets.

    Raises:
        ConfigError: no command, or a user that the image does not know.
    """
    hostname = config.hostname or id
    volumes = iter(fds.volumes)
    mounts: list[dict[str, Any]] = []
    for mount in config.mounts:
        if mount.kind == "volume":
            fd = next(volumes)
            volume: dict[str, Any] = {
                "kind": "volume",
                "fd": fd,
                "destination": mount.destination,
                "readonly": mount.readonly,
                "durability": mount.durability,
            }
            if fd in fds.bases:
                volume["base_fd"] = fds.bases[fd]
            mounts.append(volume)
        else:
            mounts.append(
                {
                    "kind": "tmpfs",
                    "destination": mount.destination,
                    "readonly": mount.readonly,
                    "size_bytes": mount.size_bytes,
                }
            )
    user = resolve_user(config.user or image.user, image.passwd, image.group)
    resources: dict[str, int] = {}
    if config.resources.memory_bytes is not None:
        resources["memory_bytes"] = config.resources.memory_bytes
    if config.resources.cpus is not None:
        resources["cpus"] = config.resources.cpus
    return {
        "schema": SCHEMA,
        "id": id,
        "rootfs": {"fd": fds.rootfs},
        "process": {
            "args": process_args(config, image),
            "env": process_env(config.env, image.env, hostname),
            "cwd": config.workdir or image.workdir or "/",
            "user": {"uid": user.uid, "gid": user.gid, "additional_gids": list(user.additional_gids)},
            "terminal": False,
        },
        "hostname": hostname,
        "resources": resources,
        "mounts": mounts,
        "network": {
            "mode": config.network,
            "publish": [_publish(port) for port in config.publish],
            "allow": list(config.allow),
        },
        "lifeline_fd": fds.lifeline,
        "events_fd": fds.events,
        "runtime_dir": runtime_dir,
        "stop_grace_ms": 0,  # when a guest has had time enough is decided here, not by the supervisor
    }


def encode_spec(spec: Mapping[str, Any]) -> bytes:
    """Serialise a document.

    Raises:
        ConfigError: for text that is no UTF-8, since JSON cannot carry it.
    """
    try:
        return json.dumps(spec, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise ConfigError("arguments and environment must be UTF-8") from error


def process_args(config: Config, image: ImageConfig) -> list[str]:
    """Entrypoint and command by docker's rules.

    The image's command counts only when the user gives neither a command nor an entrypoint; an entrypoint of "" resets
    the image's.
    """
    if config.entrypoint is None:
        args = [*image.entrypoint, *(config.command or image.cmd)]
    else:
        args = [*([config.entrypoint] if config.entrypoint else []), *config.command]
    if not args:
        raise ConfigError("no command given, and the image has none")
    return args


def process_env(given: Mapping[str, str], image: Sequence[str], hostname: str) -> list[str]:
    """Docker's environment: a PATH, HOSTNAME, then the image's, then the user's; a later value replaces an earlier one.

    HOME comes from the guest's /etc/passwd and is added by the Sentry where nobody set it.
    """
    env = {"PATH": DEFAULT_PATH, "HOSTNAME": hostname}
    for word in image:
        key, _, value = word.partition("=")
        if key:
            env[key] = value
    env |= given
    return [f"{key}={value}" for key, value in env.items()]


def resolve_user(text: str, passwd: str, group: str) -> User:
    """Turn ``name|uid[:group|gid]`` into numbers by the image's own /etc/passwd and /etc/group.

    As docker does it: a number need not be listed; without a group, the user's own and supplementary groups count; with
    one, only that.

    Raises:
        ConfigError: a name that the image does not know.
    """
    name, colon, group_name = text.partition(":")
    uid, gid, known_as = 0, 0, name
    entries = [fields for fields in (line.split(":") for line in passwd.splitlines()) if len(fields) >= 4]
    wanted = name or "0"
    for fields in entries:
        if fields[0] == wanted or (wanted.isdigit() and fields[2] == wanted):
            known_as, uid, gid = fields[0], _id(fields[2], text), _id(fields[3], text)
            break
    else:
        if not wanted.isdigit():
            raise ConfigError(f"unable to find user {name}: no matching entries in the image's passwd file")
        uid, known_as = _id(wanted, text), ""
    groups = [fields for fields in (line.split(":") for line in group.splitlines()) if len(fields) >= 3]
    if colon and group_name:
        for fields in groups:
            if fields[0] == group_name or (group_name.isdigit() and fields[2] == group_name):
                return User(uid, _id(fields[2], text))
        if not group_name.isdigit():
            raise ConfigError(f"unable to find group {group_name}: no matching entries in the image's group file")
        return User(uid, _id(group_name, text))
    members = (fields for fields in groups if len(fields) >= 4 and known_as and known_as in fields[3].split(","))
    return User(uid, gid, tuple(dict.fromkeys(_id(fields[2], text) for fields in members)))


def _id(text: str, where: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > _MAX_ID:
        raise ConfigError(f"uid and gid must be in 0-{_MAX_ID}", where=f"user {where!r}")
    return int(text)


def _publish(port: Publish) -> dict[str, Any]:
    host: dict[str, Any] = {"kind": "tcp", "address": port.address, "port": port.port}
    if port.path is not None:
        host = {"kind": "unix", "path": str(port.path)}
    return {"host": host, "guest_port": port.guest_port}
