"""``ext4lite uuid``: show or set a volume's UUID."""

from __future__ import annotations

import json
from typing import Annotated
from uuid import UUID, uuid4

import typer


def uuid(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="The volume; to set its UUID it must not be in use.")],
    new: Annotated[str | None, typer.Argument(metavar="[UUID|random]", help="The new UUID.")] = None,
    csum_seed: Annotated[
        bool,
        typer.Option("--csum-seed", help="Add the feature metadata_csum_seed where the checksums depend on the UUID."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a volume's UUID, or set it in an instant."""
    from ext4lite.volume import Volume

    if new is None:
        with Volume.open(image, dirty=True) as volume:
            found = volume.super.uuid
    else:
        from ext4lite.identity import set_uuid

        try:
            wanted = uuid4() if new == "random" else UUID(new)
        except ValueError:
            raise typer.BadParameter(f"{new!r} is not a UUID") from None
        with Volume.open(image, mode="rw") as writable:
            set_uuid(writable, wanted, add_seed=csum_seed)
            found = writable.super.uuid
    if as_json:
        print(json.dumps({"image": image, "uuid": str(found)}))
    elif new is None or new == "random":
        print(found)
