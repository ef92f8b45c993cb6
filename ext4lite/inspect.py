"""What a volume is and holds: geometry, features, usage, journal, fragmentation, Docker images."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any

from ext4lite.blockdev import StrPath
from ext4lite.delta import as_delta
from ext4lite.device import Device
from ext4lite.errors import CorruptImage
from ext4lite.inode import KIND_OF_TYPE
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import JournalSuperBlock
from ext4lite.super import Super
from ext4lite.volume import Volume

_WORST = 10


@dataclass(slots=True)
class Journal:
    """The journal: ``state`` is ``none``, ``clean``, ``needs recovery`` or ``external``."""

    state: str
    inode: int = 0
    blocks: int = 0
    bytes: int = 0
    first: int = 0
    start: int = 0
    sequence: int = 0
    features: list[str] = dataclasses.field(default_factory=list)


@dataclass(slots=True)
class Usage:
    """Counts of inodes by kind, and bytes.

    ``content_bytes`` adds up file sizes, ``data_bytes`` the blocks files hold.
    """

    used_bytes: int
    free_bytes: int
    host_bytes: int
    content_bytes: int
    data_bytes: int
    kinds: dict[str, int]


@dataclass(slots=True)
class Fragmentation:
    """Contiguous pieces of regular files (a hole also parts).

    ``histogram`` counts files by pieces, ``worst`` names the top ones.
    """

    files: int
    pieces: int
    mean: float
    max: int
    histogram: dict[str, int]
    worst: list[dict[str, int]]


@dataclass(slots=True)
class Backing:
    """The file that a delta reads what it has not from, and how many bytes are its own (``shared``: the others)."""

    path: str
    private_bytes: int
    shared_bytes: int


@dataclass(slots=True)
class Report:
    """Everything that ``ext4lite inspect`` shows. The last three are None where a journal was not replayed."""

    path: str
    uuid: str
    label: str
    state: str
    size: int
    block_size: int
    blocks: int
    free_blocks: int
    reserved_blocks: int
    inodes: int
    free_inodes: int
    inode_size: int
    groups: int
    blocks_per_group: int
    inodes_per_group: int
    desc_size: int
    flex_bg_groups: int
    features: list[str]
    journal: Journal
    usage: Usage | None
    fragmentation: Fragmentation | None
    images: list[Any] | None
    backing: Backing | None = None
    """Only of a delta."""

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data for JSON."""
        return dataclasses.asdict(self)


def inspect(path: StrPath, *, replay: bool = True, verify: bool = True) -> Report:
    """Look at an image, which must not be in use for writing.

    One that needs recovery is looked at as it will be (``replay``), as far as its journal is sound.

    ``verify``: see :meth:`ext4lite.volume.Volume.open`. VolumeBusy, CorruptImage, Unsupported, HostError.
    """
    with Volume.open(path, dirty=True, replay=replay, verify=verify) as volume:
        return report(volume)


def report(volume: Volume) -> Report:
    """Report on an open volume; see :func:`inspect`."""
    sb = volume.super
    raw = sb.raw
    usage: Usage | None = None
    fragmentation: Fragmentation | None = None
    images: list[Any] | None = None
    journal = _journal(volume)
    if volume.recovered is not None:
        from ext4lite.jbd2.patch import counts

        # The superblock of a volume in use is behind; recovery sets it right.
        free, raw.s_free_inodes_count = counts(volume)
        raw.s_free_blocks_count_lo, raw.s_free_blocks_count_hi = free & 0xFFFFFFFF, free >> 32
    if not sb.needs_recovery:
        usage, fragmentation = _files(volume)
        _verify_bitmaps(volume)
        images = _images(volume)
    return Report(
        path=volume.where,
        uuid=str(sb.uuid),
        label=sb.label,
        state=state_of(sb) if volume.recovered is None else "needs recovery",
        size=sb.blocks * sb.block_size,
        block_size=sb.block_size,
        blocks=sb.blocks,
        free_blocks=sb.free_blocks,
        reserved_blocks=raw.s_r_blocks_count_lo
        | (raw.s_r_blocks_count_hi << 32 if sb.incompat & c.INCOMPAT_64BIT else 0),
        inodes=raw.s_inodes_count,
        free_inodes=raw.s_free_inodes_count,
        inode_size=sb.inode_size,
        groups=sb.groups,
        blocks_per_group=raw.s_blocks_per_group,
        inodes_per_group=raw.s_inodes_per_group,
        desc_size=sb.desc_size,
        flex_bg_groups=1 << min(raw.s_log_groups_per_flex, 31) if sb.incompat & c.INCOMPAT_FLEX_BG else 1,
        features=sb.features,
        journal=journal,
        usage=usage,
        fragmentation=fragmentation,
        images=images,
        backing=_backing(volume.device),
    )


def _backing(device: Device) -> Backing | None:
    delta = as_delta(device)
    if delta is None:
        return None
    private = delta.present_bytes()
    return Backing(delta.base_where, private, delta.size() - private)


def state_of(sb: Super) -> str:
    """Return ``clean``, ``needs recovery``, ``not clean`` or ``has errors``."""
    if sb.needs_recovery:
        return "needs recovery"
    if sb.raw.s_state & c.STATE_ERROR:
        return "has errors"
    return "clean" if sb.raw.s_state & c.STATE_VALID else "not clean"


def _journal(volume: Volume) -> Journal:
    sb = volume.super
    if not sb.compat & c.COMPAT_HAS_JOURNAL:
        return Journal("none")
    ino = sb.raw.s_journal_inum
    if not ino:
        return Journal("external")
    where = f"{volume.where}: journal inode {ino}"
    head = volume.read(ino, 0, JournalSuperBlock.SIZE)
    if len(head) < JournalSuperBlock.SIZE:
        raise CorruptImage("the journal has no superblock", where=where)
    j = JournalSuperBlock.unpack(head)
    if j.h_magic != c.JBD2_MAGIC or j.h_blocktype not in (c.JBD2_SUPERBLOCK_V1, c.JBD2_SUPERBLOCK_V2):
        raise CorruptImage(f"the journal's superblock has magic {j.h_magic:#010x}, type {j.h_blocktype}", where=where)
    if j.s_blocksize != volume.block_size:
        raise CorruptImage(f"the journal has blocks of {j.s_blocksize} bytes", where=where)
    v1 = j.h_blocktype == c.JBD2_SUPERBLOCK_V1
    return Journal(
        state="needs recovery" if j.s_start or sb.needs_recovery or volume.recovered is not None else "clean",
        inode=ino,
        blocks=j.s_maxlen,
        bytes=j.s_maxlen * j.s_blocksize,
        first=j.s_first,
        start=j.s_start,
        sequence=j.s_sequence,
        features=[] if v1 else c.feature_names(j.s_feature_incompat, c.JBD2_INCOMPAT, "I"),
    )


def _files(volume: Volume) -> tuple[Usage, Fragmentation]:
    kinds: Counter[str] = Counter()
    histogram: Counter[int] = Counter()
    worst: list[tuple[int, int]] = []
    content = data = 0
    block_size = volume.block_size
    raw = volume.super.raw
    hidden = {raw.s_usr_quota_inum, raw.s_grp_quota_inum, raw.s_prj_quota_inum}
    if volume.super.compat & c.COMPAT_ORPHAN_FILE:
        hidden.add(raw.s_orphan_file_inum)
    for record in volume.used_inodes():
        if record.ino < c.FIRST_INO and record.ino != c.ROOT_INO:
            continue
        if record.ino in hidden or record.fields.i_flags & c.EA_INODE_FL:
            continue
        kind = KIND_OF_TYPE[record.type]
        kinds[kind] += 1
        if kind != "file":
            continue
        content += record.size
        pieces, end_logical, end_physical = 0, -1, -1
        for run in volume.map(record)[0]:
            if run.logical != end_logical or run.physical != end_physical:
                pieces += 1
            end_logical, end_physical = run.logical + run.count, run.physical + run.count
            data += run.count * block_size
        histogram[pieces] += 1
        worst.append((pieces, record.ino))
        if len(worst) >= _WORST * 100:
            worst = sorted(worst, reverse=True)[:_WORST]
    with_data = sum(n for pieces, n in histogram.items() if pieces)
    total = sum(pieces * n for pieces, n in histogram.items())
    fragmentation = Fragmentation(
        files=sum(histogram.values()),
        pieces=total,
        mean=round(total / with_data, 4) if with_data else 0.0,
        max=max(histogram, default=0),
        histogram=_buckets(histogram),
        worst=[{"inode": ino, "pieces": pieces} for pieces, ino in sorted(worst, reverse=True)[:_WORST] if pieces > 1],
    )
    free = volume.super.free_blocks * block_size
    usage = Usage(
        used_bytes=max(0, volume.blocks * block_size - free),
        free_bytes=free,
        host_bytes=volume.host_bytes(),
        content_bytes=content,
        data_bytes=data,
        kinds=dict(sorted(kinds.items())),
    )
    return usage, fragmentation


def _buckets(histogram: Counter[int]) -> dict[str, int]:
    """Group a histogram: 0, 1, 2, 3-4, 5-8, 9-16 …"""
    out: dict[str, int] = {}
    for pieces in sorted(histogram):
        high = 1 << (pieces - 1).bit_length() if pieces else 0
        name = str(pieces) if pieces <= 2 else f"{high // 2 + 1}-{high}"
        out[name] = out.get(name, 0) + histogram[pieces]
    return out


def _verify_bitmaps(volume: Volume) -> None:
    for group in range(volume.super.groups):
        if not volume.bitmap_checksums_ok(group):
            raise CorruptImage("bitmap checksum is wrong", where=f"{volume.where}: group {group}")


def _images(volume: Volume) -> list[Any]:
    """Return the Docker images inside; an empty list where there is no store."""
    if volume.lookup("image") is None:
        return []  # what can read a store takes long to import
    from ext4lite.overlay.inspection import docker_images

    found = docker_images(volume)
    return [dataclasses.asdict(image) for image in found]
