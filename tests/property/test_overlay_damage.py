"""Image archives and Docker stores with any JSON in them: an ImageError or an image, never anything else, and soon."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from ext4lite.builder import ImageBuilder, Meta
from ext4lite.errors import Ext4LiteError, HostError, ImageError, Unsupported
from ext4lite.golden import ImageArgument, make_golden
from ext4lite.inspect import inspect
from ext4lite.overlay.docker_store import chain_id
from ext4lite.overlay.oci import open_images
from support.overlay_samples import Entry, make_config, make_tar, oci_files, sha256, write_archive, write_layout

LAYER = make_tar(Entry("a", b"hello"))
CONFIG = make_config(LAYER, history=[{"created_by": "x"}])
DOCKER = {
    "c.json": CONFIG,
    "layer.tar": LAYER,
    "manifest.json": json.dumps([{"Config": "c.json", "RepoTags": ["a:1"], "Layers": ["layer.tar"]}]).encode(),
}
OCI = oci_files(
    LAYER,
    annotations={"io.containerd.image.name": "docker.io/library/a:1"},
    platform={"os": "linux", "architecture": "amd64"},
    history=[{"created_by": "x"}],
)
NASTY: list[Any] = [
    None, True, 0, -1, 1.5, 1 << 70, "", "\0", "\ud800", "\udcff", "../..", "/etc/passwd", ".", "a" * 5000,
    "x\n\x1b[31m", [], [[]], [None], ["\0"], {}, {"": {}}, {"digest": "sha256:" + "0" * 64, "size": 0},
]  # fmt: skip


def changed(value: Any) -> Iterator[Any]:
    """Every document that differs from ``value`` in one place: a part is replaced or missing."""
    yield from NASTY
    parts: list[Any] = (
        list(value) if isinstance(value, dict) else [*range(len(value))] if isinstance(value, list) else []
    )
    for part in parts:
        for inner in changed(value[part]):
            copy = deepcopy(value)
            copy[part] = inner
            yield copy
        copy = deepcopy(value)
        del copy[part]
        yield copy


def replaced(files: dict[str, bytes], name: str, content: bytes) -> dict[str, bytes]:
    """A layout with one file changed; if that is a blob, those that name it follow."""
    if not name.startswith("blobs/"):
        return files | {name: content}
    old, new = name.rpartition("/")[2], sha256(content)
    out = {k: v for k, v in files.items() if k != name} | {f"blobs/sha256/{new}": content}
    for other, text in files.items():
        if old.encode() in text:
            document = json.loads(text)
            for descriptor in [document.get("config"), *document.get("manifests", [])]:
                if descriptor and descriptor["digest"] == f"sha256:{old}":
                    descriptor.update(digest=f"sha256:{new}", size=len(content))
            out = replaced(out, other, json.dumps(document).encode())
    return out


def documents(files: dict[str, bytes]) -> Iterator[tuple[str, Any]]:
    for name, content in files.items():
        if content[:1] in b"{[":
            yield name, json.loads(content)


@pytest.mark.parametrize("files", [DOCKER, OCI], ids=["docker", "oci"])
def test_any_json_in_an_archive(tmp_path: Path, files: dict[str, bytes]) -> None:
    archive, layout = tmp_path / "archive", tmp_path / "layout"
    refused = taken = 0
    write_layout(layout, files)
    for name, document in documents(files):
        for number, other in enumerate(changed(document)):
            now = replaced(files, name, json.dumps(other).encode())
            write_layout(layout, {k: v for k, v in now.items() if files.get(k) != v or k == name})
            # Names are resolved in the layout's own way, all else is shared: every fourth as an archive is enough.
            for path in (layout, write_archive(archive, now)) if number % 4 == 0 else (layout,):
                try:
                    with open_images(path) as opened:
                        assert opened.images
                        taken += 1
                except (ImageError, HostError) as error:
                    assert str(path) in error.where
                    refused += 1
            write_layout(layout, {name: files[name]})
    assert min(refused, taken) > 100  # both are tried


def test_an_index_that_leads_everywhere_ends(tmp_path: Path) -> None:
    """Four levels of 200 references each to the level below: 1.6 thousand million documents, if one read them all."""
    files = dict(OCI)
    entries = json.loads(files["index.json"])["manifests"]
    for _ in range(4):
        content = json.dumps({"manifests": entries * 200}).encode()
        files[f"blobs/sha256/{sha256(content)}"] = content
        entries = [{"digest": f"sha256:{sha256(content)}", "size": len(content)}]
    files["index.json"] = json.dumps({"manifests": entries}).encode()
    began = time.monotonic()
    with pytest.raises(ImageError, match="too many manifests"):
        open_images(write_layout(tmp_path / "layout", files))
    assert time.monotonic() - began < 60


def store(path: Path, config: bytes, repositories: bytes, size: bytes, copies: int = 1) -> None:
    """A volume with a Docker store of one image, of these very contents."""
    with ImageBuilder(path, size=16 << 20, durable=False) as b:

        def put(name: str, content: bytes) -> int:
            *parents, last = name.encode().split(b"/")
            at = b.root
            for parent in parents:
                at = b.lookup(at, parent) or b.add_dir(at, parent, Meta())
            with b.add_file(at, last, Meta()) as f:
                f.write(content)
            return f.ino

        ino = put(f"image/overlay2/imagedb/content/sha256/{sha256(config)}", config)
        directory = b.root
        for parent in (b"image", b"overlay2", b"imagedb", b"content", b"sha256"):
            directory = b.lookup(directory, parent) or 0
        for number in range(1, copies):
            b.add_link(directory, b"%064x" % number, ino)
        put("image/overlay2/repositories.json", repositories)
        put(f"image/overlay2/layerdb/{chain_id('', 'sha256:' + sha256(LAYER)).replace(':', '/')}/size", size)
        b.finish()


def test_any_json_in_a_store(tmp_path: Path) -> None:
    image = tmp_path / "i"
    tags = {"Repositories": {"a": {"a:1": f"sha256:{sha256(CONFIG)}"}}}
    cases = [(json.dumps(c).encode(), json.dumps(tags).encode(), b"5") for c in changed(json.loads(CONFIG))]
    cases += [(CONFIG, json.dumps(t).encode(), b"5") for t in changed(tags)]
    cases += [(CONFIG, b"{}", size) for size in (b"", b"-1", b"9" * 5000, "²".encode(), b"\xff", b"1 2")]
    shown = 0
    for config, repositories, size in cases:
        store(image, config, repositories, size)
        shown += len(inspect(image).images or [])
        image.unlink()
    assert 50 < shown < len(cases)


def test_a_store_that_names_one_large_config_often(tmp_path: Path) -> None:
    store(tmp_path / "i", bytes(30 << 20), b"{}", b"5", copies=1000)
    began = time.monotonic()
    with pytest.raises(Unsupported, match="more image configs"):
        inspect(tmp_path / "i")
    assert time.monotonic() - began < 60


def test_golden_volumes_of_damaged_archives(tmp_path: Path) -> None:
    """Bytes of a whole archive are changed: what is not noticed is a sound volume; nothing else is left."""
    archive = write_archive(tmp_path / "archive", DOCKER)
    good = archive.read_bytes()
    for at in range(0, len(good), 97):
        archive.write_bytes(good[:at] + bytes([good[at] ^ 0x55]) + good[at + 1 :])
        try:
            make_golden([ImageArgument(str(archive))], tmp_path / "g", size=16 << 20, timestamp=0)
        except Ext4LiteError:
            assert [p.name for p in tmp_path.iterdir()] == ["archive"]
        else:
            assert inspect(tmp_path / "g").images
            (tmp_path / "g").unlink()
