"""Other readers of ext4 in Python, in a virtual environment of their own: they pin versions of what we use, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PACKAGES = ("dissect.extfs==3.15", "ext4==1.4.1", "ext2py==0.1.0")
_HERE = Path(__file__).resolve().parents[1]


def interpreter() -> str | None:
    """Return the Python that has the peers, installed on the first call; None (and a line why) where that fails.

    It lies in ``GVX_BENCH_PEERS``, by default ``.venv/peers`` of this checkout.
    """
    where = Path(os.environ.get("GVX_BENCH_PEERS") or _HERE / ".venv" / "peers")
    python, stamp = where / "bin" / "python", where / "peers.txt"
    wanted = "\n".join(PACKAGES)
    if stamp.exists() and stamp.read_text() == wanted:
        return str(python)
    try:
        subprocess.run([sys.executable, "-m", "venv", where], check=True, capture_output=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error).encode()
        print(f"benchmarks: without readers from PyPI: {said.decode(errors='replace').strip()}", file=sys.stderr)
        return None
    stamp.write_text(wanted)
    return str(python)
