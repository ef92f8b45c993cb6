"""Container images in miniature for tests: layers from lists of entries, packed as each kind of archive there is."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zstandard

MTIME = 1_700_000_000


@dataclass(slots=True)
class Entry:
    """One tar member. ``kind`` is a tarfile type; ``pax`` are extra PAX records."""

    name: str
    content: bytes = b""
    kind: bytes = tarfile.REGTYPE
    mode: int = 0o644
    link: str = ""
    uid: int = 0
    gid: int = 0
    mtime: float = MTIME
    device: tuple[int, int] = (0, 0)
    pax: dict[str, str] = field(default_factory=dict)


def directory(name: str, mode: int = 0o755, **more: Any) -> Entry:
    """A directory entry."""
    return Entry(name, kind=tarfile.DIRTYPE, mode=mode, **more)


def symlink(name: str, target: str, **more: Any) -> Entry:
    """A symlink entry."""
    return Entry(name, kind=tarfile.SYMTYPE, link=target, mode=0o777, **more)


def hardlink(name: str, target: str, **more: Any) -> Entry:
    """A hard link entry."""
    return Entry(name, kind=tarfile.LNKTYPE, link=target, **more)


def make_tar(*entries: Entry, form: int = tarfile.PAX_FORMAT) -> bytes:
    """An uncompressed tar of ``entries``."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for entry in entries:
            info = tarfile.TarInfo(entry.name)
            info.type, info.mode, info.linkname = entry.kind, entry.mode, entry.link
            info.uid, info.gid, info.mtime = entry.uid, entry.gid, entry.mtime
            info.devmajor, info.devminor = entry.device
            info.pax_headers = dict(entry.pax)
            info.size = len(entry.content)
            tar.addfile(info, io.BytesIO(entry.content))
    return out.getvalue()


def sha256(data: bytes) -> str:
    """Hex digest."""
    return hashlib.sha256(data).hexdigest()


def make_config(*layers: bytes, **more: Any) -> bytes:
    """An image config for uncompressed ``layers``."""
    config: dict[str, Any] = {
        "architecture": "amd64",
        "os": "linux",
        "created": "2024-01-01T00:00:00Z",
        "config": {"Cmd": ["/bin/sh"]},
        "history": [{"created": "2024-01-01T00:00:00Z", "created_by": f"step {n}"} for n in range(len(layers))],
        "rootfs": {"type": "layers", "diff_ids": ["sha256:" + sha256(layer) for layer in layers]},
    }
    return json.dumps(config | more).encode()


def docker_archive(path: Path, *layers: bytes, tags: tuple[str, ...] = ("test:1",), **config: Any) -> Path:
    """A ``docker save`` archive of the old form with one image."""
    raw = make_config(*layers, **config)
    names = [f"{number:064x}/layer.tar" for number in range(len(layers))]
    manifest = [{"Config": sha256(raw) + ".json", "RepoTags": list(tags), "Layers": names}]
    members = [Entry(sha256(raw) + ".json", raw)]
    members += [Entry(name, layer) for name, layer in zip(names, layers, strict=True)]
    members += [Entry("manifest.json", json.dumps(manifest).encode())]
    path.write_bytes(make_tar(*members))
    return path


def _packed(layer: bytes, compression: str) -> bytes:
    if compression == "gzip":
        return gzip.compress(layer, mtime=0)
    if compression == "zstd":
        return zstandard.ZstdCompressor().compress(layer)
    return layer


def oci_files(
    *layers: bytes,
    compression: str = "gzip",
    annotations: dict[str, str] | None = None,
    platform: dict[str, str] | None = None,
    **config: Any,
) -> dict[str, bytes]:
    """The files of an OCI layout with one image, by name."""
    files: dict[str, bytes] = {"oci-layout": b'{"imageLayoutVersion":"1.0.0"}'}

    def add(content: bytes, kind: str) -> dict[str, Any]:
        files[f"blobs/sha256/{sha256(content)}"] = content
        return {"mediaType": kind, "digest": "sha256:" + sha256(content), "size": len(content)}

    suffix = "" if compression == "none" else f"+{compression}"
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": add(make_config(*layers, **config), "application/vnd.oci.image.config.v1+json"),
        "layers": [
            add(_packed(layer, compression), f"application/vnd.oci.image.layer.v1.tar{suffix}") for layer in layers
        ],
    }
    entry = add(json.dumps(manifest).encode(), "application/vnd.oci.image.manifest.v1+json")
    if annotations:
        entry["annotations"] = annotations
    if platform:
        entry["platform"] = platform
    files["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()
    return files


def write_layout(path: Path, files: dict[str, bytes]) -> Path:
    """Write an OCI layout's files as a directory."""
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def write_archive(path: Path, files: dict[str, bytes]) -> Path:
    """Write files as a tar."""
    path.write_bytes(make_tar(*(Entry(name, content) for name, content in files.items())))
    return path
