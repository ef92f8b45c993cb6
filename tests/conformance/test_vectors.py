"""The shared vectors of fixtures/vectors: the core must read what the kernel told, as the Go driver must."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from ext4lite.flatten import flatten
from ext4lite.volume import Volume
from fixtures.vectors.generate import BASE_MTIME_NS, DELTAS
from support.ext4_judges import assert_same, fsck, ours

HERE = Path(__file__).parents[2] / "fixtures" / "vectors"
VECTORS = sorted(HERE.glob("*.ext4.gz"))


@pytest.mark.parametrize("packed", VECTORS, ids=lambda path: path.name.removesuffix(".ext4.gz"))
def test_reads_the_vector(tmp_path: Path, packed: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(gzip.decompress(packed.read_bytes()))
    lines = gzip.decompress(packed.with_name(packed.name.replace(".ext4.gz", ".jsonl.gz")).read_bytes()).splitlines()
    expected = [json.loads(line) for line in lines]
    assert len(expected) > 400
    assert_same(ours(image), expected)


@pytest.mark.parametrize("name", DELTAS)
def test_reads_the_delta(tmp_path: Path, name: str) -> None:
    """A delta whose places that do not count are torn, over another vector."""
    base = tmp_path / f"{DELTAS[name]}.ext4"
    base.write_bytes(gzip.decompress((HERE / f"{base.name}.gz").read_bytes()))
    os.utime(base, ns=(BASE_MTIME_NS, BASE_MTIME_NS))
    image = tmp_path / "image"
    image.write_bytes(gzip.decompress((HERE / f"{name}.delta.gz").read_bytes()))
    lines = gzip.decompress((HERE / f"{name}.jsonl.gz").read_bytes()).splitlines()
    expected = [json.loads(line) for line in lines]
    assert len(expected) > 400
    assert_same(ours(image), expected)
    with Volume.open(image, mode="rw") as volume:
        volume.mkdir("/written")
    flatten(image)
    fsck(image)


def test_vectors_are_here() -> None:
    assert len(VECTORS) >= 6
    assert len(list(HERE.glob("*.delta.gz"))) == len(DELTAS)
