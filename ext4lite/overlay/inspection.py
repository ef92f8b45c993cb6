"""What Docker images a volume holds, read from its overlay2 store as dockerd reads it on start."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ext4lite.errors import Unsupported
from ext4lite.overlay.docker_store import chain_id

if TYPE_CHECKING:
    from ext4lite.volume import Volume

_STORE = "image/overlay2"
_MAX_JSON = 32 << 20
_MAX_ALL = 512 << 20  # a hostile volume may name the same sparse file any number of times
_MAX_DIGITS = 24
_HEX = re.compile(rb"[0-9a-f]{64}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(slots=True)
class ImageInfo:
    """An image in a volume's Docker store.

    ``id`` is ``sha256:…``, ``created`` the config's own text (RFC 3339, "" if it has none), ``size`` the bytes of its
    files as dockerd counts them (all its layers, also shared ones), ``layers`` their number. ``complete`` is False
    when a layer is not in the store; dockerd would not show such an image.
    """

    id: str
    tags: list[str] = field(default_factory=list)
    created: str = ""
    size: int = 0
    layers: int = 0
    complete: bool = True


def docker_images(volume: Volume) -> list[ImageInfo]:
    """The images in a volume whose root is a /var/lib/docker with an overlay2 store, by first tag; empty if there is
    none.

    What dockerd would skip with a log line (a config that is damaged or not JSON) is left out here too. Raises
    CorruptImage only for damage of the file system itself.
    """
    contents = volume.lookup(f"{_STORE}/imagedb/content/sha256")
    if contents is None or volume.stat(contents).kind != "dir":
        return []
    tags = _tags(volume)
    sizes: dict[str, int | None] = {}
    images = []
    left = _MAX_ALL
    for name, ino, _ in volume.iterdir(contents):
        raw = _read(volume, ino) if _HEX.fullmatch(name) else None
        if raw is None:
            continue
        left -= len(raw)
        if left < 0:
            raise Unsupported(
                "more image configs than this version looks at", where=f"{volume.where}: {_STORE}/imagedb"
            )
        if hashlib.sha256(raw).hexdigest().encode() != name:
            continue
        config = _object(raw)
        rootfs = config.get("rootfs")
        diff_ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
        if not isinstance(diff_ids, list) or not all(_is_digest(diff_id) for diff_id in diff_ids):
            continue
        identity = f"sha256:{name.decode()}"
        image = ImageInfo(identity, tags.get(identity, []), str(config.get("created") or ""), layers=len(diff_ids))
        chain = ""
        for diff_id in diff_ids:
            chain = chain_id(chain, diff_id)
            if chain not in sizes:
                sizes[chain] = _layer_size(volume, chain)
            size = sizes[chain]
            if size is None:
                image.complete = False
            else:
                image.size += size
        images.append(image)
    images.sort(key=lambda image: (not image.tags, image.tags, image.id))
    return images


def _tags(volume: Volume) -> dict[str, list[str]]:
    """Image ID → tags, from repositories.json."""
    found: dict[str, list[str]] = {}
    ino = volume.lookup(f"{_STORE}/repositories.json")
    raw = None if ino is None else _read(volume, ino)
    repositories = _object(raw or b"").get("Repositories")
    if isinstance(repositories, dict):
        for references in repositories.values():
            if isinstance(references, dict):
                for reference, identity in references.items():
                    if "@" not in reference:
                        found.setdefault(str(identity), []).append(reference)
    for names in found.values():
        names.sort()
    return found


def _layer_size(volume: Volume, chain: str) -> int | None:
    """A layer's size from layerdb, None if the layer is not (wholly) there."""
    ino = volume.lookup(f"{_STORE}/layerdb/{chain.replace(':', '/', 1)}/size")
    text = None if ino is None else _read(volume, ino)
    if text is None or not text.strip().isdigit() or len(text) > _MAX_DIGITS:
        return None
    return int(text)


def _read(volume: Volume, ino: int) -> bytes | None:
    """A regular file's content, None for anything else and for absurd sizes."""
    status = volume.stat(ino)
    if status.kind != "file" or status.size > _MAX_JSON:
        return None
    return volume.read(ino, 0, status.size)


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
