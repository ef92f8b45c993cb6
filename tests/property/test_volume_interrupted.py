"""Ctrl-C anywhere: the operation under way is taken back or done, the volume is closed clean, e2fsck finds nothing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import ext4lite
from ext4lite import interrupts
from ext4lite.mkfs import mkfs
from ext4lite.volume import Volume
from support.ext4_judges import fsck
from support.volume_model import Generator, Model, Ours, allowed, facts_of, make, outcome

MIB = 1 << 20
PACKAGE = os.path.dirname(ext4lite.__file__)  # noqa: PTH120


class Interrupter:
    """Raises KeyboardInterrupt before the ``when``-th line of ext4lite that runs while signals are not held back."""

    def __init__(self, when: int) -> None:
        self.left = when

    def __call__(self, frame: FrameType, event: str, _arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE) or frame.f_code.co_filename.endswith("interrupts.py"):
            return None
        if event == "line" and not interrupts.held_back():
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("options", ["", "-t ext2 -b 1024", "-t ext4 -b 1024 -O ea_inode"])
def test_between_any_two_lines(tmp_path: Path, options: str) -> None:
    """The tree is the one before the operation or the one behind it, also without a journal."""
    image = tmp_path / "image"
    make(image, options, 16 * MIB)
    r = random.Random(options)
    model = Model()
    generator = Generator(model, r, fallocate="ext2" not in options, options=options)
    hits = 0
    for _ in range(14):
        interrupter = Interrupter(r.randrange(1, 9_000))
        before = model.facts()
        with Volume.open(image, mode="rw") as volume:
            side = Ours(volume)
            try:
                for _ in range(12):
                    op = generator.op()
                    if not allowed(model, op):
                        continue
                    before = model.facts()
                    sys.settrace(interrupter)
                    try:
                        got = outcome(side, op)
                    finally:
                        sys.settrace(None)
                    if not got:
                        assert got == outcome(model, op)
            except KeyboardInterrupt:
                hits += 1
                assert facts_of(volume) == before or not outcome(model, op)
        fsck(image)
        with Volume.open(image) as volume:
            assert facts_of(volume) == model.facts()
    assert hits > 3


def _command(*words: str | Path) -> subprocess.Popen[bytes]:
    code = "from ext4lite.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def _interrupt(process: subprocess.Popen[bytes], number: int, when: Path, grown: int) -> int:
    """Send a signal once the image (or a directory) has grown; return the exit code."""

    def size() -> int:
        return when.stat().st_blocks * 512 if when.is_file() else len(list(when.rglob("*")))

    end = time.monotonic() + 30
    while size() < grown and process.poll() is None and time.monotonic() < end:
        time.sleep(0.002)
    process.send_signal(number)
    process.communicate(timeout=60)
    return process.returncode


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_commands_stop_and_leave_the_volume_clean(tmp_path: Path, number: int) -> None:
    """In the middle of cp-in, cp-out and rm -r; nothing needs recovery, what was copied by then is whole."""
    tree, image, out = tmp_path / "tree", tmp_path / "image", tmp_path / "out"
    for d in range(30):
        (tree / f"d{d}").mkdir(parents=True)
        for i in range(60):
            (tree / f"d{d}" / f"f{i}").write_bytes(b"%d" % i * 7000)
    mkfs(image, size=96 * MIB)
    code = 130 if number == signal.SIGINT else 128 + number
    start = image.stat().st_blocks * 512
    assert _interrupt(_command("cp-in", "-r", image, tree, "/"), number, image, start + 3 * MIB) == code
    fsck(image)
    with Volume.open(image) as v:
        assert not v.super.needs_recovery
        names = [(p, i) for p, i in v.walk() if v.stat(i).kind == "file"]
        assert 0 < len(names) < 1800
        whole = [v.read(i, 0, 99_999) == (tree.parent / os.fsdecode(p)[1:]).read_bytes() for p, i in names]
        assert whole.count(False) <= 1
    done = _command("cp-in", "-r", image, tree, "/")
    done.communicate(timeout=60)
    assert done.returncode == 0
    out.mkdir()
    assert _interrupt(_command("cp-out", "-r", image, "/tree", out), number, out, 5) == code
    process = _command("rm", "-r", image, "/tree")
    while not image.with_name("image.lock").exists() and process.poll() is None:
        time.sleep(0.002)
    time.sleep(0.05)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode in (0, code)
    fsck(image)
