"""Recovery's small writer: frees and takes blocks and inodes, rewrites inodes and maps, in memory, above a volume.

It changes an :class:`~ext4lite.jbd2.log.Overlay`; who gave it decides what becomes of the changed blocks. It knows
nothing of names, policies of allocation or transactions: those belong to the writer of volumes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from struct import unpack

from ext4lite import bitmap, indirect
from ext4lite.checksum import (
    crc32c,
    group_desc_checksum,
    group_desc_crc16,
    inode_seed,
    superblock_checksum,
    xattr_block_checksum,
)
from ext4lite.errors import CorruptImage, VolumeFull
from ext4lite.extents import HEADER, INDEX, Extent, build_tree, split_long, tree_blocks_needed
from ext4lite.inode import InodeRecord, pack_record
from ext4lite.jbd2.log import Overlay
from ext4lite.jbd2.quota import Quotas
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import GroupDesc, SuperBlock, XattrHeader
from ext4lite.volume import Volume

_DESCRIPTORS_KEPT = 4096
Run = tuple[int, int]
"""(start, count) of blocks or clusters."""


def merged(runs: Iterable[Run]) -> list[Run]:
    """Return runs sorted, overlapping and adjoining ones joined."""
    out: list[Run] = []
    for start, count in sorted(runs):
        if out and start <= out[-1][0] + out[-1][1]:
            first, have = out[-1]
            out[-1] = (first, max(have, start + count - first))
        elif count:
            out.append((start, count))
    return out


def without(runs: list[Run], others: list[Run]) -> list[Run]:
    """Return what is in ``runs`` and not in ``others``; both as :func:`merged` gives them."""
    out, i = [], 0
    for start, count in runs:
        at, end = start, start + count
        while i < len(others) and others[i][0] + others[i][1] <= at:
            i += 1
        j = i
        while j < len(others) and others[j][0] < end:
            low, high = others[j][0], others[j][0] + others[j][1]
            if low > at:
                out.append((at, low - at))
            at = max(at, high)
            j += 1
        if at < end:
            out.append((at, end - at))
    return out


class _Group:
    """A group being changed: its descriptor and, once needed, its bitmaps."""

    __slots__ = ("blocks", "desc", "inodes")

    def __init__(self, desc: GroupDesc) -> None:
        self.desc = desc
        self.blocks: bytearray | None = None
        self.inodes: bytearray | None = None


class Patch:
    """Changes to one volume. Call :meth:`finish` at the end; until then bitmaps and descriptors are not in place."""

    def __init__(self, volume: Volume, overlay: Overlay, now: int) -> None:
        self.volume = volume
        self.overlay = overlay
        self.now = now
        """Seconds since 1970, for the times of deletion."""
        sb = volume.super
        self.seed: int | None = sb.seed if sb.metadata_csum else None
        self.ratio = sb.cluster_size // sb.block_size
        self.per_group = sb.raw.s_blocks_per_group // self.ratio
        self._uninit = bool(sb.metadata_csum or sb.ro_compat & c.RO_GDT_CSUM)
        self._groups: dict[int, _Group] = {}
        self._quotas = Quotas(self)

    # -- bytes ------------------------------------------------------------------------------------------------------

    def put(self, offset: int, data: bytes) -> None:
        """Change bytes of the volume; they lie within one block."""
        block, at = divmod(offset, self.volume.block_size)
        old = self.overlay.read(block)
        self.overlay.write(block, old[:at] + data + old[at + len(data) :])

    def put_inode(self, record: InodeRecord) -> None:
        """Write an inode's record, sealed."""
        self._quotas.touch(record.ino)
        raw = pack_record(record, self.seed)
        self.put(self._inode_at(record.ino), raw)
        record.raw = raw

    def _inode_at(self, ino: int) -> int:
        """Return the byte of the volume where an inode's record begins."""
        v = self.volume
        group, index = divmod(ino - 1, v.super.raw.s_inodes_per_group)
        desc = self._group(group).desc
        return (desc.bg_inode_table_lo | desc.bg_inode_table_hi << 32) * v.block_size + index * v.super.inode_size

    def raw_inode(self, ino: int) -> bytes:
        """Return an inode's record as it was written last."""
        block, at = divmod(self._inode_at(ino), self.volume.block_size)
        return self.overlay.read(block)[at : at + self.volume.super.inode_size]

    # -- groups -----------------------------------------------------------------------------------------------------

    def _at(self, group: int) -> str:
        return f"{self.volume.where}: group {group}"

    def _group(self, number: int) -> _Group:
        found = self._groups.get(number)
        if found is None:
            if not 0 <= number < self.volume.super.groups:
                raise CorruptImage("there is no such group", where=self._at(number))
            found = self._groups[number] = _Group(GroupDesc.unpack(self.volume.group(number).pack()))
        return found

    def _clusters(self, number: int) -> int:
        """Clusters in a group: the last one may be short."""
        v = self.volume
        left = v.blocks - v.first_data_block - number * v.super.raw.s_blocks_per_group
        return min(self.per_group, -(-left // self.ratio))

    def _blocks(self, number: int) -> tuple[_Group, bytearray]:
        group = self._group(number)
        if group.blocks is None:
            if self._uninit and group.desc.bg_flags & c.BG_BLOCK_UNINIT:
                group.blocks = self._fresh_bitmap(number, group.desc)
                group.desc.bg_flags &= ~c.BG_BLOCK_UNINIT
            else:
                block = group.desc.bg_block_bitmap_lo | group.desc.bg_block_bitmap_hi << 32
                group.blocks = bytearray(self.volume.block(block, self._at(number)))
        return group, group.blocks

    def _fresh_bitmap(self, number: int, desc: GroupDesc) -> bytearray:
        """Make the bitmap of an uninitialised group: it holds nothing but its own metadata, if that."""
        v = self.volume
        sb = v.super
        bits = bytearray(v.block_size)
        start = sb.group_first(number)
        runs = [
            (desc.bg_block_bitmap_lo | desc.bg_block_bitmap_hi << 32, 1),
            (desc.bg_inode_bitmap_lo | desc.bg_inode_bitmap_hi << 32, 1),
            (
                desc.bg_inode_table_lo | desc.bg_inode_table_hi << 32,
                -(-sb.raw.s_inodes_per_group * sb.inode_size // v.block_size),
            ),
            (start, self._base_blocks(number)),
        ]
        count = self._clusters(number)
        first = self._cluster(start)
        for low, length in self.clusters(runs):
            begin, end = max(low, first), min(low + length, first + count)
            if begin < end:
                bitmap.fill(bits, begin - first, end - begin, used=True)
        bitmap.fill(bits, count, 8 * v.block_size - count, used=True)
        return bits

    def _base_blocks(self, number: int) -> int:
        """Blocks at a group's beginning that hold copies of superblock and descriptors."""
        v = self.volume
        sb = v.super
        own = int(v.has_super(number))
        per_block = v.block_size // sb.desc_size
        meta, index = divmod(number, per_block)
        if sb.incompat & c.INCOMPAT_META_BG and meta >= sb.raw.s_first_meta_bg:
            return own + (index in (0, 1, per_block - 1))
        if not own:
            return 0
        table = sb.raw.s_first_meta_bg if sb.incompat & c.INCOMPAT_META_BG else -(-sb.groups // per_block)
        return own + table + sb.raw.s_reserved_gdt_blocks

    # -- blocks -----------------------------------------------------------------------------------------------------

    def _cluster(self, block: int) -> int:
        return (block - self.volume.first_data_block) // self.ratio

    def clusters(self, runs: Iterable[Run]) -> list[Run]:
        """Return the clusters that runs of blocks touch."""
        return merged(
            (self._cluster(start), self._cluster(start + count - 1) + 1 - self._cluster(start))
            for start, count in runs
            if count
        )

    def mark(self, clusters: list[Run], *, used: bool, strict: bool = True) -> int:
        """Take or free clusters; return how many changed. ``strict``: CorruptImage if any is so already."""
        changed = 0
        for start, count in clusters:
            at, left = start, count
            while left:
                number, first = divmod(at, self.per_group)
                length = min(left, self.per_group - first)
                group, bits = self._blocks(number)
                if strict and not bitmap.all_are(bits, first, length, used=not used):
                    state = "in use" if used else "free"
                    raise CorruptImage(f"block {at * self.ratio} is {state} already", where=self._at(number))
                before = bitmap.count_clear(bits, self.per_group)
                bitmap.fill(bits, first, length, used=used)
                delta = bitmap.count_clear(bits, self.per_group) - before
                desc = group.desc
                free = (desc.bg_free_blocks_count_lo | desc.bg_free_blocks_count_hi << 16) + delta
                desc.bg_free_blocks_count_lo, desc.bg_free_blocks_count_hi = free & 0xFFFF, free >> 16 & 0xFFFF
                changed += abs(delta)
                at, left = at + length, left - length
        return changed

    def allocate(self, goal: int) -> int:
        """Take a free cluster near block ``goal``; return its first block. VolumeFull."""
        groups = self.volume.super.groups
        begin = min(max(self._cluster(goal), 0) // self.per_group, groups - 1)
        for step in range(groups):
            number = (begin + step) % groups
            desc = self._group(number).desc
            if not desc.bg_free_blocks_count_lo | desc.bg_free_blocks_count_hi << 16:
                continue
            _, bits = self._blocks(number)
            count = self._clusters(number)
            found = bitmap.next_clear(bits, 0, count)
            if found < count:
                cluster = number * self.per_group + found
                self.mark([(cluster, 1)], used=True)
                return cluster * self.ratio + self.volume.first_data_block
        raise VolumeFull("no block is free for the recovery", where=self.volume.where)

    # -- inodes -----------------------------------------------------------------------------------------------------

    def _inodes(self, number: int) -> tuple[_Group, bytearray]:
        group = self._group(number)
        if group.inodes is None:
            if self._uninit and group.desc.bg_flags & c.BG_INODE_UNINIT:
                group.inodes = bytearray(b"\xff" * self.volume.block_size)
                bitmap.fill(group.inodes, 0, self.volume.super.raw.s_inodes_per_group, used=False)
                group.desc.bg_flags &= ~c.BG_INODE_UNINIT
            else:
                block = group.desc.bg_inode_bitmap_lo | group.desc.bg_inode_bitmap_hi << 32
                group.inodes = bytearray(self.volume.block(block, self._at(number)))
        return group, group.inodes

    def inode_in_use(self, ino: int) -> bool:
        """Tell whether an inode is marked as in use."""
        number, index = divmod(ino - 1, self.volume.super.raw.s_inodes_per_group)
        desc = self._group(number).desc
        if self._uninit and desc.bg_flags & c.BG_INODE_UNINIT and self._groups[number].inodes is None:
            return False
        _, bits = self._inodes(number)
        return bool(bits[index >> 3] >> (index & 7) & 1)

    def mark_inode(self, ino: int, *, used: bool, directory: bool) -> None:
        """Mark an inode as used or free, and count it; nothing happens when it is so already."""
        if self.inode_in_use(ino) == used:
            return
        self._quotas.touch(ino)
        per_group = self.volume.super.raw.s_inodes_per_group
        number, index = divmod(ino - 1, per_group)
        group, bits = self._inodes(number)
        bitmap.fill(bits, index, 1, used=used)
        desc = group.desc
        step = -1 if used else 1
        free = (desc.bg_free_inodes_count_lo | desc.bg_free_inodes_count_hi << 16) + step
        desc.bg_free_inodes_count_lo, desc.bg_free_inodes_count_hi = free & 0xFFFF, free >> 16 & 0xFFFF
        if directory:
            dirs = max(0, (desc.bg_used_dirs_count_lo | desc.bg_used_dirs_count_hi << 16) - step)
            desc.bg_used_dirs_count_lo, desc.bg_used_dirs_count_hi = dirs & 0xFFFF, dirs >> 16
        if used and self._uninit:
            unused = desc.bg_itable_unused_lo | desc.bg_itable_unused_hi << 16
            unused = min(unused, per_group - index - 1)
            desc.bg_itable_unused_lo, desc.bg_itable_unused_hi = unused & 0xFFFF, unused >> 16

    # -- what inodes own --------------------------------------------------------------------------------------------

    def whole_map(self, record: InodeRecord) -> tuple[list[Extent], list[int]]:
        """Return (runs, the map's own blocks) of an inode, also of what lies behind its end."""
        v = self.volume
        if record.fields.i_flags & c.INLINE_DATA_FL or self._has_no_map(record):
            return [], []
        if record.fields.i_flags & c.EXTENTS_FL:
            runs, _ = v.map(record)
            return runs, list(self._tree_blocks(record.fields.i_block))
        per = v.block_size // 4
        most = indirect.DIRECT + per + per**2 + per**3
        where = f"{v.where}: inode {record.ino}"
        runs, _ = indirect.read_map(record.fields.i_block, v, v.block_size, most, where)
        return runs, list(self._pointer_blocks(record.fields.i_block))

    def _has_no_map(self, record: InodeRecord) -> bool:
        if record.type == c.S_IFLNK and not record.fields.i_flags & c.EXTENTS_FL:
            own = self.volume.super.cluster_size // 512 if record.file_acl else 0
            return record.fields.i_blocks_lo - own == 0
        return record.type not in (c.S_IFREG, c.S_IFDIR, c.S_IFLNK)

    def _tree_blocks(self, node: bytes) -> Iterator[int]:
        """Yield the blocks of an extent tree that was read before (so that it is sound)."""
        _, count, _, depth, _ = HEADER.unpack_from(node)
        if depth:
            for _, low, high, _ in INDEX.iter_unpack(node[HEADER.size : HEADER.size + count * INDEX.size]):
                number = low | high << 32
                yield number
                yield from self._tree_blocks(self.overlay.read(number))

    def _pointer_blocks(self, block_map: bytes) -> Iterator[int]:
        size = self.volume.block_size

        def below(number: int, level: int) -> Iterator[int]:
            yield number
            if level > 1:
                for pointer in unpack(f"<{size // 4}I", self.overlay.read(number)):
                    if pointer:
                        yield from below(pointer, level - 1)

        for level, pointer in enumerate(unpack("<3I", block_map[48:60]), 1):
            if pointer:
                yield from below(pointer, level)

    def set_map(self, record: InodeRecord, runs: list[Extent], own: list[int]) -> list[int]:
        """Give an inode with extents a new map. ``own`` are blocks that the tree may use; more are taken as needed.

        Returns the blocks that it uses. The record is changed, not written.
        """
        runs = split_long(runs)
        size = self.volume.block_size
        need = tree_blocks_needed(len(runs), size)
        goal = runs[0].physical if runs else 0
        blocks = own[:need]
        while len(blocks) < need:
            first = self.allocate(goal)
            blocks += range(first, first + min(self.ratio, need - len(blocks)))
        seed = 0 if self.seed is None else inode_seed(self.seed, record.ino, record.fields.i_generation)
        root, nodes = build_tree(runs, blocks, size, seed)
        for number, data in nodes:
            self.overlay.write(number, data)
        record.fields.i_block = root
        return blocks

    def add_sectors(self, record: InodeRecord, clusters: int) -> None:
        """Add ``clusters`` (negative: take away) to what an inode says it holds."""
        v = self.volume
        i = record.fields
        huge = bool(v.super.ro_compat & c.RO_HUGE_FILE)
        unit = v.block_size if huge and i.i_flags & c.HUGE_FILE_FL else 512
        held = i.i_blocks_lo | (i.l_i_blocks_high << 32 if huge else 0)
        held = max(0, held + clusters * v.super.cluster_size // unit)
        i.i_blocks_lo = held & 0xFFFFFFFF
        if huge:
            i.l_i_blocks_high = held >> 32

    def delete(self, record: InodeRecord) -> None:
        """Free an inode and everything it holds."""
        runs, own = self.whole_map(record)
        held = self.clusters([*((r.physical, r.count) for r in runs), *((n, 1) for n in own)])
        self.mark(held, used=False)
        self._drop_attributes(record)
        directory = record.type == c.S_IFDIR
        i = record.fields
        i.i_links_count, i.i_dtime = 0, self.now
        i.i_size_lo = i.i_size_high = i.i_blocks_lo = i.l_i_blocks_high = 0
        i.i_file_acl_lo = i.l_i_file_acl_high = 0
        i.i_block = (HEADER.pack(c.EXTENT_MAGIC, 0, 4, 0, 0) if i.i_flags & c.EXTENTS_FL else b"").ljust(60, b"\0")
        if i.i_flags & c.INLINE_DATA_FL:
            i.i_flags &= ~c.INLINE_DATA_FL
        self.put_inode(record)
        self.mark_inode(record.ino, used=False, directory=directory)

    def outside_values(self, record: InodeRecord) -> list[tuple[int, int]]:
        """Return (inode, bytes) of each attribute value of an inode that lies in an inode of its own."""
        v = self.volume
        entries = v._inode_area(record) if v.super.inode_size > 128 else []
        if record.file_acl:
            what = f"inode {record.ino}, attribute block {record.file_acl}"
            entries = entries + v._xattr_block(record.file_acl, what)
        return [(ino, size) for _, _, _, ino, size in entries if ino]

    def _drop_attributes(self, record: InodeRecord) -> None:
        v = self.volume
        where = f"inode {record.ino}"
        if v.super.inode_size > 128:
            self._drop_values(v._inode_area(record))
        block = record.file_acl
        if not block:
            return
        entries = v._xattr_block(block, f"{where}, attribute block {block}")
        data = self.overlay.read(block)
        head = XattrHeader.unpack(data)
        if head.h_refcount > 1:
            head.h_refcount -= 1
            changed = head.pack() + data[XattrHeader.SIZE :]
            if self.seed is not None:
                head.h_checksum = xattr_block_checksum(self.seed, block, changed)
                changed = head.pack() + data[XattrHeader.SIZE :]
            self.overlay.write(block, changed)
        else:
            self.mark(self.clusters([(block, 1)]), used=False)
            self._drop_values(entries)

    def _drop_values(self, entries: list[tuple[int, bytes, bytes, int, int]]) -> None:
        """Count down the users of values in inodes of their own; their count lies in ctime and version."""
        for _, _, _, ino, _ in entries:
            if not ino:
                continue
            record = self.volume.inode(ino)
            i = record.fields
            users = ((i.i_ctime & 0xFFFFFFFF) << 32 | i.l_i_version) - 1
            if not i.i_flags & c.EA_INODE_FL or users < 0:
                raise CorruptImage("is no attribute's value", where=f"{self.volume.where}: inode {ino}")
            high = users >> 32
            i.i_ctime, i.l_i_version = high - (1 << 32 if high >> 31 else 0), users & 0xFFFFFFFF
            if users:
                self.put_inode(record)
            else:
                self.delete(record)

    def truncate(self, record: InodeRecord) -> bool:
        """Free what an inode holds behind its end; return whether there was anything. The record is not written."""
        v = self.volume
        limit = -(-record.size // v.block_size)
        runs, own = self.whole_map(record)
        before = self.clusters([*((r.physical, r.count) for r in runs), *((n, 1) for n in own)])
        kept = [
            Extent(r.logical, r.physical, min(r.count, limit - r.logical), r.unwritten)
            for r in runs
            if r.logical < limit
        ]
        self._clear_tail(record, kept)
        if sum(r.count for r in kept) == sum(r.count for r in runs):
            return False
        tree = record.fields.i_flags & c.EXTENTS_FL
        own = self.set_map(record, kept, own) if tree else self._cut_map(record, limit)
        after = self.clusters([*((r.physical, r.count) for r in kept), *((n, 1) for n in own)])
        self.add_sectors(record, -self.mark(without(before, after), used=False))
        return True

    def _clear_tail(self, record: InodeRecord, runs: list[Extent]) -> None:
        """Zero what lies behind the end within the last block, as truncate does, so that growing shows zeros."""
        size = self.volume.block_size
        last, used = divmod(record.size, size)
        for r in runs:
            if used and not r.unwritten and r.logical <= last < r.logical + r.count:
                block = r.physical + last - r.logical
                data = self.overlay.read(block)
                if any(data[used:]):
                    self.overlay.write(block, data[:used] + bytes(size - used))

    def _cut_map(self, record: InodeRecord, limit: int) -> list[int]:
        """Take pointers to file blocks from ``limit`` on out of a block map; return the pointer blocks that stay."""
        size = self.volume.block_size
        per = size // 4
        kept: list[int] = []

        def cut(number: int, level: int, first: int) -> bool:
            if first >= limit:
                return False
            kept.append(number)
            span = per ** (level - 1)
            pointers = list(unpack(f"<{per}I", self.overlay.read(number)))
            changed = False
            for i, pointer in enumerate(pointers):
                at = first + i * span
                if pointer and not (at < limit if level == 1 else cut(pointer, level - 1, at)):
                    pointers[i], changed = 0, True
            if changed:
                self.overlay.write(number, b"".join(p.to_bytes(4, "little") for p in pointers))
            return True

        roots = list(unpack("<15I", record.fields.i_block))
        for i in range(indirect.DIRECT):
            if i >= limit:
                roots[i] = 0
        first = indirect.DIRECT
        for level in (1, 2, 3):
            if roots[indirect.DIRECT + level - 1] and not cut(roots[indirect.DIRECT + level - 1], level, first):
                roots[indirect.DIRECT + level - 1] = 0
            first += per**level
        record.fields.i_block = b"".join(p.to_bytes(4, "little") for p in roots)
        return kept

    # -- the end ----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Put quotas, changed bitmaps and descriptors in place, sealed; have the volume forget what it knew."""
        self._quotas.settle()
        sb = self.volume.super
        for number, group in self._groups.items():
            desc = group.desc
            if group.blocks is None and group.inodes is None:
                continue
            if group.blocks is not None:
                self.overlay.write(desc.bg_block_bitmap_lo | desc.bg_block_bitmap_hi << 32, bytes(group.blocks))
                if self.seed is not None:
                    total = crc32c(self.seed, bytes(group.blocks[: sb.raw.s_clusters_per_group // 8]))
                    desc.bg_block_bitmap_csum_lo, desc.bg_block_bitmap_csum_hi = total & 0xFFFF, total >> 16
            if group.inodes is not None:
                self.overlay.write(desc.bg_inode_bitmap_lo | desc.bg_inode_bitmap_hi << 32, bytes(group.inodes))
                if self.seed is not None:
                    total = crc32c(self.seed, bytes(group.inodes[: sb.raw.s_inodes_per_group // 8]))
                    desc.bg_inode_bitmap_csum_lo, desc.bg_inode_bitmap_csum_hi = total & 0xFFFF, total >> 16
            offset = self.volume.desc_offset(number)
            block, at = divmod(offset, self.volume.block_size)
            raw = desc.pack()[: sb.desc_size]
            raw += self.overlay.read(block)[at + len(raw) : at + sb.desc_size]
            if self.seed is not None:
                checksum = group_desc_checksum(self.seed, number, raw)
            elif sb.ro_compat & c.RO_GDT_CSUM:
                checksum = group_desc_crc16(sb.raw.s_uuid, number, raw)
            else:
                checksum = desc.bg_checksum
            self.put(offset, raw[:30] + checksum.to_bytes(2, "little") + raw[32:])
        self._groups = {}
        self.volume.refresh()


def put_super(overlay: Overlay, sb: SuperBlock) -> None:
    """Write a superblock, sealed if the volume has checksums."""
    if sb.s_feature_ro_compat & c.RO_METADATA_CSUM and sb.s_rev_level:
        sb.s_checksum = superblock_checksum(sb.pack())
    block, at = divmod(c.SUPERBLOCK_OFFSET, overlay.block_size)
    old = overlay.read(block)
    overlay.write(block, old[:at] + sb.pack() + old[at + c.SUPERBLOCK_SIZE :])


def counts(volume: Volume) -> tuple[int, int]:
    """Return (free blocks, free inodes) as the groups count them; superblocks are not kept up to date."""
    free = inodes = 0
    for number in range(volume.super.groups):
        desc = volume.group(number)
        free += desc.bg_free_blocks_count_lo | desc.bg_free_blocks_count_hi << 16
        inodes += desc.bg_free_inodes_count_lo | desc.bg_free_inodes_count_hi << 16
        if number % _DESCRIPTORS_KEPT == _DESCRIPTORS_KEPT - 1:
            volume.refresh()
    return free * (volume.super.cluster_size // volume.block_size), inodes
