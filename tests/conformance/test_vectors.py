"""The shared vectors of fixtures/vectors: the core must read what the kernel told, as the Go driver must."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from support.ext4_judges import assert_same, ours

VECTORS = sorted((Path(__file__).parents[2] / "fixtures" / "vectors").glob("*.ext4.gz"))


@pytest.mark.parametrize("packed", VECTORS, ids=lambda path: path.name.removesuffix(".ext4.gz"))
def test_reads_the_vector(tmp_path: Path, packed: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(gzip.decompress(packed.read_bytes()))
    lines = gzip.decompress(packed.with_name(packed.name.replace(".ext4.gz", ".jsonl.gz")).read_bytes()).splitlines()
    expected = [json.loads(line) for line in lines]
    assert len(expected) > 400
    assert_same(ours(image), expected)


def test_vectors_are_here() -> None:
    assert len(VECTORS) >= 6
