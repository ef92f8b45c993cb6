"""Metadata blocks in memory: read, changed, taken back when an operation fails, and given to a transaction.

Every change of metadata goes through :meth:`BlockCache.change` or :meth:`BlockCache.create`, so that a transaction
holds all that an operation touched, and so that an operation that fails half-way leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable

_CLEAN_BYTES = 32 << 20


class BlockCache:
    """Blocks of metadata by number. Not thread-safe; one operation at a time.

    ``dirty`` are the blocks of the running transaction, ``revoked`` those that were metadata and are free now: what an
    older transaction says about them must not be replayed.
    """

    def __init__(self, read: Callable[[int, str], bytes], block_size: int) -> None:
        self._read = read
        self.block_size = block_size
        self._clean_most = max(64, _CLEAN_BYTES // block_size)
        self._clean: dict[int, bytearray] = {}
        self.dirty: dict[int, bytearray] = {}
        self.revoked: set[int] = set()
        self._undo: dict[int, bytes | None] | None = None
        self._undo_revoked: set[int] = set()

    def get(self, number: int, where: str = "") -> bytearray:
        """Return a block for reading only. CorruptImage for a number outside the volume, HostError."""
        found = self.dirty.get(number)
        if found is not None:
            return found
        found = self._clean.get(number)
        if found is None:
            found = self._clean[number] = bytearray(self._read(number, where))
            if len(self._clean) > self._clean_most:
                self._clean.pop(next(iter(self._clean)))
        return found

    def change(self, number: int, where: str = "") -> bytearray:
        """Return a block for changing; it becomes part of the running transaction."""
        data = self.dirty.get(number)
        if data is None:
            data = self.get(number, where)
            self._remember(number, None)
            self._clean.pop(number, None)
            self.dirty[number] = data
            self.revoked.discard(number)
        elif self._undo is not None and number not in self._undo:
            self._undo[number] = bytes(data)
        return data

    def create(self, number: int) -> bytearray:
        """Return a block of zeros to be filled: one that was free until now."""
        if number in self.dirty:
            data = self.change(number)
            data[:] = bytes(self.block_size)
            return data
        self._remember(number, None)
        self._clean.pop(number, None)
        data = self.dirty[number] = bytearray(self.block_size)
        self.revoked.discard(number)
        return data

    def forget(self, number: int) -> None:
        """Drop a metadata block that was just freed, and revoke it."""
        data = self.dirty.pop(number, None)
        if data is not None:
            if self._undo is not None and number not in self._undo:
                self._undo[number] = bytes(data)
        else:
            self._clean.pop(number, None)
        self.revoked.add(number)

    def drop(self, number: int) -> None:
        """Drop what was read of a block that the running transaction has not changed."""
        self._clean.pop(number, None)

    def _remember(self, number: int, content: bytes | None) -> None:
        if self._undo is not None and number not in self._undo:
            self._undo[number] = content

    def begin(self) -> None:
        """Begin an operation: from here on, :meth:`rollback` brings back what was before."""
        self._undo = {}
        self._undo_revoked = set(self.revoked)

    def end(self) -> None:
        """End an operation: its changes stay in the running transaction."""
        self._undo = None

    def rollback(self) -> None:
        """End an operation that failed: every block is as it was when it began."""
        undo, self._undo = self._undo or {}, None
        for number, content in undo.items():
            if content is None:  # was not part of the transaction: what is on disk holds
                self.dirty.pop(number, None)
                self._clean.pop(number, None)
            else:
                self.dirty[number] = bytearray(content)
        self.revoked = self._undo_revoked

    @property
    def changed(self) -> bool:
        """Whether the operation under way has changed a block."""
        return bool(self._undo)

    def replace_clean(self, number: int, data: bytearray) -> None:
        """Note what was written to a block past the transaction; what the transaction says about it stays."""
        if number not in self.dirty:
            self._clean[number] = data

    def committed(self) -> None:
        """The running transaction is safe: its blocks are clean now."""
        for number, data in self.dirty.items():
            self._clean[number] = data
        self.dirty = {}
        self.revoked = set()
        while len(self._clean) > self._clean_most:
            self._clean.pop(next(iter(self._clean)))
