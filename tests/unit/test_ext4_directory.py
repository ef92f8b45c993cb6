"""Directory blocks: limits, index structure, damage.

That lookups find the names is the kernel's to judge (conformance).
"""

from __future__ import annotations

import pytest

from ext4lite import directory
from ext4lite.directory import DX_NODE_AT, DX_ROOT_AT, DirEntry, build, pack_leaf, parse, verify_block
from ext4lite.errors import CorruptImage
from ext4lite.layout._codecs import DxCountLimit, DxEntry, DxRootInfo

SEED = 99


def build_of(entries: list[DirEntry]) -> tuple[list[bytes], bool]:
    return build(12, 2, entries, block_size=4096, seed=SEED, hash_seed=(1, 2, 3, 4), unsigned=False)


def index_of(block: bytes, at: int) -> list[tuple[int, int]]:
    """The (hash, block) pairs of an index block; the first hash is 0."""
    count = DxCountLimit.unpack(block, at).count
    pairs = [DxEntry.STRUCT.unpack_from(block, at + 8 * i) for i in range(count)]
    return [(0, pairs[0][1]), *pairs[1:]]


def names_of(blocks: list[bytes]) -> list[bytes]:
    return [name for block in blocks for name, _, _ in parse(block, 1 << 31, "here")]


def entries(count: int, length: int = 20) -> list[DirEntry]:
    return [(b"%d-" % i + b"x" * length, 13 + i, 1) for i in range(count)]


def test_one_block_as_long_as_it_fits() -> None:
    # 4096 - 12 (tail) - 24 (dots) = 4060 bytes: 84 entries of 48 and one of 28
    fitting = [(b"n" * 37 + b"%03d" % i, 13, 1) for i in range(84)] + [(b"m" * 20, 13, 1)]
    blocks, indexed = build_of(fitting)
    assert (len(blocks), indexed) == (1, False)
    blocks, indexed = build_of([*fitting, (b"1", 13, 1)])
    assert indexed
    assert sorted(names_of(blocks)) == sorted([*(e[0] for e in fitting), b"1"])


@pytest.mark.parametrize(("count", "length", "levels"), [(200, 20, 0), (30_000, 20, 0), (12_000, 230, 1)])
def test_index(count: int, length: int, levels: int) -> None:
    given = entries(count, length)
    blocks, indexed = build_of(given)
    assert indexed
    assert sorted(names_of(blocks)) == sorted(e[0] for e in given)
    for number, block in enumerate(blocks):
        assert len(block) == 4096
        verify_block(block, SEED, True, f"block {number}")
    assert DxRootInfo.unpack(blocks[0], 24).indirect_levels == levels
    tops = index_of(blocks[0], DX_ROOT_AT)
    pairs = [pair for _, node in tops for pair in index_of(blocks[node], DX_NODE_AT)] if levels else tops
    reached = {block for _, block in pairs} | ({node for _, node in tops} if levels else set()) | {0}
    assert reached == set(range(len(blocks)))
    hashes = [h for h, _ in pairs if h]
    assert hashes == sorted(hashes)


def test_equal_hashes_in_two_leaves_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit 0 of an index entry tells the kernel to look into the next block too."""
    monkeypatch.setattr(directory, "name_hash", lambda name, version, seed: (1000 if name < b"2" else 2000, 0))
    blocks, _ = build_of([(b"1" * 200 + b"%d" % i, 13, 1) for i in range(30)] + [(b"3" * 200, 13, 1)])
    assert [h for h, _ in index_of(blocks[0], DX_ROOT_AT)] == [0, 1001]


def test_a_name_of_255_bytes() -> None:
    blocks, _ = build_of([(b"n" * 255, 13, 1)])
    assert names_of(blocks) == [b"n" * 255]


def patched(at: int, value: bytes) -> bytes:
    block = pack_leaf([(b"first", 20, 1), (b"second", 21, 2)], 4096, SEED)
    return block[:at] + value + block[at + len(value) :]


@pytest.mark.parametrize(
    ("at", "value", "what"),
    [
        (4, b"\0\0", "byte 0 has length 0"),
        (4, b"\x09\0", "byte 0 has length 9"),
        (4, b"\x08\0", "byte 0 has length 8"),
        (4, b"\xfc\xff", "byte 0 has length 65532"),
        (6, b"\xff", "byte 0 has length 16"),
        (6, b"\0", "has the name b''"),
        (8, b"a/b", "has the name b'a/bst'"),
        (0, b"\xff\xff\xff\x7f", "inode number 2147483647 of 100"),
    ],
)
def test_damage_is_named(at: int, value: bytes, what: str) -> None:
    with pytest.raises(CorruptImage, match=f"here: .*{what}"):
        parse(patched(at, value), 100, "here")


def test_checksums() -> None:
    verify_block(patched(0, b""), SEED, False, "here")
    with pytest.raises(CorruptImage, match="checksum is wrong"):
        verify_block(patched(9, b"?"), SEED, False, "here")
    with pytest.raises(CorruptImage, match="has no checksum"):
        verify_block(patched(4096 - 5, b"\0"), SEED, False, "here")
