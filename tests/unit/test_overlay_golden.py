"""mkgolden from end to end in small: the store's files, equal bytes, nothing left of a failed run, exit codes."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest

from ext4lite.cli import run
from ext4lite.errors import ImageError, VolumeFull
from ext4lite.golden import ImageArgument, Progress, make_golden
from ext4lite.overlay.docker_store import cache_id, chain_id, link_name
from ext4lite.overlay.inspection import docker_images
from ext4lite.overlay.tarsplit import assemble
from ext4lite.volume import Volume
from support.overlay_samples import (
    Entry,
    directory,
    docker_archive,
    make_config,
    make_tar,
    oci_files,
    sha256,
    write_archive,
    write_layout,
)

BASE = make_tar(directory("etc/"), Entry("etc/passwd", b"root\n"), Entry("bin/sh", random.Random(1).randbytes(70_000)))
TOP = make_tar(Entry("etc/.wh.passwd"), Entry("app", b"app"))
OTHER = make_tar(Entry("other", b"other"))
SIZE = 64 << 20
UID = UUID("00000000-0000-4000-8000-000000000001")


def golden(path: Path, *archives: Path, **more: object) -> Path:
    options = {"size": SIZE, "uuid": UID, "timestamp": 1000} | more
    make_golden([ImageArgument(str(archive)) for archive in archives], path, **options)  # type: ignore[arg-type]
    return path


def text(volume: Volume, path: str) -> str:
    ino = volume.lookup(path)
    assert ino is not None, path
    return volume.read(ino, 0, 1 << 20).decode()


def names(volume: Volume, path: str) -> set[str]:
    ino = volume.lookup(path)
    assert ino is not None, path
    return {name.decode() for name, _, _ in volume.iterdir(ino)}


def mode(volume: Volume, path: str) -> int:
    ino = volume.lookup(path)
    assert ino is not None, path
    return volume.stat(ino).mode


def test_the_store(tmp_path: Path) -> None:
    one = docker_archive(tmp_path / "one.tar", BASE, TOP, tags=("one:1", "docker.io/library/also:2"))
    two = docker_archive(tmp_path / "two.tar", BASE, OTHER, tags=("reg.example/two:x",))
    low = chain_id("", "sha256:" + sha256(BASE))
    high = chain_id(low, "sha256:" + sha256(TOP))
    # The rule of the OCI image-spec, spelt out.
    assert low == "sha256:" + sha256(BASE)
    assert high == "sha256:" + sha256(f"{low} sha256:{sha256(TOP)}".encode())
    config = make_config(BASE, TOP)
    with Volume.open(golden(tmp_path / "g.ext4", one, two)) as volume:
        assert volume.stat(volume.root).mode == 0o710
        assert names(volume, "") >= {"overlay2", "image", "containers", "volumes", "tmp", "lost+found"}
        assert len(names(volume, "overlay2")) == 3 + 1
        assert len(names(volume, "overlay2/l")) == 3

        lower, upper = f"overlay2/{cache_id(low)}", f"overlay2/{cache_id(high)}"
        assert names(volume, lower) == {"diff", "link", "committed"}
        assert names(volume, upper) == {"diff", "link", "lower", "work"}
        assert text(volume, f"{lower}/link") == link_name(low)
        assert len(link_name(low)) == 26 and link_name(low).isalnum() and link_name(low).isupper()
        assert text(volume, f"{upper}/lower") == f"l/{link_name(low)}"
        link = volume.lookup(f"overlay2/l/{link_name(high)}")
        assert link is not None
        assert volume.readlink(link).decode() == f"../{cache_id(high)}/diff"
        assert [mode(volume, f"{upper}/{name}") for name in ("", "diff", "work", "lower")] == [
            0o710,
            0o755,
            0o700,
            0o644,
        ]
        assert mode(volume, f"{lower}/committed") == 0o600

        entry = f"image/overlay2/layerdb/{high.replace(':', '/')}"
        assert names(volume, entry) == {"cache-id", "diff", "parent", "size", "tar-split.json.gz"}
        assert text(volume, f"{entry}/cache-id") == cache_id(high)
        assert text(volume, f"{entry}/diff") == "sha256:" + sha256(TOP)
        assert text(volume, f"{entry}/parent") == low
        assert text(volume, f"{entry}/size") == "3"
        below = f"image/overlay2/layerdb/{low.replace(':', '/')}"
        assert names(volume, below) == {"cache-id", "diff", "size", "tar-split.json.gz"}

        packed = volume.lookup(f"{below}/tar-split.json.gz")
        assert packed is not None
        pieces: list[bytes] = []
        diff = volume.lookup(f"{lower}/diff")
        assert diff is not None

        def content(name: bytes) -> bytes:
            ino = volume.lookup(name, diff)
            assert ino is not None
            return volume.read(ino, 0, 1 << 20)

        assemble(volume.read(packed, 0, 1 << 20), content, pieces.append)
        assert b"".join(pieces) == BASE

        assert text(volume, f"image/overlay2/imagedb/content/sha256/{sha256(config)}") == config.decode()
        assert json.loads(text(volume, "image/overlay2/repositories.json")) == {
            "Repositories": {
                "also": {"also:2": f"sha256:{sha256(config)}"},
                "one": {"one:1": f"sha256:{sha256(config)}"},
                "reg.example/two": {"reg.example/two:x": f"sha256:{sha256(make_config(BASE, OTHER))}"},
            }
        }


def test_images_are_listed(tmp_path: Path) -> None:
    one = docker_archive(tmp_path / "one.tar", BASE, TOP, tags=("one:1", "also:2"))
    two = docker_archive(tmp_path / "two.tar", OTHER, tags=())
    with Volume.open(golden(tmp_path / "g.ext4", one, two)) as volume:
        first, second = docker_images(volume)
    assert (first.tags, first.layers, first.complete) == (["also:2", "one:1"], 2, True)
    assert first.id == "sha256:" + sha256(make_config(BASE, TOP))
    assert first.size == 5 + 70_000 + 3
    assert first.created == "2024-01-01T00:00:00Z"
    assert (second.tags, second.size) == ([], 5)


def test_no_store_no_images(tmp_path: Path) -> None:
    assert run(["mkfs", "--size", "64M", "-q", str(tmp_path / "empty.ext4")]) == 0
    with Volume.open(tmp_path / "empty.ext4") as volume:
        assert docker_images(volume) == []


def test_parent_of_an_archive(tmp_path: Path) -> None:
    base, child = make_config(BASE), make_config(BASE, TOP)
    manifest = [
        {"Config": "base.json", "RepoTags": ["base:1"], "Layers": ["l1"]},
        {"Config": "child.json", "RepoTags": ["child:1"], "Layers": ["l1", "l2"], "Parent": "sha256:" + sha256(base)},
    ]
    files = {
        "base.json": base,
        "child.json": child,
        "l1": BASE,
        "l2": TOP,
        "manifest.json": json.dumps(manifest).encode(),
    }
    with Volume.open(golden(tmp_path / "g.ext4", write_archive(tmp_path / "a.tar", files))) as volume:
        metadata = f"image/overlay2/imagedb/metadata/sha256/{sha256(child)}"
        assert text(volume, f"{metadata}/parent") == "sha256:" + sha256(base)
        assert len(docker_images(volume)) == 2


def test_equal_input_equal_bytes(tmp_path: Path) -> None:
    archive = docker_archive(tmp_path / "a.tar", BASE, TOP)
    layout = write_layout(
        tmp_path / "l", oci_files(BASE, TOP, compression="zstd", annotations={"io.containerd.image.name": "test:1"})
    )
    first = golden(tmp_path / "1.ext4", archive).read_bytes()
    assert golden(tmp_path / "2.ext4", archive).read_bytes() == first
    # Neither does it matter how the image was packed.
    assert golden(tmp_path / "3.ext4", layout).read_bytes() == first
    assert golden(tmp_path / "4.ext4", archive, timestamp=1001).read_bytes() != first


def test_layers_with_a_name_twice_still_come_back(tmp_path: Path) -> None:
    twice = make_tar(Entry("f", b"first"), Entry("f", b"second"))
    with Volume.open(golden(tmp_path / "g.ext4", docker_archive(tmp_path / "a.tar", twice))) as volume:
        packed = volume.lookup(f"image/overlay2/layerdb/sha256/{sha256(twice)}/tar-split.json.gz")
        assert packed is not None
        pieces: list[bytes] = []
        assemble(volume.read(packed, 0, 1 << 20), lambda _: b"second", pieces.append)
    assert b"".join(pieces) == twice


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    seen: list[Progress] = []
    golden(tmp_path / "g.ext4", docker_archive(tmp_path / "a.tar", BASE, TOP), progress=seen.append)
    assert seen[-1].done == seen[-1].total == len(BASE) + len(TOP)
    assert seen[-1].step == "writing metadata"


# -- failures ---------------------------------------------------------------------------------------------------------


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        at = file.read().index(b"root\n")
        file.seek(at)
        file.write(b"ROOT\n")


def _swap(path: Path) -> None:
    path.write_bytes(docker_archive(path, BASE, TOP).read_bytes().replace(b"etc/passwd", b"etc/passwx"))


@pytest.mark.parametrize("damage", [_cut, _flip, _swap])
def test_damaged_archive(tmp_path: Path, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]) -> None:
    archive = docker_archive(tmp_path / "a.tar", BASE, TOP)
    damage(archive)
    before = set(tmp_path.iterdir())
    assert run(["mkgolden", "--image", str(archive), "--size", "64M", str(tmp_path / "g.ext4")]) == 7
    assert set(tmp_path.iterdir()) == before
    error = capsys.readouterr().err
    assert error.startswith(f"ext4lite: {archive}")
    assert error.count("\n") == 1


def test_truncated_gzip_layer(tmp_path: Path) -> None:
    files = oci_files(BASE)
    digest = sha256(gzip.compress(BASE, mtime=0))
    index = json.loads(files["index.json"])
    manifest_name = "blobs/sha256/" + index["manifests"][0]["digest"][7:]
    manifest = json.loads(files.pop(manifest_name))
    content = files[f"blobs/sha256/{digest}"][:-100]
    files[f"blobs/sha256/{digest}"] = content
    manifest["layers"][0]["size"] = len(content)
    raw = json.dumps(manifest).encode()
    files[f"blobs/sha256/{sha256(raw)}"] = raw
    index["manifests"][0] |= {"digest": "sha256:" + sha256(raw), "size": len(raw)}
    files["index.json"] = json.dumps(index).encode()
    with pytest.raises(ImageError, match="truncated"):
        golden(tmp_path / "g.ext4", write_layout(tmp_path / "l", files))
    assert not (tmp_path / "g.ext4").exists()


def test_full_volume(tmp_path: Path) -> None:
    big = make_tar(*(Entry(str(n), random.Random(n).randbytes(1 << 20)) for n in range(12)))
    archive = docker_archive(tmp_path / "a.tar", big)
    with pytest.raises(VolumeFull):
        golden(tmp_path / "g.ext4", archive, size=8 << 20, journal_size=0)
    assert set(tmp_path.iterdir()) == {archive}


def test_an_existing_volume_survives_a_failure(tmp_path: Path) -> None:
    archive = docker_archive(tmp_path / "a.tar", BASE)
    target = tmp_path / "g.ext4"
    target.write_bytes(b"precious")
    command = ["mkgolden", "--image", str(archive), "--size", "64M", str(target)]
    assert run(command) == 6
    _cut(archive)
    assert run([*command, "--force"]) == 7
    assert target.read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--image", "absent.tar", "g.ext4"], 6),
        (["g.ext4"], 2),
        (["--image", "a.tar", "--size", "lots", "g.ext4"], 2),
        (["--image", "a.tar", "--uuid", "x", "g.ext4"], 2),
        (["--image", "a.tar=Not A Name", "g.ext4"], 7),
        (["--image", "a.tar", "--size", "64M", "absent/g.ext4"], 6),
    ],
)
def test_exit_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int) -> None:
    monkeypatch.chdir(tmp_path)
    docker_archive(tmp_path / "a.tar", BASE)
    assert run(["mkgolden", *arguments]) == code
    assert {path.name for path in tmp_path.iterdir()} == {"a.tar"}


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1000")
    docker_archive(tmp_path / "a.tar", BASE, TOP, tags=())
    command = ["mkgolden", "--image", "a.tar=mine:1", "--size", "64M", "--uuid", str(UID), "--label", "gold"]
    assert run([*command, "--json", "g.ext4"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["images"] == [{"id": sha256(make_config(BASE, TOP)), "tags": ["mine:1"], "layers": 2, "new_layers": 2}]
    assert (shown["layers"], shown["files"], shown["whiteouts"], shown["volume_bytes"]) == (2, 4, 1, SIZE)
    assert run([*command, "again.ext4"]) == 0
    assert "mine:1" in capsys.readouterr().out
    assert Path("again.ext4").read_bytes() == Path("g.ext4").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """A signal in the middle (the run is held up after its first layer): no file, named or hidden, is left."""
    layout = write_layout(tmp_path / "l", oci_files(BASE, compression="none"))
    work = tmp_path / "work"
    work.mkdir()
    code = (
        "import sys, time, ext4lite.golden as g\n"
        "from ext4lite.cli import main\n"
        "step = g._store_layer\n"
        "def slow(*a, **k):\n    step(*a, **k)\n    print('stored', flush=True)\n    time.sleep(60)\n"
        "g._store_layer = slow\n"
        "main()\n"
    )
    arguments = ["mkgolden", "--image", str(layout), "--size", "64M", str(work / "g.ext4")]
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"stored\n"
    assert not (work / "g.ext4").exists()
    process.send_signal(number)
    started = time.monotonic()
    _, error = process.communicate(timeout=30)
    assert time.monotonic() - started < 10
    assert process.returncode in (130, 143)
    assert b"Traceback" not in error
    assert list(work.iterdir()) == []


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_an_ordinary_user_makes_the_same_volume(tmp_path: Path) -> None:
    """Owners, devices, trusted and security attributes need no privilege when the file system is only bytes."""
    layer = make_tar(
        Entry("owned", b"1", uid=5, gid=6, mode=0o6755, pax={"SCHILY.xattr.security.capability": "\x01"}),
        Entry("dev", kind=tarfile.CHRTYPE, device=(1, 3)),
        Entry(".wh.gone"),
        Entry("d/.wh..wh..opq"),
    )
    archive = docker_archive(tmp_path / "a.tar", layer)
    archive.chmod(0o600)  # what is given open needs no right to be opened
    ours = golden(tmp_path / "root.ext4", archive).read_bytes()
    nobody = 65534
    with tempfile.TemporaryDirectory(prefix="gvx-") as directory_:  # pytest's own directories are for the owner only
        os.chown(directory_, nobody, nobody)
        theirs = Path(directory_) / "user.ext4"
        code = (
            "import sys\nfrom pathlib import Path\nfrom uuid import UUID\n"
            "from ext4lite.golden import ImageArgument, make_golden\n"
            "image, uuid = ImageArgument('/dev/stdin'), UUID(sys.argv[2])\n"
            "make_golden([image], sys.argv[1], size=64 << 20, uuid=uuid, timestamp=1000)"
        )
        with archive.open("rb") as stdin:
            subprocess.run(
                [sys.executable, "-c", code, str(theirs), str(UID)],
                stdin=stdin,
                user=nobody,
                group=nobody,
                extra_groups=[],
                check=True,
            )
        assert theirs.stat().st_uid == nobody
        assert theirs.read_bytes() == ours
