"""Compaction of volumes after random operations, and of damaged ones."""

from __future__ import annotations

import random
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ext4lite.compact import compact
from ext4lite.errors import Ext4LiteError
from ext4lite.rebuild import rebuild
from ext4lite.volume import Volume
from support.damage import IMAGES, Change, Sample
from support.ext4_judges import fsck, tool
from support.rebuilt import kept_of_inodes
from support.volume_model import NOSPACE, Generator, Model, Ours, allowed, assert_tree, make, outcome

MIB = 1 << 20
SECONDS = 20

PROFILES = {
    "ours": "",
    "ext4 1k": "-t ext4 -b 1024 -O orphan_file",
    "uninit_bg, small groups": "-t ext4 -O ^64bit,^metadata_csum,uninit_bg -g 1024 -b 1024 -I 128",
    "ext3": "-t ext3 -b 2048",
    "ext2 1k, no flex_bg": "-t ext2 -b 1024 -g 2048",
    "ea_inode": "-t ext4 -b 4096 -O ea_inode",
}


@pytest.mark.parametrize("profile", PROFILES)
def test_random_operations_and_compactions(tmp_path: Path, profile: str) -> None:
    """The tree is the model's, before and after; operations go on in the compacted volume, until it is full."""
    image, options = tmp_path / "image", PROFILES[profile]
    make(image, options, 24 * MIB)
    r = random.Random(profile)
    model = Model()
    generator = Generator(model, r, fallocate="ext4" in options or not options, options=options)
    for size in (None, 24 * MIB, None, 40 * MIB):
        with Volume.open(image, mode="rw") as volume:
            side = Ours(volume)
            for _ in range(120):
                op = generator.op()
                if allowed(model, op) and (got := outcome(side, op)) != NOSPACE:
                    assert got == outcome(model, op), op[:3]
        with Volume.open(image) as volume:
            before = kept_of_inodes(volume)
        compact(image, size=size)
        fsck(image)
        with Volume.open(image) as volume:
            assert_tree(volume, model)
            assert kept_of_inodes(volume) == before


CHANGE = st.tuples(
    st.integers(0, 1 << 8), st.integers(0, 1 << 8), st.integers(0, 1 << 8), st.integers(0, 15), st.integers(0, 1 << 32)
)


def clean(image: Path) -> bool:
    done = subprocess.run([tool("e2fsck"), "-fn", image], capture_output=True, timeout=60, check=False)
    return done.returncode == 0


def attempt(data: bytes, directory: Path, size: int | None) -> bool:
    """Compact an image; True when that worked. Nothing but documented errors, soon, and the image as it was."""
    image, target = directory / "damaged", directory / "target"
    image.write_bytes(data)
    begin = time.monotonic()
    try:
        rebuild(image, target, size=size, force=True, durable=False)
    except Ext4LiteError:
        return False
    finally:
        assert time.monotonic() - begin < SECONDS
        assert image.read_bytes() == data
        assert not list(directory.glob("*.tmp"))
    if not clean(target):
        assert not clean(image), "a sound volume became an unsound one"
    return True


CLEAN = [name for name in IMAGES if not any(word in name for word in ("crashed", "fast commits", "orphans"))]


@pytest.fixture(scope="module", params=CLEAN)
def sample(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return Sample(request.param, tmp_path_factory.mktemp("compact"))


@pytest.mark.root
def test_the_sample_without_damage(sample: Sample) -> None:
    assert attempt(sample.data, sample.directory, None)
    assert attempt(sample.data, sample.directory, 8 * MIB)
    assert clean(sample.directory / "target") or sample.name == "everything odd"  # whose quota files mke2fs left empty


@pytest.mark.root
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    changes=st.lists(CHANGE, min_size=1, max_size=3),
    fixed=st.sampled_from((True, True, True, False)),
    size=st.sampled_from((None, 8 * MIB)),
)
def test_changed_structures(sample: Sample, changes: list[Change], fixed: bool, size: int | None) -> None:
    attempt(bytes(sample.changed(changes, fixed)), sample.directory, size)
