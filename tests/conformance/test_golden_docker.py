"""A real dockerd judges golden volumes: it finds the images whole, and made the very same store of the same archives.

The volume, mounted by the kernel, is the daemon's data root. Image: the fixture ``python:3.11-slim``
(whiteouts, opaque directories, hard links, capabilities) and a small archive with the oddities of layers.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from conformance.host_docker import HostDocker
from ext4lite.golden import ImageArgument, make_golden
from fixtures import build
from support.kernel_manifest import manifest as kernel_manifest
from support.overlay_samples import MTIME, Entry, directory, docker_archive, hardlink, make_tar, symlink

pytestmark = [
    pytest.mark.root,
    pytest.mark.images,
    pytest.mark.skipif(HostDocker.missing() is not None, reason=HostDocker.missing() or ""),
]

STAMP = 1_750_000_000
PYTHON = "python:3.11-slim"
ODD = "odd:1"

# Only what dockerd accepts too: it refuses layers with a name twice.
ODD_LAYERS = (
    make_tar(
        directory("./", 0o700),
        directory("etc/", uid=3, gid=4, mtime=MTIME + 0.987654321),
        Entry("etc/passwd", b"root\n", mode=0o4755, mtime=MTIME + 0.5),
        symlink("etc/link", "passwd"),
        hardlink("etc/hard-symlink", "etc/link"),
        hardlink("etc/hard", "etc/passwd", mode=0o4755, mtime=MTIME + 0.5),
        hardlink("etc/changed", "etc/passwd", mode=0o600, uid=7, mtime=MTIME + 9),
        Entry("implicit/parents/file", b"x" * 5000),
        symlink("lib", "usr/lib"),
        directory("usr/"),
        directory("usr/lib/"),
        Entry("lib/through-a-link", b"there"),
        Entry("grün", b"utf-8"),
        Entry("n" * 255, b"long"),
        symlink("sixty", "t" * 60),
        Entry("null", kind=tarfile.CHRTYPE, device=(1, 3), mode=0o666),
        Entry("disk", kind=tarfile.BLKTYPE, device=(259, 70000), mode=0o660, gid=6),
        Entry("pipe", kind=tarfile.FIFOTYPE),
        Entry("later", b"", mtime=5_000_000_000),
        Entry("attributes", b"a", pax={"SCHILY.xattr.user.note": "hi", "SCHILY.xattr.com.apple.x": "dropped"}),
        directory("gone/"),
        Entry("gone/file", b"g"),
        directory("opaque/"),
        Entry("opaque/below", b"o"),
        Entry("/absolute", b"1"),
        directory("twice/", 0o700),
        Entry("twice/file", b"t"),
    ),
    make_tar(
        Entry(".wh.gone", uid=5, gid=6),
        directory("opaque/", 0o750),
        Entry("opaque/above", b"a"),
        Entry("opaque/.wh..wh..opq"),
        Entry("etc/.wh.passwd"),
        Entry("new/.wh..wh..opq"),
    ),
    make_tar(),
    make_tar(Entry("empty-file")) + bytes(8192) + b"behind the end",
)


@contextlib.contextmanager
def mounted(volume: Path, point: Path) -> Iterator[Path]:
    """The kernel's read-only loop mount of a volume."""
    point.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "loop,ro", str(volume), str(point)], check=True)
    try:
        yield point
    finally:
        subprocess.run(["umount", str(point)], check=True)


def fsck(volume: Path) -> None:
    done = subprocess.run(["e2fsck", "-fn", str(volume)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    odd = docker_archive(tmp_path_factory.mktemp("odd") / "odd.tar", *ODD_LAYERS, tags=(ODD,))
    return [build("python")["docker"], odd]


@dataclass(slots=True)
class Golden:
    """The golden volume that the daemon gets; ``digest`` is of its bytes before."""

    path: Path
    digest: str


@pytest.fixture(scope="module")
def golden(archives: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Golden:
    path = make(archives, tmp_path_factory.mktemp("golden") / "golden.ext4")
    fsck(path)
    return Golden(path, data_digest(path))


@pytest.fixture(scope="module")
def volume(golden: Golden) -> Path:
    return golden.path


def make(archives: list[Path], path: Path) -> Path:
    arguments = [ImageArgument(str(archive)) for archive in archives]
    make_golden(arguments, path, size=4 << 30, uuid=UUID(int=7), timestamp=STAMP)
    return path


@dataclass(slots=True)
class Stored:
    """A layer as a store holds it."""

    diff_id: str
    parent: str
    size: int
    split: list[tuple[Any, ...]]
    tree: dict[str, dict[str, Any]]


def read_store(root: Path) -> dict[str, Stored]:
    """All layers of a data root, by chain ID."""
    found = {}
    for entry in (root / "image/overlay2/layerdb/sha256").iterdir():
        parent = entry / "parent"
        found[entry.name] = Stored(
            (entry / "diff").read_text(),
            parent.read_text() if parent.exists() else "",
            int((entry / "size").read_text()),
            read_split(entry / "tar-split.json.gz"),
            read_tree(root / "overlay2" / (entry / "cache-id").read_text() / "diff"),
        )
    return found


def read_split(path: Path) -> list[tuple[Any, ...]]:
    """A tar-split's entries; segments next to one another are one (dockerd cuts them where its pipe does)."""
    entries: list[tuple[Any, ...]] = []
    with gzip.open(path) as lines:
        for position, line in enumerate(lines):
            entry = json.loads(line)
            assert entry["position"] == position
            if entry["type"] == 2:
                raw = base64.b64decode(entry["payload"])
                if entries and entries[-1][0] == 2:
                    raw = entries.pop()[1] + raw
                entries.append((2, raw))
            else:
                entries.append((1, entry.get("name"), entry.get("name_raw"), entry.get("size"), entry["payload"]))
    return entries


def read_tree(top: Path) -> dict[str, dict[str, Any]]:
    """Everything under a directory, by path."""
    return {entry["path"]: entry for entry in kernel_manifest(top)}


def test_manifest_and_kernel_agree(volume: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "ext4lite", "manifest", str(volume)], capture_output=True, check=True)
    ours = [json.loads(line) for line in done.stdout.splitlines()]
    with mounted(volume, tmp_path / "mnt") as root:
        kernels = read_tree(root)
    assert len(ours) == len(kernels) > 10_000
    for entry in ours:
        assert entry == kernels[entry["path"]]


def is_whiteout(entry: dict[str, Any]) -> bool:
    return (entry["type"], entry["mode"], entry.get("rdev")) == ("char", 0, [0, 0])


def test_layers_equal_what_docker_load_makes(archives: list[Path], volume: Path, tmp_path: Path) -> None:
    """Trees, sizes, parents, tar-split of every layer; the differences are exactly those of docs/docker-store.md."""
    with mounted(volume, tmp_path / "mnt") as root:
        ours = read_store(root)
    loaded = tmp_path / "loaded.ext4"
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", str(loaded), "4G"], check=True)
    (tmp_path / "data").mkdir()
    with HostDocker(tmp_path / "data", volume=loaded) as host:
        for archive in archives:
            host.docker("load", "-i", str(archive))
    with mounted(loaded, tmp_path / "mnt") as root:
        theirs = read_store(root)
    assert ours.keys() == theirs.keys()
    assert len(ours) == 5 + len(ODD_LAYERS)
    explained = set()
    for chain, layer in ours.items():
        other = theirs[chain]
        assert (layer.diff_id, layer.parent, layer.size) == (other.diff_id, other.parent, other.size)
        assert layer.split == other.split
        assert layer.tree.keys() == other.tree.keys()
        for path, entry in layer.tree.items():
            expected = dict(other.tree[path])
            if entry["mtime_ns"] != expected["mtime_ns"]:
                if is_whiteout(entry):
                    explained.add("whiteouts have the marker's time, not the time of loading")
                elif (entry["type"], entry["mode"], entry["mtime_ns"]) == ("dir", 0o755, STAMP * 10**9):
                    explained.add("missing parents have the build's time, not the time of loading")
                else:
                    assert entry["mtime_ns"] < 0 and expected["mtime_ns"] == 0, path
                    explained.add("times before 1970 are kept")
                expected["mtime_ns"] = entry["mtime_ns"]
            if entry.get("xattrs") != expected.get("xattrs"):
                assert path == "/opt/odd/file-becomes-directory"
                expected["xattrs"] = {"trusted.overlay.opaque": base64.b64encode(b"y").decode()}
                explained.add("a directory in a whiteout's place is opaque")
            assert entry == expected, path
    assert len(explained) == 4, explained


@pytest.fixture(scope="module")
def host(volume: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostDocker]:
    """A daemon whose data root is the volume, mounted by the kernel."""
    with HostDocker(tmp_path_factory.mktemp("data"), volume=volume) as daemon:
        yield daemon


def test_lists(host: HostDocker) -> None:
    assert host.docker("info", "--format", "{{.Driver}} {{.Images}} {{.Containers}}").stdout == "overlay2 2 0\n"
    listed = host.docker("images", "--format", "{{.Repository}}:{{.Tag}}").stdout.split()
    assert sorted(listed) == [ODD, PYTHON]


def test_inspects_and_tells_the_history(host: HostDocker, archives: list[Path]) -> None:
    with tarfile.open(archives[0]) as tar:
        manifest = json.loads(_member(tar, "manifest.json"))[0]
        raw = _member(tar, manifest["Config"])
    config = json.loads(raw)
    (shown,) = json.loads(host.docker("inspect", PYTHON).stdout)
    assert shown["Id"] == "sha256:" + hashlib.sha256(raw).hexdigest()
    assert shown["RootFS"]["Layers"] == config["rootfs"]["diff_ids"]
    assert shown["Config"]["Cmd"] == config["config"]["Cmd"]
    assert shown["GraphDriver"]["Name"] == "overlay2"
    assert len(shown["GraphDriver"]["Data"]["LowerDir"].split(":")) == len(config["rootfs"]["diff_ids"]) - 1
    steps = host.docker("history", "--no-trunc", "--format", "{{.CreatedBy}}", PYTHON).stdout.splitlines()
    assert len(steps) == len(config["history"])


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    assert file is not None
    return file.read()


def test_runs(host: HostDocker) -> None:
    run = ("run", "--rm", "--network", "none", PYTHON)
    assert host.docker(*run, "python", "-c", "print(6*7)").stdout == "42\n"
    # The top layer deletes these, the one below had them.
    assert host.docker(*run, "sh", "-c", "ls -A /opt/odd | grep deleted || echo none").stdout == "none\n"


def test_saves_the_very_same_layers(host: HostDocker, tmp_path: Path) -> None:
    for name in (PYTHON, ODD):
        path = tmp_path / "saved.tar"
        host.docker("save", "-o", str(path), name)
        with tarfile.open(path) as tar:
            (item,) = json.loads(_member(tar, "manifest.json"))
            assert item["RepoTags"] == [name]
            wanted = json.loads(_member(tar, item["Config"]))["rootfs"]["diff_ids"]
            saved = ["sha256:" + hashlib.sha256(_member(tar, layer)).hexdigest() for layer in item["Layers"]]
        assert saved == wanted


def test_builds_on_top(host: HostDocker) -> None:
    dockerfile = f"FROM {PYTHON}\nRUN python -c \"open('/made', 'w').write('here')\" && rm -r /opt/odd\n"
    subprocess.run(
        ["docker", "build", "--network", "none", "-t", "built:1", "-"],
        input=dockerfile.encode(),
        env=host.environment | {"DOCKER_BUILDKIT": "0"},
        capture_output=True,
        check=True,
        timeout=120,
    )
    shell = "cat /made; test -e /opt/odd || echo ' and gone'"
    assert host.docker("run", "--rm", "--network", "none", "built:1", "sh", "-c", shell).stdout == "here and gone\n"
    host.docker("image", "rm", "built:1")


def test_removes_without_a_trace(host: HostDocker, volume: Path, tmp_path: Path) -> None:
    """Last: the images go, and with them every layer and every file about them; what is left is clean."""
    host.docker("image", "rm", PYTHON, ODD)
    assert host.docker("images", "-q").stdout == ""
    host.stop()
    fsck(volume)
    with mounted(volume, tmp_path / "mnt") as root:
        assert [entry.name for entry in (root / "overlay2").iterdir()] == ["l"]
        assert list((root / "overlay2/l").iterdir()) == []
        assert list((root / "image/overlay2/layerdb/sha256").iterdir()) == []
        assert list((root / "image/overlay2/imagedb/content/sha256").iterdir()) == []


def data_digest(path: Path) -> str:
    """A digest of a sparse file's data and of where it lies."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        at, size = 0, path.stat().st_size
        while at < size:
            try:
                start = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:
                break
            at = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            digest.update(f"{start}-{at}\n".encode())
            while start < at:
                piece = os.pread(file.fileno(), min(1 << 20, at - start), start)
                digest.update(piece)
                start += len(piece)
    return digest.hexdigest()


def test_same_input_same_bytes(archives: list[Path], golden: Golden, tmp_path: Path) -> None:
    assert data_digest(make(archives, tmp_path / "again.ext4")) == golden.digest


def test_every_form_of_an_image_gives_the_same_layers(tmp_path: Path) -> None:
    """docker-archive, gzip and zstd layout: stored together, every layer is there once."""
    paths = build("python")
    result = make_golden([ImageArgument(str(path)) for path in paths.values()], tmp_path / "all.ext4", size=4 << 30)
    assert result.layers == 5
    assert [image.new_layers for image in result.images] == [5, 0, 0]
    fsck(tmp_path / "all.ext4")


def strange_layer(salt: bytes) -> bytes:
    """Legal as a tar, but not as dockerd likes it."""
    return make_tar(
        Entry("twice", salt + b"first"),
        Entry("twice", b"second, longer"),
        Entry("hidden", b"before its own whiteout"),
        Entry(".wh.hidden"),
        directory("usr/"),
        symlink("absolute", "/usr"),
        Entry("absolute/behind", b"an absolute symlink"),
        directory("d/"),
        directory("d/"),
        Entry("d/f", b"1"),
        Entry("d", b"a file now"),
    )


def test_layers_that_docker_load_refuses_are_saved_as_they_were(tmp_path: Path) -> None:
    layer = strange_layer(b"")
    archive = docker_archive(tmp_path / "a.tar", layer, tags=("strange:1",))
    make_golden([ImageArgument(str(archive))], tmp_path / "g.ext4", size=1 << 30)
    (tmp_path / "data").mkdir()
    with HostDocker(tmp_path / "data", volume=tmp_path / "g.ext4") as host:
        saved = tmp_path / "saved.tar"
        host.docker("save", "-o", str(saved), "strange:1")
        with tarfile.open(saved) as tar:
            (item,) = json.loads(_member(tar, "manifest.json"))
            assert _member(tar, item["Layers"][0]) == layer
        other = docker_archive(tmp_path / "b.tar", strange_layer(b"not the "), tags=("other:1",))
        assert "duplicates of file paths" in host.docker("load", "-i", str(other), check=False).stderr
    fsck(tmp_path / "g.ext4")
