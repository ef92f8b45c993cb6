"""Golden volumes: container images turned into a ready /var/lib/docker on an ext4 volume, without Docker and root.

For every layer that is not in the volume yet the stored blob is read once: a worker thread decompresses it and hashes
the uncompressed tar, the main thread parses the tar, computes the checksums for tar-split, and hands contents on to the
:class:`~ext4lite.builder.ImageBuilder`, which writes them one after another. Layers that images share (equal chain
IDs) are stored once. Nothing exists under the output's name until everything is written and verified.
"""

from __future__ import annotations

import hashlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

from ext4lite.builder import ImageBuilder
from ext4lite.errors import Ext4LiteError, ImageError
from ext4lite.overlay.docker_store import StoreWriter, chain_id
from ext4lite.overlay.layers import LayerApplier, split_again
from ext4lite.overlay.oci import Blob, Image, ImageArchive, open_images
from ext4lite.overlay.tarsplit import TarSplitWriter
from ext4lite.overlay.tarstream import TarReader
from ext4lite.units import source_date_epoch

#: Chunks (of at most 1 MiB) decompressed ahead of the parser.
_AHEAD = 16
DEFAULT_SIZE = 16 << 30


@dataclass(slots=True, frozen=True)
class ImageArgument:
    """What ``--image`` names: a path, and the tag to give the image in it instead of its own (None: keep its own)."""

    path: str
    tag: str | None = None

    @classmethod
    def parse(cls, text: str) -> ImageArgument:
        """``PATH`` or ``PATH=name:tag``; a file whose name has an ``=`` in it is taken as it is."""
        path, equals, tag = text.rpartition("=")
        if equals and not Path(text).exists():
            return cls(path, tag)
        return cls(text)


@dataclass(slots=True)
class GoldenImage:
    """An image in the golden volume: ID (hex), tags, and how many of its layers were new to the volume."""

    id: str
    tags: list[str]
    layers: int
    new_layers: int


@dataclass(slots=True)
class GoldenResult:
    """What :func:`make_golden` made. Sizes in bytes, times in seconds (monotonic wall clock)."""

    path: str
    images: list[GoldenImage] = field(default_factory=list)
    layers: int = 0
    members: int = 0
    files: int = 0
    whiteouts: int = 0
    content_bytes: int = 0
    stored_bytes: int = 0
    volume_bytes: int = 0
    allocated_bytes: int = 0
    seconds: float = 0.0
    finish_seconds: float = 0.0


@dataclass(slots=True)
class Progress:
    """What is going on: ``done`` of ``total`` stored bytes of layers read, and the step in words."""

    done: int
    total: int
    step: str


def make_golden(
    images: Sequence[ImageArgument],
    output: str | Path,
    *,
    size: int = DEFAULT_SIZE,
    uuid: UUID | None = None,
    label: str = "",
    journal_size: int | None = None,
    timestamp: int | None = None,
    platform: str = "linux/amd64",
    force: bool = False,
    progress: Callable[[Progress], object] | None = None,
) -> GoldenResult:
    """Write the volume ``output`` (``size`` bytes, sparse) with the Docker store that holds ``images``.

    ``timestamp`` (seconds) dates the store's own files; None means SOURCE_DATE_EPOCH, else now. Equal images,
    ``uuid`` and timestamp give equal bytes. ``progress`` is called from both threads, a few times per MiB. Raises
    ImageError for a bad archive, VolumeFull, HostError; then there is no output file.
    """
    started = time.monotonic()
    now = _now() if timestamp is None else timestamp
    result = GoldenResult(os.fspath(output))
    with ExitStack() as stack:
        archives: list[ImageArchive] = []
        for argument in images:
            archives.append(stack.enter_context(open_images(argument.path, platform=platform, tag=argument.tag)))
        plan = _plan(archives)
        meter = _Meter(sum(step.blob.size for step in plan), progress)
        builder = stack.enter_context(
            ImageBuilder(
                result.path, size=size, uuid=uuid, label=label, journal_size=journal_size, timestamp=now, force=force
            )
        )
        store = StoreWriter(builder, timestamp_ns=now * 1_000_000_000)
        feed = stack.enter_context(_Feed(plan, meter))
        pool = stack.enter_context(ThreadPoolExecutor(1, "tar-split"))
        for number, step in enumerate(plan, 1):
            meter.step = f"layer {number}/{len(plan)}"
            _store_layer(builder, store, feed, step, pool=pool, now_ns=now * 1_000_000_000, result=result)
        for archive in archives:
            for image in archive.images:
                store.add_image(image)
                fresh = sum(1 for step in plan if step.image is image)
                result.images.append(GoldenImage(image.id, image.tags, len(image.layers), fresh))
        store.finish()
        meter.step = "writing metadata"
        meter.add(0)
        finishing = time.monotonic()
        builder.finish()
        result.finish_seconds = time.monotonic() - finishing
    status = Path(result.path).stat()
    result.layers = len(plan)
    result.stored_bytes = meter.total
    result.volume_bytes, result.allocated_bytes = status.st_size, status.st_blocks * 512
    result.seconds = time.monotonic() - started
    return result


def _now() -> int:
    try:
        epoch = source_date_epoch()
    except ValueError as error:
        raise Ext4LiteError(str(error), where="SOURCE_DATE_EPOCH") from None
    return int(time.time()) if epoch is None else epoch


@dataclass(slots=True)
class _Step:
    """A layer to store: its place in the chain, its blob, and the image that brings it."""

    image: Image
    parent: str
    diff_id: str
    blob: Blob
    where: str


def _plan(archives: Sequence[ImageArchive]) -> list[_Step]:
    """The layers to store, each chain ID once, parents first."""
    plan: list[_Step] = []
    known: set[str] = set()
    for archive in archives:
        for image in archive.images:
            parent = ""
            for layer in image.layers:
                chain = chain_id(parent, layer.diff_id)
                if chain not in known:
                    known.add(chain)
                    plan.append(_Step(image, parent, layer.diff_id, layer.blob, f"{archive.where}: {layer.blob.name}"))
                parent = chain
    return plan


def _store_layer(
    builder: ImageBuilder,
    store: StoreWriter,
    feed: _Feed,
    step: _Step,
    *,
    pool: Executor,
    now_ns: int,
    result: GoldenResult,
) -> None:
    layer = store.begin_layer(step.parent, step.diff_id)
    applier = LayerApplier(builder, layer.diff, timestamp_ns=now_ns, where=step.where)
    split = TarSplitWriter(pool)
    applier.apply(TarReader(feed.layer(), where=step.where), split)
    if feed.digest != step.diff_id:
        raise ImageError(f"damaged layer: its content is {feed.digest}, expected {step.diff_id}", where=step.where)
    stats = applier.stats
    if stats.superseded:
        split = split_again(TarReader(step.blob.uncompressed(), where=step.where), stats.superseded)
    store.finish_layer(layer, size=stats.size, tar_split=split.finish())
    result.members += stats.members
    result.files += stats.files
    result.whiteouts += stats.whiteouts
    result.content_bytes += stats.content_bytes


class _Meter:
    """Counts the bytes read and tells who wants to know."""

    def __init__(self, total: int, callback: Callable[[Progress], object] | None) -> None:
        self.total = total
        self.done = 0
        self.step = "reading images"
        self._callback = callback

    def add(self, count: int) -> None:
        self.done += count
        if self._callback is not None:
            self._callback(Progress(self.done, self.total, self.step))


class _Feed:
    """Decompresses and hashes the planned layers in order, in a thread of its own, a bounded number of chunks ahead.

    Decompressors and hashes work without the GIL, so that this runs beside the parser. Context manager: leaving it
    stops the thread, whatever it is doing.
    """

    def __init__(self, plan: Sequence[_Step], meter: _Meter) -> None:
        self._plan = plan
        self._meter = meter
        # A chunk; None and then the digest at a layer's end; an exception.
        self._queue: queue.Queue[bytes | str | BaseException | None] = queue.Queue(_AHEAD)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="layers", daemon=True)
        self.digest = ""

    def __enter__(self) -> _Feed:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        while self._thread.is_alive():
            try:
                while True:
                    self._queue.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)

    def _work(self) -> None:
        try:
            for step in self._plan:
                digest = hashlib.sha256()
                try:
                    for chunk in step.blob.uncompressed(self._meter.add):
                        digest.update(chunk)
                        self._queue.put(chunk)
                        if self._stop.is_set():
                            return
                except ImageError as error:
                    raise ImageError(error.what, where=step.where.partition(": ")[0], hint=error.hint) from error
                self._queue.put(None)
                self._queue.put("sha256:" + digest.hexdigest())
        except BaseException as error:
            self._queue.put(error)

    def layer(self) -> Iterator[bytes]:
        """The next layer's uncompressed tar; when it is exhausted, :attr:`digest` is that layer's."""
        while True:
            item = self._queue.get()
            if isinstance(item, bytes):
                yield item
            elif item is None:
                digest = self._queue.get()
                assert isinstance(digest, str)
                self.digest = digest
                return
            elif isinstance(item, BaseException):
                raise item
