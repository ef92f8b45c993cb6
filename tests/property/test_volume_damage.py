"""Writing to a damaged image: documented errors only, soon, and nothing outside the image."""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path

import pytest

from ext4lite.errors import Ext4LiteError
from ext4lite.volume import Volume
from support.volume_model import (
    Failed,
    Generator,
    Model,
    Ours,
    make,
)

MIB = 1 << 20
COUNT = 40


def prepare(path: Path, options: str) -> None:
    """Make a small volume with some of everything."""
    make(path, options, 8 * MIB)
    with Volume.open(path, mode="rw") as v:
        v.mkdir("/d")
        for i in range(300):
            v.symlink(f"/d/symlink-with-a-long-name-{i}", "t" * (i % 90 + 1))
        ino = v.create("/holes")
        for i in range(30):
            v.pwrite(ino, i * 20_000, b"d" * 3000)
        v.set_xattr(ino, b"user.long", b"v" * 700)
        for i in range(20):
            v.pwrite(v.create(f"/f{i}"), 0, bytes(i * 1000))


def places(data: bytes) -> list[int]:
    """Return where the first megabyte holds something: superblock, descriptors, bitmaps, inodes, directories."""
    return [i for i in range(0, 1 << 20, 4) if data[i : i + 4] != bytes(4)]


PROFILES = ["", "-t ext4 -b 1024 -O ^metadata_csum", "-t ext4 -b 4096 -O ^metadata_csum", "-t ext2 -b 1024"]


@pytest.mark.parametrize("options", PROFILES)
def test_changed_bytes(tmp_path: Path, options: str) -> None:
    """Mostly on volumes without checksums, as if all had been made right again after the change."""
    image = tmp_path / "image"
    prepare(image, options)
    whole = image.read_bytes()
    used = places(whole)
    refused = 0
    for seed in range(COUNT):
        r = random.Random(f"{options}{seed}")
        image.write_bytes(whole)
        with image.open("r+b") as f:
            for _ in range(r.choice([1, 3, 20])):
                f.seek(r.choice(used) + r.randrange(4))
                f.write(bytes([r.choice([0, 1, 0x7F, 0x80, 0xFF, r.randrange(256)])]))
        begin = time.monotonic()
        try:
            with Volume.open(image, mode="rw") as v:
                side, model = Ours(v), Model()
                generator = Generator(model, r, most=300_000)
                for path, ino in v.walk():
                    if v.stat(ino).kind == "file" and path.count(b"/") == 1:
                        model.do_create(path, 0)
                model.do_mkdir(b"/d", 0)
                for _ in range(60):
                    op = generator.op()
                    with contextlib.suppress(Failed):
                        side.apply(op)
                        model.apply(op)
                for path in (b"/d", b"/holes"):
                    if (found := v.lookup(path)) is not None and v.stat(found).kind == "file":
                        v.truncate(found, 1)
        except Ext4LiteError:
            refused += 1
        assert time.monotonic() - begin < 30
        assert image.stat().st_size == len(whole)
    assert 0 < refused < COUNT
