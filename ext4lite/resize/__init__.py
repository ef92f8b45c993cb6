"""A volume made larger or smaller, in place, so that a killed process leaves the old volume or the new one.

    result = resize("image.ext4", 32 << 30)

``engine.py`` decides the way and takes it: ``grow.py`` and ``shrink.py`` in place, through the journal; without one, or
when something does not fit a transaction, on a copy. ``move.py`` moves what lies in the way, ``resize_inode.py`` keeps
the resize inode. The geometry itself is :mod:`ext4lite.shape`, the volume meanwhile :mod:`ext4lite.layout_volume`.
"""

from __future__ import annotations

from ext4lite.resize.engine import ResizeResult, resize

__all__ = ["ResizeResult", "resize"]
