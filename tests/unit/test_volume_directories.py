"""Large directories: their names are looked up on disk, with the answers that memory would give."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ext4lite import names as module
from ext4lite.dirnames import NamesOnDisk
from ext4lite.errors import Exists, NotEmpty
from ext4lite.volume import Volume
from support.ext4_judges import fsck
from support.volume_model import make

MIB = 1 << 20


@pytest.mark.parametrize("block", [1024, 4096])
def test_names_on_disk_are_those_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(module, "_LARGE_DIRECTORY", 8192)
    monkeypatch.setattr(module, "_TRIM_EVERY", 7)
    image = tmp_path / "image"
    make(image, f"-t ext4 -b {block} -N 6000", 48 * MIB)
    r, names = random.Random(block), dict[str, int]()
    for turn in range(2):
        with Volume.open(image, mode="rw") as v:
            if not turn:
                v.mkdir("/d")
            for i in range(900):
                kind = r.random() if names else 0
                if kind < 0.6:
                    path = f"/d/{'n' * r.randrange(1, 60)}{turn}-{i}"
                    names[path] = v.create(path)
                    continue
                one, two = r.choice(list(names)), r.choice(list(names))
                if kind < 0.8:
                    v.unlink(one)
                    del names[one]
                elif kind < 0.9:
                    v.rename(one, f"{one}r")
                    names[f"{one}r"] = names.pop(one)
                else:
                    v.rename(one, two, how="exchange")
                    names[one], names[two] = names[two], names[one]
                    assert v.lookup(f"/d/none{i}") is None
            assert isinstance(v._states[v.resolve("/d")].names, NamesOnDisk)
            assert all(v.lookup(path) == ino for path, ino in names.items())
            with pytest.raises(Exists):
                v.create(r.choice(list(names)))
        fsck(image)
        with Volume.open(image) as read:
            found = {f"/d/{name.decode()}": ino for name, ino, _ in read.iterdir(read.lookup("/d") or 0)}
        assert found == names
    with Volume.open(image, mode="rw") as v:
        with pytest.raises(NotEmpty):
            v.rmdir("/d")
        for path in names:
            v.unlink(path)
        v.rmdir("/d")
    fsck(image)
