"""The free blocks of a volume that is being built."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from ext4lite.errors import VolumeFull

if TYPE_CHECKING:
    from ext4lite.geometry import Geometry


class Space:
    """Hands out free blocks in ascending order, and remembers what was taken and given back."""

    def __init__(self, geometry: Geometry, where: str) -> None:
        self._where = where
        self._runs = geometry.free_runs()
        self._pending: deque[tuple[int, int]] = deque()
        self._cursor = self._end = 0
        self.freed: list[tuple[int, int]] = []
        self.log: list[list[int]] = []

    def take(self, count: int) -> list[tuple[int, int]]:
        """Return runs (start, count) of ``count`` blocks together.

        VolumeFull if that many are not left (those that were are taken then: the image is lost anyway).
        """
        out = []
        while count:
            if self._cursor == self._end:
                self._next_run()
            got = min(count, self._end - self._cursor)
            out.append((self._cursor, got))
            self._mark(self._cursor, got, 1)
            self._cursor += got
            count -= got
        return out

    def take_contiguous(self, count: int) -> list[tuple[int, int]]:
        """Like :meth:`take` before anything else is taken, but from the first run that holds all.

        Smaller runs stay for others.
        """
        skipped: list[tuple[int, int]] = []
        for start, length in self._runs:
            if length >= count:
                self._mark(start, count, 1)
                self._pending.extend(skipped)
                if length > count:
                    self._pending.append((start + count, length - count))
                return [(start, count)]
            skipped.append((start, length))
        self._pending.extend(skipped)
        return self.take(count)

    def give_back(self, start: int, count: int) -> None:
        """Free a run; it is used again only when all else is taken."""
        self._mark(start, count, 0)
        if start + count == self._cursor:
            self._cursor = start
        else:
            self.freed.append((start, count))

    def free(self) -> int:
        """Count the blocks that :meth:`take` can still give."""
        self._pending.extend(self._runs)
        runs = [*self._pending, *self.freed]
        return self._end - self._cursor + sum(count for _, count in runs)

    def _mark(self, start: int, count: int, used: int) -> None:
        last = self.log[-1] if self.log else None
        if last is not None and last[2] == used and last[0] + last[1] == start:
            last[1] += count
        else:
            self.log.append([start, count, used])

    def _next_run(self) -> None:
        if self._pending:
            start, count = self._pending.popleft()
        else:
            run = next(self._runs, None)
            if run is None and self.freed:
                self.freed.sort(reverse=True)
                run = self.freed.pop()
            if run is None:
                raise VolumeFull("no free blocks are left", where=self._where, hint="make the volume larger")
            start, count = run
        self._cursor, self._end = start, start + count
