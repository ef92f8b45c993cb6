"""Locks, the record of their holder, and the checks before a guest gets a volume."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ext4lite.blockdev import (
    lock_exclusive,
    lock_shared,
    open_for_guest,
    open_image,
    record_path,
    unlock,
)
from ext4lite.checksum import superblock_checksum
from ext4lite.clone import clone
from ext4lite.errors import CorruptImage, HostError, NeedsRecovery, Unsupported, VolumeBusy
from ext4lite.features import GUEST, GUEST_READ
from ext4lite.inspect import inspect
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import SuperBlock
from ext4lite.mkfs import mkfs
from ext4lite.volume import Volume

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "volume.ext4"
    mkfs(path, size=16 << 20)
    return path


def patch_super(path: Path, **values: int) -> None:
    """Change fields of the superblock, with a right checksum."""
    with path.open("r+b") as f:
        f.seek(1024)
        sb = SuperBlock.unpack(f.read(1024))
        for name, value in values.items():
            setattr(sb, name, value)
        sb.s_checksum = superblock_checksum(sb.pack())
        f.seek(1024)
        f.write(sb.pack())


def test_a_writer_excludes_everybody_and_is_named(image: Path, tmp_path: Path) -> None:
    with open_for_guest(image, command="gvx-launch"):
        record = json.loads(record_path(image).read_text())
        assert record["pid"] == os.getpid()
        for attempt in (
            lambda: open_for_guest(image).close(),
            lambda: open_for_guest(image, readonly=True).close(),
            lambda: Volume.open(image).close(),
            lambda: print(clone(image, tmp_path / "clone")),
            lambda: print(inspect(image)),
        ):
            with pytest.raises(VolumeBusy, match=rf"in use by gvx-launch \(pid {os.getpid()}\)"):
                attempt()  # type: ignore[no-untyped-call]
        assert record_path(image).exists()
    assert not record_path(image).exists()
    open_for_guest(image).close()


def test_readers_share(image: Path) -> None:
    with Volume.open(image), Volume.open(image), open_for_guest(image, readonly=True) as guest:
        assert guest.readonly
        with pytest.raises(VolumeBusy):
            open_for_guest(image)
        assert not record_path(image).exists()


def test_a_holder_without_a_record_is_found(image: Path) -> None:
    code = (
        "import sys; from ext4lite.blockdev import *; g = open_for_guest(sys.argv[1]); record_path(g.path).unlink();"
        "print('locked', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(image)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "locked\n"
        with pytest.raises(VolumeBusy, match=rf"\(pid {child.pid}\)"):
            Volume.open(image)
    finally:
        child.kill()
        child.communicate()
    Volume.open(image).close()


def test_a_holder_without_a_record_is_found_by_a_command(image: Path, tmp_path: Path) -> None:
    """Holder and finder have the volume open under the same number; and another name of it has no record."""
    other = tmp_path / "other"
    other.hardlink_to(image)
    code = (
        "import sys; from ext4lite.blockdev import *; g = open_for_guest(sys.argv[1]); print(g.fd, flush=True); input()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(image)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        number = int(child.stdout.readline())
        look = "import sys; from ext4lite.blockdev import *; f = open_image(sys.argv[1])\n"
        look += "print(f)\ntry: lock_shared(f, sys.argv[1])\nexcept Exception as e: print(e)"
        for name, who in ((image, "python"), (other, r"\S+")):
            done = subprocess.run([sys.executable, "-c", look, str(name)], capture_output=True, text=True, check=True)
            first, second = done.stdout.splitlines()
            assert int(first) == number
            assert re.fullmatch(rf".*is in use by {who} \(pid {child.pid}\)", second)
    finally:
        child.kill()
        child.communicate()


_READER = """
import sys
from ext4lite.volume import Volume
with Volume.open(sys.argv[1]):
    print('open', flush=True)
    sys.stdin.read()
"""


def _run_reader(image: Path, *before: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [*before, sys.executable, "-c", _READER, str(image)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "open\n"
    return child


def test_readers_are_named(image: Path) -> None:
    """One, two, many; a record that a writer left is not theirs, however alive the process is that it names."""
    readers = [_run_reader(image)]
    record_path(image).write_text(json.dumps({"pid": os.getpid(), "command": "somebody-else", "since": 0}))
    try:
        with pytest.raises(VolumeBusy, match=rf"in use by python\S* \(pid {readers[0].pid}\), for reading"):
            Volume.open(image, mode="rw")
        readers.append(_run_reader(image))
        with pytest.raises(VolumeBusy, match=r"in use by .* and .* \(pid \d+\), for reading"):
            open_for_guest(image)
        readers.append(_run_reader(image))
        with pytest.raises(VolumeBusy, match=r"in use by .* \(pid \d+\) and 2 others, for reading"):
            open_for_guest(image)
    finally:
        for child in readers:
            child.communicate()
        record_path(image).unlink()
    open_for_guest(image).close()


def test_a_number_used_again_is_not_the_holder(image: Path) -> None:
    """The record of a process that was killed, whose number another process has by now."""
    with open_for_guest(image) as guest:
        record = json.loads(record_path(image).read_text())
        record_path(image).write_text(json.dumps(record | {"started": record["started"] - 1, "command": "long-gone"}))
        with pytest.raises(VolumeBusy, match=rf"\(pid {os.getpid()}\)") as caught:
            Volume.open(image)
        assert "long-gone" not in str(caught.value)
        assert guest.path == image
    record_path(image).unlink(missing_ok=True)


@pytest.mark.root
def test_a_holder_of_another_user_is_told_apart(image: Path, tmp_path: Path) -> None:
    """An ordinary user cannot look into root's processes, but the record tells."""
    for above in (tmp_path, *tmp_path.parents):
        if above.stat().st_uid == 0 and above.stat().st_mode & 0o005 != 0o005:
            above.chmod(above.stat().st_mode | 0o005)
    image.chmod(0o666)
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    look = (
        "import sys; from ext4lite.blockdev import *\ntry: open_for_guest(sys.argv[1])\nexcept Exception as e: print(e)"
    )
    words = [*user, sys.executable, "-c", look, str(image)]
    with open_for_guest(image, command="gvx-launch"):
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        assert f"in use by gvx-launch (pid {os.getpid()})" in done.stdout
    with Volume.open(image):
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        assert "in use by a process that only root can see, for reading" in done.stdout


def test_a_record_without_room_is_not_left_empty(image: Path) -> None:
    fd = open_image(image, write=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # writing fails, as on a full disk; making files does not
    try:
        lock_exclusive(fd, image)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not record_path(image).exists()
    os.close(fd)


def test_a_stale_record_does_not_lock(image: Path) -> None:
    record_path(image).write_text(json.dumps({"pid": 2**22 + 1, "command": "gone", "since": 0}))
    with open_for_guest(image):
        assert json.loads(record_path(image).read_text())["pid"] == os.getpid()


def test_a_child_that_inherits_the_descriptor_keeps_the_lock(image: Path) -> None:
    guest = open_for_guest(image)
    child = subprocess.Popen(["sleep", "60"], pass_fds=[guest.fd])
    try:
        guest.close()
        with pytest.raises(VolumeBusy):
            Volume.open(image)
    finally:
        child.kill()
        child.wait()
    Volume.open(image).close()


def test_unlock_releases(image: Path) -> None:
    fd = open_image(image, write=True)
    lock_exclusive(fd, image)
    unlock(fd, image)
    other = open_image(image)
    lock_shared(other, image)
    os.close(other)
    os.close(fd)
    assert not record_path(image).exists()


def test_a_guest_needs_a_clean_volume(image: Path) -> None:
    patch_super(image, s_state=0)
    with pytest.raises(NeedsRecovery, match="not closed cleanly"):
        open_for_guest(image)
    patch_super(image, s_state=1, s_last_orphan=12)
    with pytest.raises(NeedsRecovery, match="first 12"):
        open_for_guest(image)
    patch_super(image, s_state=3, s_last_orphan=0)
    with pytest.raises(NeedsRecovery, match="errors"):
        open_for_guest(image)
    assert not record_path(image).exists()


def test_a_guests_volume_is_recovered_first(image: Path) -> None:
    incompat = 0x2 | 0x40 | 0x80 | 0x200 | 0x2000
    patch_super(image, s_state=1, s_feature_incompat=incompat | 0x4)
    with pytest.raises(NeedsRecovery, match="NEEDS_RECOVERY"):
        open_for_guest(image, readonly=True)
    report = inspect(image)
    assert (report.state, report.journal.state, report.images) == ("needs recovery", "needs recovery", [])
    report = inspect(image, replay=False)
    assert (report.state, report.journal.state, report.images) == ("needs recovery", "needs recovery", None)
    open_for_guest(image).close()
    assert inspect(image).state == "clean"


def test_a_guest_needs_known_features(image: Path) -> None:
    good = 0x2 | 0x40 | 0x80 | 0x200 | 0x2000
    patch_super(image, s_feature_incompat=good | 0x8000)
    with pytest.raises(Unsupported, match="inline_data"):
        open_for_guest(image)
    open_for_guest(image, readonly=True).close()
    patch_super(image, s_feature_incompat=good | 0x10000)
    with pytest.raises(Unsupported, match="encrypt"):
        open_for_guest(image, readonly=True)
    Volume.open(image).close()  # what is not encrypted can be read
    patch_super(image, s_feature_incompat=good | 0x400000)
    with pytest.raises(Unsupported, match="FEATURE_I22"):
        Volume.open(image)
    patch_super(image, s_feature_incompat=good & ~0x40)
    with pytest.raises(Unsupported, match="extents"):
        open_for_guest(image)
    patch_super(image, s_feature_incompat=good & ~0x2)
    with pytest.raises(Unsupported, match="filetype"):
        open_for_guest(image)


def test_what_a_guest_can_do_is_what_the_driver_says() -> None:
    """The masks here and in the driver (native/internal/ext4/feature.go) are the same, bit for bit.

    The recovery bit is the driver's only to give it a message of its own; here it is looked at in ``require_clean``.
    """
    text = re.sub(r"//.*", "", (REPOSITORY / "native/internal/ext4/feature.go").read_text())
    bits = {name: int(number, 16) for name, number in re.findall(r"^\s*(\w+)\s*= (0x[0-9a-f]+)$", text, re.MULTILINE)}
    masks = {}
    for name, value in re.findall(r"^\s*(\w+able) = ((?:.*\|\n)*.*)$", text, re.MULTILINE):
        masks[name] = 0
        for word in value.split("|"):
            masks[name] |= bits[word.strip()]
    assert masks == {
        "incompatReadable": GUEST_READ.incompat | c.INCOMPAT_RECOVER,
        "incompatWritable": GUEST.incompat | c.INCOMPAT_RECOVER,
        "roCompatWritable": GUEST.ro_compat,
    }


def test_unknown_ro_compat_is_readable(image: Path) -> None:
    patch_super(image, s_feature_ro_compat=0x46B | 0x40000000)
    Volume.open(image).close()
    open_for_guest(image, readonly=True).close()
    with pytest.raises(Unsupported, match="FEATURE_R30"):
        open_for_guest(image)


def test_what_is_not_an_image_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="no such file"):
        Volume.open(tmp_path / "none")
    with pytest.raises(HostError, match="not a regular file"):
        Volume.open(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(HostError, match="not a regular file"):
        Volume.open(tmp_path / "fifo")
    (tmp_path / "empty").touch()
    with pytest.raises(CorruptImage, match="only 0 bytes"):
        Volume.open(tmp_path / "empty")
    (tmp_path / "zeros").write_bytes(bytes(5000))
    with pytest.raises(CorruptImage, match="magic 0x0000"):
        Volume.open(tmp_path / "zeros")


def test_a_cut_image_is_refused(image: Path) -> None:
    os.truncate(image, (16 << 20) - 1)
    with pytest.raises(CorruptImage, match="cut short"):
        open_for_guest(image)
    assert not record_path(image).exists()


def test_a_wrong_superblock_checksum_is_found(image: Path) -> None:
    with image.open("r+b") as f:
        f.seek(1024 + 0x78)
        f.write(b"changed")
    with pytest.raises(CorruptImage, match="superblock checksum"):
        open_for_guest(image)
