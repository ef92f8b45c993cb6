"""Features that need more than filling an image: tall trees, large indices, keys, other devices, flags by hand."""

from __future__ import annotations

import fcntl
import os
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from ext4lite import extents, manifest, paths
from ext4lite.checksum import crc32c, inode_seed, superblock_checksum
from ext4lite.cli import run as cli
from ext4lite.errors import CorruptImage, NeedsRecovery, Unsupported
from ext4lite.identity import set_uuid
from ext4lite.inode import pack_record
from ext4lite.inspect import inspect
from ext4lite.layout._codecs import SuperBlock
from ext4lite.volume import Volume
from support.ext4_judges import assert_same, debugfs, fsck, mounted, ours, run, tool
from support.feature_images import copy_of, fallocate, stats
from support.kernel_manifest import manifest as kernel_manifest

pytestmark = pytest.mark.root

MIB = 1 << 20


def make(image: Path, *options: str, size: str = "16M") -> None:
    run(tool("mke2fs"), "-q", "-F", "-t", "ext4", *options, image, size)


def assert_read_as_mounted(image: Path, at: Path) -> None:
    with mounted(image, at, "ro,noatime") as root, Volume.open(image) as volume:
        assert_same(ours(image), kernel_manifest(root))
        assert stats(root, volume) == []


def set_super(image: Path, **fields: int) -> None:
    """Change fields of the superblock, and its checksum with them."""
    with image.open("r+b") as f:
        f.seek(1024)
        sb = SuperBlock.unpack(f.read(1024))
        for name, value in fields.items():
            setattr(sb, name, value)
        sb.s_checksum = superblock_checksum(sb.pack())
        f.seek(1024)
        f.write(sb.pack())


def test_an_index_of_three_levels(tmp_path: Path) -> None:
    """large_dir: the root's index points to nodes of nodes. Long names of one file fill 1 KiB blocks soon."""
    image = tmp_path / "image"
    make(image, "-b", "1024", "-O", "large_dir,^has_journal", "-N", "64", size="64M")
    names = [b"%05d-" % i + b"n" * 234 for i in range(36_000)]
    with mounted(image, tmp_path / "mnt") as root:
        (root / "d").mkdir()
        (root / "f").touch()
        for name in names:
            os.link(root / "f", bytes(root) + b"/d/" + name)
    fsck(image)
    with Volume.open(image) as volume:
        ino = volume.lookup("/d")
        assert ino is not None
        assert volume.block(volume.extents(ino)[0].physical)[0x1E] == 2
        assert sorted(name for name, _, _ in volume.iterdir(ino)) == names
        assert volume.lookup(b"/d/" + names[777]) == volume.lookup("/f")


def _taller(image: Path, path: str, levels: int) -> None:
    """Put index nodes of one entry each above a file's extents; the file gives its last blocks for them."""
    with Volume.open(image) as volume:
        ino = volume.lookup(path)
        assert ino is not None
        record = volume.inode(ino)
        (run_,) = volume.map(record)[0]
        size, seed = volume.block_size, volume.super.seed
        group = volume.group(0)
        at = group.bg_inode_table_lo * size + (ino - 1) * volume.super.inode_size
    kept = run_.count - levels
    own = inode_seed(seed, ino, record.fields.i_generation)
    most = (size - 12) // 12
    with image.open("r+b") as f:
        below = struct.pack("<IHHI", 0, kept, run_.physical >> 32, run_.physical & 0xFFFFFFFF)
        for level in range(levels):
            body = struct.pack("<HHHHI", 0xF30A, 1, most, level, 0) + below
            body += bytes(12 + 12 * most - len(body))
            body += crc32c(own, body).to_bytes(4, "little")
            number = run_.physical + kept + level
            f.seek(number * size)
            f.write(body.ljust(size, b"\0"))
            below = struct.pack("<IIHH", 0, number, 0, 0)
        root = struct.pack("<HHHHI", 0xF30A, 1, 4, levels, 0) + below
        record.fields.i_block = root + bytes(60 - len(root))
        record.fields.i_size_lo = kept * size
        f.seek(at)
        f.write(pack_record(record, seed))


@pytest.mark.parametrize("levels", [1, 2, 3, 4, 5])
def test_extent_trees_of_any_depth(tmp_path: Path, levels: int) -> None:
    image = tmp_path / "image"
    make(image, "-b", "1024", "-O", "metadata_csum_seed")
    with mounted(image, tmp_path / "mnt") as root:
        (root / "tall").write_bytes(random.Random(levels).randbytes((20 + levels) * 1024))
    _taller(image, "/tall", levels)
    assert f"0/ {levels}" in debugfs(image, "ex /tall")
    fsck(image)
    assert_read_as_mounted(image, tmp_path / "mnt")


def test_extent_trees_as_the_kernel_grows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Holes punched into a file of 1 KiB blocks: over 28,000 extents, three levels below the root."""
    image = tmp_path / "image"
    make(image, "-b", "1024", "-O", "^has_journal", size="96M")
    with mounted(image, tmp_path / "mnt") as root:
        with (root / "f").open("wb") as f:
            for i in range(60):
                f.write(random.Random(i).randbytes(MIB))
        for i in range(0, 60 * 1024, 2):
            fallocate(root / "f", i * 1024, 1024, mode=3)
    fsck(image)
    with Volume.open(image) as volume:
        ino = volume.lookup("/f")
        assert ino is not None
        assert volume.inode(ino).fields.i_block[6] == 3
        assert len(volume.extents(ino)) == 60 * 512
        real, times = extents.read_tree, []

        def counted(root: bytes, io: Any, seed: int | None, where: str) -> Any:
            times.append(where)
            return real(root, io, seed, where)

        monkeypatch.setattr(extents, "read_tree", counted)
        for at in range(0, 60 * MIB, 4 * MIB):
            assert volume.read(ino, at + 1024, 1024) == random.Random(at // MIB).randbytes(MIB)[1024:2048]
        assert len(times) == 1  # not once a piece
    assert_read_as_mounted(image, tmp_path / "mnt")


def test_blocks_counted_in_blocks(tmp_path: Path) -> None:
    """HUGE_FILE_FL: what a file of more than 2 TiB has, set by hand on a small one."""
    image = tmp_path / "image"
    make(image, "-b", "4096")
    with mounted(image, tmp_path / "mnt") as root:
        (root / "f").write_bytes(b"h" * 50_000)
    run(tool("debugfs"), "-w", "-R", "sif /f flags 0xC0000", image)
    run(tool("debugfs"), "-w", "-R", "sif /f blocks 13", image)
    fsck(image)
    with Volume.open(image) as volume:
        assert volume.stat(volume.lookup("/f") or 0).blocks512 == 13 * 8
    assert_read_as_mounted(image, tmp_path / "mnt")


@pytest.mark.long
def test_more_subdirectories_than_links(tmp_path: Path) -> None:
    """dir_nlink: beyond 65,000 links a directory's count is 1."""
    image = tmp_path / "image"
    make(image, "-b", "1024", "-N", "70000", size="200M")
    with mounted(image, tmp_path / "mnt") as root:
        (root / "d").mkdir()
        for i in range(65_100):
            (root / "d" / str(i)).mkdir()
        assert (root / "d").stat().st_nlink == 1
    fsck(image)
    assert_read_as_mounted(image, tmp_path / "mnt")


def test_quota_files_are_hidden_and_readable(tmp_path: Path) -> None:
    image, tree = tmp_path / "image", tmp_path / "tree"
    tree.mkdir()
    (tree / "f").write_bytes(b"q" * 10_000)
    make(image, "-O", "quota,project", "-I", "256", "-E", "quotatype=usrquota:grpquota:prjquota", "-d", str(tree))
    assert [e["path"] for e in ours(image)] == ["/f"]
    with Volume.open(image) as volume:
        raw = volume.super.raw
        for ino, magic in ((3, 0xD9C01F11), (4, 0xD9C01927), (raw.s_prj_quota_inum, 0xD9C03F14)):
            data = b"".join(volume.chunks(ino))
            assert len(data) == volume.stat(ino).size
            assert int.from_bytes(data[:4], "little") == magic
    usage = inspect(image).usage
    assert usage is not None
    assert usage.kinds == {"dir": 2, "file": 1}


def test_a_verity_file_ends_where_it_ends(tmp_path: Path) -> None:
    """The Merkle tree lies behind the end, from the next 64 KiB on; this kernel has no fs-verity, debugfs judges."""
    image = tmp_path / "image"
    make(image, "-O", "verity", "-b", "4096")
    content = random.Random(1).randbytes(5000)
    with mounted(image, tmp_path / "mnt") as root, (root / "f").open("wb") as f:
        f.write(content)
        f.seek(65_536)
        f.write(b"merkle" * 1000)
    run(tool("debugfs"), "-w", "-R", "sif /f flags 0x180000", image)
    run(tool("debugfs"), "-w", "-R", "sif /f size 5000", image)
    fsck(image)
    run(tool("debugfs"), "-R", f"dump /f {tmp_path / 'out'}", image)
    with Volume.open(image) as volume:
        ino = volume.lookup("/f") or 0
        assert volume.read(ino, 0, 1 << 20) == content == (tmp_path / "out").read_bytes()
        assert b"".join(volume.chunks(ino)) == content
    (tmp_path / "cp").mkdir()
    assert cli(["cp-out", str(image), "/f", str(tmp_path / "cp")]) == 0
    assert (tmp_path / "cp" / "f").read_bytes() == content


NAMES = [
    "README",
    "Größe",
    "STRASSE",
    "ﬀ",
    "Ünïcödé",
    "İstanbul",
    "ΑΣΣ",
    "plain",
    "a\u00adb",
    "Å",
    *map(str, range(90)),
]


def test_names_in_casefold_directories(tmp_path: Path) -> None:
    """e2fsck -D sorts the leaves by the hash of folded names, and only the right order satisfies it."""
    image, tree = tmp_path / "image", tmp_path / "tree"
    (tree / "d").mkdir(parents=True)
    (tree / "sensitive").mkdir()
    for name in NAMES:
        (tree / "d" / name).write_text(name)
        (tree / "sensitive" / name).write_text(name)
    make(image, "-O", "casefold", "-b", "1024", "-d", str(tree))
    run(tool("debugfs"), "-w", "-R", "sif /d flags 0x40080000", image)
    run(tool("debugfs"), "-w", "-R", "sif /d/plain flags 0x80000", image)
    os.system(f"{tool('e2fsck')} -fyD {image} >{tmp_path}/log 2>&1")
    fsck(image)
    assert "Hash Version" in debugfs(image, "htree_dump /d")
    with Volume.open(image) as volume:
        d = volume.lookup("/d") or 0
        assert [e[0] for e in volume.iterdir_by_hash(d)] == [e[0] for e in volume.iterdir(d)]
        for name, asked in [
            ("README", "readme"),
            ("Größe", "GRÖSSE"),
            ("Größe", "gro\u0308ße"),
            ("STRASSE", "straße"),
            ("ﬀ", "FF"),
            ("İstanbul", "i\u0307STANBUL"),
            ("ΑΣΣ", "ασς"),
            ("a\u00adb", "AB"),
            ("Å", "\u212b"),
            ("plain", "PLAIN"),
        ]:
            ino = volume.lookup(f"/d/{asked}")
            assert ino is not None, asked
            assert volume.read(ino, 0, 100).decode() == name
            assert paths.resolve(volume, f"/d/{asked}") == ino
            assert volume.lookup(f"/sensitive/{asked}") is None
        assert volume.lookup("/d/other") is None
        assert volume.lookup(b"/d/\xff\xfe") is None
        assert volume.lookup("/D") is None


def test_folding_is_that_of_unicode_12_1(tmp_path: Path) -> None:
    """A hash of each folded name by e2fsprogs's own tables; names of random letters, marks and ignorable ones."""
    from ext4lite import htree
    from ext4lite.casefold import fold

    image = tmp_path / "image"
    make(image, "-O", "casefold")
    r = random.Random(12)
    kinds = [range(0x41, 0x5B), range(0xC0, 0x250), range(0x300, 0x370), range(0x370, 0x590), range(0x1E00, 0x2000)]
    kinds += [range(0x2060, 0x2070), range(0xA640, 0xA800), range(0x10400, 0x10600), range(0x1E900, 0x1E950)]
    names = ["".join(chr(r.choice(r.choice(kinds))) for _ in range(r.randrange(1, 18))) for _ in range(4000)]
    seed = "01234567-89ab-cdef-0123-456789abcdef"
    words = struct.unpack("<4I", bytes.fromhex(seed.replace("-", "")))
    asked = "".join(f'dx_hash -c -e utf8-12.1 -h half_md4 -s {seed} "{name}"\n' for name in names)
    answers = [a for a in run(tool("debugfs"), "-f", "-", image, stdin=asked).split("\n") if a.startswith("Hash of ")]
    assert len(answers) == len(names)
    for name, answer in zip(names, answers, strict=True):
        major, minor = htree.name_hash(fold(name.encode()), htree.HALF_MD4, words)
        assert answer.endswith(f"is 0x{major:x} (minor 0x{minor:x})"), name.encode("unicode_escape")


_ADD_KEY = 0xC0506617  # FS_IOC_ADD_ENCRYPTION_KEY
_SET_POLICY = 0x800C6613  # FS_IOC_SET_ENCRYPTION_POLICY


def _encrypted_directory(root: Path) -> None:
    fd = os.open(root, os.O_RDONLY)
    try:
        key = bytearray(struct.pack("<II32sII32x", 2, 0, b"", 64, 0) + bytes(range(64)))
        fcntl.ioctl(fd, _ADD_KEY, key)
    except OSError as e:
        pytest.skip(f"this kernel has no fscrypt: {e}")
    finally:
        os.close(fd)
    (root / "secret").mkdir()
    fd = os.open(root / "secret", os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _SET_POLICY, struct.pack("<BBBB4s16s", 2, 1, 4, 0, b"", bytes(key[8:24])))
    finally:
        os.close(fd)


@pytest.mark.parametrize("options", ["encrypt", "encrypt,inline_data", "encrypt,^metadata_csum"])
def test_what_is_encrypted_is_refused_and_the_rest_is_not(
    tmp_path: Path, options: str, capsys: pytest.CaptureFixture[str]
) -> None:
    image = tmp_path / "image"
    make(image, "-O", options)
    with mounted(image, tmp_path / "mnt") as root:
        _encrypted_directory(root)
        (root / "secret" / "file").write_bytes(b"hidden" * 1000)
        (root / "secret" / "link").symlink_to("hidden")
        os.setxattr(root / "secret" / "file", "user.a", b"b")
        (root / "open").write_bytes(b"open" * 1000)
        inos = [(root / "secret" / name).stat(follow_symlinks=False).st_ino for name in ("file", "link")]
        wanted = (root / "secret").stat()
    fsck(image)
    with Volume.open(image) as volume:
        assert volume.read(volume.lookup("/open") or 0, 0, 8) == b"openopen"
        secret = volume.lookup("/secret") or 0
        assert volume.stat(secret).nlink == wanted.st_nlink
        assert volume.xattrs(secret) == {}  # the context is not for users
        assert volume.xattrs(inos[0]) == {b"user.a": b"b"}
        assert volume.stat(inos[0]).size == 6000
        for attempt in (
            lambda: volume.iterdir(secret),
            lambda: volume.lookup("/secret/file"),
            lambda: list(volume.walk()),
            lambda: list(manifest.entries(volume)),
            lambda: volume.read(inos[0], 0, 10),
            lambda: list(volume.chunks(inos[0])),
            lambda: volume.readlink(inos[1]),
        ):
            with pytest.raises(Unsupported, match="is encrypted"):
                attempt()
    assert inspect(image).state == "clean"
    capsys.readouterr()
    assert cli(["ls", str(image)]) == 0
    assert "open\nsecret\n" in capsys.readouterr().out
    assert cli(["ls", str(image), "/secret"]) == 5
    assert "inode 12: is encrypted: the names in it" in capsys.readouterr().err
    (tmp_path / "out").mkdir()
    assert cli(["cp-out", "-r", str(image), "/", str(tmp_path / "out")]) == 6  # something is missing
    assert "secret: left out: is encrypted" in capsys.readouterr().err
    assert (tmp_path / "out" / "open").read_bytes() == b"open" * 1000
    with pytest.raises(Unsupported, match="encrypt"):
        Volume.open(image, mode="rw")


@contextmanager
def loop(image: Path) -> Iterator[str]:
    device = run(tool("losetup"), "-f", "--show", image).strip()
    try:
        yield device
    finally:
        run(tool("losetup"), "-d", device)


def test_a_journal_on_another_device(tmp_path: Path) -> None:
    journal, image, crashed = tmp_path / "journal", tmp_path / "image", tmp_path / "crashed"
    run(tool("mke2fs"), "-q", "-F", "-O", "journal_dev", "-b", "4096", journal, "8M")
    with loop(journal) as device:
        make(image, "-b", "4096", "-J", f"device={device}")
        with mounted(image, tmp_path / "mnt") as root:
            (root / "f").write_bytes(b"here")
            os.sync()
            copy_of(image, crashed)
        fsck(image)
    assert [e["path"] for e in ours(image)] == ["/f"]
    assert inspect(image).journal.state == "external"
    with pytest.raises(Unsupported, match="is an external journal \\(journal_dev\\), not a volume"):
        Volume.open(journal)
    with pytest.raises(Unsupported, match="journal is on another device"):
        Volume.open(crashed)
    assert cli(["recover", str(crashed)]) == 5
    with Volume.open(crashed, replay=False) as volume:
        assert volume.lookup("/f") is not None
    with pytest.raises(Unsupported, match="another device"):
        Volume.open(image, mode="rw")
    assert cli(["inspect", "--json", str(crashed)]) == 5
    assert cli(["inspect", "--no-replay", "--json", str(crashed)]) == 0


@pytest.mark.parametrize("bit", [5, 11, 18, 31])
def test_unknown_incompat_features_are_refused(tmp_path: Path, bit: int) -> None:
    image = tmp_path / "image"
    make(image)
    with Volume.open(image) as volume:
        before = volume.super.incompat
    set_super(image, s_feature_incompat=before | 1 << bit)
    with pytest.raises(Unsupported, match=f"FEATURE_I{bit}"):
        Volume.open(image)


def test_unknown_other_features_are_read(tmp_path: Path) -> None:
    image, tree = tmp_path / "image", tmp_path / "tree"
    tree.mkdir()
    (tree / "f").write_bytes(b"content")
    make(image, "-d", str(tree))
    with Volume.open(image) as volume:
        raw = volume.super.raw
    set_super(
        image,
        s_feature_ro_compat=raw.s_feature_ro_compat | 0x80000000 | 0x4000,
        s_feature_compat=raw.s_feature_compat | 0x80000000,
    )
    assert [e["path"] for e in ours(image)] == ["/f"]
    assert {"FEATURE_R31", "FEATURE_C31", "shared_blocks"} <= set(inspect(image).features)
    with pytest.raises(Unsupported, match="shared_blocks, FEATURE_R31"):
        Volume.open(image, mode="rw")


def test_symlinks_with_values_in_inodes_of_their_own(tmp_path: Path) -> None:
    """i_blocks counts the values' blocks, too, so that only its length tells where a target is.

    e2fsck 1.47.0 takes the target for block numbers, so the kernel is the only judge here.
    """
    image = tmp_path / "image"
    make(image, "-O", "ea_inode", "-b", "1024")
    with mounted(image, tmp_path / "mnt") as root:
        for length in (1, 59, 60, 61, 200):
            (root / f"l{length}").symlink_to("t" * length)
            os.setxattr(root / f"l{length}", "trusted.large", b"v" * 30_000, follow_symlinks=False)
    assert_read_as_mounted(image, tmp_path / "mnt")


def test_without_verifying(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each kind of structure with a wrong checksum: refused, but readable when that is asked for."""
    image, tree, bad = tmp_path / "image", tmp_path / "tree", tmp_path / "bad"
    tree.mkdir()
    (tree / "f").write_bytes(b"content")
    os.setxattr(tree / "f", "user.a", b"v" * 600)
    make(image, "-b", "1024", "-d", str(tree))
    with Volume.open(image) as volume:
        ino = volume.lookup("/f") or 0
        group = volume.group(0)
        record = volume.inode(ino)
        size = volume.block_size
        places = {
            "superblock checksum": 1024 + 0x3FC,
            "group descriptor checksum": volume.desc_offset(0) + 0x1E,
            "inode checksum": group.bg_inode_table_lo * size + (ino - 1) * 256 + 0x7C,
            "attribute block checksum": record.file_acl * size + 0x10,
            "directory block checksum": volume.extents(2)[0].physical * size + size - 1,
            "bitmap checksum": group.bg_inode_bitmap_lo * size,
        }
    for what, at in places.items():
        copy_of(image, bad)
        with bad.open("r+b") as f:
            f.seek(at)
            byte = f.read(1)[0]
            f.seek(at)
            f.write(bytes([byte ^ 0x55]))
        with pytest.raises(CorruptImage, match=what):
            ours(bad) and inspect(bad)
        with Volume.open(bad, verify=False) as volume:
            assert_same(list(manifest.entries(volume)), ours(image))
        words = [str(bad), "/f"]
        for command in ("cat", "stat", "xattr", "ls"):
            assert cli([command, "--no-verify", *words]) == 0
        assert cli(["manifest", "--no-verify", str(bad)]) == 0
        assert cli(["inspect", "--no-verify", "--json", str(bad)]) == 0
        (tmp_path / what).mkdir()
        assert cli(["cp-out", "--no-verify", *words, str(tmp_path / what)]) == 0
        assert (tmp_path / what / "f").read_bytes() == b"content"
        assert cli(["inspect", str(bad)]) == (0 if what.startswith("attribute") else 4)
        capsys.readouterr()


@pytest.mark.parametrize("features", ["ea_inode", "ea_inode,^metadata_csum", "ea_inode,metadata_csum_seed"])
def test_values_in_inodes_of_their_own_are_verified(tmp_path: Path, features: str) -> None:
    image = tmp_path / "image"
    make(image, "-O", features, "-b", "1024")
    value = random.Random(1).randbytes(5000)
    with mounted(image, tmp_path / "mnt") as root:
        (root / "f").touch()
        os.setxattr(root / "f", "user.large", value)
    run(tool("tune2fs"), "-f", "-U", "01234567-89ab-cdef-0123-456789abcdef", image)
    fsck(image)
    with Volume.open(image) as volume:
        assert volume.xattrs(volume.lookup("/f") or 0) == {b"user.large": value}
        (holder,) = [r for r in volume.used_inodes() if r.fields.i_flags & 0x200000]
        at = volume.map(holder)[0][0].physical * volume.block_size + 2000
    with image.open("r+b") as f:
        f.seek(at)
        f.write(bytes([value[2000] ^ 1]))
    with Volume.open(image) as volume, pytest.raises(CorruptImage, match="attribute value hash is wrong"):
        volume.xattrs(volume.lookup("/f") or 0)
    with Volume.open(image, verify=False) as volume:
        assert len(volume.xattrs(volume.lookup("/f") or 0)[b"user.large"]) == 5000
    with Volume.open(image, mode="rw") as writable:
        if features == "ea_inode,^metadata_csum":
            with pytest.raises(Unsupported, match="seed of the hashes of attribute values"):
                set_uuid(writable, UUID(int=1))
        else:
            set_uuid(writable, UUID(int=1), add_seed=True)


@pytest.mark.parametrize("command", ["ls", "stat", "xattr", "cat", "manifest", "inspect", "cp-out"])
def test_raw_reading_of_a_volume_in_need_of_recovery(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that only the journal knows of is there, and is not with --no-replay; no byte is written."""
    image, crashed = tmp_path / "image", tmp_path / "crashed"
    make(image, "-b", "4096")
    with mounted(image, tmp_path / "mnt") as root:
        (root / "d").mkdir()
        os.sync()
    with mounted(image, tmp_path / "mnt") as root:
        fd = os.open(root / "d" / "new", os.O_CREAT | os.O_WRONLY)
        os.fsync(fd)
        os.close(fd)
        copy_of(image, crashed)
    before = crashed.read_bytes()
    with pytest.raises(NeedsRecovery):
        Volume.open(crashed, replay=False).super.require_clean()
    words = {"ls": ["/d"], "manifest": [], "inspect": ["--json"]}.get(command, ["/d/new"])
    after = [str(tmp_path / "out")] if command == "cp-out" else []
    assert cli([command, str(crashed), *words, *after]) == 0
    replayed = capsys.readouterr().out
    code = cli([command, "--no-replay", str(crashed), *words, *after])
    raw = capsys.readouterr().out
    if command in ("ls", "manifest"):
        assert (code, "new" in replayed, "new" in raw) == (0, True, False)
    elif command == "inspect":
        assert (code, '"usage": null' in raw, '"usage": null' in replayed) == (0, True, False)
    else:
        assert code == 10
    assert crashed.read_bytes() == before
