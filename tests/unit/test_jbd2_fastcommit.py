"""Fast-commit records that no kernel writes: applied to a volume in memory, they end in an Ext4LiteError if at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ext4lite import manifest
from ext4lite.builder import ImageBuilder, Meta
from ext4lite.errors import CorruptImage, Ext4LiteError
from ext4lite.jbd2 import fastcommit
from ext4lite.jbd2.fastcommit import Record
from ext4lite.jbd2.log import FileBlocks, Log, Overlay
from ext4lite.layout import constants as c
from ext4lite.recover import Recovered
from ext4lite.super import read_super
from ext4lite.volume import Volume


class Patient:
    """A small volume; every attempt sees it through an overlay of its own."""

    def __init__(self, path: Path) -> None:
        with ImageBuilder(path, size=16 << 20, timestamp=1) as b:
            self.d = b.add_dir(b.root, b"d", Meta())
            with b.add_file(self.d, b"f", Meta()) as f:
                f.write(b"f" * 50_000)
            b.add_symlink(self.d, b"s", b"target", Meta())
            b.finish()
        self.fd = os.open(path, os.O_RDONLY)
        self.super = read_super(self.fd, "image")
        with Volume.open(path) as v:
            inos = {name: v.lookup("/d/" + name) for name in ("f", "s")}
            assert inos["f"]
            assert inos["s"]
            self.f, self.s = inos["f"], inos["s"]
            self.d = v.lookup("/d") or 0
            self.raw = v.inode(self.f).raw
            self.journal = v.extents(8)

    def apply(self, records: list[Record]) -> Volume:
        """Return the volume with records applied."""
        blocks = FileBlocks(self.fd, 4096, "image")
        overlay = Overlay(blocks, {})
        log = Log.open(blocks, self.journal, "image")
        found = Recovered(self.super, overlay, log, None, records)  # type: ignore[arg-type]
        volume = Volume(self.fd, self.super, "image", found)
        fastcommit.apply(volume, overlay, records, 1)
        return volume


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Patient:
    return Patient(tmp_path_factory.mktemp("fc") / "image")


def words(*numbers: int) -> bytes:
    return b"".join(n.to_bytes(4, "little") for n in numbers)


def test_names_and_ranges(patient: Patient) -> None:
    new = 40
    volume = patient.apply(
        [
            Record(c.FC_INODE, words(new) + patient.raw),
            Record(c.FC_ADD_RANGE, words(new) + words(0) + (2).to_bytes(2, "little") + bytes(2) + words(2000)),
            Record(c.FC_CREAT, words(patient.d, new) + b"new"),
            Record(c.FC_LINK, words(patient.d, new) + b"again"),
            Record(c.FC_LINK, words(patient.d, new) + b"again"),
            Record(c.FC_UNLINK, words(patient.d, patient.f) + b"f"),
            Record(c.FC_UNLINK, words(patient.d, patient.f) + b"f"),
        ]
    )
    assert volume.lookup("/d/new") == volume.lookup("/d/again") == new
    assert volume.lookup("/d/f") is None
    assert volume.stat(new).nlink == 2
    assert [(e.logical, e.physical, e.count) for e in volume.extents(new)] == [(0, 2000, 2)]
    assert volume.inode(patient.f).fields.i_links_count == 0
    assert volume.bitmap_checksums_ok(0)


@pytest.mark.parametrize(
    ("record", "what"),
    [
        (Record(c.FC_UNLINK, words(2, 10**6) + b"x"), "no such inode"),
        (Record(c.FC_INODE, words(8) + bytes(256)), "reserved"),
        (Record(c.FC_CREAT, words(2, 60) + b"x"), "nobody says what it is"),
        (Record(c.FC_LINK, words(2, 12) + b"a/b"), "impossible name"),
        (Record(c.FC_INODE, words(12) + bytes(300)), "record of 300 bytes"),
        (Record(c.FC_DEL_RANGE, words(12, 5, 0)), "range of 0 blocks"),
        (Record(c.FC_ADD_RANGE, words(12, 0) + b"\1\0\0\0" + words(10**6)), "outside the volume"),
    ],
)
def test_records_that_cannot_be(patient: Patient, record: Record, what: str) -> None:
    with pytest.raises(CorruptImage, match=what):
        patient.apply([record])


INO = st.one_of(st.sampled_from([2, 11, 12, 13, 14, 40, 41]), st.integers(0, 5000))
NUMBER = st.one_of(st.integers(0, 5000), st.integers(0, 0xFFFFFFFF))
NAME = st.sampled_from([b"f", b"s", b"d", b"new", b"..", b"lost+found"])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_records(patient: Patient, data: st.DataObject) -> None:
    records = []
    for _ in range(data.draw(st.integers(1, 8))):
        tag = data.draw(
            st.sampled_from([c.FC_ADD_RANGE, c.FC_DEL_RANGE, c.FC_CREAT, c.FC_LINK, c.FC_UNLINK, c.FC_INODE])
        )
        ino = data.draw(INO)
        if tag == c.FC_INODE:
            raw = bytearray(patient.raw)
            for at, byte in data.draw(st.lists(st.tuples(st.integers(0, 159), st.integers(0, 255)), max_size=4)):
                raw[at] = byte
            records.append(Record(tag, words(ino) + bytes(raw)))
        elif tag in (c.FC_ADD_RANGE, c.FC_DEL_RANGE):
            records.append(Record(tag, words(ino, *data.draw(st.tuples(NUMBER, NUMBER, NUMBER)))))
        else:
            records.append(Record(tag, words(data.draw(INO), ino) + data.draw(NAME)))
    try:
        volume = patient.apply(records)
        for number in range(volume.super.groups):
            assert volume.bitmap_checksums_ok(number)
        sum(1 for _ in manifest.entries(volume))
    except Ext4LiteError as e:
        assert str(e)
