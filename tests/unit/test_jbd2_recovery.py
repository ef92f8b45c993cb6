"""The rules by which a log is read, each on a log made for it."""

from __future__ import annotations

import random
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ext4lite.checksum import crc32c
from ext4lite.errors import CorruptImage, Ext4LiteError, Unsupported
from ext4lite.extents import Extent
from ext4lite.jbd2 import fastcommit
from ext4lite.jbd2.log import HEADER, Log, Overlay, later_or_same, next_sequence, super_checksum, write_back
from ext4lite.jbd2.patch import merged, without
from ext4lite.jbd2.recovery import crc32_be, replay, scan
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import FcHead, FcTag, FcTail, JournalCommit, JournalSuperBlock
from support.journals import CSUM_V3, Trace, fresh, journal_of, recovered

BS = 1024


def some_log(incompat: int = CSUM_V3, commits: int = 3, sequence: int = 1) -> tuple[Trace, list[Extent], Log]:
    """A log with some commits: commit n writes n to block n, and then a revoke of block 50 + n."""
    device, runs = fresh(incompat=incompat, sequence=sequence)
    journal = journal_of(device, runs)
    for n in range(commits):
        with journal.begin() as h:
            h.write(n, bytes([n]) * BS)
            h.revoke(50 + n)
        journal.commit()
    return device, runs, Log.open(device, runs, "test")


def poke(log: Log, number: int, at: int, data: bytes) -> None:
    """Change bytes of a block of the journal."""
    old = log.read(number)
    log.write(number, old[:at] + data + old[at + len(data) :])


def change_super(device: Trace, runs: list[Extent], **fields: int) -> None:
    """Set fields of the journal's superblock and make its checksum right."""
    at = runs[0].physical * BS
    sb = JournalSuperBlock.unpack(device.data, at)
    for name, value in fields.items():
        setattr(sb, name, value)
    sb.s_checksum = super_checksum(sb.pack())
    device.data[at : at + 1024] = sb.pack()


def where(log: Log, kind: int, sequence: int) -> int:
    """Return the block of the journal that is of a kind and transaction."""
    return next(n for n in range(1, log.maxlen) if HEADER.unpack_from(log.read(n)) == (c.JBD2_MAGIC, kind, sequence))


def set_commit_time(log: Log, sequence: int, seconds: int) -> None:
    """Change the time of a commit, with its checksum."""
    at = where(log, c.JBD2_COMMIT, sequence)
    commit = JournalCommit.unpack(log.read(at))
    commit.h_commit_sec, commit.h_chksum = seconds, (0,) * 8
    data = commit.pack() + bytes(BS - JournalCommit.SIZE)
    if log.csum:
        data = data[:16] + crc32c(log.seed, data).to_bytes(4, "big") + data[20:]
    log.write(at, data)


def test_numbers_go_round() -> None:
    assert later_or_same(5, 5)
    assert later_or_same(6, 5)
    assert not later_or_same(5, 6)
    assert later_or_same(2, 0xFFFFFFF0)
    assert not later_or_same(0xFFFFFFF0, 2)
    assert next_sequence(0xFFFFFFFF) == 0
    _, _, log = some_log(commits=6, sequence=0xFFFFFFFD)
    found = scan(log)
    assert [t.sequence for t in found.transactions] == [0xFFFFFFFD, 0xFFFFFFFE, 0xFFFFFFFF, 0, 1, 2]
    assert found.end == 3


def test_crc32_be_is_the_mirrored_one() -> None:
    """The kernel's crc32_be is that of Ethernet with the bits the other way round; 0x0376e6e7 is CRC-32/MPEG-2."""
    assert crc32_be(0xFFFFFFFF, b"123456789") == 0x0376E6E7
    assert crc32_be(crc32_be(0xFFFFFFFF, b"1234"), b"56789") == 0x0376E6E7
    assert zlib.crc32(b"123456789") == 0xCBF43926


def test_an_unfinished_transaction_does_not_count() -> None:
    device, runs, log = some_log()
    poke(log, where(log, c.JBD2_COMMIT, 3), 0, b"\0\0\0\0")
    assert [t.sequence for t in scan(log).transactions] == [1, 2]
    assert recovered(device, runs)[2 * BS : 3 * BS] == device.read(2)


@pytest.mark.parametrize("kind", [c.JBD2_DESCRIPTOR, c.JBD2_REVOKE])
@pytest.mark.parametrize("sequence", [1, 3])
def test_a_wrong_checksum_before_a_commit_is_damage(kind: int, sequence: int) -> None:
    _, _, log = some_log()
    poke(log, where(log, kind, sequence), 700, b"?")
    with pytest.raises(CorruptImage, match=f"transaction {sequence} has a wrong checksum.*e2fsck"):
        replay(log, volume_blocks=200)


def test_a_wrong_checksum_in_what_a_former_life_left_is_not() -> None:
    _, _, log = some_log()
    poke(log, where(log, c.JBD2_DESCRIPTOR, 3), 700, b"?")
    set_commit_time(log, 3, 17)
    assert scan(log).end == 3


def test_a_commit_block_with_a_wrong_checksum() -> None:
    _, _, log = some_log()
    at = where(log, c.JBD2_COMMIT, 2)
    poke(log, at, 57, b"?")
    with pytest.raises(CorruptImage, match=f"commit block {at} of transaction 2"):
        scan(log)
    log.incompat |= c.JBD2_INCOMPAT_ASYNC
    assert scan(log).end == 2, "an asynchronous commit that did not get through"
    set_commit_time(log, 2, 17)
    poke(log, where(log, c.JBD2_COMMIT, 2), 16, b"????")
    log.incompat &= ~c.JBD2_INCOMPAT_ASYNC
    assert scan(log).end == 2, "older than the one before: stale"


def test_old_bytes_behind_a_commit_block_are_forgiven() -> None:
    _, _, log = some_log()
    poke(log, where(log, c.JBD2_COMMIT, 3), 600, b"left over")
    assert scan(log).end == 4


def test_a_copy_with_a_wrong_checksum_is_damage_unless_revoked() -> None:
    device, runs, log = some_log()
    at = where(log, c.JBD2_DESCRIPTOR, 1) + 1
    poke(log, at, 5, b"?")
    with pytest.raises(CorruptImage, match="copy of block 0 in transaction 1"):
        replay(log, volume_blocks=200)
    journal = journal_of(*fresh())
    with journal.begin() as h:
        h.write(9, b"9" * BS)
    journal.commit()
    with journal.begin() as h:
        h.revoke(9)
    journal.commit()
    log = journal.log
    poke(log, where(log, c.JBD2_DESCRIPTOR, 1) + 1, 5, b"?")
    assert (replay(log, volume_blocks=200).revoked, len(device.data), len(runs)) == (1, 200 * BS, 2)


def test_checksums_of_version_1_cover_the_whole_transaction() -> None:
    device, runs, log = some_log(incompat=1, commits=2)
    change_super(device, runs, s_feature_compat=1)
    assert scan(Log.open(device, runs, "x")).end == 3, "a commit block without one is fine"
    for sequence in (1, 2):
        at = where(log, c.JBD2_DESCRIPTOR, sequence)
        crc = crc32_be(crc32_be(0xFFFFFFFF, log.read(at)), log.read(at + 1))
        poke(log, where(log, c.JBD2_COMMIT, sequence), 12, bytes([1, 4, 0, 0]) + crc.to_bytes(4, "big"))
    log = Log.open(device, runs, "x")
    assert scan(log).end == 3
    poke(log, where(log, c.JBD2_DESCRIPTOR, 2) + 1, 5, b"?")
    with pytest.raises(CorruptImage, match="transaction 2"):
        scan(log)
    log.incompat |= c.JBD2_INCOMPAT_ASYNC
    assert scan(log).end == 2
    poke(log, where(log, c.JBD2_DESCRIPTOR, 1) + 1, 5, b"?")
    with pytest.raises(CorruptImage, match="transaction 1 is damaged, but later ones are there"):
        scan(log)


def test_every_tag_may_have_a_uuid() -> None:
    device, runs, log = some_log(incompat=1, commits=1)
    at = where(log, c.JBD2_DESCRIPTOR, 1)
    tag = (0).to_bytes(4, "big") + bytes(4)
    two = tag + bytes(16) + (9).to_bytes(4, "big") + bytes(2) + (c.JBD2_FLAG_LAST).to_bytes(2, "big") + bytes(16)
    poke(log, at, 12, two)
    log.write(at + 2, b"n" * BS)
    log.write(at + 3, HEADER.pack(c.JBD2_MAGIC, c.JBD2_COMMIT, 1) + bytes(BS - 12))
    after = recovered(device, runs)
    assert after[9 * BS : 10 * BS] == b"n" * BS
    assert after[:BS] == bytes(BS)


@pytest.mark.parametrize("block", [200, 1 << 40, 140])
def test_nothing_is_written_outside_the_volume_or_over_the_journal(block: int) -> None:
    journal = journal_of(*fresh())
    with journal.begin() as h:
        h.write(block, bytes(BS))
    journal.commit()
    with pytest.raises(CorruptImage, match=f"changes block {block}"):
        replay(journal.log, volume_blocks=200)


def test_an_impossible_revoke_block() -> None:
    _, _, log = some_log(incompat=1)
    poke(log, where(log, c.JBD2_REVOKE, 2), 12, (5000).to_bytes(4, "big"))
    with pytest.raises(CorruptImage, match="says 5000 bytes"):
        replay(log, volume_blocks=200)


def test_a_log_full_of_one_transaction_ends() -> None:
    device, runs = fresh(incompat=0)
    change_super(device, runs, s_start=1)
    log = Log.open(device, runs, "test")
    for n in range(1, log.maxlen):
        log.write(n, HEADER.pack(c.JBD2_MAGIC, c.JBD2_REVOKE, 1) + bytes(BS - 12))
    assert scan(log).transactions == []


@pytest.mark.parametrize(
    ("fields", "error", "what"),
    [
        ({"h_magic": 5}, CorruptImage, "magic"),
        ({"h_blocktype": 2}, CorruptImage, "type 2"),
        ({"s_blocksize": 4096}, CorruptImage, "blocks of 4096"),
        ({"s_maxlen": 65}, CorruptImage, "64 blocks"),
        ({"s_first": 0}, CorruptImage, "from 0 on"),
        ({"s_start": 64}, CorruptImage, "starts at block 64"),
        ({"s_feature_incompat": 0x1012}, Unsupported, "FEATURE_I12"),
        ({"s_feature_ro_compat": 1}, Unsupported, "FEATURE_R0"),
        ({"s_checksum_type": 1}, Unsupported, "type 1"),
    ],
)
def test_superblocks_that_are_refused(fields: dict[str, int], error: type[Exception], what: str) -> None:
    device, runs = fresh()
    change_super(device, runs, **fields)
    with pytest.raises(error, match=what):
        Log.open(device, runs, "test")


def test_superblock_checksum_and_holes() -> None:
    device, runs = fresh()
    device.data[runs[0].physical * BS + 27] ^= 1
    with pytest.raises(CorruptImage, match="checksum"):
        Log.open(device, runs, "test")
    device, runs = fresh()
    for bad in ([], [Extent(1, 5, 63)], [runs[0], Extent(40, 170, 24)], [Extent(0, 135, 64, True)]):
        with pytest.raises(CorruptImage):
            Log.open(device, bad, "test")


def test_runs_of_clusters() -> None:
    assert merged([(5, 2), (1, 2), (7, 1), (2, 2), (9, 0)]) == [(1, 3), (5, 3)]
    assert without([(0, 10), (20, 5)], [(2, 3), (8, 14)]) == [(0, 2), (5, 3), (22, 3)]
    assert without([(0, 4)], []) == [(0, 4)]


def test_an_overlay_patches_what_is_read() -> None:
    r = random.Random(1)
    base = Trace(BS, bytearray(r.randbytes(20 * BS)))
    overlay = Overlay(base, {3: b"3" * BS, 4: b"4" * BS})
    overlay.write(4, b"f" * BS)
    overlay.write(9, b"9" * BS)
    whole = bytearray(base.data)
    for number, data in overlay.everything().items():
        whole[number * BS : (number + 1) * BS] = data
    assert sorted(overlay.everything()) == [3, 4, 9]
    for _ in range(300):
        start = r.randrange(20 * BS)
        length = r.randrange(20 * BS - start + 1)
        assert overlay.patch(bytes(base.data[start : start + length]), start) == whole[start : start + length]
    write_back(base, overlay.everything())
    assert base.data == whole


# -- fast commits ---------------------------------------------------------------------------------------------------


def fc_log(*commits: bytes, tid: int = 1, head_tid: int = 1) -> Log:
    """A log with a fast-commit area that holds the given commits' records, each ended by a tail."""
    device, runs = fresh(incompat=CSUM_V3 | 0x20)
    change_super(device, runs, s_num_fc_blks=20, s_start=1)
    log = Log.open(device, runs, "test")
    for i, records in enumerate(commits):
        data = b"" if i else FcTag(c.FC_HEAD, 8).pack() + FcHead(0, head_tid).pack()
        data += records
        room = BS - len(data) - FcTag.SIZE
        data += FcTag(c.FC_TAIL, room).pack() + tid.to_bytes(4, "little")
        data += FcTail(tid, crc32c(0, data)).pack()[4:]
        log.write(log.fc_first + i, data + bytes(BS - len(data)))
    return log


def unlink(name: bytes) -> bytes:
    return FcTag(c.FC_UNLINK, 8 + len(name)).pack() + (2).to_bytes(4, "little") + (12).to_bytes(4, "little") + name


def test_fast_commits_that_count() -> None:
    log = fc_log(unlink(b"a"), unlink(b"b") + FcTag(c.FC_PAD, 30).pack() + bytes(30), unlink(b"c"))
    assert [r.value[8:] for r in fastcommit.scan(log, 1)] == [b"a", b"b", b"c"]
    assert fastcommit.scan(log, 2) == [], "of another transaction"
    poke(log, log.fc_first + 2, 6, b"\1")
    assert [r.value[8:] for r in fastcommit.scan(log, 1)] == [b"a", b"b"], "a wrong checksum ends it"
    poke(log, log.fc_first + 1, 0, b"\x77")
    assert [r.value[8:] for r in fastcommit.scan(log, 1)] == [b"a"], "an unknown tag ends it"
    assert fastcommit.scan(fc_log(unlink(b"a"), tid=7), 1) == []
    assert fastcommit.scan(fc_log(unlink(b"a"), head_tid=7), 1) == []
    log.super.s_start = 0
    assert fastcommit.scan(log, 1) == [], "not in a journal that is empty"


def test_fast_commits_with_unknown_features_are_refused() -> None:
    log = fc_log(unlink(b"a"))
    poke(log, log.fc_first, 4, b"\1")
    with pytest.raises(Unsupported, match="features 0x1"):
        fastcommit.scan(log, 1)


def reseal(log: Log) -> None:
    """Make the checksums of all blocks of the journal's own right, whatever they say by now."""
    for number in range(1, log.maxlen):
        data = log.read(number)
        magic, kind, _ = HEADER.unpack_from(data)
        if magic != c.JBD2_MAGIC or not log.csum:
            continue
        at = JournalCommit.OFFSET_h_chksum if kind == c.JBD2_COMMIT else BS - 4
        if kind in (c.JBD2_DESCRIPTOR, c.JBD2_REVOKE, c.JBD2_COMMIT):
            poke(log, number, at, log.block_checksum(data, at).to_bytes(4, "big"))


# -- anything -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("incompat", [CSUM_V3 | 0x20, 1], ids=["checksums", "none"])
@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    changes=st.lists(
        st.tuples(st.integers(0, 24), st.integers(0, BS - 1), st.binary(min_size=1, max_size=4)), min_size=1, max_size=6
    ),
    fix=st.booleans(),
)
def test_damaged_logs(incompat: int, changes: list[tuple[int, int, bytes]], fix: bool) -> None:
    """Whatever bytes a log has, reading it ends, in an Ext4LiteError if at all, and names only blocks of the volume."""
    device, runs, log = some_log(incompat=incompat & ~0x20, commits=6)
    if incompat & 0x20:
        change_super(device, runs, s_feature_incompat=log.super.s_feature_incompat | 0x20, s_num_fc_blks=8)
    for number, at, data in changes:
        poke(log, number, at % 80 if number == 0 else at, data[: BS - at])
    if fix:
        change_super(device, runs)
    try:
        log = Log.open(device, runs, "test")
        if fix:
            reseal(log)
        found = replay(log, volume_blocks=200)
        fastcommit.scan(log, found.end)
    except Ext4LiteError as e:
        assert str(e)
        return
    assert len(found.blocks) <= 64
    assert all(0 <= n < 200 and len(found.blocks[n]) == BS for n in found.blocks)
