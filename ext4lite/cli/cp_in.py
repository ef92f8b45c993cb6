"""``ext4lite cp-in``: copy files into a volume."""

from __future__ import annotations

from typing import Annotated

import typer


def cp_in(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="The volume to write to; it must not be in use.")],
    files: Annotated[
        list[str], typer.Argument(metavar="SOURCE... TARGET", help="Host files, then a path in the volume.")
    ],
    *,
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="Directories, too, with all in them.")] = False,
    archive: Annotated[
        bool, typer.Option("--archive", "-a", help="As -r, with owners and extended attributes.")
    ] = False,
    owner: Annotated[str, typer.Option("--owner", metavar="UID:GID", help="Owner of what is copied.")] = "0:0",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Copy host files into a volume; into TARGET if that is a directory. Holes, permissions and times are kept;
    symlinks are copied, not followed.

    What below a SOURCE cannot be read is left out and reported; the exit code is then 6.
    """
    from ext4lite.cli.copying import report
    from ext4lite.cli.progress import steps
    from ext4lite.transfer import CopyIn, host_weight
    from ext4lite.volume import Volume

    if len(files) < 2:
        raise typer.BadParameter("needs SOURCE and TARGET")
    uid, colon, gid = owner.partition(":")
    if not (uid.isdecimal() and (gid.isdecimal() or not colon)):
        raise typer.BadParameter(f"{owner!r} is not UID:GID")
    ids = int(uid), int(gid or uid)
    with (
        Volume.open(image, mode="rw") as volume,
        steps("copying in", lambda: host_weight(files[:-1]), shown=not as_json) as progress,
    ):
        copy = CopyIn(volume, recursive=recursive or archive, archive=archive, owner=ids, progress=progress)
        done = copy.copy(files[:-1], files[-1])
    report(done, as_json=as_json)
