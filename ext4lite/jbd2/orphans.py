"""Orphans: inodes that were deleted while open, or whose truncation was under way, when the system went down.

They are listed in two places (source: Documentation/filesystems/ext4/orphan.rst): a list from the superblock through
the inodes' ``i_dtime``, and, with the orphan_file feature, a file of inode numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from struct import unpack

from ext4lite.checksum import crc32c, inode_seed
from ext4lite.errors import CorruptImage
from ext4lite.jbd2.log import Overlay
from ext4lite.jbd2.patch import Patch, put_super
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import SuperBlock
from ext4lite.volume import Volume

_BLOCK_MAGIC = 0x0B10CA04
_TAIL = 8


@dataclass(slots=True)
class OrphanCounts:
    """What became of them."""

    deleted: int = 0
    truncated: int = 0


def present(volume: Volume) -> bool:
    """Tell whether a volume may have orphans."""
    sb = volume.super
    return bool(sb.raw.s_last_orphan or sb.ro_compat & c.RO_ORPHAN_PRESENT)


def process(volume: Volume, overlay: Overlay, now: int, step: Callable[[], None]) -> OrphanCounts:
    """Delete or truncate every orphan, one at a time; ``step`` is called after each, when the volume is consistent.

    CorruptImage for a list that cannot be.
    """
    done = OrphanCounts()
    seen: set[int] = set()
    sb = _super(overlay)
    while sb.s_last_orphan:
        ino = sb.s_last_orphan
        if ino in seen:
            raise CorruptImage(f"the orphan list meets inode {ino} twice", where=volume.where)
        seen.add(ino)
        patch = Patch(volume, overlay, now)
        follower = _settle(volume, patch, ino, done)
        sb.s_last_orphan = follower
        put_super(overlay, sb)
        patch.finish()
        step()
    if sb.s_feature_ro_compat & c.RO_ORPHAN_PRESENT:
        for block, index, ino in _filed(volume, overlay):
            if ino in seen:
                raise CorruptImage(f"inode {ino} is an orphan twice", where=volume.where)
            seen.add(ino)
            patch = Patch(volume, overlay, now)
            _settle(volume, patch, ino, done)
            _strike(volume, overlay, block, index)
            patch.finish()
            step()
        sb = _super(overlay)
        sb.s_feature_ro_compat &= ~c.RO_ORPHAN_PRESENT
        put_super(overlay, sb)
        step()
    return done


def _super(overlay: Overlay) -> SuperBlock:
    block, at = divmod(c.SUPERBLOCK_OFFSET, overlay.block_size)
    return SuperBlock.unpack(overlay.read(block), at)


def _settle(volume: Volume, patch: Patch, ino: int, done: OrphanCounts) -> int:
    """Delete or truncate one orphan; return the next of the list."""
    where = f"{volume.where}: orphan inode {ino}"
    raw = volume.super.raw
    first = c.FIRST_INO if raw.s_rev_level == 0 else raw.s_first_ino
    if not first <= ino <= raw.s_inodes_count:
        raise CorruptImage("cannot be an orphan", where=where, hint="run e2fsck -fy on it")
    if not patch.inode_in_use(ino):
        raise CorruptImage("is free", where=where, hint="run e2fsck -fy on it")
    record = volume.inode(ino)
    follower = record.fields.i_dtime
    if record.fields.i_links_count == 0:
        patch.delete(record)
        done.deleted += 1
    else:
        record.fields.i_dtime = 0
        if record.type in (c.S_IFREG, c.S_IFDIR, c.S_IFLNK):
            patch.truncate(record)
        patch.put_inode(record)
        done.truncated += 1
    return follower


def _filed(volume: Volume, overlay: Overlay) -> Iterator[tuple[int, int, int]]:
    """Yield (block, index, inode number) of the orphan file's entries, its checksums verified."""
    sb = volume.super
    ino = sb.raw.s_orphan_file_inum
    where = f"{volume.where}: orphan file, inode {ino}"
    record = volume.inode(ino)
    if record.type != c.S_IFREG:
        raise CorruptImage("is not a regular file", where=where)
    for run in volume.map(record)[0]:
        for block in range(run.physical, run.physical + run.count):
            data = overlay.read(block)
            magic, checksum = unpack("<II", data[-_TAIL:])
            if magic != _BLOCK_MAGIC:
                raise CorruptImage(f"block {block} has magic {magic:#010x}", where=where)
            if sb.metadata_csum and _checksum(volume, block, data) != checksum:
                raise CorruptImage(f"block {block} has a wrong checksum", where=where)
            for index, entry in enumerate(unpack(f"<{(len(data) - _TAIL) // 4}I", data[:-_TAIL])):
                if entry:
                    yield block, index, entry


def _checksum(volume: Volume, block: int, data: bytes) -> int:
    ino = volume.super.raw.s_orphan_file_inum
    seed = inode_seed(volume.super.seed, ino, volume.inode(ino).fields.i_generation)
    return crc32c(crc32c(seed, block.to_bytes(8, "little")), data[:-_TAIL])


def _strike(volume: Volume, overlay: Overlay, block: int, index: int) -> None:
    """Take an entry out of the orphan file."""
    data = overlay.read(block)
    data = data[: index * 4] + bytes(4) + data[index * 4 + 4 :]
    if volume.super.metadata_csum:
        data = data[:-4] + _checksum(volume, block, data).to_bytes(4, "little")
    overlay.write(block, data)
