"""Benchmarks of gvx: every figure side by side with its limit or peer, in one run, on one machine, as ratios."""

import sys
from pathlib import Path

# The host's dockerd, a peer here, is started by what the tests use to judge golden volumes.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
