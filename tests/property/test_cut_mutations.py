"""The judges judged: with each of these mistakes in the code, the seeded cuts fail."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.mutations import MUTATIONS

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("tests/unit/test_jbd2_transaction.py", "tests/property/test_volume_cut.py")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MUTATIONS)
def test_every_mistake_is_caught(tmp_path: Path, name: str) -> None:
    """A copy of the package has the mistake, and the tests of CI are run on it until the first one fails."""
    shutil.copytree(ROOT / "ext4lite", tmp_path / "ext4lite", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "launcher").symlink_to(ROOT / "launcher")
    MUTATIONS[name].apply(tmp_path / "ext4lite")
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *TESTS]
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1, f"nobody noticed\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    caught = re.search(r"FAILED .*::(\S+)", done.stdout)
    assert caught is not None, done.stdout[-3000:]
    print(f"{name}: {caught[1]}")
