"""Making a journal: free blocks become a log whose one transaction makes them the journal's."""

from __future__ import annotations

from ext4lite.blockdev import StrPath
from ext4lite.checksum import superblock_checksum
from ext4lite.jbd2.log import Log, super_checksum
from ext4lite.jbd2.transaction import Journal
from ext4lite.journal.blocks import Device, clear, extend, note, open_volume, own_nodes
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import JournalSuperBlock
from ext4lite.super import Super

_SECTOR = 512
_KBYTES_WRITTEN = 0x178  # byte of s_kbytes_written in the superblock


class Creation:
    """Making a journal; see the package's text."""

    def __init__(self, fd: int, path: StrPath, device: Device | None) -> None:
        self.v = open_volume(fd, path, device, journaled=False)

    def run(self, blocks: int) -> None:
        v = self.v
        try:
            log = self._prepare(blocks)
            journal = Journal(log, start=log.first, sequence=log.super.s_sequence)
            journal.share = 1
            with journal.begin() as handle:
                for number, data in v.cache.dirty.items():
                    handle.write(number, bytes(data))
            journal.commit()
            number = c.SUPERBLOCK_OFFSET // v.block_size
            block = bytearray(v._blocks.read(number))
            at = c.SUPERBLOCK_OFFSET % v.block_size
            new = bytes(v.cache.get(number)[at : at + c.SUPERBLOCK_SIZE])
            old = bytes(block[at : at + c.SUPERBLOCK_SIZE])
            block[at : at + c.SUPERBLOCK_SIZE] = _in_one_sector(old, new, sums=v.super.metadata_csum)
            v.write_raw(number, bytes(block))  # from here on there is a journal
            v._blocks.flush()
        except BaseException:
            v.abandon()
            raise
        v.cache.committed()
        v.alloc.committed()
        v.adopt_journal(journal)
        v.write_superblock_copies()
        v.close()

    def _prepare(self, blocks: int) -> Log:
        """Put all changes into the cache, and write an empty log."""
        v = self.v
        raw = v.super.raw
        v.begin_unmarked()
        record = v.new_record(c.JOURNAL_INO, c.S_IFREG | 0o600, uid=0, gid=0, links=1)
        record.fields.i_generation = 0  # the superblock's copy of the inode has none
        v._give_map(record)
        pieces = extend(v, record, blocks)
        for piece in pieces:
            clear(v, piece.physical, piece.count)
        raw.s_feature_compat |= c.COMPAT_HAS_JOURNAL
        raw.s_feature_incompat |= c.INCOMPAT_RECOVER
        raw.s_journal_inum, raw.s_journal_dev, raw.s_journal_uuid = c.JOURNAL_INO, 0, bytes(16)
        note(v, record, blocks)
        v.store_all()
        for number in own_nodes(v, record):  # the log is found through them
            v.write_raw(number, bytes(v.cache.get(number)))
        first = pieces[0].physical
        v.write_raw(first, _empty_log(v.super, blocks))
        return Log.open(v._blocks, pieces, v._at("the new journal"))


def _in_one_sector(old: bytes, new: bytes, *, sums: bool) -> bytes:
    """Return a superblock with the first sector of ``new`` and the second of ``old``: written whole or not at all.

    So that the checksum, which is in the second, is right, the number of kilobytes ever written is made to fit. The log
    has the true superblock, which recovery brings. (crc32c is linear: each bit of a field changes it in one way.)
    """
    mixed = bytearray(new[:_SECTOR] + old[_SECTOR:])
    if not sums:
        return bytes(mixed)
    at = _KBYTES_WRITTEN
    mixed[at : at + 4] = bytes(4)
    base = superblock_checksum(bytes(mixed))
    rows = []
    for bit in range(32):
        mixed[at : at + 4] = (1 << bit).to_bytes(4, "little")
        rows.append((superblock_checksum(bytes(mixed)) ^ base, 1 << bit))
    wanted, value = base ^ int.from_bytes(old[-4:], "little"), 0
    for bit in range(31, -1, -1):  # elimination: one row for each leading bit
        row = next(r for r in rows if r[0].bit_length() == bit + 1)
        rows = [(r[0] ^ row[0], r[1] ^ row[1]) if r[0] >> bit & 1 else r for r in rows if r is not row]
        if wanted >> bit & 1:
            wanted, value = wanted ^ row[0], value ^ row[1]
    mixed[at : at + 4] = value.to_bytes(4, "little")
    return bytes(mixed)


def _empty_log(sb: Super, blocks: int) -> bytes:
    """Return the first block of an empty journal with what suits the volume."""
    head = JournalSuperBlock(
        h_magic=c.JBD2_MAGIC,
        h_blocktype=c.JBD2_SUPERBLOCK_V2,
        s_blocksize=sb.block_size,
        s_maxlen=blocks,
        s_first=1,
        s_sequence=1,
        s_uuid=sb.raw.s_uuid,
        s_nr_users=1,
    )
    if sb.incompat & c.INCOMPAT_64BIT:
        head.s_feature_incompat |= c.JBD2_INCOMPAT_64BIT
    if sb.compat & c.COMPAT_FAST_COMMIT:
        head.s_num_fc_blks = c.JBD2_DEFAULT_FC_BLOCKS
    if sb.metadata_csum:
        head.s_feature_incompat |= c.JBD2_INCOMPAT_CSUM_V3
        head.s_checksum_type = c.JBD2_CRC32C
        head.s_checksum = super_checksum(head.pack())
    return head.pack() + bytes(sb.block_size - JournalSuperBlock.SIZE)
