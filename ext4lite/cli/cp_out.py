"""``ext4lite cp-out``: copy files out of a volume."""

from __future__ import annotations

from typing import Annotated

import typer

from ext4lite.cli.values import Replay, Verify


def cp_out(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="The volume to look into.")],
    files: Annotated[
        list[str], typer.Argument(metavar="SOURCE... TARGET", help="Paths in the volume, then a host path.")
    ],
    *,
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="Directories, too, with all in them.")] = False,
    archive: Annotated[
        bool, typer.Option("--archive", "-a", help="As -r, with owners and extended attributes (needs root).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    replay: Replay = True,
    verify: Verify = True,
) -> None:
    """Copy files of a volume to the host; into TARGET if that is a directory. Holes, permissions and times are kept,
    set-user-id bits only with -a and the owner.

    What the host refuses to make (devices, without root) is left out and reported; the exit code is then 6.
    """
    from ext4lite.cli.copying import report
    from ext4lite.cli.progress import steps
    from ext4lite.copyout import CopyOut, volume_weight
    from ext4lite.volume import Volume

    if len(files) < 2:
        raise typer.BadParameter("needs SOURCE and TARGET")
    with (
        Volume.open(image, replay=replay, verify=verify) as volume,
        steps("copying out", lambda: volume_weight(volume, files[:-1]), shown=not as_json) as progress,
    ):
        copy = CopyOut(volume, recursive=recursive or archive, archive=archive, progress=progress)
        done = copy.copy(files[:-1], files[-1])
    report(done, as_json=as_json)
