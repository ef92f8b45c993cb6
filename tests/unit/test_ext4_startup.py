"""What short commands import: every module costs milliseconds on every call. (Times themselves decide nothing.)"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ext4lite.cli import run

CODE = """
import json, os, sys
import typer.main
before = set(sys.modules)
from ext4lite.cli import run
out, sys.stdout = sys.stdout, open(os.devnull, "w")
code = run(sys.argv[1:])
json.dump([code, sorted(set(sys.modules) - before)], out)
"""
NEVER = (
    "construct", "rich", "crcmod", "anycrc", "cffi", "xattr", "zstandard", "isal", "ctypes", "subprocess", "tempfile",
    "asyncio", "multiprocessing", "ssl", "socket", "tarfile", "gzip", "random", "unittest", "gvx",
)  # fmt: skip
"""Packages (and what is in them) that no short command needs."""
WRITING = ("writer", "alloc", "extent_tree", "dirwrite", "jbd2", "recover")
BUILDING = ("builder", "building", "golden", "overlay", "populate", "compact", "rebuild", "resize")
READING = ("volume", "directory", "inode", "xattrs")


def _ours(names: tuple[str, ...]) -> set[str]:
    return {f"ext4lite.{name}" for name in names}


COMMANDS: dict[str, tuple[list[str], set[str]]] = {
    "help": (["--help"], _ours((*WRITING, *BUILDING, *READING, "blockdev", "layout"))),
    "ls": (["ls", "IMAGE"], _ours((*WRITING, *BUILDING))),
    "cat": (["cat", "IMAGE", "/file"], _ours((*WRITING, *BUILDING))),
    "stat": (["stat", "IMAGE", "/file"], _ours((*WRITING, *BUILDING))),
    "xattr": (["xattr", "IMAGE", "/file"], _ours((*WRITING, *BUILDING))),
    "label": (["label", "IMAGE"], _ours((*WRITING, *BUILDING))),
    "inspect": (["inspect", "IMAGE"], _ours((*WRITING, *BUILDING))),
    "manifest": (["manifest", "IMAGE"], _ours((*WRITING, *BUILDING))),
    "cp-out": (["cp-out", "IMAGE", "/file", "OUT"], _ours((*WRITING, *BUILDING))),
    "clone": (["clone", "IMAGE", "OUT"], _ours((*WRITING, *BUILDING, *READING))),
    "recover": (["recover", "IMAGE"], _ours(("writer", *BUILDING))),
    "mkfs": (["mkfs", "-q", "--size", "8M", "OUT"], _ours((*WRITING, "golden", "overlay", "populate", "volume"))),
    "set the label": (["label", "IMAGE", "name"], _ours(BUILDING)),
    "uuid": (["uuid", "IMAGE", "random"], _ours(BUILDING)),
    "set an attribute": (["xattr", "-s", "user.a=b", "IMAGE", "/file"], _ours(BUILDING)),
    "mkdir": (["mkdir", "IMAGE", "/d"], _ours(BUILDING)),
    "ln": (["ln", "IMAGE", "/file", "/l"], _ours(BUILDING)),
    "mv": (["mv", "IMAGE", "/file", "/m"], _ours(BUILDING)),
    "rm": (["rm", "IMAGE", "/file"], _ours(BUILDING)),
    "cp-in": (["cp-in", "IMAGE", "IN", "/new"], _ours(BUILDING)),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_short_command_imports_what_it_needs(tmp_path: Path, name: str) -> None:
    words, without = COMMANDS[name]
    places = {"IMAGE": tmp_path / "image", "IN": tmp_path / "in", "OUT": tmp_path / "out"}
    places["IN"].write_bytes(b"content")
    assert run(["mkfs", "-q", "--size", "8M", str(places["IMAGE"])]) == 0
    assert run(["cp-in", str(places["IMAGE"]), str(places["IN"]), "/file"]) == 0
    words = [str(places.get(word, word)) for word in words]
    done = subprocess.run([sys.executable, "-c", CODE, *words], capture_output=True, text=True, check=False)
    code, modules = json.loads(done.stdout) if done.stdout else (done.stderr, [])
    assert code == 0, done.stderr
    assert {"ext4lite.cli"} <= set(modules)
    loaded = {module for module in modules for bad in {*NEVER, *without} if f"{module}.".startswith(f"{bad}.")}
    assert not loaded, f"{name} imports {sorted(loaded)}"
