"""The superblock, checked and with what follows from it: geometry, features by name, state."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from ext4lite.backing import read_header
from ext4lite.checksum import fs_seed, superblock_checksum
from ext4lite.device import Handle, as_device
from ext4lite.errors import CorruptImage, NeedsRecovery, Unsupported
from ext4lite.features import READ
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import SuperBlock

_MAX_LOG_BLOCK_SIZE = 6
_MAX_LOG_CLUSTER_RATIO = 20


@dataclass(slots=True)
class Super:
    """A checked superblock (``raw``) and its consequences; sizes in bytes unless the name says blocks."""

    raw: SuperBlock
    where: str
    file_size: int
    block_size: int
    blocks: int
    first_data_block: int
    groups: int
    desc_size: int
    inode_size: int
    compat: int
    incompat: int
    ro_compat: int
    cluster_size: int
    """Bytes of the unit of allocation: a block, or more with bigalloc."""
    seed: int
    """Seed of metadata checksums (only with :attr:`metadata_csum`)."""

    @property
    def uuid(self) -> UUID:
        """The volume's UUID."""
        return UUID(bytes=self.raw.s_uuid)

    @property
    def label(self) -> str:
        """The volume's name, undecodable bytes escaped."""
        return self.raw.s_volume_name.rstrip(b"\0").decode("utf-8", "backslashreplace")

    @property
    def metadata_csum(self) -> bool:
        """Whether every piece of metadata has a crc32c."""
        return bool(self.ro_compat & c.RO_METADATA_CSUM)

    @property
    def needs_recovery(self) -> bool:
        """Whether the journal holds changes that are not yet in place."""
        return bool(self.incompat & c.INCOMPAT_RECOVER)

    @property
    def clean(self) -> bool:
        """Whether the volume was unmounted properly and no error was noted in it."""
        return self.raw.s_state & 0x3 == c.STATE_VALID and not self.needs_recovery

    @property
    def free_blocks(self) -> int:
        """Free blocks, as the superblock counts them."""
        high = self.raw.s_free_blocks_count_hi if self.incompat & c.INCOMPAT_64BIT else 0
        return self.raw.s_free_blocks_count_lo | high << 32

    @property
    def features(self) -> list[str]:
        """Names of all features, in dumpe2fs's order: compat, incompat, ro_compat."""
        return [
            *c.feature_names(self.compat, c.COMPAT, "C"),
            *c.feature_names(self.incompat, c.INCOMPAT, "I"),
            *c.feature_names(self.ro_compat, c.RO_COMPAT, "R"),
        ]

    def group_first(self, group: int) -> int:
        """First block of a group."""
        return self.first_data_block + group * self.raw.s_blocks_per_group

    def require_clean(self) -> None:
        """Raise NeedsRecovery unless the volume is clean."""
        if self.needs_recovery:
            raise NeedsRecovery(
                "the journal holds changes that are not in place yet (NEEDS_RECOVERY)",
                where=self.where,
                hint="ext4lite recover replays it",
            )
        if not self.clean:
            why = "has noted errors" if self.raw.s_state & c.STATE_ERROR else "was not closed cleanly"
            raise NeedsRecovery(f"the volume {why}", where=self.where, hint="run e2fsck -fy on it")
        if self.raw.s_last_orphan:
            what = f"the volume has inodes that were removed while in use, first {self.raw.s_last_orphan}"
            raise NeedsRecovery(what, where=self.where, hint="run e2fsck -fy on it")


def read_super(image: Handle, where: str, *, torn: bool = False, verify: bool = True) -> Super:
    """Read and check the superblock of an image: a single read.

    ``torn`` accepts one whose checksum is wrong, if it says that the journal must be replayed: a crash may have cut its
    writing in half, and then the journal has the whole one. Who asks for that must check the superblock again.
    ``verify=False`` takes no notice of the checksum at all.

    Raises CorruptImage (not ext4, cut short, impossible geometry, wrong checksum), Unsupported (by the feature's name),
    HostError.
    """
    if isinstance(image, int) and read_header(image, where) is not None:
        raise Unsupported("the image is a delta", where=where, hint="ext4lite flatten it first")
    device = as_device(image, where)
    size = device.size()
    data = device.read(c.SUPERBLOCK_SIZE, c.SUPERBLOCK_OFFSET)
    return parse_super(data, size, where, torn=torn, verify=verify)


def _may_be_torn(sb: SuperBlock) -> bool:
    """Tell whether a superblock with a wrong checksum may be half old, half new (sectors of 512 bytes).

    Setting and clearing RECOVER changes nothing but that bit and the checksum, so that both halves are known.
    """
    if sb.s_feature_incompat & c.INCOMPAT_RECOVER:
        return True
    sb.s_feature_incompat |= c.INCOMPAT_RECOVER
    return superblock_checksum(sb.pack()) == sb.s_checksum


def parse_super(data: bytes, file_size: int, where: str, *, torn: bool = False, verify: bool = True) -> Super:
    """Check the 1024 bytes of a superblock; see :func:`read_super`."""
    if len(data) < c.SUPERBLOCK_SIZE:
        raise CorruptImage(f"not an ext4 image: only {file_size} bytes", where=where)
    sb = SuperBlock.unpack(data)
    if sb.s_magic != c.MAGIC:
        raise CorruptImage(f"not an ext4 image: magic {sb.s_magic:#06x} instead of 0xef53 at byte 1080", where=where)
    summed = verify and sb.s_feature_ro_compat & c.RO_METADATA_CSUM
    if summed and superblock_checksum(data) != sb.s_checksum and not (torn and _may_be_torn(sb)):
        raise CorruptImage("superblock checksum is wrong", where=where)
    compat, incompat, ro_compat = sb.s_feature_compat, sb.s_feature_incompat, sb.s_feature_ro_compat
    if incompat & c.INCOMPAT_JOURNAL_DEV:
        what = "the image is an external journal (journal_dev), not a volume"
        raise Unsupported(what, where=where, hint="the volume that it belongs to is another image")
    unknown = incompat & ~READ.incompat
    if unknown:
        names = ", ".join(c.feature_names(unknown, c.INCOMPAT, "I"))
        raise Unsupported(f"the volume uses features that this version does not know: {names}", where=where)

    def require(condition: bool, what: str) -> None:
        if not condition:
            raise CorruptImage(f"superblock: {what}", where=where)

    require(sb.s_log_block_size <= _MAX_LOG_BLOCK_SIZE, f"block size 1024 << {sb.s_log_block_size} is out of range")
    block_size = 1024 << sb.s_log_block_size
    wide = bool(incompat & c.INCOMPAT_64BIT)
    blocks = sb.s_blocks_count_lo | (sb.s_blocks_count_hi << 32 if wide else 0)
    first = sb.s_first_data_block
    clusters = bool(ro_compat & c.RO_BIGALLOC)
    require(first == (1 if block_size == 1024 and not clusters else 0), f"first data block {first}")
    require(first < blocks, f"{blocks} blocks")
    ratio = 0  # blocks a cluster, as a power of 2
    if clusters:
        ratio = sb.s_log_cluster_size - sb.s_log_block_size
        require(0 <= ratio <= _MAX_LOG_CLUSTER_RATIO, f"cluster size 1024 << {sb.s_log_cluster_size} is out of range")
        per_group = sb.s_clusters_per_group
        require(
            0 < per_group <= 8 * block_size and per_group << ratio == sb.s_blocks_per_group,
            f"{per_group} clusters and {sb.s_blocks_per_group} blocks a group",
        )
    else:
        require(0 < sb.s_blocks_per_group <= 8 * block_size, f"{sb.s_blocks_per_group} blocks a group")
    require(0 < sb.s_inodes_per_group <= 8 * block_size, f"{sb.s_inodes_per_group} inodes a group")
    inode_size = 128 if sb.s_rev_level == 0 else sb.s_inode_size
    require(128 <= inode_size <= block_size and inode_size & inode_size - 1 == 0, f"inode size {inode_size}")
    desc_size = sb.s_desc_size if wide else 32
    require(
        desc_size == 32 or (64 <= desc_size <= min(1024, block_size) and desc_size & desc_size - 1 == 0),
        f"group descriptor size {desc_size}",
    )
    groups = -(-(blocks - first) // sb.s_blocks_per_group)
    require(
        sb.s_inodes_count == groups * sb.s_inodes_per_group,
        f"{sb.s_inodes_count} inodes instead of {groups} groups of {sb.s_inodes_per_group}",
    )
    if ro_compat & c.RO_METADATA_CSUM and sb.s_checksum_type != 1:
        raise Unsupported(f"checksum type {sb.s_checksum_type} is unknown", where=where)
    if file_size < blocks * block_size:
        raise CorruptImage(
            f"the image is cut short: {file_size} bytes instead of {blocks * block_size}",
            where=where,
            hint="was it copied whole?",
        )
    seed = sb.s_checksum_seed if incompat & c.INCOMPAT_CSUM_SEED else fs_seed(sb.s_uuid)
    return Super(
        sb,
        where,
        file_size,
        block_size,
        blocks,
        first,
        groups,
        desc_size,
        inode_size,
        compat,
        incompat,
        ro_compat,
        block_size << ratio,
        seed,
    )
