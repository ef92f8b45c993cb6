"""The tar reader: what tarfile writes is read back, every byte is accounted for, and nothing malformed gets through."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ext4lite.errors import ImageError
from ext4lite.overlay import tarstream
from ext4lite.overlay.tarstream import Member, TarReader, clean_name
from support.overlay_samples import Entry, directory, hardlink, make_tar, symlink


def chunks_of(data: bytes, size: int) -> Iterator[bytes]:
    return iter([data[start : start + size] for start in range(0, len(data), size)])


def read_all(data: bytes, chunk: int = 1 << 20) -> tuple[list[tuple[Member, bytes]], bytes]:
    """Every member with its content, and the tar put together again from raw parts and contents."""
    reader = TarReader(chunks_of(data, chunk), where="test")
    members = []
    again = bytearray()
    while (member := reader.next()) is not None:
        content = b"".join(reader.data())
        members.append((member, content))
        again += member.raw + content
    for piece in reader.tail():
        again += piece
    return members, bytes(again)


def only(data: bytes) -> Member:
    members, again = read_all(data)
    assert again == data
    assert len(members) == 1
    return members[0][0]


def checksummed(header: bytearray) -> bytes:
    header[148:156] = b"        "
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def header_of(data: bytes) -> bytearray:
    return bytearray(data[:512])


SAMPLE = (
    directory("etc/", 0o1777, uid=3, gid=4),
    Entry("etc/passwd", b"root:x:0:0\n", mode=0o4755),
    Entry("empty"),
    Entry("big", bytes(range(256)) * 40),
    symlink("link", "etc/passwd"),
    hardlink("hard", "etc/passwd"),
    Entry("null", kind=tarfile.CHRTYPE, device=(1, 3), mode=0o666),
    Entry("disk", kind=tarfile.BLKTYPE, device=(259, 300)),
    Entry("pipe", kind=tarfile.FIFOTYPE),
    Entry("d/" * 60 + "deep", b"deep"),
    Entry("n" * 200, b"long"),
    symlink("to-long", "t" * 180),
    Entry("grün/ü", b"utf-8"),
    Entry("big-ids", b"x", uid=3_000_000, gid=4_000_000),
)


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("chunk", [1, 7, 511, 512, 513, 4096, 1 << 20])
def test_reads_what_tarfile_writes(form: int, chunk: int) -> None:
    data = make_tar(*SAMPLE, form=form)
    members, again = read_all(data, chunk)
    assert again == data
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        expected = tar.getmembers()
    assert len(members) == len(expected)
    for (member, content), info in zip(members, expected, strict=True):
        assert clean_name(member.name).decode() == info.name
        assert bytes([member.type]) == info.type
        assert (member.mode, member.uid, member.gid) == (info.mode, info.uid, info.gid)
        assert member.mtime_ns == info.mtime * 10**9
        assert member.linkname.decode() == info.linkname
        assert member.size == len(content) == info.size
        if info.isdev() and not info.isfifo():
            assert (member.major, member.minor) == (info.devmajor, info.devminor)
    by_name = {bytes(member.name): content for member, content in members}
    assert by_name[b"big"] == bytes(range(256)) * 40


def test_ustar_prefix() -> None:
    name = "p" * 100 + "/" + "n" * 90
    assert only(make_tar(Entry(name), form=tarfile.USTAR_FORMAT)).name.decode() == name


def test_skipped_contents_still_count() -> None:
    data = make_tar(Entry("a", b"1" * 5000), Entry("b", b"2"))
    reader = TarReader(chunks_of(data, 100), where="test")
    assert (a := reader.next()) is not None and a.name == b"a"
    assert (b := reader.next()) is not None and b.name == b"b"
    assert b.offset == 512 + 5120
    assert b"".join(reader.data()) == b"2"
    assert reader.next() is None


def test_skips_by_seeking_where_it_can() -> None:
    data = make_tar(Entry("a", b"1" * 300_000), Entry("b", b"2"))
    stream = io.BytesIO(data)
    read = 0

    def pieces() -> Iterator[bytes]:
        nonlocal read
        while piece := stream.read(1024):
            read += len(piece)
            yield piece

    def skip(n: int) -> int:
        before = stream.tell()
        return min(stream.seek(n, io.SEEK_CUR), len(data)) - before

    reader = TarReader(pieces(), where="test", skip=skip)
    assert reader.next() is not None
    assert reader.position == 512
    assert (b := reader.next()) is not None and b.name == b"b"
    assert reader.position == b.offset + 512
    assert bytes(reader.whole() or b"") == b"2"
    assert read < 20_000


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("1700000000.123456789", 1_700_000_000_123_456_789),
        ("1700000000.5", 1_700_000_000_500_000_000),
        ("1700000000.1234567899999", 1_700_000_000_123_456_789),
        ("-1.5", -1_500_000_000),
        ("4294967296", 4_294_967_296_000_000_000),
        ("7.", 7_000_000_000),
    ],
)
def test_pax_times(text: str, ns: int) -> None:
    assert only(make_tar(Entry("f", pax={"mtime": text}))).mtime_ns == ns


def test_times_before_1970_in_base_256() -> None:
    assert only(make_tar(Entry("f", mtime=-86400), form=tarfile.GNU_FORMAT)).mtime_ns == -86400 * 10**9


def test_extended_attributes() -> None:
    member = only(make_tar(Entry("f", pax={"SCHILY.xattr.user.note": "a=b", "SCHILY.xattr.security.x": "\x01\x02"})))
    assert member.xattrs == {b"user.note": b"a=b", b"security.x": b"\x01\x02"}


def test_names_that_are_not_utf8() -> None:
    record = b"21 hdrcharset=BINARY\n" + b"17 path=caf\xe9-\xff-x\n"
    data = _with_records(record)
    assert only(data).name == b"caf\xe9-\xff-x"


def _with_records(records: bytes, kind: bytes = b"x", size: int | None = None) -> bytes:
    """A tar whose only file is preceded by an extended header with these raw records."""
    header = header_of(make_tar(Entry("pax", b"")))
    header[156:157] = kind
    header[124:136] = b"%011o\0" % (len(records) if size is None else size)
    return checksummed(header) + records + bytes(-len(records) % 512) + make_tar(Entry("f", b"content"))


def test_empty_pax_value_keeps_the_header() -> None:
    assert only(_with_records(b"8 path=\n")).name == b"f"


def test_global_header_is_handed_out_and_applied_to_nothing() -> None:
    data = _with_records(b"18 path=elsewhere\n", kind=b"g")
    members, again = read_all(data)
    assert again == data
    assert [member.type for member, _ in members] == [tarstream.PAX_GLOBAL, tarstream.REGULAR]
    assert members[1][0].name == b"f"


def test_signed_checksum_of_old_tars() -> None:
    header = header_of(make_tar(Entry("f", b""), form=tarfile.USTAR_FORMAT))
    header[:4] = b"caf\xe9"
    header[148:156] = b"        "
    header[148:156] = b"%06o\0 " % (sum(header) - 256)
    assert only(bytes(header) + bytes(1024)).name == b"caf\xe9"


@pytest.mark.parametrize("name", ["v7dir/", "v7file"])
def test_v7_type(name: str) -> None:
    header = header_of(make_tar(Entry(name.rstrip("/"))))
    header[: len(name)] = name.encode()
    header[156] = 0
    header[257:512] = bytes(255)
    expected = tarstream.DIRECTORY if name.endswith("/") else tarstream.REGULAR
    assert only(checksummed(header) + bytes(1024)).type == expected


def test_sizes_of_links_and_directories_do_not_count() -> None:
    header = header_of(make_tar(hardlink("h", "f")))
    header[124:136] = b"%011o\0" % 4096
    members, _ = read_all(checksummed(header) + make_tar(Entry("next", b"n")))
    assert [(member.name, member.size) for member, _ in members] == [(b"h", 0), (b"next", 1)]


@pytest.mark.parametrize("end", [0, 512, 1024, 10240, 10240 + 3])
def test_every_kind_of_end(end: int) -> None:
    data = make_tar(Entry("f", b"abc"))[:1024] + bytes(end)
    if end == 10243:
        data = data[:-3] + b"xyz"  # what follows the end marker is kept, whatever it is
    assert only(data).name == b"f"


def test_empty_layers() -> None:
    for data in (b"", bytes(512), bytes(1024), bytes(10240)):
        assert read_all(data) == ([], data)


def test_truncation_anywhere_is_noticed() -> None:
    data = make_tar(Entry("a", b"x" * 700), Entry("b" * 150, b"y"), form=tarfile.PAX_FORMAT)
    # Between members, and in the zero blocks after the last one (at 3584), a tar may simply be over.
    ends = {0, 1536, 3584, 4096, 4608}
    for length in range(4609):
        if length in ends:
            read_all(data[:length])
        else:
            with pytest.raises(ImageError, match=r"test: .*(truncated|lone zero block)"):
                read_all(data[:length])


def bad(change: str) -> bytes:
    header = header_of(make_tar(Entry("f", b"")))
    match change:
        case "checksum":
            header[0] ^= 1
            return bytes(header) + bytes(1024)
        case "checksum field":
            header[148:156] = b"zzzzzzzz"
            return bytes(header) + bytes(1024)
        case "negative size":
            header[124:136] = b"\xff" * 12
        case "huge size":
            header[124:136] = b"\x80\xff" + b"\xff" * 10
        case "octal":
            header[124:136] = b"00000000089\0"
        case "underscore":
            header[124:136] = b"0000000_001\0"
        case "negative uid":
            header[108:116] = b"\xff" * 8
        case "type":
            header[156:157] = b"D"
        case "sparse":
            header[156:157] = b"S"
        case "lone zero block":
            return bytes(512) + checksummed(header)
    return checksummed(header) + bytes(1024)


@pytest.mark.parametrize(
    "change",
    [
        "checksum",
        "checksum field",
        "negative size",
        "huge size",
        "octal",
        "underscore",
        "negative uid",
        "type",
        "sparse",
        "lone zero block",
    ],
)
def test_malformed_headers(change: str) -> None:
    with pytest.raises(ImageError, match=r"test: .* at byte \d+ of the tar"):
        read_all(bad(change))


@pytest.mark.parametrize(
    "records",
    [
        b"path=x\n",
        b"999 path=x\n",
        b"10 path=xy",
        b"7 path=\n\0",
        b"9 nokey\n\n",
        b"12 path=a\0b\n",
        b"13 mtime=soon\n",
        b"11 size=-1\n",
        b"10 uid=0x1\n",
        b"6 =x\n\n",
        b"22 GNU.sparse.major=1\n",
        b"19 hdrcharset=EBCD\n",
        b"99999999999999999999999 a=b\n",
    ],
)
def test_malformed_pax_records(records: bytes) -> None:
    with pytest.raises(ImageError, match=r"at byte \d+ of the tar"):
        read_all(_with_records(records))


@pytest.mark.parametrize("kind", [b"x", b"g", b"L", b"K"])
def test_extended_headers_are_bounded(kind: bytes) -> None:
    with pytest.raises(ImageError, match="extended header of"):
        read_all(_with_records(b"", kind, size=1 << 30))


def test_clean_names() -> None:
    for name, clean in [
        (b"etc/passwd", b"etc/passwd"),
        (b"./etc/", b"etc"),
        (b"/etc//x/.", b"etc/x"),
        (b"//etc", b"etc"),
        (b"./", b""),
        (b"/", b""),
        (b"a/../b", b"b"),
        (b"/../b", b"b"),
        (b"a/../../b", b"../b"),
        (b".hidden", b".hidden"),
        (b"a/.wh.b", b"a/.wh.b"),
        (b"caf\xe9/", b"caf\xe9"),
    ]:
        assert clean_name(name) == clean


@settings(max_examples=300, deadline=None)
@given(
    position=st.integers(0, 4095),
    value=st.integers(0, 255),
    cut=st.integers(0, 12_000),
    chunk=st.sampled_from([1, 100, 512, 5000]),
    fix=st.booleans(),
)
def test_damage_is_an_image_error_or_harmless(position: int, value: int, cut: int, chunk: int, fix: bool) -> None:
    """Whatever byte is wrong: ImageError, or a tar whose bytes are still all accounted for."""
    data = bytearray(make_tar(*SAMPLE[:4], Entry("x" * 120, b"z", pax={"mtime": "5.25"})))
    data[position] = value
    if fix:
        start = position // 512 * 512
        data[start : start + 512] = checksummed(data[start : start + 512])
    damaged = bytes(data[: len(data) - cut])
    try:
        _, again = read_all(damaged, chunk)
    except ImageError:
        return
    assert again == damaged
