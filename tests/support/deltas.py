"""Delta files for tests, made without a volume: the backing file is noise with something like a superblock."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

from ext4lite import backing
from ext4lite.backing import BLOCK, PAGE_BITS
from ext4lite.delta import DeltaDevice
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import DeltaHeader, SuperBlock

SIZE = 2 * PAGE_BITS * BLOCK + 10 * BLOCK + 1024
"""Three pages of the bitmap, and an end that is no block's."""
WINDOWS = (
    (0, 32 << 10),
    ((512 - 32) * 8 * BLOCK - (16 << 10), 32 << 10),  # where the bits go from one sector of a page to the next
    (PAGE_BITS * BLOCK - (16 << 10), 32 << 10),  # where a page ends
    (SIZE - (33 << 10), 33 << 10),
)
"""(offset, length) of the places that tests write to."""

Model = list[bytearray]


def make_base(path: Path) -> Path:
    """Make a backing file: noise in the windows, holes elsewhere."""
    r = random.Random(1)
    with path.open("wb") as f:
        for offset, length in WINDOWS:
            f.seek(offset)
            f.write(r.randbytes(length))
        f.seek(c.SUPERBLOCK_OFFSET)
        f.write(SuperBlock(s_magic=c.MAGIC, s_uuid=b"sixteen bytes...").pack())
    return path


def make_delta(path: Path, base: Path) -> Path:
    """Make an empty delta over ``base``."""
    with base.open("rb") as b, path.open("x+b") as f:
        backing.create(f.fileno(), b.fileno(), base, path)
    return path


def open_delta(path: Path, *, eager: bool = False) -> DeltaDevice:
    """Open a delta for reading and writing."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    header = backing.read_header(fd, str(path))
    assert header is not None
    base, where = backing.open_base(header, path)
    return DeltaDevice(fd, str(path), header, base, str(where), eager=eager)


def snapshot(read: Callable[[int, int], bytes]) -> Model:
    """Return what the windows hold; ``read`` takes length and offset."""
    return [bytearray(read(length, offset)) for offset, length in WINDOWS]


def step(r: random.Random, device: DeltaDevice, model: Model) -> None:
    """Do something at random to device and model."""
    number = r.randrange(len(WINDOWS))
    offset, length = WINDOWS[number]
    at = r.randrange(length)
    count = r.randint(1, min(length - at, r.randint(1, 20 << 10)))
    if r.random() < 0.5:
        at &= ~511
        count = min(max(512, count & ~511), length - at)
    kind = r.random()
    if kind < 0.7:
        data = r.randbytes(count)
        device.write(data, offset + at)
        model[number][at : at + count] = data
    elif kind < 0.9:
        assert device.punch(offset + at, count)
        model[number][at : at + count] = bytes(count)
    else:
        assert device.read(count, offset + at) == model[number][at : at + count]


def header_of(path: Path) -> DeltaHeader:
    """Return a delta's header."""
    with path.open("rb") as f:
        found = backing.read_header(f.fileno(), str(path))
    assert found is not None
    return found
