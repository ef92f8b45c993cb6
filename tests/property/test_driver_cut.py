"""The runtime's driver, cut off anywhere: what was synced is there afterwards, and the volume is consistent.

``go test -run TestWriteTraces`` (native/internal/ext4/trace_test.go) runs a workload on a device that records every
write, flush and hole, and notes what tree there was when. Here the recording is cut at seeded places.

With durability ``host`` all that was flushed before the cut is on the disk, of the rest a random part in any order,
some of it torn between sectors. With ``process`` the host lives on: there is everything before the cut and nothing
behind it, the write that was interrupted up to some page.

Then our recovery must bring a volume that e2fsck has nothing to say about and whose tree is what it was at one moment
between the last promise and the cut; so must e2fsck's own replay, on another copy, and the kernel's.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
import subprocess
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ext4lite.checksum import crc32c
from ext4lite.mkfs import mkfs
from ext4lite.recover import recover
from ext4lite.volume import Volume
from support.ext4_judges import fsck, mounted, run, tool

MIB = 1 << 20
SECTOR, PAGE = 512, 4096
ROOT = Path(__file__).parents[2]
_EVENT = struct.Struct("<cQQ")
_KINDS = {"file": 1, "dir": 2, "symlink": 7}


@dataclass(slots=True)
class Case:
    """A volume to run the workload on: ``make`` makes it, ``durable`` is the durability ``host``."""

    make: Callable[[Path], None]
    durable: bool
    seed: int
    steps: int = 250
    cuts: int = 40


def _ours(image: Path) -> None:
    mkfs(image, size=24 * MIB, journal_size=4 * MIB)


def _mke2fs(options: str, size: int, incompat: int | None = None, *, version: int = 4) -> Callable[[Path], None]:
    def make(image: Path) -> None:
        with image.open("wb") as f:
            f.truncate(size)
        run(tool("mke2fs"), "-q", "-F", "-t", "ext4", *options.split(), image)
        if incompat is not None or version != 4:
            _journal_features(image, incompat or 0, version)

    return make


def _journal_features(image: Path, incompat: int, version: int) -> None:
    """Give the journal other features, as older kernels left them: csum v2, 32-bit, or none in a v1 superblock."""
    with Volume.open(image) as volume:
        start = volume.map(volume.inode(8))[0][0].physical * volume.super.block_size
    with image.open("r+b") as f:
        f.seek(start)
        raw = bytearray(f.read(1024))
        struct.pack_into(">I", raw, 4, version)
        if version == 4:
            struct.pack_into(">I", raw, 40, incompat)
            raw[80] = 4
            struct.pack_into(">I", raw, 252, 0)
            struct.pack_into(">I", raw, 252, crc32c(0xFFFFFFFF, bytes(raw)))
        else:
            raw[36:] = b"\xa5" * (1024 - 36)  # undefined in version 1
        f.seek(start)
        f.write(raw)


CASES = {
    "profile": Case(_ours, True, 1),
    "1k-no-csum": Case(_mke2fs("-b 1024 -J size=1", 12 * MIB), True, 2),
    "csum-v2": Case(_mke2fs("-b 4096 -J size=4 -O orphan_file", 24 * MIB, 0x8), True, 3),
    "v1-32bit": Case(_mke2fs("-b 1024 -J size=1 -O ^metadata_csum,^64bit,uninit_bg", 12 * MIB, version=3), True, 4),
    "killed": Case(_ours, False, 5),
    "killed-1k": Case(_mke2fs("-b 1024 -J size=1", 12 * MIB, 0x12), False, 6),
}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the volumes and have the driver run on them."""
    where = tmp_path_factory.mktemp("traces")
    for name, case in CASES.items():
        case.make(where / f"{name}.ext4")
        options = {"durable": case.durable, "seed": case.seed, "steps": case.steps}
        (where / f"{name}.opts").write_text(json.dumps(options))
    done = subprocess.run(
        [ROOT / ".ci" / "go", "test", "-count=1", "-run", "TestWriteTraces", "./internal/ext4"],
        cwd=ROOT / "native",
        env=os.environ | {"GVX_TRACES": str(where)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return where


@dataclass(slots=True)
class Event:
    """Something that reached the device: ``W`` a write, ``Z`` a hole (bytes are zeros), ``F`` a flush, ``S`` a promise
    of state ``offset``."""

    kind: str
    offset: int
    data: bytes


def read_trace(path: Path) -> list[Event]:
    """Return the events of a trace; a hole is a write of zeros to whoever reads the disk."""
    raw = path.read_bytes()
    out = []
    at = 0
    while at < len(raw):
        kind, offset, length = _EVENT.unpack_from(raw, at)
        at += _EVENT.size
        data = b""
        if kind == b"W":
            data = raw[at : at + length]
            at += length
        elif kind == b"Z":
            data = bytes(length)
        out.append(Event(kind.decode(), offset, data))
    return out


class Disk:
    """The image as it is at some event, and what a failure there leaves of it."""

    def __init__(self, before: bytes, events: list[Event], *, durable: bool) -> None:
        self._disk = bytearray(before)
        self._events, self._durable = events, durable
        self._sure = 0  # events that are in self._disk for certain

    def cut(self, at: int, r: random.Random) -> bytearray:
        """Return the image after a failure before event ``at``; places must not go down from call to call."""
        events = self._events
        sure = at
        if self._durable:
            sure = max((i for i in range(self._sure, at) if events[i].kind == "F"), default=self._sure)
        for event in events[self._sure : sure]:
            self._put(self._disk, event.offset, event.data, event.kind)
        self._sure = sure
        disk = bytearray(self._disk)
        if not self._durable:
            for torn in events[at : at + 1]:  # killed in the middle of it
                end = (torn.offset + r.randrange(len(torn.data) + 1)) // PAGE * PAGE
                self._put(disk, torn.offset, torn.data[: max(end - torn.offset, 0)], "W" if torn.kind == "W" else "")
            return disk
        keep = r.random()
        for event in events[sure:at]:
            if event.kind not in "WZ" or r.random() >= keep:
                continue
            if event.kind == "W" and r.random() < 0.2:
                for piece in range(0, len(event.data), SECTOR):
                    if r.random() < 0.5:
                        self._put(disk, event.offset + piece, event.data[piece : piece + SECTOR], "W")
            else:
                self._put(disk, event.offset, event.data, event.kind)
        return disk

    @staticmethod
    def _put(disk: bytearray, offset: int, data: bytes, kind: str) -> None:
        if kind in "WZ":
            disk[offset : offset + len(data)] = data


def facts(image: Path) -> list[str]:
    """Return what trace_test.go's ``line`` writes of each file, as a volume shows it."""
    out = []
    with Volume.open(image) as volume:
        for path, ino in volume.walk():
            name = path.decode().removeprefix("/")
            if not name or name.split("/")[0] == "lost+found":
                continue
            s = volume.stat(ino)
            body = b"".join(volume.chunks(ino)) if s.kind == "file" else b""
            target = volume.readlink(ino).decode() if s.kind == "symlink" else ""
            words = [
                name,
                _KINDS[s.kind],
                f"{s.mode & 0o7777:o}",
                s.nlink,
                len(body),
                f"{zlib.crc32(body):08x}",
                target,
            ]
            words += [f"{key.decode()}={zlib.crc32(value):08x}" for key, value in sorted(volume.xattrs(ino).items())]
            out.append("|".join(str(word) for word in words))
    return sorted(out, key=str.encode)


def digest(lines: list[str]) -> str:
    """Return the name of a state."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def wanted_facts(trace: Path, state: int) -> list[str]:
    """Return what was noted of one state."""
    text = trace.with_suffix(".facts").read_text()
    begin = text.index(f"== {state}\n")
    return text[text.index("\n", begin) + 1 :].split("\n== ")[0].strip().splitlines()


def judge(image: Path, trace: Path, states: list[str], promised: int, what: str) -> None:
    """Assert that the tree is one of those from the last promise on, and e2fsck content."""
    fsck(image)
    found = facts(image)
    if digest(found) in states[promised:]:
        return
    wanted = wanted_facts(trace, promised)
    wrong = sorted(set(found) ^ set(wanted))
    raise AssertionError(f"{what}: no state from {promised} on; beside the promised one: {wrong[:6]}")


@pytest.mark.parametrize("name", CASES)
def test_cut_off_anywhere(tmp_path: Path, traces: Path, name: str) -> None:
    case = CASES[name]
    trace = traces / f"{name}.trace"
    events = read_trace(trace)
    noted = json.loads((traces / f"{name}.states").read_text())
    states: list[str] = noted["states"]
    assert noted["journal"]["Checkpoints"] > 0 and noted["journal"]["Revokes"] > 0, noted["journal"]
    r = random.Random(case.seed)
    disk = Disk((traces / f"{name}.ext4").read_bytes(), events, durable=case.durable)
    promised, seen = 0, 0
    image, other = tmp_path / "cut", tmp_path / "other"
    for at in sorted(r.sample(range(1, len(events) + 1), case.cuts)):
        for event in events[seen:at]:
            if event.kind == "S":
                promised = event.offset
        seen = at
        left = disk.cut(at, r)
        what = f"{name}, cut at {at} of {len(events)}"
        image.write_bytes(left)
        recover(image)
        judge(image, trace, states, promised, what)
        if r.random() < 0.5 and _super_whole(left):
            other.write_bytes(left)
            if r.random() < 0.2 and os.geteuid() == 0:
                with mounted(other, tmp_path / "mnt"):
                    pass
            else:
                repaired = subprocess.run([tool("e2fsck"), "-fy", other], capture_output=True, timeout=60, check=False)
                assert repaired.returncode in (0, 1), repaired.stdout
                assert b"FIXED" not in repaired.stdout.replace(b"WAS MODIFIED", b"")
            judge(other, trace, states, promised, what + ", replayed by others")


def _super_whole(image: bytearray) -> bool:
    """Tell whether the superblock was not cut in half: the journal has it, but only ours looks there first."""
    raw = bytes(image[1024:2048])
    (ro_compat,) = struct.unpack_from("<I", raw, 100)
    return not ro_compat & 0x400 or crc32c(0xFFFFFFFF, raw[:1020]) == struct.unpack_from("<I", raw, 1020)[0]
