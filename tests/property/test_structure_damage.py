"""Every structure of every kind of image, changed field by field, with checksums made right again and not.

Whatever the bytes: every operation and command ends soon, with little memory, in an Ext4LiteError if at all; reading
changes no byte, writing stays inside the image. ``python -m support.damage SECONDS SEED`` (in ``tests/``) is the long
run of the same; what it found is kept as examples here or as tests of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ext4lite import manifest
from support.damage import IMAGES, Change, Sample, readers, survive, writers

pytestmark = pytest.mark.root

CHANGE = st.tuples(
    st.integers(0, 1 << 8), st.integers(0, 1 << 8), st.integers(0, 1 << 8), st.integers(0, 15), st.integers(0, 1 << 32)
)
READERS = sorted(readers(Path(), Path()))
WRITERS = sorted(writers(Path(), Path()))


@pytest.fixture(scope="module", params=IMAGES)
def sample(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return Sample(request.param, tmp_path_factory.mktemp("damage"))


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged size may not make the tests hash gigabytes."""
    monkeypatch.setattr(manifest, "ZEROS_ALLOWED", 256 << 20)
    monkeypatch.setattr(manifest, "MOST_ZEROS", 4)


@pytest.mark.parametrize("name", [name for name in READERS if name.startswith(("ever", "man", "insp", "ls", "cp"))])
def test_whole_images_are_read(sample: Sample, name: str) -> None:
    """Without damage nothing fails, or the other tests would test nothing."""
    assert survive(sample.data, sample.directory, name, writing=False) == ""


@settings(max_examples=24, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    changes=st.lists(CHANGE, min_size=1, max_size=3),
    fixed=st.sampled_from((True, True, True, False)),
    reading=st.lists(st.sampled_from(READERS), min_size=1, max_size=2, unique=True),
    writing=st.sampled_from(WRITERS),
)
def test_changed_structures(
    sample: Sample, changes: list[Change], fixed: bool, reading: list[str], writing: str
) -> None:
    image = sample.changed(changes, fixed)
    for name in reading:
        survive(image, sample.directory, name, writing=False)
    survive(image, sample.directory, writing, writing=True)


@pytest.mark.parametrize("cut", [0, 1023, 1024, 2047, 70_000, 2 << 20, (5 << 20) - 1])
def test_a_cut_image(maps: Sample, tmp_path: Path, cut: int) -> None:
    for name in READERS:
        assert survive(maps.data[:cut], tmp_path, name, writing=False) in ("CorruptImage", "CommandFailed")
    for name in WRITERS:
        assert survive(maps.data[:cut], tmp_path, name, writing=True) in ("CorruptImage", "CommandFailed")


@pytest.fixture(scope="module")
def maps(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return Sample("block maps", tmp_path_factory.mktemp("maps"))


def test_counts_that_are_not_the_bitmaps(maps: Sample) -> None:
    """Shrinking made a count negative, and its field could not hold that."""
    changes = [(43898, 17390, 63020, 11, 930917054), (32903, 1245, 45873, 10, 2901966474)]
    changes += [(55740, 51570, 55792, 9, 1863488144)]
    survive(maps.changed(changes, True), maps.directory, "shrink", writing=True)
