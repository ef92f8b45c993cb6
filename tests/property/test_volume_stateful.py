"""Hypothesis plays a writable volume against the plain model, and makes what fails short.

Operations come from the same generator as those of the seeded runs, but its dice are hypothesis' own: what differs is
shrunk to the few operations that it takes. Volumes are closed and opened again on the way, crash and are recovered; at
the end e2fsck finds nothing, and the kernel's mount shows the tree that the model has.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from ext4lite.recover import recover
from ext4lite.volume import Volume
from ext4lite.writer import WritableVolume
from support.ext4_judges import assert_same, fsck, mounted, ours
from support.kernel_manifest import manifest as kernel_manifest
from support.volume_model import NOSPACE, Generator, Model, Ours, allowed, assert_tree, make, outcome

pytestmark = pytest.mark.root

PROFILES = (
    "",
    "-t ext4 -b 1024",
    "-t ext4 -b 4096 -O orphan_file,ea_inode",
    "-t ext3 -b 1024",
    "-t ext2 -b 4096 -I 128",
)
SIZE = 12 << 20


class _Dice(random.Random):
    """Hypothesis' random numbers; bytes come from a seed among them, for they would be too many to shrink."""

    def __init__(self, below: random.Random) -> None:
        super().__init__(0)
        self._below = below

    def random(self) -> float:
        return self._below.random()

    def getrandbits(self, k: int) -> int:
        return self._below.getrandbits(k)

    def choice(self, seq: Any) -> Any:
        return self._below.choice(seq)

    def choices(self, *args: Any, **kwargs: Any) -> Any:
        return self._below.choices(*args, **kwargs)

    def randrange(self, *args: Any) -> int:
        return self._below.randrange(*args)

    def randbytes(self, n: int) -> bytes:
        return random.Random(self._below.randrange(1 << 16)).randbytes(n)


class Machine(RuleBasedStateMachine):
    """One volume, one model."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="stateful-"))
        self.image = self.folder / "image"
        self.volume: WritableVolume | None = None

    @initialize(options=st.sampled_from(PROFILES))
    def begin(self, options: str) -> None:
        make(self.image, options, SIZE)
        self.options = options
        self.model = Model()
        self.generator = Generator(
            self.model, random.Random(0), fallocate="ext4" in options or not options, options=options
        )
        self.volume = Volume.open(self.image, mode="rw")

    @rule(dice=st.randoms(use_true_random=False), count=st.integers(1, 12))
    def operate(self, dice: random.Random, count: int) -> None:
        """The same answer as the model's."""
        assert self.volume is not None
        self.generator.r = _Dice(dice)
        side = Ours(self.volume)
        for _ in range(count):
            op = self.generator.op()
            if allowed(self.model, op) and (got := outcome(side, op)) != NOSPACE:
                assert got == outcome(self.model, op), op[:3]

    @rule()
    def look(self) -> None:
        assert self.volume is not None
        assert_tree(self.volume, self.model)

    @rule()
    def open_again(self) -> None:
        assert self.volume is not None
        self.volume.close()
        fsck(self.image)
        self.volume = Volume.open(self.image, mode="rw")

    @rule()
    def crash_after_sync(self) -> None:
        """What a killed process leaves is, replayed in memory or recovered, what was synced."""
        assert self.volume is not None
        self.volume.sync()
        copy = self.folder / "copy"
        shutil.copyfile(self.image, copy)
        if "ext2" in self.options:
            return  # nothing was promised
        with Volume.open(copy) as replayed:
            assert_tree(replayed, self.model)
        recover(copy)
        fsck(copy)
        with Volume.open(copy) as recovered:
            assert_tree(recovered, self.model)

    def teardown(self) -> None:
        try:
            if self.volume is not None:
                self.volume.close()
                fsck(self.image)
                with Volume.open(self.image) as volume:
                    assert_tree(volume, self.model)
                with mounted(self.image, self.folder / "mnt", "ro") as root:
                    assert_same(ours(self.image), kernel_manifest(root))
        finally:
            shutil.rmtree(self.folder)


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=25,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
