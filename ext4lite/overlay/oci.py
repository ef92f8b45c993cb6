"""Container images as files: docker-archive tars (``docker save``), OCI layout directories, and tars of OCI layouts.

:func:`open_images` finds out which of them a path is and returns an :class:`ImageArchive` with the images in it. The
archive itself may be compressed (gzip, zstd); it is then unpacked into a nameless temporary file first, since layers
are read in the images' order. Layers may be plain, gzip or zstd whatever their media type says, as in docker.

What is verified: sizes of all blobs, digests of index, manifests and configs, and (by whoever reads a layer, see
:mod:`ext4lite.golden`) the layer's diff ID, the digest of its uncompressed tar. Everything wrong is an
:class:`~ext4lite.errors.ImageError` naming archive and blob.

Sources: OCI image-spec v1 (image-layout, image-index, manifest, config, annotations), Docker image spec v1.2
(manifest.json), reference grammar of distribution.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import posixpath
import re
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, cast

from ext4lite.errors import HostError, ImageError
from ext4lite.overlay import tarstream
from ext4lite.overlay.tarstream import TarReader, clean_name

#: Bytes read at once from an archive, and at most decompressed at once.
CHUNK = 1 << 20
_MAX_JSON = 32 << 20
_MAX_MEMBERS = 1 << 20
_MAX_INDEX_DEPTH = 4
# Indexes may name each other and the same blob any number of times; what is read of an archive is bounded as a whole.
_MAX_DOCUMENTS = 5_000
_MAX_DOCUMENT_BYTES = 512 << 20
#: dockerd refuses deeper images (moby: maxLayerDepth).
MAX_LAYERS = 125

_OWN_DESCRIPTOR = re.compile(r"/dev/stdin|/(?:dev|proc/self)/fd/(?P<number>[0-9]{1,6})")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_OTHER_MAGICS = ((b"BZh", "bzip2"), (b"\xfd7zXZ\x00", "xz"), (b"\x04\x22\x4d\x18", "lz4"))


@dataclass(slots=True)
class Blob:
    """A run of bytes of a file on the host: ``size`` bytes from ``offset`` of ``fd``, or of ``path`` where that is -1.

    A layout's files are opened only while they are read, since there may be more of them than file descriptors.
    """

    name: str
    fd: int
    offset: int
    size: int
    path: str = ""

    @contextmanager
    def _opened(self) -> Iterator[int]:
        if self.fd >= 0:
            yield self.fd
            return
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise HostError.from_os(error, self.path) from error
        try:
            yield fd
        finally:
            os.close(fd)

    def chunks(self, start: int = 0) -> Iterator[bytes]:
        """Its bytes from ``start`` on, in pieces of at most 1 MiB. A file that shrank meanwhile is an ImageError."""
        at, end = self.offset + start, self.offset + self.size
        with self._opened() as fd:
            while at < end:
                piece = os.pread(fd, min(CHUNK, end - at), at)
                if not piece:
                    raise ImageError(f"{self.name} is truncated: {end - at} bytes are missing")
                at += len(piece)
                yield piece

    def read(self, limit: int = _MAX_JSON) -> bytes:
        """All of it, if it has at most ``limit`` bytes."""
        if self.size > limit:
            raise ImageError(f"{self.name} is too large: {self.size} bytes")
        return b"".join(self.chunks())

    def compression(self) -> str:
        """``"none"``, ``"gzip"`` or ``"zstd"``, by the first bytes; anything else known is refused."""
        with self._opened() as fd:
            head = os.pread(fd, min(8, self.size), self.offset)
        if head.startswith(_GZIP_MAGIC):
            return "gzip"
        if head.startswith(_ZSTD_MAGIC) or (head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F):
            return "zstd"
        for magic, what in _OTHER_MAGICS:
            if head.startswith(magic):
                raise ImageError(f"{self.name} is compressed with {what}; only gzip and zstd are supported")
        return "none"

    def uncompressed(self, progress: Callable[[int], object] = lambda _: None) -> Iterator[bytes]:
        """The bytes behind the compression, in pieces of at most 1 MiB; ``progress`` gets counts of stored bytes."""
        kind = self.compression()
        stored = _counted(self.chunks(), progress)
        if kind == "gzip":
            return _gunzip(stored, self.name)
        if kind == "zstd":
            return _unzstd(stored, self.name)
        return stored


@dataclass(slots=True)
class Layer:
    """A layer of an image: its ``diff_id`` (``sha256:…`` of the uncompressed tar) and the blob that holds it."""

    diff_id: str
    blob: Blob


@dataclass(slots=True)
class Image:
    """An image found in an archive.

    ``id`` is the hex digest of ``config`` (the raw JSON), ``tags`` familiar references (``python:3.11-slim``),
    ``parent`` the image ID named as the parent by a docker-archive, else "".
    """

    id: str
    config: bytes
    layers: list[Layer]
    tags: list[str] = field(default_factory=list)
    parent: str = ""


class _Blobs(Protocol):
    """Named files: members of a tar, or files under a directory."""

    where: str

    def get(self, name: str) -> Blob | None: ...
    def close(self) -> None: ...


class ImageArchive:
    """An opened archive or layout: ``images`` in its order. Context manager: blobs are readable until it is closed."""

    def __init__(self, blobs: _Blobs, images: list[Image]) -> None:
        self._blobs = blobs
        self.where = blobs.where
        self.images = images

    def close(self) -> None:
        """Close the files behind the blobs."""
        self._blobs.close()

    def __enter__(self) -> ImageArchive:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_images(path: str | Path, *, platform: str = "linux/amd64", tag: str | None = None) -> ImageArchive:
    """Open an archive or layout and describe its images.

    ``platform`` chooses from image indexes of several platforms. ``tag`` (``name:tag``) is given to the image instead
    of the archive's own tags; the archive must then hold a single image. Raises ImageError, or HostError when it
    cannot be read.
    """
    path = os.fspath(path)
    if not path:
        raise HostError("an empty path names no image")
    try:
        blobs: _Blobs = _Directory(path) if Path(path).is_dir() else _Archive(path)
    except OSError as error:
        hint = "archives that are compressed or come from a pipe need room in TMPDIR" if _no_room(error) else ""
        raise HostError((error.strerror or str(error)).lower(), where=path, hint=hint) from error
    try:
        if blobs.get("manifest.json") is not None:
            images = _docker_images(blobs, _Documents())
        elif blobs.get("index.json") is not None:
            images = _oci_images(blobs, platform)
        elif blobs.get("repositories") is not None:
            raise ImageError("a docker-archive of Docker before 1.10 (no manifest.json) is not supported")
        else:
            raise ImageError("neither a docker-archive (manifest.json) nor an OCI layout (index.json)")
        if not images:
            raise ImageError("there is no image in it")
        if tag is not None:
            if len(images) != 1:
                raise ImageError(f"there are {len(images)} images in it, so that {tag!r} could be any of them")
            images[0].tags = [familiar(tag)]
    except ImageError as error:
        blobs.close()
        if not error.where:
            raise ImageError(error.what, where=path, hint=error.hint) from error
        raise
    except BaseException:
        blobs.close()
        raise
    return ImageArchive(blobs, images)


def _no_room(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Documents:
    """Reads an archive's JSON documents, and only so many and so much."""

    def __init__(self) -> None:
        self._left = _MAX_DOCUMENTS
        self._bytes_left = _MAX_DOCUMENT_BYTES

    def read(self, blob: Blob) -> bytes:
        """All of a blob. ImageError when it, or all that was read so far, is too much for an image archive."""
        self._left -= 1
        self._bytes_left -= blob.size
        if self._left < 0 or self._bytes_left < 0:
            raise ImageError(f"too many manifests, indexes and configs for an image archive, the last is {blob.name}")
        return blob.read()


# -- where blobs are ------------------------------------------------------------------------------------------------


class _Directory:
    """Files under a directory. Names never leave it: no ``..``, no symlinks out of it."""

    def __init__(self, path: str) -> None:
        self.where = path
        self._root = os.path.realpath(path)

    def get(self, name: str) -> Blob | None:
        try:
            full = os.path.realpath(f"{self._root}/{name}")  # untrusted: resolved first, then checked
        except ValueError:  # NUL, or a surrogate that stands for no byte
            return None
        if not full.startswith(self._root + os.sep):
            raise ImageError(f"{name!r} is outside of the layout", where=self.where)
        try:
            status = Path(full).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise HostError.from_os(error, full) from error
        if not stat.S_ISREG(status.st_mode):
            raise ImageError(f"{name!r} is not a file", where=self.where)
        return Blob(name, -1, 0, status.st_size, full)

    def close(self) -> None:
        """Nothing stays open."""


class _Archive:
    """Members of a tar file. What is compressed or no regular file (``/dev/stdin``, ``<(docker save …)``) is first put
    into a temporary file without a name, since layers are read in the images' order."""

    def __init__(self, path: str) -> None:
        self.where = path
        own = _OWN_DESCRIPTOR.fullmatch(path)
        # What we were given open may be another user's (docker save | sudo -u …), and opening it anew needs rights.
        self._fd = os.dup(int(own["number"] or 0)) if own else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                self._replace(iter(lambda: os.read(self._fd, CHUNK), b""))
            whole = Blob(path, self._fd, 0, os.fstat(self._fd).st_size)
            if not whole.size:
                raise ImageError("the file is empty", where=path)
            if whole.compression() != "none":
                self._replace(whole.uncompressed())
                whole = Blob(path, self._fd, 0, os.fstat(self._fd).st_size)
            self._members = self._index(whole)
        except BaseException:
            self.close()
            raise

    def _replace(self, pieces: Iterator[bytes]) -> None:
        """Go on with a temporary file that holds ``pieces``."""
        with tempfile.TemporaryFile(prefix="ext4lite-") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.dup2(file.fileno(), self._fd, inheritable=False)

    def _index(self, whole: Blob) -> dict[str, Blob | str]:
        """Where each member's content is; links map to the member they mean. The content itself is not read."""
        at = 0

        def pieces() -> Iterator[bytes]:
            nonlocal at
            while at < whole.size:
                piece = os.pread(self._fd, 64 << 10, at)
                at += len(piece)
                yield piece

        def skip(n: int) -> int:
            nonlocal at
            n = min(n, whole.size - at)
            at += n
            return n

        reader = TarReader(pieces(), where=self.where, skip=skip)
        members: dict[str, Blob | str] = {}
        while (member := reader.next()) is not None:
            name = clean_name(member.name).decode("utf-8", "surrogateescape")
            if member.type in (tarstream.REGULAR, tarstream.CONTIGUOUS):
                members[name] = Blob(name, self._fd, reader.position, member.size)
            elif member.type in (tarstream.LINK, tarstream.SYMLINK):
                target = member.linkname.decode("utf-8", "surrogateescape")
                base = posixpath.dirname(name) if member.type == tarstream.SYMLINK else ""
                members[name] = posixpath.normpath(posixpath.join(base, target)).lstrip("/")
            if len(members) > _MAX_MEMBERS:
                raise ImageError("too many members for an image archive", where=self.where)
        return members

    def get(self, name: str) -> Blob | None:
        name = posixpath.normpath(name)
        for _ in range(8):
            found = self._members.get(name)
            if not isinstance(found, str):
                return found
            name = found
        raise ImageError(f"{name!r}: links in a circle", where=self.where)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


# -- docker-archive -------------------------------------------------------------------------------------------------


def _docker_images(blobs: _Blobs, documents: _Documents) -> list[Image]:
    """The images of a ``docker save`` archive, old form (``ID/layer.tar``) and new (``blobs/sha256/…``)."""
    images: list[Image] = []
    manifest = _json(_need(blobs, "manifest.json").read(), "manifest.json", list)
    for item in manifest:
        if not isinstance(item, dict):
            raise ImageError("manifest.json: not a list of objects")
        config_name = _text(item.get("Config"), "manifest.json: Config")
        layer_names = _strings(item.get("Layers"), "manifest.json: Layers")
        config = documents.read(_need(blobs, config_name))
        digest = hashlib.sha256(config).hexdigest()
        # docker: HEX.json or blobs/sha256/HEX; go-containerregistry: sha256:HEX.
        named = posixpath.basename(config_name).removesuffix(".json").removeprefix("sha256:")
        if re.fullmatch(r"[0-9a-f]{64}", named) and named != digest:
            raise ImageError(f"{config_name} is damaged: its sha256 is {digest}")
        tags = [familiar(tag) for tag in _strings(item.get("RepoTags"), "manifest.json: RepoTags")]
        layers = [_need(blobs, name) for name in layer_names]
        parent = item.get("Parent") or ""
        if parent and not _DIGEST.fullmatch(_text(parent, "manifest.json: Parent")):
            raise ImageError(f"manifest.json: bad Parent {parent!r}")
        images.append(_image(config, layers, tags, parent.removeprefix("sha256:")))
    return images


# -- OCI layout -----------------------------------------------------------------------------------------------------


def _oci_images(blobs: _Blobs, platform: str) -> list[Image]:
    marker = blobs.get("oci-layout")
    if marker is not None:
        version = _json(marker.read(), "oci-layout", dict).get("imageLayoutVersion")
        if not isinstance(version, str) or not version.startswith("1."):
            raise ImageError(f"OCI layout version {version!r} is not supported")
    index = _json(_need(blobs, "index.json").read(), "index.json", dict)
    images: dict[str, Image] = {}
    others: set[str] = set()
    walk = _Walk(blobs, platform, images, others, _Documents())
    _walk_index(walk, index, "index.json", tags=[])
    if not images and others:
        raise ImageError(f"no image for {platform} in it, only for {', '.join(sorted(others))}")
    return list(images.values())


@dataclass(slots=True)
class _Walk:
    """What a walk through a layout's indexes looks for (``platform``), and what it found: images, other platforms."""

    blobs: _Blobs
    platform: str
    images: dict[str, Image]
    others: set[str]
    documents: _Documents


def _walk_index(walk: _Walk, index: dict[str, Any], where: str, *, tags: list[str], depth: int = 0) -> None:
    """Collect the images for a platform from an index and those in it; tags are inherited from outer descriptors."""
    blobs, platform, others = walk.blobs, walk.platform, walk.others
    if depth > _MAX_INDEX_DEPTH:
        raise ImageError(f"{where}: indexes are nested too deeply")
    for descriptor in _list(index.get("manifests"), f"{where}: manifests"):
        if not isinstance(descriptor, dict):
            raise ImageError(f"{where}: a descriptor is not an object")
        annotations = descriptor.get("annotations") or {}
        if not isinstance(annotations, dict):
            raise ImageError(f"{where}: annotations are not an object")
        if annotations.get("vnd.docker.reference.type") == "attestation-manifest":
            continue
        wanted = _platform(descriptor.get("platform"))
        if wanted and not _matches(wanted, platform):
            others.add(wanted)
            continue
        inner = [*tags, *_annotated_tags(annotations)]
        blob = _blob(blobs, descriptor, where)
        content = walk.documents.read(blob)
        _verify(content, descriptor["digest"])
        document = _json(content, blob.name, dict)
        if "manifests" in document:
            _walk_index(walk, document, blob.name, tags=inner, depth=depth + 1)
            continue
        config_blob = _blob(blobs, document.get("config"), blob.name)
        config = walk.documents.read(config_blob)
        _verify(config, document["config"]["digest"])
        layers = [_blob(blobs, layer, blob.name) for layer in _list(document.get("layers"), f"{blob.name}: layers")]
        if not wanted:
            parsed = _json(config, config_blob.name, dict)
            actual = f"{parsed.get('os') or 'linux'}/{parsed.get('architecture') or 'amd64'}"
            if not _matches(actual, platform):
                others.add(actual)
                continue
        image = _image(config, layers, inner, "")
        known = walk.images.setdefault(image.id, image)
        known.tags.extend(tag for tag in image.tags if tag not in known.tags)


def _blob(blobs: _Blobs, descriptor: object, where: str) -> Blob:
    """The blob that a descriptor means, of the size that it states."""
    if not isinstance(descriptor, dict):
        raise ImageError(f"{where}: a descriptor is missing")
    digest = descriptor.get("digest")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ImageError(f"{where}: bad digest {digest!r} (only sha256 is supported)")
    blob = _need(blobs, f"blobs/sha256/{digest.removeprefix('sha256:')}")
    if blob.size != descriptor.get("size"):
        raise ImageError(f"{blob.name} has {blob.size} bytes, {where} says {descriptor.get('size')!r}")
    return blob


def _platform(value: object) -> str:
    """``os/architecture`` of a descriptor's platform, "" if it says nothing."""
    if not isinstance(value, dict) or not value.get("architecture"):
        return ""
    return f"{value.get('os') or 'linux'}/{value['architecture']}"


def _matches(have: str, want: str) -> bool:
    return have.split("/")[:2] == want.split("/")[:2]


def _annotated_tags(annotations: dict[str, Any]) -> list[str]:
    """The references in a descriptor's annotations: containerd's full name, else a ref.name that is no bare tag."""
    full = annotations.get("io.containerd.image.name")
    if isinstance(full, str) and full:
        return [] if "@" in full else [familiar(full)]
    short = annotations.get("org.opencontainers.image.ref.name")
    if isinstance(short, str) and (":" in short or "/" in short) and "@" not in short:
        return [familiar(short)]
    return []


# -- common ---------------------------------------------------------------------------------------------------------


def _image(config: bytes, blobs: list[Blob], tags: list[str], parent: str) -> Image:
    """Check a config against its layers, with the rules by which dockerd refuses images."""
    name = "the image's config"
    parsed = _json(config, name, dict)
    system = parsed.get("os") or "linux"
    if system != "linux":
        raise ImageError(f"the image is for {system}, not for linux")
    rootfs = parsed.get("rootfs")
    if not isinstance(rootfs, dict):
        raise ImageError(f"{name} has no rootfs")
    diff_ids = _strings(rootfs.get("diff_ids"), f"{name}: diff_ids")
    for diff_id in diff_ids:
        if not _DIGEST.fullmatch(diff_id):
            raise ImageError(f"{name}: bad diff_id {diff_id!r} (only sha256 is supported)")
    if len(diff_ids) != len(blobs):
        raise ImageError(f"{name} names {len(diff_ids)} layers, the manifest {len(blobs)}")
    if len(diff_ids) > MAX_LAYERS:
        raise ImageError(f"the image has {len(diff_ids)} layers; dockerd accepts {MAX_LAYERS}")
    history = _list(parsed.get("history"), f"{name}: history")
    filled = sum(1 for step in history if isinstance(step, dict) and not step.get("empty_layer"))
    if filled > len(diff_ids):
        raise ImageError(f"{name}: the history has {filled} steps with a layer, but there are {len(diff_ids)} layers")
    layers = [Layer(diff_id, blob) for diff_id, blob in zip(diff_ids, blobs, strict=True)]
    return Image(hashlib.sha256(config).hexdigest(), config, layers, list(dict.fromkeys(tags)), parent)


_NAME_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REFERENCE = re.compile(
    rf"(?:(?P<host>[A-Za-z0-9.-]+(?::\d+)?|\[[0-9a-fA-F:]+\](?::\d+)?)/)??(?P<path>{_NAME_PART}(?:/{_NAME_PART})*)"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?",
    re.ASCII,
)


def familiar(reference: str) -> str:
    """A reference the way docker shows and stores it: ``docker.io/library/python:3.11`` → ``python:3.11``.

    Without a tag it gets ``latest``. Raises ImageError if it is not a name with a tag.
    """
    host, slash, rest = reference.partition("/")
    if not slash or not (any(c in host for c in ".:") or host == "localhost" or host != host.lower()):
        host, rest = "docker.io", reference
    match = _REFERENCE.fullmatch(rest)
    if match is None or match["host"] or not _REFERENCE.fullmatch(f"{host}/x"):
        raise ImageError(f"bad image name {reference!r}", hint="expected name:tag")
    path, tag = match["path"], match["tag"] or "latest"
    if host in ("docker.io", "index.docker.io"):
        return f"{path.removeprefix('library/')}:{tag}" if path.count("/") == 1 else f"{path}:{tag}"
    return f"{host}/{path}:{tag}"


def _need(blobs: _Blobs, name: str) -> Blob:
    blob = blobs.get(name)
    if blob is None:
        raise ImageError(f"{name} is missing")
    return blob


def _verify(content: bytes, digest: str) -> None:
    actual = "sha256:" + hashlib.sha256(content).hexdigest()
    if actual != digest:
        raise ImageError(f"blob {digest} is damaged: its digest is {actual}")


def _json(content: bytes, name: str, kind: type) -> Any:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ImageError(f"{name} is not JSON: {error}") from error
    if not isinstance(value, kind):
        raise ImageError(f"{name} is not a JSON {'object' if kind is dict else 'array'}")
    return value


def _list(value: object, what: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise ImageError(f"{what} is not a list")
    return value


def _strings(value: object, what: str) -> list[str]:
    items = _list(value, what)
    if not all(isinstance(item, str) for item in items):
        raise ImageError(f"{what} is not a list of strings")
    return cast("list[str]", items)


def _text(value: object, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise ImageError(f"{what} is missing")
    return value


# -- decompression --------------------------------------------------------------------------------------------------


def _counted(chunks: Iterator[bytes], progress: Callable[[int], object]) -> Iterator[bytes]:
    for chunk in chunks:
        progress(len(chunk))
        yield chunk


def _gunzip(chunks: Iterator[bytes], name: str) -> Iterator[bytes]:
    """Decompress gzip, members one after another; zero padding behind the last one is allowed, as in gzip(1)."""
    make, failure = _gzip_decompressor()
    data = next(chunks, b"")
    while data:
        stream = make()
        try:
            while not stream.eof:
                piece = stream.decompress(data, CHUNK)
                if piece:
                    yield piece
                data = b""
                if stream.needs_input and not stream.eof:
                    data = next(chunks, b"")
                    if not data:
                        raise ImageError(f"{name} is truncated: its gzip stream does not end")
        except failure as error:
            raise ImageError(f"{name} is damaged: {error}") from error
        data = stream.unused_data
        while not data.strip(b"\0"):
            data = next(chunks, b"")
            if not data:
                return
        data = data.lstrip(b"\0")


class _GzipStream(Protocol):
    eof: bool
    needs_input: bool
    unused_data: bytes

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _ZlibGzip:
    """zlib's decompressor with the calling convention of bz2's and isal's."""

    def __init__(self) -> None:
        import zlib

        self._stream = zlib.decompressobj(zlib.MAX_WBITS | 16)

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def needs_input(self) -> bool:
        return not self._stream.unconsumed_tail and not self._stream.eof

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._stream.decompress(self._stream.unconsumed_tail + data, max_length)


def _gzip_decompressor() -> tuple[Callable[[], _GzipStream], Any]:
    """ISA-L's inflate where it is installed (2–3 times zlib's speed), else zlib's; and what it raises for bad data."""
    try:
        from isal import igzip_lib
    except ImportError:
        import zlib

        return cast("Callable[[], _GzipStream]", _ZlibGzip), zlib.error
    return (lambda: cast("_GzipStream", igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP))), igzip_lib.error


def _unzstd(chunks: Iterator[bytes], name: str) -> Iterator[bytes]:
    import zstandard

    class Source:
        """The ``read`` that zstandard asks for."""

        ended = False

        def read(self, _size: int = -1) -> bytes:
            chunk = next(chunks, b"")
            self.ended = not chunk
            return chunk

    try:
        with zstandard.ZstdDecompressor().stream_reader(cast("Any", Source()), read_across_frames=True) as reader:
            while piece := reader.read(CHUNK):
                yield piece
    except zstandard.ZstdError as error:
        raise ImageError(f"{name} is damaged: {error}") from error
