"""gvx.config: docker-like flags into dataclasses."""

from __future__ import annotations

from pathlib import Path

import pytest

from gvx.config import (
    Config,
    Mount,
    Publish,
    parse_cpus,
    parse_env,
    parse_memory,
    parse_mount,
    parse_publish,
    parse_size,
)
from gvx.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("1b", 1),
        ("4k", 4096),
        ("512m", 512 << 20),
        ("4g", 4 << 30),
        ("4G", 4 << 30),
        ("4GiB", 4 << 30),
        ("4gb", 4 << 30),
        ("1.5g", 3 << 29),
        ("2t", 2 << 40),
        ("0", 0),
    ],
)
def test_sizes_are_dockers(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "g", "-1g", "4x", "4 g g", "1e3", "0x10", "١g", "4g,"])
def test_what_is_no_size_is_refused(text: str) -> None:
    if text == "١g":  # a digit of another script is a digit to int(), and a fine one
        assert parse_size(text) == 1 << 30
        return
    with pytest.raises(ConfigError, match="no size"):
        parse_size(text)


def test_memory_has_a_floor() -> None:
    assert parse_memory("64m") == 64 << 20
    with pytest.raises(ConfigError, match="too little"):
        parse_memory("63m")


def test_cpus_are_whole() -> None:
    assert [parse_cpus("2"), parse_cpus("1.0")] == [2, 1]
    for text in ("0", "-1", "1.5", "two", "", "nan"):
        with pytest.raises(ConfigError, match="no number of CPUs"):
            parse_cpus(text)


def test_environment_words() -> None:
    host = {"HOME": "/h", "EMPTY": ""}
    assert parse_env(["A=1", "B=x=y", "C=", "HOME", "EMPTY", "ABSENT", "A=2"], host) == {
        "A": "2",
        "B": "x=y",
        "C": "",
        "HOME": "/h",
        "EMPTY": "",
    }
    with pytest.raises(ConfigError):
        parse_env(["=x"], host)


@pytest.mark.parametrize(
    ("text", "mount"),
    [
        ("type=volume,src=/a.ext4,dst=/v", Mount("volume", "/v", Path("/a.ext4"))),
        ("source=/a.ext4,target=/v/", Mount("volume", "/v", Path("/a.ext4"))),
        ("type=volume,src=/a.ext4,destination=/v,readonly", Mount("volume", "/v", Path("/a.ext4"), readonly=True)),
        ("type=volume,src=/a.ext4,dst=/v,ro=true", Mount("volume", "/v", Path("/a.ext4"), readonly=True)),
        ("type=volume,src=/a.ext4,dst=/v,readonly=false", Mount("volume", "/v", Path("/a.ext4"))),
        ("src=/a.ext4,dst=/v,durability=host", Mount("volume", "/v", Path("/a.ext4"), durability="host")),
        ("src=/a.ext4,dst=/v,durability=process", Mount("volume", "/v", Path("/a.ext4"))),
        ('type=volume,"src=/a,b.ext4",dst=/v', Mount("volume", "/v", Path("/a,b.ext4"))),
        ("type=tmpfs,dst=/t,tmpfs-size=64m", Mount("tmpfs", "/t", size_bytes=64 << 20)),
    ],
)
def test_mounts(text: str, mount: Mount) -> None:
    assert parse_mount(text) == mount


def test_a_relative_volume_is_found_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_mount("src=ep.ext4,dst=/v").source == tmp_path / "ep.ext4"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "type=volume,src=/a",
        "type=volume,dst=/v",
        "type=volume,src=/a,dst=v",
        "type=volume,src=/a,dst=/",
        "type=bind,src=/,dst=/v",
        "type=tmpfs,src=/a,dst=/v",
        "src=/a,dst=/v,colour=red",
        "src=/a,dst=/v,ro=maybe",
        "src=/a,dst=/v,durability=disk",
        "src=/a,dst=/v,durability",
        "type=tmpfs,dst=/v,durability=host",
        "src=/a,dst=/v/../..",
    ],
)
def test_what_is_no_mount_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_mount(text)


@pytest.mark.parametrize(
    ("text", "port"),
    [
        ("unix:/run/d.sock:2375", Publish(2375, path=Path("/run/d.sock"))),
        ("unix:/run/a:b.sock:2375", Publish(2375, path=Path("/run/a:b.sock"))),
        ("80", Publish(80)),
        ("8080:80", Publish(80, port=8080)),
        ("8080:80/tcp", Publish(80, port=8080)),
        ("0.0.0.0:8080:80", Publish(80, address="0.0.0.0", port=8080)),
        ("127.0.0.1::80", Publish(80)),
        ("[::1]:8080:80", Publish(80, address="::1", port=8080)),
    ],
)
def test_published_ports(text: str, port: Publish) -> None:
    assert parse_publish(text) == port


@pytest.mark.parametrize(
    "text", ["", "unix:2375", "unix::2375", "unix:/s:", "x", "8080:x", "0", "70000", "80/udp", f"unix:/{'a' * 107}:1"]
)
def test_what_publishes_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_publish(text)


def test_a_config_refuses_contradictions() -> None:
    volume = Mount("volume", "/v", Path("/a"))
    with pytest.raises(ConfigError, match="without a network"):
        Config(image="i", publish=(Publish(80),), network="none")
    with pytest.raises(ConfigError, match="mount point /v is given twice"):
        Config(image="i", mounts=(volume, Mount("tmpfs", "/v")))
    with pytest.raises(ConfigError, match="volume /a is given twice"):
        Config(image="i", mounts=(volume, Mount("volume", "/w", Path("/a"))))
    with pytest.raises(ConfigError, match="host name"):
        Config(image="i", hostname="under_score")
    with pytest.raises(ConfigError, match="not absolute"):
        Config(image="i", workdir="src")
    with pytest.raises(ConfigError, match="NUL"):
        Config(image="i", command=("a\0b",))
    with pytest.raises(ConfigError, match="no image"):
        Config(image="")
