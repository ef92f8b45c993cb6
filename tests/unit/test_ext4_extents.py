"""Extent trees: what is built is what is read, at every depth."""

from __future__ import annotations

import random

import pytest

from ext4lite.errors import CorruptImage
from ext4lite.extents import (
    HEADER,
    Extent,
    build_tree,
    entries_per_block,
    read_tree,
    split_long,
    tree_blocks_needed,
)


class Blocks:
    """Tree blocks in memory, as a volume."""

    first_data_block = 1
    blocks = 1 << 40

    def __init__(self, content: dict[int, bytes]) -> None:
        self.content = content

    def block(self, number: int, where: str) -> bytes:
        """Return a block."""
        return self.content[number]


def random_extents(count: int, seed: int = 1) -> list[Extent]:
    r = random.Random(seed)
    out, logical = [], 0
    for _ in range(count):
        logical += r.choice((0, 0, 1, 7))
        run = r.choice((1, 2, 100))
        out.append(Extent(logical, r.randrange(1, 1 << 40), run, r.random() < 0.2))
        logical += run
    return out


@pytest.mark.parametrize("block_size", [1024, 4096])
@pytest.mark.parametrize(
    ("count", "depth"), [(0, 0), (1, 0), (4, 0), (5, 1), (84, 1), (336, 1), (337, (2, 1)), (2000, 2), (30_000, (3, 2))]
)
def test_round_trip(count: int, depth: int | tuple[int, int], block_size: int) -> None:
    extents = random_extents(count)
    need = tree_blocks_needed(count, block_size)
    root, content = build_tree(extents, list(range(100, 100 + need)), block_size, seed=7)
    assert len(root) == 60
    assert len(content) == need
    wanted = depth if isinstance(depth, int) else depth[block_size == 4096]
    assert HEADER.unpack_from(root)[3] == wanted
    assert read_tree(root, Blocks(dict(content)), 7, "here") == (extents, need)


def test_a_wrong_checksum_is_found() -> None:
    root, content = build_tree(random_extents(10), [100], 4096, seed=7)
    for seed, good in ((7, True), (None, True), (8, False)):
        if good:
            read_tree(root, Blocks(dict(content)), seed, "here")
        else:
            with pytest.raises(CorruptImage, match="here, extent block 100: extent block checksum is wrong"):
                read_tree(root, Blocks(dict(content)), seed, "here")


@pytest.mark.parametrize(
    ("at", "value", "what"),
    [
        (0, 0, "magic"),
        (2, 5, "5 of 4 entries"),
        (4, 9, "2 of 9 entries where 4"),
        (6, 6, "depth 6"),
        (12 + 4, 0, "0 blocks"),
        (24, 0, "out of order"),
        (12 + 6, 0xFFFF, "outside the volume"),
    ],
)
def test_damage_is_named(at: int, value: int, what: str) -> None:
    root, _ = build_tree([Extent(0, 50, 3), Extent(3, 99, 1)], [], 4096, seed=0)
    broken = root[:at] + value.to_bytes(2, "little") + root[at + 2 :]
    with pytest.raises(CorruptImage, match=what):
        read_tree(broken, Blocks({}), None, "here")


def test_long_runs_are_split() -> None:
    assert split_long([Extent(0, 10, 70_000)]) == [
        Extent(0, 10, 32768),
        Extent(32768, 10 + 32768, 32768),
        Extent(65536, 10 + 65536, 4464),
    ]
    assert entries_per_block(4096) == 340
