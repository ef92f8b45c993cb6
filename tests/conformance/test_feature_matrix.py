"""Everything that mke2fs 1.47 can make is read as the kernel reads it, checksums verified.

Where this kernel does not mount a feature, the tree that mke2fs filled the image from is the judge, or debugfs.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ext4lite.inspect import inspect
from ext4lite.volume import Volume
from support.ext4_judges import assert_same, fsck, mounted, ours
from support.feature_images import CASES, Case, make, populate, stats
from support.kernel_manifest import manifest as kernel_manifest

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
