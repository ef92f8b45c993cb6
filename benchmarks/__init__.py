"""Benchmarks of gvx: every figure side by side with its limit or peer, in one run, on one machine, as ratios."""
