"""Journals in memory, and a device that remembers what was written, to be cut off anywhere."""

from __future__ import annotations

import os
import random
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from ext4lite.checksum import superblock_checksum
from ext4lite.extents import Extent
from ext4lite.jbd2.log import FileBlocks, Log, super_checksum
from ext4lite.jbd2.recovery import replay
from ext4lite.jbd2.transaction import Journal
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import GroupDesc, JournalSuperBlock, SuperBlock
from ext4lite.volume import Volume

SECTOR = 512
UUID = bytes(range(16))
CSUM_V3 = 0x10 | 0x2
CSUM_V2 = 0x8 | 0x2


@dataclass
class Trace:
    """A device in memory: its content, and the writes (block, data) and flushes (None) that made it."""

    block_size: int
    data: bytearray
    events: list[tuple[int, bytes] | None] = field(default_factory=list)

    def read(self, block: int, count: int = 1) -> bytes:
        """See Blocks."""
        return bytes(self.data[block * self.block_size : (block + count) * self.block_size])

    def write(self, block: int, data: bytes | memoryview) -> None:
        """See Blocks."""
        self.data[block * self.block_size : block * self.block_size + len(data)] = data
        self.events.append((block, bytes(data)))

    def flush(self) -> None:
        """See Blocks."""
        self.events.append(None)

    def cut(self, before: bytes, at: int, r: random.Random) -> Trace:
        """Return the device after a power cut behind event ``at``: unflushed sectors may or may not be there."""
        image = bytearray(before)
        done = self.events[:at]
        last = max((i for i, event in enumerate(done) if event is None), default=-1)
        mode = r.choice(("all", "none", "some", "torn"))
        for i, event in enumerate(done):
            if event is None:
                continue
            block, data = event
            for sector in range(0, len(data), SECTOR):
                lucky = mode == "all" or (mode == "some" and r.random() < 0.5)
                if mode == "torn":
                    lucky = i < at - 1 or sector < r.randrange(0, len(data) + 1, SECTOR)
                if i <= last or lucky:
                    start = block * self.block_size + sector
                    image[start : start + SECTOR] = data[sector : sector + SECTOR]
        return Trace(self.block_size, image)


def fresh(
    *, blocks: int = 200, journal: int = 64, block_size: int = 1024, incompat: int = CSUM_V3, sequence: int = 1
) -> tuple[Trace, list[Extent]]:
    """Return a device whose blocks say who they are, and the runs of an empty journal at its end (in two pieces)."""
    data = bytearray(b"".join(n.to_bytes(4, "little") * (block_size // 4) for n in range(blocks)))
    sb = JournalSuperBlock(c.JBD2_MAGIC, c.JBD2_SUPERBLOCK_V2, 0, block_size, journal, 1, sequence)
    sb.s_feature_incompat, sb.s_uuid, sb.s_nr_users = incompat, UUID, 1
    if incompat & 0x18:
        sb.s_checksum_type = c.JBD2_CRC32C
        sb.s_checksum = super_checksum(sb.pack())
    start = blocks - journal - 1
    half = journal // 2
    runs = [Extent(0, start, half), Extent(half, start + half + 1, journal - half)]
    data[start * block_size : start * block_size + 1024] = sb.pack()
    for n in range(1, journal):
        at = start + n + (n >= half)
        data[at * block_size : (at + 1) * block_size] = bytes(block_size)
    return Trace(block_size, data), runs


def journal_of(device: Trace, runs: list[Extent]) -> Journal:
    """Open the journal for writing; its commits are a second apart."""
    ticks = iter(range(10**6))
    return Journal.open(device, runs, "test", clock=lambda: (1_000_000 + next(ticks)) * 10**9)


def recovered(device: Trace, runs: list[Extent]) -> bytes:
    """Return the device's content as recovery sees it."""
    log = Log.open(device, runs, "test")
    found = replay(log, volume_blocks=len(device.data) // device.block_size)
    out = bytearray(device.data)
    for number, data in found.blocks.items():
        out[number * device.block_size : (number + 1) * device.block_size] = data
    return bytes(out)


def fill_journal(path: Path, *, journal_mib: int = 64, volume_mib: int = 0, seed: int = 1) -> int:
    """Make a volume whose journal is full of committed transactions that are not in place; return their blocks.

    They change free blocks, some of them several times, in no order, so that what is replayed harms nobody and e2fsck
    is content. For benchmarks of recovery, too.
    """
    size = 4096
    mke2fs = ["mke2fs", "-q", "-F", "-t", "ext4", "-b", str(size), "-J", f"size={journal_mib}", str(path)]
    env = {**os.environ, "PATH": f"/usr/sbin:/sbin:{os.environ.get('PATH', '')}"}
    subprocess.run([*mke2fs, f"{volume_mib or 16 * journal_mib}M"], check=True, env=env, capture_output=True)
    with Volume.open(path) as volume:
        runs = volume.extents(c.JOURNAL_INO)
        per = volume.super.raw.s_blocks_per_group
        empty = [g for g in range(volume.super.groups) if _free_blocks(volume.group(g)) == per]
    fd = os.open(path, os.O_RDWR)
    try:
        blocks = FileBlocks(fd, size, str(path))
        journal = Journal.open(blocks, runs, str(path))
        r = random.Random(seed)
        noise = r.randbytes(1 << 20)
        total = 0
        room = journal.log.last - journal.log.first
        each = min(1000, journal.most_changes)
        while room - total - total // 50 > each + each // 50 + 20:
            with journal.begin() as h:
                for _ in range(each):
                    at = r.randrange((1 << 20) - size)
                    h.write(r.choice(empty) * per + r.randrange(per), noise[at : at + size])
            total += len(journal._running)
            journal.commit()
        super_block = SuperBlock.unpack(os.pread(fd, c.SUPERBLOCK_SIZE, c.SUPERBLOCK_OFFSET))
        super_block.s_feature_incompat |= c.INCOMPAT_RECOVER
        super_block.s_checksum = superblock_checksum(super_block.pack())
        os.pwrite(fd, super_block.pack(), c.SUPERBLOCK_OFFSET)
    finally:
        os.close(fd)
    return total


def _free_blocks(desc: GroupDesc) -> int:
    return desc.bg_free_blocks_count_lo | desc.bg_free_blocks_count_hi << 16
