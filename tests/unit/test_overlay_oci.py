"""Image archives: every form is understood, and everything wrong with one is said in one line."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from ext4lite.errors import HostError, ImageError
from ext4lite.overlay.oci import CHUNK, Blob, Image, familiar, open_images
from support.overlay_samples import (
    Entry,
    directory,
    docker_archive,
    make_config,
    make_tar,
    oci_files,
    sha256,
    symlink,
    write_archive,
    write_layout,
)

LAYERS = (make_tar(directory("etc/"), Entry("etc/a", b"hello")), make_tar(Entry("etc/.wh.a")))
TAG = {"io.containerd.image.name": "docker.io/library/test:1"}


def contents(image: Image) -> list[bytes]:
    return [b"".join(layer.blob.uncompressed()) for layer in image.layers]


def check(path: Path) -> None:
    with open_images(path) as archive:
        (image,) = archive.images
        assert image.tags == ["test:1"]
        assert image.id == hashlib.sha256(image.config).hexdigest()
        assert contents(image) == list(LAYERS)
        assert [layer.diff_id for layer in image.layers] == ["sha256:" + sha256(layer) for layer in LAYERS]


def test_docker_archive(tmp_path: Path) -> None:
    check(docker_archive(tmp_path / "a.tar", *LAYERS))


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
def test_oci_layout_and_its_tar(tmp_path: Path, compression: str) -> None:
    files = oci_files(*LAYERS, compression=compression, annotations=TAG)
    check(write_layout(tmp_path / "layout", files))
    check(write_archive(tmp_path / "layout.tar", files))
    check(write_archive(tmp_path / "dotted.tar", {f"./{name}": content for name, content in files.items()}))


def test_compressed_archives(tmp_path: Path) -> None:
    plain = docker_archive(tmp_path / "a.tar", *LAYERS).read_bytes()
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(plain))
    (tmp_path / "a.tar.zst").write_bytes(zstandard.ZstdCompressor().compress(plain))
    check(tmp_path / "a.tar.gz")
    check(tmp_path / "a.tar.zst")


def test_archive_from_a_pipe(tmp_path: Path) -> None:
    plain = docker_archive(tmp_path / "a.tar", *LAYERS).read_bytes()
    for content in (plain, gzip.compress(plain)):
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        writer = threading.Thread(target=pipe.write_bytes, args=(content,))
        writer.start()
        check(pipe)
        writer.join()
        pipe.unlink()


def test_layout_takes_no_descriptors(tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "layout", oci_files(*(make_tar(Entry(str(n))) for n in range(100))))
    before = len(list(Path("/proc/self/fd").iterdir()))
    with open_images(layout):
        assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_hybrid_archive_of_new_docker(tmp_path: Path) -> None:
    """docker save since 25 writes an OCI layout with a manifest.json beside it; the tags are in the latter."""
    files = oci_files(*LAYERS, compression="none", annotations={"org.opencontainers.image.ref.name": "1"})
    manifest = {
        "Config": f"blobs/sha256/{sha256(make_config(*LAYERS))}",
        "RepoTags": ["test:1"],
        "Layers": [f"blobs/sha256/{sha256(layer)}" for layer in LAYERS],
        "LayerSources": {},
    }
    check(write_archive(tmp_path / "a.tar", files | {"manifest.json": json.dumps([manifest]).encode()}))


def test_layers_that_are_links(tmp_path: Path) -> None:
    """docker save writes a layer that occurs twice as a symlink to its first place."""
    config = make_config(LAYERS[0], LAYERS[0])
    manifest = [{"Config": "c.json", "RepoTags": None, "Layers": ["one/layer.tar", "two/layer.tar"]}]
    path = tmp_path / "a.tar"
    path.write_bytes(
        make_tar(
            Entry("c.json", config),
            Entry("one/layer.tar", LAYERS[0]),
            symlink("two/layer.tar", "../one/layer.tar"),
            Entry("manifest.json", json.dumps(manifest).encode()),
        )
    )
    with open_images(path) as archive:
        assert contents(archive.images[0]) == [LAYERS[0], LAYERS[0]]
        assert archive.images[0].tags == []


def _with_index(files: dict[str, bytes], *more: dict[str, bytes]) -> dict[str, bytes]:
    """One layout of several: their descriptors in one index."""
    entries = [entry for part in (files, *more) for entry in json.loads(part["index.json"])["manifests"]]
    merged = {name: content for part in (files, *more) for name, content in part.items()}
    return merged | {"index.json": json.dumps({"schemaVersion": 2, "manifests": entries}).encode()}


def test_platform_is_chosen(tmp_path: Path) -> None:
    amd64 = oci_files(*LAYERS, annotations=TAG, platform={"os": "linux", "architecture": "amd64"})
    arm64 = oci_files(
        LAYERS[0], platform={"os": "linux", "architecture": "arm64", "variant": "v8"}, architecture="arm64"
    )
    attestation = oci_files(
        LAYERS[1],
        annotations={"vnd.docker.reference.type": "attestation-manifest"},
        platform={"os": "unknown", "architecture": "unknown"},
    )
    layout = write_layout(tmp_path / "all", _with_index(arm64, amd64, attestation))
    check(layout)
    with open_images(layout, platform="linux/arm64") as archive:
        assert [len(image.layers) for image in archive.images] == [1]
    with pytest.raises(ImageError, match="no image for linux/amd64 in it, only for linux/arm64"):
        open_images(write_layout(tmp_path / "arm", arm64))
    unlabelled = oci_files(LAYERS[0], architecture="arm64")
    with pytest.raises(ImageError, match="only for linux/arm64"):
        open_images(write_layout(tmp_path / "unlabelled", unlabelled))


def test_nested_index_hands_its_tag_down(tmp_path: Path) -> None:
    files = oci_files(*LAYERS, platform={"os": "linux", "architecture": "amd64"})
    inner = files["index.json"]
    descriptor = {
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "digest": "sha256:" + sha256(inner),
        "size": len(inner),
        "annotations": TAG,
    }
    files[f"blobs/sha256/{sha256(inner)}"] = inner
    files["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [descriptor]}).encode()
    check(write_layout(tmp_path / "nested", files))


@pytest.mark.parametrize(
    ("annotations", "tags"),
    [
        ({}, []),
        ({"org.opencontainers.image.ref.name": "latest"}, []),
        ({"org.opencontainers.image.ref.name": "docker.io/library/python:3.11-slim"}, ["python:3.11-slim"]),
        ({"org.opencontainers.image.ref.name": "python:3.11-slim"}, ["python:3.11-slim"]),
        (
            {"io.containerd.image.name": "r.example:5000/a/b:x", "org.opencontainers.image.ref.name": "y"},
            ["r.example:5000/a/b:x"],
        ),
        ({"io.containerd.image.name": "reg.example/a@sha256:" + "0" * 64}, []),
    ],
)
def test_tags_from_annotations(tmp_path: Path, annotations: dict[str, str], tags: list[str]) -> None:
    with open_images(write_layout(tmp_path / "layout", oci_files(*LAYERS, annotations=annotations))) as archive:
        assert archive.images[0].tags == tags


def test_tag_from_the_caller(tmp_path: Path) -> None:
    with open_images(docker_archive(tmp_path / "a.tar", *LAYERS), tag="docker.io/library/mine") as archive:
        assert archive.images[0].tags == ["mine:latest"]
    two = _with_index(oci_files(*LAYERS), oci_files(LAYERS[0]))
    with pytest.raises(ImageError, match="2 images"):
        open_images(write_layout(tmp_path / "two", two), tag="x:1")


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("python", "python:latest"),
        ("python:3.11-slim", "python:3.11-slim"),
        ("docker.io/library/python:3.11-slim", "python:3.11-slim"),
        ("index.docker.io/library/python", "python:latest"),
        ("docker.io/user/app:1", "user/app:1"),
        ("library/python:1", "python:1"),
        ("user/app", "user/app:latest"),
        ("localhost/app:1", "localhost/app:1"),
        ("localhost:5000/app", "localhost:5000/app:latest"),
        ("ghcr.io/a/b/c:v1.0_x", "ghcr.io/a/b/c:v1.0_x"),
        ("docker:dind", "docker:dind"),
    ],
)
def test_familiar_names(reference: str, expected: str) -> None:
    assert familiar(reference) == expected


@pytest.mark.parametrize("reference", ["", "UPPER:1", "a:b:c", "a/", "/a", "a b", "a@sha256:00", "x:" + "t" * 129])
def test_bad_names(reference: str) -> None:
    with pytest.raises(ImageError, match="bad image name"):
        familiar(reference)


def _edit(files: dict[str, bytes], change: Callable[[dict[str, object]], None]) -> dict[str, bytes]:
    index = json.loads(files["index.json"])
    change(index["manifests"][0])
    return files | {"index.json": json.dumps(index).encode()}


def _without(files: dict[str, bytes], largest: bool) -> dict[str, bytes]:
    blobs = sorted((name for name in files if name.startswith("blobs/")), key=lambda name: len(files[name]))
    return {name: content for name, content in files.items() if name != blobs[-1 if largest else 0]}


def _flipped(files: dict[str, bytes]) -> dict[str, bytes]:
    name = "blobs/sha256/" + json.loads(files["index.json"])["manifests"][0]["digest"][7:]
    return files | {name: files[name].replace(b"schemaVersion", b"schemaversion")}


OCI = oci_files(*LAYERS)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "neither a docker-archive"),
        ({"repositories": b"{}"}, "before 1.10"),
        ({"index.json": b"{"}, "index.json is not JSON"),
        ({"index.json": b"[]"}, "not a JSON object"),
        ({"manifest.json": b"{}"}, "not a JSON array"),
        ({"manifest.json": b"[]"}, "no image in it"),
        ({"manifest.json": b"[1]"}, "not a list of objects"),
        ({"manifest.json": b'[{"Config":"c","Layers":[]}]'}, "c is missing"),
        ({"manifest.json": b'[{"Config":"c","Layers":["../../etc/passwd"]}]', "c": make_config()}, "missing|outside"),
        ({"manifest.json": b'[{"Config":"c","Layers":[]}]', "c": b"{}"}, "no rootfs"),
        ({"manifest.json": b'[{"Config":"c","Layers":[]}]', "c": make_config(LAYERS[0])}, "1 layers, the manifest 0"),
        ({"manifest.json": b'[{"Config":"c","Layers":[]}]', "c": make_config(os="windows")}, "for windows"),
        ({"manifest.json": b'[{"Config":"c","Layers":[]}]', "c": make_config(history=[{}])}, "the history has 1"),
        ({"manifest.json": b'[{"Config":"c","Layers":[],"RepoTags":["A:B"]}]', "c": make_config()}, "bad image name"),
        (OCI | {"oci-layout": b'{"imageLayoutVersion":"2.0"}'}, "version '2.0'"),
        (_edit(OCI, lambda entry: entry.update(digest="sha512:00")), "bad digest"),
        (_edit(OCI, lambda entry: entry.update(digest="sha256:../x")), "bad digest"),
        (_edit(OCI, lambda entry: entry.update(size=5)), "index.json says 5"),
        (_flipped(OCI), "is damaged"),
        (_without(OCI, largest=True), "is missing"),
        (_without(OCI, largest=False), "is missing"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    layout = tmp_path / "layout"
    layout.mkdir()
    for path in (write_layout(layout, files), write_archive(tmp_path / "layout.tar", files)):
        with pytest.raises(ImageError, match=message) as caught:
            open_images(path)
        assert str(caught.value).startswith(str(path))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["0" * 64 + ".json", "sha256:" + "0" * 64, "blobs/sha256/" + "0" * 64])
def test_config_named_by_its_digest_is_verified(tmp_path: Path, name: str) -> None:
    manifest = json.dumps([{"Config": name, "Layers": []}]).encode()
    with pytest.raises(ImageError, match="is damaged: its sha256 is"):
        open_images(write_archive(tmp_path / "a.tar", {"manifest.json": manifest, name: make_config()}))


def test_too_many_layers(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="126 layers; dockerd accepts 125"):
        open_images(docker_archive(tmp_path / "a.tar", *(make_tar(Entry(str(n))) for n in range(126))))


def test_layout_cannot_lead_outside(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(make_config())
    layout = tmp_path / "layout"
    layout.mkdir()
    (layout / "link").symlink_to("../secret")
    for name in ("../secret", "link"):
        (layout / "manifest.json").write_text(json.dumps([{"Config": name, "Layers": []}]))
        with pytest.raises(ImageError, match="outside of the layout"):
            open_images(layout)


def test_not_an_archive(tmp_path: Path) -> None:
    path = tmp_path / "f"
    with pytest.raises(HostError, match="no such file"):
        open_images(path)
    (tmp_path / "layout/manifest.json").mkdir(parents=True)
    with pytest.raises(ImageError, match="not a file"):
        open_images(tmp_path / "layout")
    for content, message in [(b"", "empty"), (b"x" * 2000, "not a tar header"), (b"BZh91AY", "bzip2"), (b"x", "trunc")]:
        path.write_bytes(content)
        with pytest.raises(ImageError, match=message):
            open_images(path)


def test_truncated_archive(tmp_path: Path) -> None:
    path = docker_archive(tmp_path / "a.tar", *LAYERS)
    os.truncate(path, path.stat().st_size // 2 + 100)
    with pytest.raises(ImageError, match=r"truncated|missing|neither"):
        open_images(path)


def blob_of(path: Path, content: bytes) -> Blob:
    path.write_bytes(content)
    return Blob("blob", os.open(path, os.O_RDONLY), 0, len(content))


DATA = os.urandom(100_000) + bytes(5 * CHUNK)


@pytest.mark.parametrize(
    "packed",
    [
        DATA,
        gzip.compress(DATA),
        gzip.compress(DATA[:1000]) + gzip.compress(DATA[1000:]),
        gzip.compress(DATA) + bytes(700),
        zstandard.ZstdCompressor().compress(DATA),
        zstandard.ZstdCompressor().compress(DATA[:1000]) + zstandard.ZstdCompressor().compress(DATA[1000:]),
    ],
    ids=["plain", "gzip", "gzip members", "gzip padding", "zstd", "zstd frames"],
)
def test_decompression(tmp_path: Path, packed: bytes) -> None:
    read = 0

    def count(n: int) -> None:
        nonlocal read
        read += n

    pieces = list(blob_of(tmp_path / "b", packed).uncompressed(count))
    assert b"".join(pieces) == DATA
    assert max(map(len, pieces)) <= CHUNK
    assert read == len(packed)


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_damaged_gzip(tmp_path: Path, damage: str) -> None:
    packed = bytearray(gzip.compress(DATA))
    if damage == "cut":
        del packed[-5:]
    else:
        packed[50_000] ^= 0xFF
    with pytest.raises(ImageError, match=r"truncated|damaged"):
        list(blob_of(tmp_path / "b", bytes(packed)).uncompressed())


def test_gzip_without_isal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Platforms without ISA-L use zlib, with equal results."""
    monkeypatch.setitem(__import__("sys").modules, "isal", None)
    for packed in (gzip.compress(DATA), gzip.compress(DATA[:9]) + gzip.compress(DATA[9:]) + bytes(9)):
        assert b"".join(blob_of(tmp_path / "b", packed).uncompressed()) == DATA
    with pytest.raises(ImageError, match="truncated"):
        list(blob_of(tmp_path / "b", gzip.compress(DATA)[:-9]).uncompressed())
