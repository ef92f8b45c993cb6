"""tar-split as dockerd reads and writes it, and from it back to the same tar."""

from __future__ import annotations

import base64
import gzip
import json
import zlib

import crcmod
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ext4lite.errors import ImageError
from ext4lite.overlay.layers import split_again
from ext4lite.overlay.tarsplit import TarSplitWriter, assemble, crc64
from ext4lite.overlay.tarstream import TarReader, clean_name
from support.overlay_samples import Entry, directory, hardlink, make_tar, symlink


def lines(packed: bytes) -> list[str]:
    return gzip.decompress(packed).decode().splitlines()


def split_of(tar: bytes, superseded: set[int] | None = None) -> bytes:
    return split_again(TarReader(iter([tar]), where="test"), superseded or set()).finish()


def contents_of(tar: bytes) -> dict[bytes, bytes]:
    reader = TarReader(iter([tar]), where="test")
    found = {}
    while (member := reader.next()) is not None:
        found[member.name] = b"".join(reader.data())
    return found


def reassembled(packed: bytes, contents: dict[bytes, bytes]) -> bytes:
    out: list[bytes] = []
    assemble(packed, contents.__getitem__, out.append)
    return b"".join(out)


def test_crc64_is_gos_iso_table() -> None:
    # The catalogue's check value for CRC-64/GO-ISO.
    assert crc64(b"123456789") == 0xB90956C775A41001
    assert crc64(b"6789", crc64(b"12345")) == crc64(b"123456789")
    assert crc64(b"") == 0


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_crc64_implementations_agree(a: bytes, b: bytes) -> None:
    other = crcmod.mkCrcFun(0x1000000000000001B, initCrc=0, rev=True, xorOut=0xFFFFFFFFFFFFFFFF)
    assert crc64(a) == other(a)
    assert crc64(memoryview(b), crc64(a)) == other(b, other(a)) == crc64(a + b)


def test_entries_are_spelt_as_by_go() -> None:
    split = TarSplitWriter()
    split.segment(b"\0\1\2")
    split.segment(b"")
    split.file(b"etc/", 0, 0)
    split.file(b'a<b>&"\\c', 5, 0x0102030405060708)
    split.file("grün\u2028".encode(), 0, 0)
    split.file(b"caf\xe9", 1, 1)
    # As Go's encoding/json writes these storage.Entry values.
    assert lines(split.finish()) == [
        '{"type":2,"payload":"AAEC","position":0}',
        '{"type":1,"name":"etc/","payload":null,"position":1}',
        '{"type":1,"name":"a\\u003cb\\u003e\\u0026\\"\\\\c","size":5,"payload":"AQIDBAUGBwg=","position":2}',
        '{"type":1,"name":"grün\\u2028","payload":null,"position":3}',
        '{"type":1,"name_raw":"Y2Fm6Q==","size":1,"payload":"AAAAAAAAAAE=","position":4}',
    ]


def test_stream_is_closed_and_without_a_date() -> None:
    packed = split_of(make_tar(Entry("a", b"1")))
    stream = zlib.decompressobj(31)
    stream.decompress(packed)
    assert stream.eof and not stream.unused_data
    assert packed[4:8] == bytes(4)
    assert packed == split_of(make_tar(Entry("a", b"1")))
    with pytest.raises(ImageError, match="not closed"):
        reassembled(packed[:-3], {b"a": b"1"})


TARS = [
    b"",
    bytes(1024),
    make_tar(),
    make_tar(directory("d/"), Entry("d/a", b"x" * 513), Entry("empty"), symlink("l", "d"), hardlink("h", "d/a")),
    make_tar(Entry("n" * 200, b"long", pax={"SCHILY.xattr.user.a": "b"})) + b"trailing garbage",
    make_tar(Entry("big", b"0123456789" * 200_000)),
]


@pytest.mark.parametrize("number", range(len(TARS)))
def test_round_trip(number: int) -> None:
    tar = TARS[number]
    assert reassembled(split_of(tar), contents_of(tar)) == tar


def test_damaged_content_is_noticed() -> None:
    packed = split_of(make_tar(Entry("a", b"good")))
    with pytest.raises(ImageError, match="does not match"):
        reassembled(packed, {b"a": b"evil"})


def test_superseded_contents_become_segments() -> None:
    tar = make_tar(Entry("a", b"first"), Entry("./a", b"second"))
    packed = split_of(tar, {0})
    files = [json.loads(line) for line in lines(packed) if '"type":1' in line]
    assert [(entry["name"], entry["size"]) for entry in files] == [("./a", 6)]
    assert base64.b64decode(files[0]["payload"]) == crc64(b"second").to_bytes(8, "big")
    assert reassembled(packed, {b"./a": b"second"}) == tar


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.binary(max_size=600)), max_size=8))
def test_any_tar_comes_back(entries: list[tuple[str, bytes]]) -> None:
    tar = make_tar(*(Entry(name, content) for name, content in entries))
    last = {clean_name(name.encode()): index for index, (name, _) in enumerate(entries)}
    superseded = set(range(len(entries))) - set(last.values())
    contents = {name.encode(): content for name, content in entries}
    assert reassembled(split_of(tar, superseded), contents) == tar
