"""A delta device against a model of plain bytes, and cut off anywhere."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from ext4lite import backing, delta, hostfs
from ext4lite.backing import BLOCK
from ext4lite.device import Buffer
from support.deltas import SIZE, WINDOWS, Model, header_of, make_base, make_delta, open_delta, snapshot, step


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("delta") / "base")


@pytest.mark.parametrize("eager", [False, True])
def test_is_like_plain_bytes(tmp_path: Path, base: Path, eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "fdatasync", lambda _fd, _where: None)  # durability is the other tests'
    before = base.stat().st_mtime_ns
    for seed in range(12):
        r = random.Random(seed)
        path = make_delta(tmp_path / f"{seed}", base)
        device = open_delta(path, eager=eager)
        model = snapshot(device.read)
        for _ in range(120):
            step(r, device, model)
            if r.random() < 0.03:
                device.close()  # eager: as if killed, since it has nothing to write
                device = open_delta(path, eager=eager)
        assert snapshot(device.read) == model
        device.flush()
        again = open_delta(path)
        assert snapshot(again.read) == model
        for start, length in WINDOWS:
            runs = list(again.data_runs(start, start + length))
            told = bytearray(length)
            for at, count in runs:
                told[at - start : at - start + count] = again.read(count, at)
            assert told == again.read(length, start), "what data_runs leaves out is zeros"
        again.close()
        device.close()
    assert base.stat().st_mtime_ns == before


class CutDisk:
    """Stands in for what the delta device does to its file, and forgets or tears what was not flushed.

    The file itself is the host's page cache, ``stable`` the disk. After ``left`` operations the host is lost.
    """

    def __init__(self, stable: int, r: random.Random, left: int) -> None:
        self.stable, self.r, self.left = stable, r, left
        self.pending: list[tuple[int, bytes | None, int]] = []

    def lost(self) -> bool:
        self.left -= 1
        if self.left == 0:
            self._crash()
        return self.left <= 0

    def write(self, fd: int, data: Buffer, offset: int) -> None:
        hostfs.pwrite_all(fd, data, offset)
        if not self.lost():
            start = offset & ~511  # whole sectors, as from a page cache
            whole = os.pread(fd, -(-(offset + len(data)) // 512) * 512 - start, start)
            self.pending.append((start, whole, len(whole)))

    def punch(self, fd: int, offset: int, length: int) -> bool:
        if not self.lost():
            self.pending.append((offset, None, length))
        return hostfs.punch(fd, offset, length)

    def flush(self, _fd: int, _where: str) -> None:
        if not self.lost():
            for operation in self.pending:
                self._apply(*operation)
            self.pending.clear()

    def _apply(self, offset: int, data: bytes | None, length: int) -> None:
        if data is None:
            assert hostfs.punch(self.stable, offset, length)
        else:
            hostfs.pwrite_all(self.stable, data, offset)

    def _crash(self) -> None:
        for offset, data, length in self.pending:
            fate = self.r.randrange(3)
            if fate == 1:
                self._apply(offset, data, length)
            elif fate == 2:
                for at in range(0, length, 512):
                    if self.r.random() < 0.5:
                        count = min(512, length - at)
                        self._apply(offset + at, None if data is None else data[at : at + count], count)


def _cut(path: Path, base: Path, r: random.Random, patch: Callable[[CutDisk], None]) -> tuple[Path, list[Model]]:
    """Write to a delta until the host is lost; return what the disk has, and what the windows may hold."""
    stable = make_delta(path.with_suffix(".stable"), base)
    path.write_bytes(b"")
    os.truncate(path, stable.stat().st_size)
    with path.open("r+b") as f:  # the same header: one id
        backing.write_header(f.fileno(), header_of(stable))
    fd = os.open(stable, os.O_RDWR)
    disk = CutDisk(fd, r, r.randint(1, 80))
    patch(disk)
    device = open_delta(path)
    model = snapshot(device.read)
    allowed = [[bytearray(w) for w in model]]
    while disk.left > 0:
        step(r, device, model)
        allowed.append([bytearray(w) for w in model])
        if r.random() < 0.12:
            device.flush()
            if disk.left > 0:
                allowed = [[bytearray(w) for w in model]]
    device.close()
    os.close(fd)
    return stable, allowed


def test_cut_off_anywhere(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sector is as it was at the last flush or as a write since has left it."""

    def patch(disk: CutDisk) -> None:
        monkeypatch.setattr(delta, "pwrite_all", disk.write)
        monkeypatch.setattr(delta, "fdatasync", disk.flush)
        monkeypatch.setattr(delta, "punch", disk.punch)

    for seed in range(80):
        stable, allowed = _cut(tmp_path / f"{seed}", base, random.Random(seed), patch)
        monkeypatch.undo()
        after = open_delta(stable)
        for number, window in enumerate(snapshot(after.read)):
            for at in range(0, len(window), 512):
                sector = window[at : at + 512]
                assert any(a[number][at : at + 512] == sector for a in allowed), (seed, number, at)
        after.close()


def test_a_failed_flush_stays_failed(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ext4lite.errors import HostError

    device = open_delta(make_delta(tmp_path / "d", base))
    device.write(bytes(BLOCK), 0)

    def fail(_fd: int, where: str) -> None:
        raise HostError("input/output error", where=where)

    with monkeypatch.context() as m:
        m.setattr(delta, "fdatasync", fail)
        with pytest.raises(HostError):
            device.flush()
    with pytest.raises(HostError):
        device.flush()
    device.close()


def test_nothing_outside(tmp_path: Path, base: Path) -> None:
    from ext4lite.errors import HostError

    device = open_delta(make_delta(tmp_path / "d", base))
    assert device.read(100, SIZE - 10) == base.read_bytes()[SIZE - 10 :]
    assert device.read(10, SIZE) == b""
    for offset in (-1, SIZE - 5, SIZE):
        with pytest.raises(HostError):
            device.write(bytes(10), offset)
    device.close()
