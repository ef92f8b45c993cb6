"""gvx.spec: docker's rules, and the document of docs/episode.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gvx.config import Config, Mount, Publish, Resources
from gvx.errors import ConfigError
from gvx.spec import (
    DEFAULT_PATH,
    Descriptors,
    ImageConfig,
    User,
    build_spec,
    encode_spec,
    process_args,
    process_env,
    resolve_user,
)

PASSWD = "root:x:0:0:root:/root:/bin/sh\nana:x:1000:1001::/home/ana:/bin/sh\n1000:x:77:78::/:\nbroken\n"
GROUP = "root:x:0:\nana:x:1001:\ndocker:x:999:bo,ana\nwheel:x:10:ana\n\n"


def image(
    entrypoint: str = "", cmd: str = "", env: tuple[str, ...] = (), user: str = "", workdir: str = ""
) -> ImageConfig:
    return ImageConfig(
        "d" * 64, tuple(entrypoint.split()), tuple(cmd.split()), env, user, workdir, passwd=PASSWD, group=GROUP
    )


@pytest.mark.parametrize(
    ("entrypoint", "command", "args"),
    [
        (None, "", "ep -x cmd 1"),
        (None, "sh", "ep -x sh"),
        ("new", "", "new"),  # the image's command belongs to the image's entrypoint
        ("new", "a b", "new a b"),
        ("", "a b", "a b"),
    ],
)
def test_entrypoint_and_command(entrypoint: str | None, command: str, args: str) -> None:
    config = Config(image="i", entrypoint=entrypoint, command=tuple(command.split()))
    assert process_args(config, image("ep -x", "cmd 1")) == args.split()


@pytest.mark.parametrize(("entrypoint", "of_image"), [(None, image()), ("", image("ep", "cmd"))])
def test_no_command_at_all(entrypoint: str | None, of_image: ImageConfig) -> None:
    with pytest.raises(ConfigError, match="no command"):
        process_args(Config(image="i", entrypoint=entrypoint), of_image)


def test_environment_in_dockers_order() -> None:
    assert process_env({}, (), "h") == [f"PATH={DEFAULT_PATH}", "HOSTNAME=h"]
    assert process_env({"A": "2", "HOSTNAME": "own"}, ("PATH=/bin", "A=1", "B=", "C"), "h") == [
        "PATH=/bin",
        "HOSTNAME=own",
        "A=2",
        "B=",
        "C=",
    ]


@pytest.mark.parametrize(
    ("text", "user"),
    [
        ("", User(0, 0, ())),
        ("root", User(0, 0, ())),
        ("ana", User(1000, 1001, (999, 10))),
        ("77", User(77, 78, ())),  # found by number, its name has no groups
        ("4242", User(4242, 0, ())),
        ("4242:4343", User(4242, 4343, ())),
        ("ana:wheel", User(1000, 10, ())),
        ("ana:10", User(1000, 10, ())),
        (":wheel", User(0, 10, ())),
    ],
)
def test_users_as_docker_finds_them(text: str, user: User) -> None:
    assert resolve_user(text, PASSWD, GROUP) == user


def test_without_a_passwd_root_is_root() -> None:
    assert resolve_user("", "", "") == User()
    assert resolve_user("0:0", "", "") == User()


@pytest.mark.parametrize("text", ["nobody-here", "ana:nogroup-here", "4294967296", "1:4294967296", "-1"])
def test_unknown_users_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        resolve_user(text, PASSWD, GROUP)


def test_image_configuration_with_nulls() -> None:
    document = json.loads(
        '{"config": {"Entrypoint": null, "Cmd": ["sh"], "Env": null, "User": "", "StopSignal": "SIGINT"}}'
    )
    found = ImageConfig.from_json("x", document)
    assert (found.entrypoint, found.cmd, found.env, found.stop_signal) == ((), ("sh",), (), "SIGINT")
    assert ImageConfig.from_json("x", {}).stop_signal == "SIGTERM"


def test_the_document() -> None:
    config = Config(
        image="i",
        command=("sh", "-c", "é"),
        resources=Resources(4 << 30, 2),
        mounts=(
            Mount("volume", "/v", Path("/a")),
            Mount("tmpfs", "/t", size_bytes=9),
            Mount("volume", "/w", Path("/b"), True, durability="host"),
        ),
        publish=(Publish(2375, path=Path("/s")), Publish(80, port=8080)),
    )
    spec = build_spec(
        config, image(user="ana", workdir="/src"), Descriptors(5, 7, 8, (6, 9)), id="abc", runtime_dir="/r"
    )
    assert json.loads(encode_spec(spec)) == {
        "schema": "gvx.episode/1",
        "id": "abc",
        "rootfs": {"fd": 5},
        "process": {
            "args": ["sh", "-c", "é"],
            "env": [f"PATH={DEFAULT_PATH}", "HOSTNAME=abc"],
            "cwd": "/src",
            "user": {"uid": 1000, "gid": 1001, "additional_gids": [999, 10]},
            "terminal": False,
        },
        "hostname": "abc",
        "resources": {"memory_bytes": 4 << 30, "cpus": 2},
        "mounts": [
            {"kind": "volume", "fd": 6, "destination": "/v", "readonly": False, "durability": "process"},
            {"kind": "tmpfs", "destination": "/t", "readonly": False, "size_bytes": 9},
            {"kind": "volume", "fd": 9, "destination": "/w", "readonly": True, "durability": "host"},
        ],
        "network": {
            "mode": "nat",
            "publish": [
                {"host": {"kind": "unix", "path": "/s"}, "guest_port": 2375},
                {"host": {"kind": "tcp", "address": "127.0.0.1", "port": 8080}, "guest_port": 80},
            ],
            "allow": [],
        },
        "lifeline_fd": 7,
        "events_fd": 8,
        "runtime_dir": "/r",
        "stop_grace_ms": 0,
    }


def test_text_that_json_cannot_carry_is_refused() -> None:
    with pytest.raises(ConfigError, match="UTF-8"):
        encode_spec({"args": [b"\xff".decode(errors="surrogateescape")]})
