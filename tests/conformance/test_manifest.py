"""The manifest beside that of the kernel's mount: its order, and files that are mostly holes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ext4lite import manifest
from ext4lite.builder import ImageBuilder, Meta
from ext4lite.errors import Unsupported
from ext4lite.volume import Volume
from support import kernel_manifest
from support.ext4_judges import assert_same, fsck, mounted, ours, run, tool

TIB = 1 << 40


@pytest.mark.root
@pytest.mark.parametrize("block_size", ["1024", "4096"])
def test_what_the_kernel_lists(tmp_path: Path, block_size: str) -> None:
    image = tmp_path / "image"
    run(tool("mke2fs"), "-q", "-t", "ext4", "-b", block_size, image, "64M")
    with mounted(image, tmp_path / "mnt") as point:
        for name in ("a", "a/b", "a/b!", "a/b-c", "a/b0", "a!", "a-b", "a.b", "a0", "a/b/c", "a/b!/c", "a-b/c"):
            (point / name).mkdir(parents=True, exist_ok=True)
            (point / f"{name}#").write_bytes(name.encode())
        (point / "lost+found-not").touch()
        with (point / "huge").open("wb") as f:
            f.truncate(3 * TIB + 5)
            for at in (0, 5000, TIB + 3071, TIB + 4096 * 3 + 1024, 3 * TIB):
                f.seek(at)
                f.write(b"mark")
            f.seek(2 * TIB)
            f.write(bytes(8192))  # zeros on disk
            os.posix_fallocate(f.fileno(), TIB + 4096, 40_960)  # unwritten beside written
        seen = kernel_manifest.manifest(point)
    fsck(image)
    assert_same(ours(image), seen)
    assert [e["path"] for e in seen] == sorted(e["path"] for e in seen)
    assert "data_sha256" in next(e for e in seen if e["path"] == "/huge")


def test_where_holes_are_makes_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "HASHED_WHOLE", 1 << 20)
    hashes = []
    for turn in range(2):
        with ImageBuilder(tmp_path / f"image{turn}", size=16 << 20, timestamp=0) as builder:
            with builder.add_file(builder.root, b"file", Meta()) as sink:
                sink.write(b"x" * 10_000 + bytes(40_000))  # zeros on disk
                sink.write(bytes(3 << 20)) if turn else sink.skip(3 << 20)
                sink.write(b"y")
            builder.finish()
        (entry,) = ours(tmp_path / f"image{turn}")
        hashes.append(entry["data_sha256"])
    assert hashes[0] == hashes[1]


def test_holes_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is small enough, all together are not."""
    monkeypatch.setattr(manifest, "ZEROS_ALLOWED", 1 << 20)
    monkeypatch.setattr(manifest, "MOST_ZEROS", 1)
    with ImageBuilder(tmp_path / "image", size=8 << 20, timestamp=0) as builder:
        for number in range(3):
            with builder.add_file(builder.root, b"file%d" % number, Meta()) as sink:
                sink.skip(3 << 20)
        builder.finish()
    with Volume.open(tmp_path / "image") as volume, pytest.raises(Unsupported, match="hole"):
        list(manifest.entries(volume))
