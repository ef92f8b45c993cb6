"""Everything that mke2fs 1.47 can make is read as the kernel reads it, checksums verified.

Where this kernel does not mount a feature, the tree that mke2fs filled the image from is the judge, or debugfs.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from ext4lite.errors import Unsupported
from ext4lite.inspect import inspect
from ext4lite.volume import Volume
from support.ext4_judges import assert_same, fsck, mounted, ours
from support.feature_images import CASES, Case, make, populate, stats
from support.kernel_manifest import manifest as kernel_manifest
from support.volume_model import NOSPACE, Generator, Kernel, Model, Ours, allowed, assert_tree, outcome

pytestmark = pytest.mark.root


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_reads(tmp_path: Path, case: Case) -> None:
    image, tree = tmp_path / "image", tmp_path / "tree"
    if case.judge == "kernel":
        make(case, image)
        with mounted(image, tmp_path / "mnt") as root:
            populate(root, case)
    else:
        tree.mkdir()
        populate(tree, case)
        make(case, image, tree)
    fsck(image)
    if case.judge == "tree":
        expected = kernel_manifest(tree)
        got = ours(image)
        for entry in [*got, *expected]:
            del entry["mtime_ns"]  # mke2fs -d keeps whole seconds of 32 bits,
            if entry["type"] == "symlink":
                del entry["nlink"]  # and makes two of two names of a symlink
        assert_same(got, expected)
    else:
        with mounted(image, tmp_path / "mnt", "ro,noatime") as root, Volume.open(image) as volume:
            assert_same(ours(image), kernel_manifest(root))
            assert stats(root, volume) == []
            for name in ("many", "plain", "corners"):
                listed = os.listdir(os.fsencode(root / name))  # noqa: PTH208
                assert [entry[0] for entry in volume.iterdir_by_hash(volume.lookup(name) or 0)] == listed
    assert inspect(image).state == "clean"


READ_ONLY = {
    name
    for name in (case.name for case in CASES)
    if name.startswith(("meta_bg", "bigalloc", "inline_data", "ea_inode, inline", "mmp", "verity", "encrypt"))
}
"""What is mounted here, but not written by us: refused by the feature's name."""


@pytest.mark.parametrize("case", [case for case in CASES if case.judge == "kernel"], ids=lambda case: case.name)
def test_round_trips(tmp_path: Path, case: Case) -> None:
    """The kernel writes, we read and write, it reads and writes, we read; each operation has the model's outcome."""
    image = tmp_path / "image"
    make(case, image)
    if case.name in READ_ONLY:
        with pytest.raises(Unsupported, match="can only be read"):
            Volume.open(image, mode="rw")
        return
    old = os.umask(0)
    try:
        with Volume.open(image) as volume:
            options = f"{case.options} -b {volume.block_size}"
            trees = bool(volume.super.incompat & 0x40)
            if volume.super.inode_size == 128:
                options += " -I 128"
        model, r = Model(), random.Random(case.name)
        generator = Generator(model, r, fallocate=trees, options=options)
        _turn(image, tmp_path, model, generator)
        with Volume.open(image, mode="rw") as volume:
            assert_tree(volume, model)
            for _ in range(50):
                _step(Ours(volume), model, generator)
            assert_tree(volume, model)
        fsck(image)
        _turn(image, tmp_path, model, generator)
        with Volume.open(image) as volume:
            assert_tree(volume, model)
    finally:
        os.umask(old)


def _turn(image: Path, directory: Path, model: Model, generator: Generator) -> None:
    with mounted(image, directory / "mnt") as root:
        for _ in range(50):
            _step(Kernel(root), model, generator)
        shown = kernel_manifest(root)
    fsck(image)
    assert_same(ours(image), shown)


def _step(side: Ours | Kernel, model: Model, generator: Generator) -> None:
    op = generator.op()
    if op[0] != "sync" and allowed(model, op) and (got := outcome(side, op)) != NOSPACE:
        assert got == outcome(model, op), op[:3]
