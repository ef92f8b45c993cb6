"""Whatever bytes an image has, reading it ends soon, in an Ext4LiteError if at all: never another exception.

Never out of bounds.

Damage of a certain kind, and what says so; ``test_structure_damage.py`` changes every structure there is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ext4lite import manifest
from ext4lite.blockdev import open_for_guest
from ext4lite.builder import ImageBuilder, Meta
from ext4lite.checksum import superblock_checksum
from ext4lite.errors import Ext4LiteError
from ext4lite.inspect import report
from ext4lite.layout._codecs import SuperBlock
from ext4lite.volume import Volume


def small_image(path: Path) -> None:
    """A few files of every kind, with an extent tree, an index, attribute blocks."""
    with ImageBuilder(path, size=8 << 20, journal_size=4 << 20, timestamp=1) as b:
        d = b.add_dir(b.root, b"d", Meta(xattrs={b"user.a": b"b", b"trusted.long": b"v" * 300}))
        for i in range(150):
            b.add_symlink(d, b"symlink-with-a-long-name-%d" % i, b"t" * (i + 1), Meta())
        with b.add_file(d, b"holes", Meta(xattrs={b"security.capability": b"x" * 20})) as f:
            for _ in range(12):
                f.write(b"d" * 4096 + bytes(65536 * 2 - 4096))
        b.add_node(d, b"null", Meta(), "char", 1, 3)
        acl = bytes.fromhex("0200000001000700ffffffff02000500e803000004000500ffffffff10000700ffffffff20000500ffffffff")
        b.add_dir(d, b"inner", Meta(xattrs={b"system.posix_acl_access": acl}))
        b.finish()


def without_checksums(path: Path) -> None:
    """Take the features metadata_csum and metadata_csum_seed away."""
    with path.open("r+b") as f:
        f.seek(1024)
        sb = SuperBlock.unpack(f.read(1024))
        sb.s_feature_ro_compat &= ~0x400
        sb.s_feature_incompat &= ~0x2000
        sb.s_checksum = superblock_checksum(sb.pack())
        f.seek(1024)
        f.write(sb.pack())


def read_everything(path: Path) -> int:
    """Read an image in every way the commands do; return how many of them found damage."""
    found = 0
    for way in (_manifest, _inspect, _lookups, _guest):
        try:
            way(path)
        except Ext4LiteError as e:
            assert str(e)
            assert "\n" not in str(e)
            found += 1
    return found


def _manifest(path: Path) -> None:
    with Volume.open(path) as v:
        for entry in manifest.entries(v):
            manifest.to_line(entry)


def _inspect(path: Path) -> None:
    with Volume.open(path, dirty=True) as v:
        report(v).as_dict()


def _lookups(path: Path) -> None:
    with Volume.open(path, dirty=True) as v:
        for name in ("/d/holes", "/d/symlink-with-a-long-name-77", "/d/none", "/d/null/x"):
            ino = v.lookup(name)
            if ino is not None:
                v.stat(ino)
                v.read(ino, 100_000, 200_000)


def _guest(path: Path) -> None:
    open_for_guest(path, readonly=True).close()


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged size may not make the tests hash gigabytes."""
    monkeypatch.setattr(manifest, "ZEROS_ALLOWED", 16 << 20)
    monkeypatch.setattr(manifest, "MOST_ZEROS", 4)


@pytest.mark.parametrize("cut", [0, 1023, 1024, 2047, 4096, 70_000, 2 << 20, (8 << 20) - 1])
def test_a_cut_image(tmp_path: Path, cut: int) -> None:
    copy = tmp_path / "cut"
    small_image(copy)
    assert read_everything(copy) == 0
    with copy.open("r+b") as f:
        f.truncate(cut)
    assert read_everything(copy) == 4


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(min_size=0, max_size=5000))
def test_arbitrary_bytes_are_no_image(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    assert read_everything(tmp_path / "x") == 4


def _poke(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as f:
        f.seek(offset)
        f.write(data)


def _inode_offset(path: Path, ino: int) -> int:
    with Volume.open(path) as v:
        return v.group(0).bg_inode_table_lo * v.block_size + (ino - 1) * v.super.inode_size


def _rejected(path: Path, what: str) -> None:
    with pytest.raises(Ext4LiteError, match=what):
        _manifest(path)


@pytest.fixture
def bare(tmp_path: Path) -> Any:
    path = tmp_path / "bare"
    small_image(path)
    without_checksums(path)
    return path


def test_a_directory_loop(bare: Path) -> None:
    """A directory that contains its parent would never end."""
    with Volume.open(bare) as v:
        inner, outer = v.lookup("/d/inner"), v.lookup("/d")
        assert inner
        assert outer
        block = v.extents(inner)[0].physical
    entry = outer.to_bytes(4, "little") + (4096 - 12 - 24).to_bytes(2, "little") + bytes([4, 2]) + b"loop"
    _poke(bare, block * 4096 + 12 + 4, (12).to_bytes(2, "little"))
    _poke(bare, block * 4096 + 24, entry)
    _rejected(bare, "second name")


def test_an_extent_tree_that_contains_itself(bare: Path) -> None:
    with Volume.open(bare) as v:
        ino = v.lookup("/d/holes")
        assert ino
        leaf = int.from_bytes(v.inode(ino).fields.i_block[16:20], "little")
    at = _inode_offset(bare, ino) + 40
    _poke(bare, at + 6, (2).to_bytes(2, "little"))  # depth 2: the leaf is an inner node now
    header = bytes.fromhex("0af3") + (1).to_bytes(2, "little") + (340).to_bytes(2, "little") + (1).to_bytes(2, "little")
    _poke(bare, leaf * 4096, header + bytes(4) + bytes(4) + leaf.to_bytes(4, "little") + bytes(4))
    _rejected(bare, rf"inode {ino}.*(twice|depth)")


def test_an_extent_outside_the_volume(bare: Path) -> None:
    with Volume.open(bare) as v:
        ino = v.lookup("/d")
        assert ino
    _poke(bare, _inode_offset(bare, ino) + 40 + 12 + 8, (2048).to_bytes(4, "little"))
    _rejected(bare, rf"inode {ino}: extent points to blocks 2048\+\d+, outside the volume")


def test_an_entry_for_a_free_inode(bare: Path) -> None:
    with Volume.open(bare) as v:
        ino = v.lookup("/d/null")
        assert ino
    _poke(bare, _inode_offset(bare, ino), bytes(256))
    _rejected(bare, rf"inode {ino}: is not in use, but has a name")


def test_checksums_tell_where(tmp_path: Path) -> None:
    path = tmp_path / "sums"
    small_image(path)
    with Volume.open(path) as v:
        ino = v.lookup("/d/null")
        d = v.lookup("/d")
        assert ino
        assert d
        leaf = v.extents(d)[0].physical + 1
    _poke(path, leaf * 4096 + 9, b"?")
    _rejected(path, rf"directory inode {d}, block {leaf}: directory block checksum is wrong")
    _poke(path, _inode_offset(path, d) + 4, b"?")
    _rejected(path, rf"inode {d}: inode checksum is wrong")
    _poke(path, 4096 + 5, b"?")
    _rejected(path, "group 0: group descriptor checksum is wrong")
