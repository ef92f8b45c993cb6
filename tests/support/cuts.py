"""Power failure at any moment of a recorded workload, and who judges what recovery makes of it.

:func:`record` runs a :mod:`workload <support.workloads>` on blocks that remember every write and flush. :class:`Disk`
is the image as a failure leaves it: all that was flushed before is there, of the rest a random part, some of it torn
between sectors. It is built up as the recording goes on, and everything done to it is taken back before the next cut.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from ext4lite.jbd2.log import Blocks, super_checksum
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import JournalSuperBlock
from ext4lite.recover import recover
from ext4lite.volume import Volume
from ext4lite.writer import File, WritableVolume
from support.ext4_judges import fsck, run, tool
from support.volume_model import NOSPACE, Failed, Model, Node, Op, Ours, allowed, facts_of, make, outcome
from support.workloads import MIB, Stage, Workload

SECTOR = 512
Event = tuple[int, bytes] | None
"""A write (byte offset, data), or a flush."""
Facts = dict[bytes, tuple[Any, ...]]
_IN_PLACE = ("write", "truncate", "punch", "zero")


@dataclass
class Recording:
    """Blocks that note every write and flush, and pass them on."""

    below: Blocks
    events: list[Event] = field(default_factory=list)

    @property
    def block_size(self) -> int:
        """See Blocks."""
        return self.below.block_size

    def read(self, block: int, count: int = 1) -> bytes:
        """See Blocks."""
        return self.below.read(block, count)

    def write(self, block: int, data: bytes | memoryview) -> None:
        """See Blocks."""
        self.events.append((block * self.block_size, bytes(data)))
        self.below.write(block, data)

    def flush(self) -> None:
        """Note it; what lies below is thrown away anyway."""
        self.events.append(None)


def _digest(body: bytes | bytearray) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()


class CutModel(Model):
    """The model with flags, and with contents as digests, so that the tree after every operation can be kept."""

    def __init__(self) -> None:
        super().__init__()
        self._digests: WeakKeyDictionary[Node, bytes] = WeakKeyDictionary()
        self._known: Facts = {}
        self.flags: WeakKeyDictionary[Node, int] = WeakKeyDictionary()

    def _file(self, path: bytes) -> Node:
        node = super()._file(path)
        self._digests.pop(node, None)  # its content is about to change
        return node

    def do_chattr(self, path: bytes, flags: int) -> None:
        """Set flags."""
        self.flags[self.find(path)] = flags

    def do_orphan(self, path: bytes) -> None:
        """Delete what somebody has open."""
        if self.find(path).kind != "file":
            raise Failed(21)
        self.do_unlink(path)

    def tree(self) -> Facts:
        """Return all that is compared, by path; what is as it was before is the same object."""
        nodes = list(self.walk())
        counts: dict[int, int] = {}
        for _, node in nodes:
            counts[id(node)] = counts.get(id(node), 0) + 1
        out = {}
        for path, node in nodes:
            body = node.target
            if node.kind == "file":
                body = self._digests.get(node) or self._digests.setdefault(node, _digest(node.content))
            dirs = sum(child.kind == "dir" for child in node.children.values())
            nlink = 2 + dirs if node.kind == "dir" else counts[id(node)]
            attributes = tuple(sorted(node.xattrs.items()))
            flags = self.flags.get(node, 0)
            new = (node.kind, node.mode, node.uid, node.gid, nlink, body, node.rdev, attributes, flags)
            old = self._known.get(path)
            out[path] = old if old == new and old is not None else new
        self._known = out
        return out


def tree_of(volume: Volume) -> Facts:
    """Return what :meth:`CutModel.tree` does, as a volume shows it."""
    out: Facts = {}
    for path, (kind, mode, uid, gid, nlink, body, rdev, attributes) in facts_of(volume).items():
        ino = volume.lookup(path) or 0
        flags = volume.inode(ino).fields.i_flags & 0xC0
        content = _digest(body) if kind == "file" else body
        out[path] = (kind, mode, uid, gid, nlink, content, rdev, tuple(sorted(attributes.items())), flags)
    return out


class _Side(Ours):
    """Does operations with a volume; keeps open what is deleted while it is open."""

    def __init__(self, volume: WritableVolume) -> None:
        super().__init__(volume)
        self.open: list[File] = []

    def _do(self, op: Op) -> None:
        match op:
            case ("chattr", path, flags):
                self.v.set_attributes(self.v.resolve(path, follow=False), flags=flags)
            case ("orphan", path):
                file = self.v.open_file(path)
                self.v.unlink(path)
                self.open.append(file)
            case _:
                super()._do(op)

    def let_go(self) -> None:
        """Close what was kept open."""
        while self.open:
            self.open.pop().close()


@dataclass
class Story:
    """A recorded run: the image before it, what was written, the tree after each operation, and what syncs promised."""

    workload: Workload
    before: bytes
    events: list[Event]
    states: list[int]
    """Of each tree its hash."""
    begun: list[int]
    """For each state the length of the recording when the operation began that led to it."""
    synced: list[tuple[int, int]]
    """(length of the recording when a sync had returned, the state that it promised)."""
    operations: list[Op]
    """Those that led from state to state."""
    start: list[Op]
    """Those before the recording."""
    counts: dict[str, int]
    log_super: int = -1
    """Byte of the image where the log's superblock lies."""

    def __post_init__(self) -> None:
        self._index: dict[int, list[int]] = {}
        for number, state in enumerate(self.states):
            self._index.setdefault(state, []).append(number)

    def places(self, count: int, r: random.Random) -> list[int]:
        """Choose where to cut, in order.

        A third of them is anywhere, a third just before a flush, where most is in doubt, and a third there after the
        log's superblock has changed: that happens seldom, and much depends on it.
        """
        flushes = [i for i, e in enumerate(self.events) if e is None and i]
        changed = [i for i, e in enumerate(self.events) if e is not None and e[0] == self.log_super]
        after = [f for i in changed for f in [f for f in flushes if f > i][:2]]
        out = r.choices(after, k=count // 3) + r.choices(flushes, k=count // 3)
        return sorted(out + [r.randrange(1, len(self.events) + 1) for _ in range(count - len(out))])

    @property
    def writes(self) -> int:
        """Number of writes."""
        return sum(e is not None for e in self.events)

    def promised(self, at: int) -> int:
        """Return the state that must not be lost when the power fails before event ``at``."""
        return max((state for length, state in self.synced if length <= at), default=0)

    def reached(self, at: int, found: Facts) -> int:
        """Return the state that a tree found after a cut is; AssertionError if it cannot have been the last one."""
        promised = self.promised(at)
        for number in self._index.get(_hash(found), []):
            if number >= promised and self.begun[number] <= at:
                return number
        wanted = replayed(self.start, self.operations[:promised]).tree()
        wrong = [
            (p, found.get(p), wanted.get(p)) for p in found.keys() | wanted.keys() if found.get(p) != wanted.get(p)
        ]
        text = str(wrong[:3])[:900]
        raise AssertionError(f"cut at {at} of {len(self.events)}: no state from {promised} on; {text}")


def _hash(facts: Facts) -> int:
    return hash(frozenset(facts.items()))


def prepare(image: Path, work: Workload) -> None:
    """Make the volume of a workload."""
    make(image, work.options, work.size * MIB)
    if work.requests:
        run(tool("debugfs"), "-w", "-f", "-", image, stdin="\n".join(work.requests) + "\n")
    if work.journal:
        _shorten(image, work.journal)
    fsck(image)


def _shorten(image: Path, blocks: int) -> None:
    """Have a journal use only its first blocks."""
    with Volume.open(image) as volume:
        size, runs = volume.block_size, volume.extents(c.JOURNAL_INO)
    with image.open("r+b") as f:
        f.seek(runs[0].physical * size)
        sb = JournalSuperBlock.unpack(f.read(size))
        sb.s_maxlen = blocks
        if sb.s_feature_incompat & (c.JBD2_INCOMPAT_CSUM_V2 | c.JBD2_INCOMPAT_CSUM_V3):
            sb.s_checksum = super_checksum(sb.pack())
        f.seek(runs[0].physical * size)
        f.write(sb.pack())


def record(
    image: Path,
    work: Workload,
    r: random.Random,
    *,
    writes: int = 1 << 30,
    operations: int = 1 << 30,
    past: list[Op] | None = None,
) -> Story:
    """Run a workload on an image until it has written often enough or done enough operations; close it then.

    ``past`` are the operations that made what the image holds already.
    """
    before = image.read_bytes()
    made: list[Recording] = []

    def device(blocks: Blocks) -> Blocks:
        made.append(Recording(blocks))
        return made[0]

    model = replayed(past or [])
    volume = WritableVolume.open_for_writing(image, device=device)
    side, events = _Side(volume), made[0].events
    stage = Stage(model, r, volume.block_size, extents="ext3" not in work.options)
    story = Story(work, before, events, [_hash(model.tree())], [0], [], [], past or [], {})
    assert volume.journal is not None
    story.log_super = volume.journal.log.physical(0) * volume.block_size
    safe: set[Node] = {node for _, node in model.walk()}
    sequence = _sequence(volume)
    counted = done = 0

    def sync() -> None:
        volume.sync()
        story.synced.append((len(events), len(story.states) - 1))

    for op in work.script(stage):
        if counted >= writes or done >= operations:
            break
        done += 1
        begin = len(events)
        if op[0] == "sync":
            sync()
        elif op[0] == "let-go":
            side.let_go()
        elif op[0] in _IN_PLACE and _torn(model, op, safe, volume.block_size):
            continue
        elif op[0] == "orphan" or allowed(model, op):
            got = outcome(side, op)
            story.counts["full"] = story.counts.get("full", 0) + (got == NOSPACE)
            if got != NOSPACE:
                assert got == outcome(model, op), op[:3]
                story.states.append(_hash(model.tree()))
                story.begun.append(begin)
                story.operations.append(op)
                story.counts[op[0]] = story.counts.get(op[0], 0) + (got == 0)
        if r.random() < work.sync:
            sync()
        if _sequence(volume) != sequence:  # something was committed, asked for or not
            sequence = _sequence(volume)
            safe = {node for _, node in model.walk()}
        counted += sum(e is not None for e in events[begin:])
    volume.close()
    story.synced.append((len(events), len(story.states) - 1))
    story.__post_init__()
    return story


def _sequence(volume: WritableVolume) -> int:
    return volume.journal.sequence if volume.journal is not None else 0


def _torn(model: CutModel, op: Op, safe: set[Node], block_size: int) -> bool:
    """Tell whether bytes that a commit showed would change in place: nobody promises what a cut leaves of it."""
    try:
        node = model.find(op[1])
    except Failed:
        return False
    if node not in safe:
        return False
    size = len(node.content)
    if op[0] == "write":
        return bool(op[2] < size)
    if op[0] == "truncate":
        return bool(op[2] < size and op[2] % block_size)
    return op[0] == "zero" or bool(op[2] % block_size or (op[2] + op[3]) % block_size)


def replayed(*parts: list[Op]) -> CutModel:
    """Return the model after some operations."""
    model = CutModel()
    for part in parts:
        for op in part:
            outcome(model, op)
    return model


class Disk:
    """An image in a file that is cut off again and again: every change can be taken back."""

    def __init__(self, path: Path, before: bytes) -> None:
        self.path = path
        path.write_bytes(before)
        self._fd = os.open(path, os.O_RDWR)
        self._undo: list[tuple[int, bytes]] = []
        self._flushed = 0

    def close(self) -> None:
        """Let go of the file and remove it."""
        os.close(self._fd)
        self.path.unlink()

    def write(self, offset: int, data: bytes) -> None:
        """Change bytes; :meth:`kept` takes it back."""
        self._undo.append((offset, os.pread(self._fd, len(data), offset)))
        os.pwrite(self._fd, data, offset)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """At the block's end the disk is what it was at its beginning."""
        mark = len(self._undo)
        try:
            yield
        finally:
            while len(self._undo) > mark:
                offset, old = self._undo.pop()
                os.pwrite(self._fd, old, offset)

    @contextmanager
    def cut(self, events: list[Event], at: int, r: random.Random) -> Iterator[int]:
        """Within the block the power has failed just before event ``at``; gives how many writes were in doubt.

        Cuts of one recording come in ascending order.
        """
        flushed = max((i for i in range(at - 1, self._flushed - 1, -1) if events[i] is None), default=None)
        if flushed is not None:
            for entry in events[self._flushed : flushed]:
                if entry is not None:
                    os.pwrite(self._fd, entry[1], entry[0])
            self._flushed = flushed + 1
        loose = [e for e in events[self._flushed : at] if e is not None]
        with self.kept():
            self.scatter(loose, r)
            yield len(loose)

    def scatter(self, loose: list[tuple[int, bytes]], r: random.Random) -> None:
        """Write a random part of what was not flushed, some of it torn."""
        keep = r.choice([0.0, 1.0, r.random(), r.random(), 0.9])
        torn = 0.0 if r.random() < 0.3 else r.random() / 2
        for i, (offset, data) in enumerate(loose):
            last = i == len(loose) - 1
            if r.random() >= keep and not last:
                continue
            if r.random() >= (0.5 if last else torn):
                self.write(offset, data)
                continue
            sectors = len(data) // SECTOR
            end = r.randrange(sectors + 1)
            odd = r.random() < 0.5
            for n in range(sectors):
                if (r.random() < 0.5) if odd else (n < end):
                    self.write(offset + n * SECTOR, data[n * SECTOR : (n + 1) * SECTOR])

    def device(self, events: list[Event]) -> Callable[[Blocks], Blocks]:
        """Return what to put below a recovery of the disk: it notes its events, and is taken back with the rest."""
        return lambda blocks: _Reversible(self, blocks, events)


class _Reversible(Recording):
    def __init__(self, disk: Disk, below: Blocks, events: list[Event]) -> None:
        super().__init__(below, events)
        self._disk = disk

    def write(self, block: int, data: bytes | memoryview) -> None:
        self.events.append((block * self.block_size, bytes(data)))
        self._disk.write(block * self.block_size, bytes(data))


def judge(story: Story, disk: Disk, at: int, *, look: bool = False) -> tuple[int, list[Event]]:
    """Recover a disk that was cut, have e2fsck judge it, and compare its tree.

    Returns the state it is in and what recovery wrote. ``look`` compares what a reader saw before, too.
    """
    seen = None
    if look:
        with Volume.open(disk.path) as volume:
            seen = tree_of(volume)
    events: list[Event] = []
    recover(disk.path, device=disk.device(events))
    fsck(disk.path)
    with Volume.open(disk.path) as volume:
        found = tree_of(volume)
    assert seen is None or seen == found, f"cut at {at}: a reader saw another tree"
    return story.reached(at, found), events


def judge_recovery(story: Story, disk: Disk, at: int, events: list[Event], r: random.Random, *, times: int = 2) -> None:
    """Cut off the recovery that wrote ``events`` on a disk that was cut at ``at``, and let another one finish it."""
    flushes = [i for i, e in enumerate(events) if e is None]
    state = None
    for _ in range(times):
        stop = r.choice(flushes) if flushes and r.random() < 0.6 else r.randrange(len(events) + 1)
        last = max((i for i in range(stop) if events[i] is None), default=-1)
        with disk.kept():
            for e in events[: last + 1]:
                if e is not None:
                    disk.write(*e)
            disk.scatter([e for e in events[last + 1 : stop] if e is not None], r)
            got, _ = judge(story, disk, at, look=r.random() < 0.3)
            assert state in (None, got), "it depends on where recovery was cut what it finds"
            state = got
