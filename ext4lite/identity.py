"""A volume's name and UUID, changed in place in an instant, in the superblock and its copies.

The UUID is the seed of all checksums of metadata unless the feature metadata_csum_seed keeps the old one. So a volume
without it gets that feature (kernels since 4.4 know it), or the change is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from ext4lite.checksum import superblock_checksum
from ext4lite.errors import Invalid, Unsupported
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import SuperBlock
from ext4lite.writer import WritableVolume

MAX_LABEL = 16


def set_label(volume: WritableVolume, label: bytes) -> None:
    """Name a volume; at most 16 bytes. Durable when it returns. Invalid."""
    if len(label) > MAX_LABEL or b"\0" in label:
        raise Invalid(f"a label has at most {MAX_LABEL} bytes, this one {len(label)}", where=volume.where)

    def change(raw: SuperBlock) -> None:
        raw.s_volume_name = label + bytes(MAX_LABEL - len(label))

    _everywhere(volume, change)


def set_uuid(volume: WritableVolume, uuid: UUID, *, add_seed: bool = False) -> None:
    """Give a volume another UUID. Durable when it returns.

    Unsupported for a volume with metadata_csum and without metadata_csum_seed, unless ``add_seed`` adds that feature,
    and for one with ea_inode and without metadata_csum.
    """
    sb = volume.super
    needs_seed = sb.metadata_csum and not sb.incompat & c.INCOMPAT_CSUM_SEED
    if needs_seed and not add_seed:
        what = "the UUID is the seed of the volume's checksums (metadata_csum without metadata_csum_seed)"
        raise Unsupported(what, where=volume.where, hint="--csum-seed adds the feature that keeps the old seed")
    if sb.incompat & c.INCOMPAT_EA_INODE and not sb.metadata_csum:
        what = "the UUID is the seed of the hashes of attribute values (ea_inode without metadata_csum)"
        raise Unsupported(what, where=volume.where, hint="tune2fs -U hashes them anew")

    def change(raw: SuperBlock) -> None:
        if needs_seed:
            raw.s_checksum_seed = sb.seed
            raw.s_feature_incompat |= c.INCOMPAT_CSUM_SEED
        raw.s_uuid = uuid.bytes

    if sb.ro_compat & c.RO_GDT_CSUM and not sb.metadata_csum:
        volume.alloc.reseal()  # their checksums begin with the UUID
    _everywhere(volume, change)
    if needs_seed:
        sb.incompat |= c.INCOMPAT_CSUM_SEED


def _everywhere(volume: WritableVolume, change: Callable[[SuperBlock], None]) -> None:
    """Change the superblock in a transaction, then its copies in place."""
    volume.mark_in_use()
    change(volume.super.raw)
    volume.super_changed()
    volume.sync()
    sb, blocks = volume.super, volume._blocks
    for group in range(1, sb.groups):
        if not volume.has_super(group):
            continue
        number = sb.group_first(group)
        block = bytearray(blocks.read(number))
        copy = SuperBlock.unpack(bytes(block))
        if copy.s_magic != c.MAGIC:
            continue
        change(copy)
        data = copy.pack()
        if copy.s_feature_ro_compat & c.RO_METADATA_CSUM:
            copy.s_checksum = superblock_checksum(data)
            data = copy.pack()
        block[: len(data)] = data
        blocks.write(number, bytes(block))
