"""The wheel: holds the static runtime on linux x86_64, is pure Python without it, and imports nothing Linux-only."""

from __future__ import annotations

import os
import pkgutil
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import ext4lite

ROOT = Path(__file__).resolve().parents[2]
ELF_MAGIC = b"\x7fELF"
PT_INTERP = 3


def build_wheel(target: Path, **environment: str) -> Path:
    """Build this checkout's wheel into ``target`` and return its path."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(target), str(ROOT)],
        check=True,
        env={**os.environ, **environment},
    )
    (wheel,) = target.glob("gvx-*.whl")
    return wheel


def program_header_types(elf: bytes) -> set[int]:
    """The ``p_type`` of every program header of a 64-bit little-endian ELF file (System V ABI, chapter 5)."""
    e_phoff = int.from_bytes(elf[32:40], "little")
    e_phentsize = int.from_bytes(elf[54:56], "little")
    e_phnum = int.from_bytes(elf[56:58], "little")
    starts = (e_phoff + number * e_phentsize for number in range(e_phnum))
    return {int.from_bytes(elf[start : start + 4], "little") for start in starts}


@pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="no gvx-sentry elsewhere")
def test_wheel_holds_a_static_sentry(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = archive.getinfo("gvx/bin/gvx-sentry")
        assert info.external_attr >> 16 & 0o111, "not executable"
        elf = archive.read(info)
    assert elf.startswith(ELF_MAGIC)
    assert PT_INTERP not in program_header_types(elf), "asks for a dynamic loader"
    assert "gvx/__init__.py" in names
    assert "ext4lite/__init__.py" in names
    assert not [name for name in names if name.startswith(("tests/", "native/", "fixtures/", "launcher/"))]


def test_wheel_without_the_runtime_installs_and_works(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, GVX_PURE="1")
    assert wheel.name.endswith("-py3-none-any.whl")
    site = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)], check=True
    )
    assert not (site / "gvx" / "bin").exists()
    image = tmp_path / "volume.ext4"
    program = f"import ext4lite, ext4lite.cli; assert ext4lite.__file__.startswith({str(site)!r}); ext4lite.cli.main()"
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    subprocess.run([*command, "mkfs", "--size", "16M", str(image)], check=True, env=environment, cwd=tmp_path)
    done = subprocess.run(
        [*command, "inspect", "--json", str(image)], check=True, env=environment, cwd=tmp_path, capture_output=True
    )
    assert b"metadata_csum" in done.stdout


def test_every_module_imports_on_another_platform() -> None:
    """Nothing of ext4lite is Linux-only at import time (seen by importing it with another ``sys.platform``)."""
    names = [
        module.name for module in pkgutil.walk_packages(ext4lite.__path__, "ext4lite.") if "__main__" not in module.name
    ]
    program = "import importlib, sys\nsys.platform = 'darwin'\nfor name in sys.argv[1:]: importlib.import_module(name)"
    subprocess.run([sys.executable, "-c", program, *names], check=True, cwd=ROOT)
