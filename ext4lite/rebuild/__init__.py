"""Write a volume afresh into a new image: packed, with everything that it holds and is.

    report = rebuild("old.ext4", "new.ext4", size=4 << 30)

The new volume has the features, block size, UUID, label, seeds, options and times of the old one, and every inode with
its raw record, only block pointers, block counts and checksums are new. Files and directories are contiguous as far as
the groups' metadata lets them be, a directory's files lie together, the journal is empty, its numbers go on.

In-place use (exclusive lock, recovery first, the new file renamed over the old one) is :func:`ext4lite.compact.compact`,
which takes the same ``size``.
"""

from __future__ import annotations

from ext4lite.blockdev import StrPath
from ext4lite.rebuild.report import Progress, RebuildReport

__all__ = ["Progress", "RebuildReport", "rebuild"]


def rebuild(
    source: StrPath,
    target: StrPath,
    *,
    size: int | None = None,
    keep_numbers: bool = False,
    force: bool = False,
    durable: bool = True,
    progress: Progress | None = None,
) -> RebuildReport:
    """Write the clean volume ``source`` (locked shared meanwhile) afresh to the file ``target``.

    ``size`` is the new volume's size in bytes, rounded down to what its groups allow; None for the smallest possible.
    Inodes keep their numbers if they fit into the new volume; else they are renumbered in the order of the tree, unless
    ``keep_numbers``. ``target`` appears whole or not at all; one that is there is refused unless ``force``.

    Raises VolumeFull (which names the least size) when ``size`` is too small, NeedsRecovery, CorruptImage, Unsupported
    (by the feature's name), VolumeBusy, HostError.
    """
    raise NotImplementedError
