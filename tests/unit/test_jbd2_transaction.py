"""Transactions: what was committed is there after any cut, what was not is not there at all."""

from __future__ import annotations

import random

import pytest

from ext4lite.errors import CorruptImage
from ext4lite.extents import Extent
from ext4lite.jbd2.log import Log, super_checksum
from ext4lite.jbd2.recovery import replay, scan
from ext4lite.jbd2.transaction import Journal, TransactionTooLarge
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import JournalSuperBlock
from support.journals import CSUM_V2, CSUM_V3, Trace, fresh, journal_of, recovered

FEATURES = pytest.mark.parametrize("incompat", [CSUM_V3, CSUM_V2, 0x8, 0x10, 0x2, 0], ids=hex)
USED = 100


def content(r: random.Random, size: int) -> bytes:
    """A block; some begin with the journal's magic and must be escaped."""
    data = r.randbytes(size)
    return c.JBD2_MAGIC.to_bytes(4, "big") + data[4:] if r.random() < 0.3 else data


@FEATURES
def test_committed_blocks_are_replayed(incompat: int) -> None:
    device, runs = fresh(incompat=incompat)
    journal = journal_of(device, runs)
    with journal.begin() as h:
        h.write(5, c.JBD2_MAGIC.to_bytes(4, "big") + b"x" * 1020)
        h.write(6, b"y" * 1024)
        assert h.read(6) == b"y" * 1024
    journal.commit()
    with journal.begin() as h:
        h.write(7, b"never" + bytes(1019))
    log = Log.open(device, runs, "test")
    (tag, other) = scan(log).transactions[0].tags
    assert tag.flags & c.JBD2_FLAG_ESCAPE
    assert not other.flags & c.JBD2_FLAG_ESCAPE
    assert log.read(tag.at) == bytes(4) + b"x" * 1020, "it does not look like a block of the journal's own"
    after = recovered(device, runs)
    assert after[5 * 1024 : 6 * 1024] == c.JBD2_MAGIC.to_bytes(4, "big") + b"x" * 1020
    assert after[6 * 1024 : 7 * 1024] == b"y" * 1024
    assert after[7 * 1024 : 8 * 1024] == device.read(7)
    assert device.read(5) == (5).to_bytes(4, "little") * 256, "nothing is in place before the checkpoint"
    assert journal.read(7).startswith(b"never")
    journal.close()
    assert device.read(7).startswith(b"never")
    log = Log.open(device, runs, "test")
    assert (log.super.s_start, log.super.s_sequence) == (0, 4)


@FEATURES
def test_revoked_blocks_are_not(incompat: int) -> None:
    device, runs = fresh(incompat=incompat)
    journal = journal_of(device, runs)
    for block in (5, 6, 7):
        with journal.begin() as h:
            h.write(block, bytes([block]) * 1024)
    journal.commit()
    with journal.begin() as h:
        h.revoke(5)
        h.revoke(6)
        h.write(6, b"again" + bytes(1019))
    journal.commit()
    device.write(5, b"data!" + bytes(1019))
    with journal.begin() as h:
        h.revoke(7)
    with journal.begin() as h:
        h.write(7, b"used" + bytes(1020))
    journal.commit()
    log = Log.open(device, runs, "test")
    assert replay(log, volume_blocks=200).revoked == 1
    after = recovered(device, runs)
    assert after[5 * 1024 :].startswith(b"data!")
    assert after[6 * 1024 :].startswith(b"again")
    assert after[7 * 1024 :].startswith(b"used")
    journal.checkpoint()
    assert device.read(5).startswith(b"data!"), "the checkpoint forgets it, too"


@FEATURES
def test_more_revocations_than_a_block_holds(incompat: int) -> None:
    device, runs = fresh(incompat=incompat, blocks=2000, journal=1500)
    journal = journal_of(device, runs)
    blocks = range(300)
    for block in blocks:
        with journal.begin() as h:
            h.write(block, b"old!" * 256)
    journal.commit()
    for block in blocks:
        with journal.begin() as h:
            h.revoke(block)
    journal.commit()
    for block in blocks:
        device.write(block, b"data" * 256)
    log = Log.open(device, runs, "test")
    assert [len(t.revokes) for t in scan(log).transactions] == [0, 3 if incompat & c.JBD2_INCOMPAT_64BIT else 2]
    assert replay(log, volume_blocks=2000).revoked == 300
    assert recovered(device, runs)[: 300 * 1024] == b"data" * (300 * 256)


def test_an_operation_that_fails_leaves_nothing() -> None:
    device, runs = fresh()
    journal = journal_of(device, runs)
    with pytest.raises(KeyError), journal.begin() as h:
        h.write(5, bytes(1024))
        raise KeyError
    with pytest.raises(RuntimeError, match="under way"), journal.begin():
        journal.begin()
    with pytest.raises(TransactionTooLarge), journal.begin() as h:
        for block in range(journal.most_changes + 1):
            h.write(block, bytes(1024))
    with pytest.raises(ValueError, match="1024 bytes"), journal.begin() as h:
        h.write(5, b"short")
    journal.close()
    assert [e for e in device.events if e] == []


def test_ordered_data_comes_before_the_commit() -> None:
    device, runs = fresh()
    journal = journal_of(device, runs)
    with journal.begin() as h:
        h.write(5, bytes(1024))
        h.ordered(lambda: device.write(90, b"data" * 256))
    assert device.events == []
    journal.commit()
    writes = [e and e[0] for e in device.events]
    at = writes.index(90)
    assert None in writes[at + 1 : -2], "a flush between data and commit block"
    assert writes[-1] is None


def test_compound_transactions_and_wrap() -> None:
    """Far more than the log holds goes through it; small operations share a transaction."""
    r = random.Random(3)
    device, runs = fresh(sequence=0xFFFFFFF0)
    journal = journal_of(device, runs)
    model = bytearray(device.data)
    for step in range(300):
        with journal.begin() as h:
            for _ in range(r.randrange(1, 5)):
                block = r.randrange(USED)
                data = content(r, 1024)
                h.write(block, data)
                model[block * 1024 : (block + 1) * 1024] = data
        if step % 3 == 0:
            journal.commit()
            assert recovered(device, runs)[: USED * 1024] == model[: USED * 1024]
    assert journal.sequence < 1000, "numbers have gone round"
    journal.close()
    assert device.data[: USED * 1024] == model[: USED * 1024]


@FEATURES
def test_cut_off_anywhere(incompat: int) -> None:
    """After a cut with lost and torn sectors the device is as after one of the commits, and not before the last one."""
    r = random.Random(incompat)
    device, runs = fresh(incompat=incompat, journal=40)
    before = bytes(device.data)
    journal = journal_of(device, runs)
    states = [(0, before[: USED * 1024])]
    model = bytearray(before)
    for _ in range(40):
        for _ in range(r.randrange(1, 3)):
            with journal.begin() as h:
                for _ in range(r.randrange(1, 4)):
                    block = r.randrange(USED)
                    data = content(r, 1024)
                    h.write(block, data)
                    model[block * 1024 : (block + 1) * 1024] = data
        if r.random() < 0.2:
            journal.checkpoint()
        journal.commit()
        states.append((len(device.events), bytes(model[: USED * 1024])))
    journal.close()
    # A merge commits, too, when a transaction grows too large; here none does.
    assert journal.sequence == 41
    places = [r.randrange(len(device.events) + 1) for _ in range(120)]
    loose: set[int] = set()
    for i, event in enumerate(device.events):  # where it is in doubt whether the log's superblock has changed
        if event is not None:
            loose.add(event[0])
        else:
            places += [i] * 20 * (runs[0].physical in loose)
            loose = set()
    for at in places:
        left = device.cut(before, at, r)
        synced = max(i for i, (events, _) in enumerate(states) if events <= at)
        result = recovered(left, runs)[: USED * 1024]
        reached = [i for i, (_, state) in enumerate(states) if state == result]
        assert reached, f"cut behind event {at} of {len(device.events)}: a state that never was"
        assert max(reached) >= synced, f"cut behind event {at}: commit {synced} is lost"


def _replayed_in_place(device: Trace, runs: list[Extent], filled: int) -> tuple[Journal, list[int]]:
    """Fill a log with so many transactions of a block each; return a writer that goes on behind them, and the blocks.

    They were written in place, but not flushed: as in a recovery.
    """
    writer = journal_of(device, runs)
    for n in range(filled):
        with writer.begin() as h:
            h.write(5 + n, bytes([n]) * 1024)
        writer.commit()
    device.events.append(None)
    log = Log.open(device, runs, "test")
    found = replay(log, volume_blocks=USED)
    for number, data in found.blocks.items():
        device.write(number, data)
    used = log.length(log.super.s_start, found.head)
    return Journal(log, start=found.head, sequence=found.end, used=used), sorted(found.blocks)


@pytest.mark.parametrize(("filled", "goes_on"), [(3, False), (3, True), (20, True)])
def test_the_log_is_given_free_only_when_what_was_replayed_is_durable(filled: int, goes_on: bool) -> None:
    """Also with a log so full (3 of 63 blocks are free) that the next transaction must take the place of old ones."""
    device, runs = fresh()
    journal, blocks = _replayed_in_place(device, runs, filled)
    before, begin = device.data[:], len(device.events) - len(blocks)
    if goes_on:
        with journal.begin() as h:
            for number in range(80, 84):
                h.write(number, b"later" + bytes(1019))
        journal.commit()
    journal.close()
    durable = bytearray(before)
    for number in blocks:  # none of them has got through
        durable[number * 1024 : (number + 1) * 1024] = number.to_bytes(4, "little") * 256
    flushed = False
    for event in device.events[begin:]:
        if event is None:
            flushed = True
        elif event[0] not in blocks:
            number, data = event
            if not flushed:  # the worst: this is on the disk at once, and what was replayed is not
                durable[number * 1024 : number * 1024 + len(data)] = data
                after = recovered(Trace(1024, durable), runs)
                for block in blocks:
                    assert after[block * 1024 : (block + 1) * 1024] == device.read(block), f"block {block} is lost"
    assert flushed
    log = Log.open(device, runs, "test")
    assert (log.super.s_start, log.super.s_sequence) == (0, 2 + filled + goes_on)
    assert device.read(80).startswith(b"later") == goes_on


def test_a_version_1_superblock_grows_features_when_it_needs_them() -> None:
    device, runs = fresh(incompat=0)
    at = runs[0].physical * 1024
    device.data[at + 7] = 3
    device.data[at + 36 : at + 1024] = b"\xee" * 988  # undefined in version 1
    journal = journal_of(device, runs)
    with journal.begin() as h:
        h.revoke(5)
        h.write(6, b"6" * 1024)
    journal.commit()
    log = Log.open(device, runs, "test")
    assert (log.super.h_blocktype, log.incompat, log.tag_size) == (4, c.JBD2_INCOMPAT_REVOKE, 8)
    assert [len(t.tags) for t in scan(log).transactions] == [1]


def test_fast_commit_area_is_no_part_of_the_log() -> None:
    device, runs = fresh(incompat=CSUM_V3 | 0x20, journal=64)
    _with_fc_blocks(device, runs, 20)
    with pytest.raises(CorruptImage, match="300 of 64 blocks"):
        Log.open(Trace(1024, _with_fc_blocks(fresh(incompat=CSUM_V3 | 0x20)[0], runs, 300)), runs, "test")
    log = Log.open(device, runs, "test")
    assert (log.first, log.last, log.fc_first) == (1, 44, 45)
    assert log.after(43) == 1


def _with_fc_blocks(device: Trace, runs: list[Extent], count: int) -> bytearray:
    at = runs[0].physical * 1024
    sb = JournalSuperBlock.unpack(device.data, at)
    sb.s_num_fc_blks = count
    sb.s_checksum = super_checksum(sb.pack())
    device.data[at : at + 1024] = sb.pack()
    return device.data
