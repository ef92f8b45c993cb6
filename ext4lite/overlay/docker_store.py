"""Writing /var/lib/docker as dockerd's overlay2 driver and image store keep it; the volume's root is that directory.

What is written (modes as a dockerd of today makes them; ownership root, times the build's)::

    overlay2/<cache-id>/{diff/,link[,lower][,work/][,committed]}   a layer; "committed" marks one that has children
    overlay2/l/<26 characters> → ../<cache-id>/diff                 short names, so that mount options fit a page
    image/overlay2/layerdb/sha256/<chain-id>/{cache-id,diff,size,tar-split.json.gz[,parent]}
    image/overlay2/imagedb/content/sha256/<image-id>                the config, byte for byte
    image/overlay2/imagedb/metadata/sha256/<image-id>/parent        only where an archive names a parent
    image/overlay2/repositories.json                                tags
    containers volumes tmp network plugins …                        empty; dockerd fills them on its first start

Nothing that identifies a daemon is written (engine-id, swarm state, network database): each episode's dockerd makes
its own.

Sources: moby v20.10 to v28 ``daemon/graphdriver/overlay2``, ``layer/filestore.go``, ``image/fs.go``,
``reference/store.go``, read and described in docs/docker-store.md; the modes were observed on a fresh dockerd after
``docker load``.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass

from ext4lite.builder import ImageBuilder, Meta
from ext4lite.errors import ImageError
from ext4lite.overlay.oci import Image

#: overlay2 refuses more lower directories (moby: overlay2.maxDepth).
MAX_LOWER = 128
_DRIVER = "overlay2"
_LINK_LENGTH = 26
# Directories dockerd has at its root, with the modes it makes them with. It makes what is missing, but never repairs
# modes.
_ROOM_MODES = (
    (b"buildkit", 0o711),
    (b"containers", 0o710),
    (b"image", 0o700),
    (b"network", 0o750),
    (b"overlay2", 0o710),
    (b"plugins", 0o700),
    (b"runtimes", 0o700),
    (b"swarm", 0o700),
    (b"tmp", 0o700),
    (b"volumes", 0o701),
)


def chain_id(parent: str, diff_id: str) -> str:
    """The chain ID (``sha256:…``) of a layer on ``parent`` ("" for the lowest): OCI image-spec, "Layer ChainID"."""
    if not parent:
        return diff_id
    return "sha256:" + hashlib.sha256(f"{parent} {diff_id}".encode()).hexdigest()


def cache_id(chain: str) -> str:
    """The directory under overlay2/ for a chain ID: 64 hex digits, random in dockerd, here derived and so stable."""
    return hashlib.sha256(b"gvx overlay2 cache-id\0" + chain.encode()).hexdigest()


def link_name(chain: str) -> str:
    """The short name under overlay2/l/ for a chain ID: 26 characters of base32, as dockerd's random ones."""
    digest = hashlib.sha256(b"gvx overlay2 link\0" + chain.encode()).digest()
    return base64.b32encode(digest)[:_LINK_LENGTH].decode()


@dataclass(slots=True)
class StoredLayer:
    """A layer in the store: where its ``diff`` directory is (inode), its own directory, and the chain below it."""

    chain: str
    diff_id: str
    parent: str
    directory: int
    diff: int
    lower: list[str]


class StoreWriter:
    """Builds the store in an empty volume. Call :meth:`begin_layer`, apply the tar, :meth:`finish_layer`; then
    :meth:`add_image` for each image, then :meth:`finish`."""

    def __init__(self, builder: ImageBuilder, *, timestamp_ns: int) -> None:
        self._builder = builder
        self._now = timestamp_ns
        self._layers: dict[str, StoredLayer] = {}
        self._with_children: set[str] = set()
        self._tags: dict[str, str] = {}
        self._images: set[str] = set()
        builder.set_meta(builder.root, self._meta(0o710))
        rooms = {name: self._dir(builder.root, name, mode) for name, mode in _ROOM_MODES}
        self._overlay2 = rooms[b"overlay2"]
        self._links = self._dir(self._overlay2, b"l", 0o700)
        image = self._image = self._dir(rooms[b"image"], _DRIVER.encode(), 0o700)
        self._dir(image, b"distribution", 0o700)
        imagedb = self._dir(image, b"imagedb", 0o700)
        self._contents = self._dir(self._dir(imagedb, b"content", 0o700), b"sha256", 0o700)
        self._metadata = self._dir(self._dir(imagedb, b"metadata", 0o700), b"sha256", 0o700)
        layerdb = self._dir(image, b"layerdb", 0o700)
        self._layerdb = self._dir(layerdb, b"sha256", 0o755)
        self._dir(layerdb, b"mounts", 0o755)
        self._dir(layerdb, b"tmp", 0o755)

    def has_layer(self, chain: str) -> bool:
        """Is the layer of this chain ID in the store?"""
        return chain in self._layers

    def begin_layer(self, parent: str, diff_id: str) -> StoredLayer:
        """Make the directories of a new layer on ``parent`` (a chain ID in the store, or "")."""
        chain = chain_id(parent, diff_id)
        lower: list[str] = []
        if parent:
            below = self._layers[parent]
            lower = [f"l/{link_name(parent)}", *below.lower]
            if len(lower) > MAX_LOWER:
                raise ImageError(f"more than {MAX_LOWER} layers on top of one another", where=diff_id)
        directory = self._dir(self._overlay2, cache_id(chain).encode(), 0o710)
        link = link_name(chain)
        self._builder.add_symlink(
            self._links, link.encode(), f"../{cache_id(chain)}/diff".encode(), Meta(0o777, 0, 0, self._now)
        )
        diff = self._dir(directory, b"diff", 0o755)
        self._file(directory, b"link", link.encode())
        if parent:
            self._file(directory, b"lower", ":".join(lower).encode())
            self._dir(directory, b"work", 0o700)
            if parent not in self._with_children:
                self._with_children.add(parent)
                self._file(self._layers[parent].directory, b"committed", b"", 0o600)
        layer = self._layers[chain] = StoredLayer(chain, diff_id, parent, directory, diff, lower)
        return layer

    def finish_layer(self, layer: StoredLayer, *, size: int, tar_split: bytes) -> None:
        """Register a layer in layerdb: ``size`` as dockerd counts it, ``tar_split`` the finished tar-split.json.gz."""
        entry = self._dir(self._layerdb, layer.chain.removeprefix("sha256:").encode(), 0o700)
        self._file(entry, b"cache-id", cache_id(layer.chain).encode())
        self._file(entry, b"diff", layer.diff_id.encode())
        if layer.parent:
            self._file(entry, b"parent", layer.parent.encode())
        self._file(entry, b"size", str(size).encode())
        self._file(entry, b"tar-split.json.gz", tar_split)

    def add_image(self, image: Image) -> None:
        """Store an image's config and note its tags; of two images with one tag the later gets it, as in ``docker
        load``."""
        for tag in image.tags:
            self._tags[tag] = f"sha256:{image.id}"
        if image.id in self._images:
            return
        self._images.add(image.id)
        self._file(self._contents, image.id.encode(), image.config, 0o600)
        if image.parent and image.parent in self._images and image.parent != image.id:
            metadata = self._dir(self._metadata, image.id.encode(), 0o700)
            self._file(metadata, b"parent", f"sha256:{image.parent}".encode(), 0o600)

    def finish(self) -> None:
        """Write repositories.json."""
        repositories: dict[str, dict[str, str]] = {}
        for tag in sorted(self._tags):
            name = tag.rpartition(":")[0]
            repositories.setdefault(name, {})[tag] = self._tags[tag]
        content = json.dumps({"Repositories": repositories}, separators=(",", ":"), sort_keys=True)
        self._file(self._image, b"repositories.json", content.encode(), 0o600)

    def _meta(self, mode: int) -> Meta:
        return Meta(mode, 0, 0, self._now)

    def _dir(self, parent: int, name: bytes, mode: int) -> int:
        return self._builder.add_dir(parent, name, self._meta(mode))

    def _file(self, parent: int, name: bytes, content: bytes, mode: int = 0o644) -> None:
        sink = self._builder.add_file(parent, name, self._meta(mode), len(content))
        if content:
            sink.write(content)
        sink.close()
