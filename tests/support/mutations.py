"""Mistakes that a journal's writer or its recovery could have; the cuts must notice each of them.

Each is an edit of one module of ext4lite: the old text stands there exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutation:
    """``old`` becomes ``new`` in a module below ``ext4lite/``."""

    module: str
    old: str
    new: str

    def apply(self, package: Path) -> None:
        """Make the mistake in a copy of the package."""
        path = package / self.module
        text = path.read_text()
        assert text.count(self.old) == 1, (
            f"{self.module} has changed: {self.old!r} is there {text.count(self.old)} times"
        )
        path.write_text(text.replace(self.old, self.new))


_T = "jbd2/transaction.py"
_R = "recover.py"
_FLUSH = "self._blocks.flush()"
_TAIL = "            self.log.write_super(start=self._head, sequence=self.sequence)\n"
MUTATIONS = {
    # -- revocations
    "revokes are not written": Mutation(_T, "self._revoke_blocks() + self._descriptors()", "self._descriptors()"),
    "revokes do not reach the journal": Mutation("writable.py", "handle.revoke(number)", "pass"),
    "only the first revoke block is written": Mutation(
        _T, "body = self._revoke_blocks() + ", "body = self._revoke_blocks()[:1] + "
    ),
    "a revoked block is written in place at the checkpoint": Mutation(
        _T,
        """        for block in self._revoked:
            self._committed.pop(block, None)
""",
        "",
    ),
    "a block written again stays revoked": Mutation(_T, "        self._revoked -= written.keys()\n", ""),
    "a freed metadata block is not revoked": Mutation(
        "buffers.py", "        self.revoked.add(number)\n", "        pass\n"
    ),
    "a directory's blocks are not revoked": Mutation(
        "filedata.py", "if record.type == c.S_IFDIR:\n            for number", "if False:\n            for number"
    ),
    "revokes are ignored at replay": Mutation(
        "jbd2/recovery.py", "if by is not None and later_or_same(by, sequence):", "if False:"
    ),
    "a revocation forbids later copies, too": Mutation(
        "jbd2/recovery.py", "if by is not None and later_or_same(by, sequence):", "if by is not None:"
    ),
    # -- barriers of a commit
    "no flush before the commit block": Mutation(
        _T, f"        {_FLUSH}  # ordered data, too, before the commit block says that they are there\n", ""
    ),
    "no flush behind the commit block": Mutation(
        _T,
        f"        self._append([self._commit_block(body)])\n        {_FLUSH}\n",
        "        self._append([self._commit_block(body)])\n",
    ),
    "no commit block": Mutation(_T, "        self._append([self._commit_block(body)])\n", ""),
    "the log is not said to be in use": Mutation(_T, "        self._activate()\n", "        self._active = True\n"),
    "RECOVER is not set": Mutation("writable.py", "        self._patch_super(in_use=True)\n", "        pass\n"),
    # -- ordered data
    "data is written after the commit": Mutation(
        "filedata.py",
        "        self._blocks.write(piece.physical + first, part)\n",
        """        journal = self.journal
        if not hasattr(self, "late"):
            self.late, commit = [], journal.commit

            def committed():
                done = commit()
                for one in self.late:
                    self._blocks.write(*one)
                self.late.clear()
                return done

            journal.commit = committed
        self.late.append((piece.physical + first, part))
""",
    ),
    "freed blocks are taken again before the commit": Mutation(
        "alloc.py",
        "            if used:\n                bitmap.fill(busy, bit, part, used=True)\n",
        "            bitmap.fill(busy, bit, part, used=used)\n            if used:\n                pass\n",
    ),
    # -- checkpoint and tail
    "no flush between checkpoint and tail": Mutation(
        _T,
        f"            write_back(self._blocks, self._committed)\n            {_FLUSH}\n",
        "            write_back(self._blocks, self._committed)\n",
    ),
    "no flush behind the tail": Mutation(
        _T, f"            {_FLUSH}\n            self._used = 0\n", "            self._used = 0\n"
    ),
    "blocks go to their places before the commit": Mutation(
        _T,
        "        self._append(body)\n",
        "        self._append(body)\n        write_back(self._blocks, self._running)\n",
    ),
    "the checkpoint brings what is not committed": Mutation(
        _T,
        "write_back(self._blocks, self._committed)",
        "write_back(self._blocks, self._committed | self._running)",
    ),
    "the checkpoint forgets a block": Mutation(
        _T,
        "write_back(self._blocks, self._committed)",
        "write_back(self._blocks, dict(list(self._committed.items())[1:]))",
    ),
    "the tail moves before the checkpoint": Mutation(
        _T,
        "        self._bring_in_place()\n        if self._used",
        "        self.log.write_super(start=self._head, sequence=self.sequence)\n        self._blocks.flush()\n"
        "        self._bring_in_place()\n        if self._used",
    ),
    "the tail has the number before": Mutation(
        _T,
        f"{_TAIL}            {_FLUSH}\n            self._used",
        f"{_TAIL.replace('.sequence)', '.sequence - 1)')}            {_FLUSH}\n            self._used",
    ),
    "the tail stays where it is": Mutation(
        _T,
        f"{_TAIL}            {_FLUSH}\n            self._used",
        "            self._used",
    ),
    "the log overwrites its own beginning": Mutation(
        _T, "if need > self._room - self._used - 1:", "if need > 2 * self._room:"
    ),
    "the log runs over the journal's end": Mutation(
        "jbd2/log.py",
        "number if number < self.last else number - (self.last - self.first)",
        "number if number < self.last else self.first + 1",
    ),
    "the journal is emptied before the checkpoint": Mutation(
        _T,
        "        self.commit()\n        self._bring_in_place()\n        if self._active",
        "        self.commit()\n        self.log.write_super(start=0, sequence=self.sequence)\n"
        "        self._blocks.flush()\n        self._bring_in_place()\n        if self._active",
    ),
    "RECOVER is cleared before the journal is empty": Mutation(
        "writable.py",
        "            self.journal.close()\n",
        "            self._patch_super(in_use=False)\n            self.journal.close()\n",
    ),
    # -- the log's blocks
    "what looks like the journal's is not escaped": Mutation(
        _T,
        "                    flags |= c.JBD2_FLAG_ESCAPE\n                    data = bytes(4) + data[4:]\n",
        "                    pass\n",
    ),
    "the escape is not undone": Mutation(
        "jbd2/recovery.py", "return MAGIC_BYTES + data[4:] if at & 1 else data", "return data"
    ),
    "a transaction without commit block counts": Mutation(
        "jbd2/recovery.py",
        "        if magic != c.JBD2_MAGIC or sequence != expected:\n            break\n",
        "        if magic != c.JBD2_MAGIC or sequence != expected:\n            if current.tags:\n"
        "                done.transactions.append(current)\n            break\n",
    ),
    "the last transaction is not replayed": Mutation(
        "jbd2/recovery.py",
        "    for transaction in found.transactions:\n        sequence",
        "    for transaction in found.transactions[:-1]:\n        sequence",
    ),
    "numbers do not go on after recovery": Mutation(
        _R,
        "start=brought.head, sequence=brought.end, used=used)",
        "start=brought.head, sequence=1, used=used)",
    ),
    # -- recovery
    "recovery moves the tail before blocks are in place": Mutation(
        _R,
        "    for batch in brought.blocks.batches(_BATCH):\n",
        "    log.write_super(start=brought.head, sequence=brought.end)\n    blocks.flush()\n"
        "    for batch in brought.blocks.batches(_BATCH):\n",
    ),
    "recovery does not flush before it moves the tail": Mutation(
        _T, "self._unflushed = used is not None", "self._unflushed = False"
    ),
    "recovery's transactions overwrite what was replayed": Mutation(_T, "self._used = used or 0", "self._used = 0"),
    "recovery clears RECOVER with the blocks": Mutation(_R, "        _set_recover(overlay, True)\n", "        pass\n"),
    "recovery leaves orphans": Mutation(
        _R, "done = orphans.process(volume, settled, now, step)", "done = orphans.OrphanCounts()"
    ),
    "a file being cut is no orphan": Mutation(
        "orphans.py",
        "            self.add_orphan(record)\n            self.put_inode(record)\n\n        def end",
        "            self.put_inode(record)\n\n        def end",
    ),
    "a torn superblock is refused": Mutation("super.py", "not (torn and _may_be_torn(sb))", "not (torn and False)"),
}
