"""``ext4lite mkgolden``: container images → a golden volume with a ready Docker store."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ext4lite.cli.values import epoch_value, size_value, uuid_value

if TYPE_CHECKING:
    from ext4lite.golden import GoldenResult, Progress


def mkgolden(
    output: Annotated[str, typer.Argument(metavar="GOLDEN", help="The volume to write.")],
    *,
    image: Annotated[
        list[str],
        typer.Option(
            "--image",
            metavar="PATH[=NAME:TAG]",
            help="A docker-archive, an OCI layout directory, or a tar of one; may be given again. "
            "NAME:TAG names the image in it, for archives that do not.",
        ),
    ],
    size: Annotated[
        str, typer.Option(metavar="SIZE", help="Size of the volume, sparse: bytes, or with K, M, G, T.")
    ] = "16G",
    uuid: Annotated[str, typer.Option(metavar="UUID", help="UUID of the volume; random by default.")] = "",
    label: Annotated[str, typer.Option(metavar="LABEL", help="Label of the volume, at most 16 bytes.")] = "",
    journal_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Size of the journal; by default by the volume's size.")
    ] = "",
    platform: Annotated[
        str, typer.Option(metavar="OS/ARCH", help="Which image of a multi-platform one.")
    ] = "linux/amd64",
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace GOLDEN if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, and no progress.")] = False,
) -> None:
    """Make a golden volume: a complete /var/lib/docker (overlay2) with the images, without Docker and without root.

    Equal images, --uuid and SOURCE_DATE_EPOCH give equal bytes. If anything fails, GOLDEN is left as it was.
    """
    from ext4lite.golden import ImageArgument, make_golden

    volume_size, volume_uuid, timestamp = size_value(size, "--size"), uuid_value(uuid), epoch_value()
    journal = size_value(journal_size, "--journal-size") if journal_size else None
    with _progress(wanted=not as_json) as progress:
        result = make_golden(
            [ImageArgument.parse(argument) for argument in image],
            output,
            size=volume_size,
            uuid=volume_uuid,
            label=label,
            journal_size=journal,
            timestamp=timestamp,
            platform=platform,
            force=force,
            progress=progress,
        )
    if as_json:
        print(json.dumps(asdict(result)))
    else:
        _print(result)


def _progress(*, wanted: bool) -> AbstractContextManager[Callable[[Progress], object] | None]:
    """A progress bar on stderr, if that is a terminal."""
    return _Bar() if wanted and sys.stderr.isatty() else nullcontext()


class _Bar:
    """rich's progress bar, fed with :class:`ext4lite.golden.Progress`."""

    def __enter__(self) -> Callable[[Progress], object]:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn, TransferSpeedColumn
        from rich.progress import Progress as RichProgress

        columns = (
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        self._bar = RichProgress(*columns, console=Console(stderr=True), transient=True)
        self._bar.start()
        self._task = self._bar.add_task("reading images", total=None)
        return self._update

    def _update(self, progress: Progress) -> None:
        self._bar.update(self._task, completed=progress.done, total=progress.total, description=progress.step)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _print(result: GoldenResult) -> None:
    from ext4lite.units import human

    for image in result.images:
        name = ", ".join(image.tags) or "<none>"
        print(f"{name}  {image.id[:12]}  {image.layers} layers, {image.layers - image.new_layers} of them shared")
    print(
        f"{result.path}: {result.files} files, {human(result.content_bytes)} in {result.layers} layers; "
        f"{human(result.allocated_bytes)} on disk; {result.seconds:.1f} s"
    )
