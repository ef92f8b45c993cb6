"""Write a volume afresh into a new image: packed, with everything that it holds and is.

    report = rebuild("old.ext4", "new.ext4", size=4 << 30)

The new volume has the features, block size, UUID, label, seeds, options and times of the old one, and every inode with
its raw record, only block pointers, block counts and checksums are new. Files and directories are contiguous as far as
the groups' metadata lets them be, a directory's files lie together, the journal is empty, its numbers go on.

In-place use (exclusive lock, recovery first, the new file renamed over the old one) is
:func:`ext4lite.compact.compact`, which takes the same ``size``.
"""

from __future__ import annotations

import contextlib
import os
import time

from ext4lite import hostfs
from ext4lite.blockdev import StrPath, check_target, replacing, target_path
from ext4lite.errors import HostError, NeedsRecovery
from ext4lite.rebuild.choice import Choice, Chooser, require_known
from ext4lite.rebuild.engine import Engine
from ext4lite.rebuild.report import Progress, RebuildReport
from ext4lite.rebuild.survey import Source, explore
from ext4lite.rebuild.target import OutOfSpace, Output
from ext4lite.volume import Volume

__all__ = ["Progress", "RebuildReport", "rebuild", "rebuild_into"]


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
    path = target_path(target)
    replace = check_target(path, force=force) or force
    with Volume.open(source) as volume:
        if path.exists() and os.path.samestat(path.stat(), os.fstat(volume.fileno())):
            raise HostError("source and target are the same file", where=str(path))
        file = hostfs.NewFile(path)
        try:
            report = rebuild_into(
                volume, file.fd, str(path), size=size, keep_numbers=keep_numbers, durable=durable, progress=progress
            )
            with replacing(path) if replace else contextlib.nullcontext():
                file.publish(durable=durable, replace=replace)
        except FileExistsError as e:
            raise HostError("the target exists", where=str(path), hint="--force replaces it") from e
        except OSError as e:
            raise HostError.from_os(e, str(path)) from e
        finally:
            file.discard()
    return report


def rebuild_into(
    volume: Volume,
    fd: int,
    where: str,
    *,
    size: int | None = None,
    keep_numbers: bool = False,
    durable: bool = True,
    progress: Progress | None = None,
) -> RebuildReport:
    """Do the work of :func:`rebuild` from an open volume into the empty file open at ``fd`` (``where`` in errors).

    Nothing is flushed to the disk at the end; ``durable`` only lets the host begin with it.
    """
    begin = time.perf_counter()
    if volume.recovered is not None:  # read as if recovered, orphans not settled
        raise NeedsRecovery("the journal must be replayed first", where=volume.where, hint="ext4lite recover does that")
    volume.super.require_clean()
    source = Source(volume)
    require_known(source)
    found = explore(source)
    chooser = Chooser(source, found, keep_numbers=keep_numbers)
    choice = chooser.choose(size)
    try:
        os.ftruncate(fd, choice.layout.blocks * source.block_size)
        output = Output(fd, where, volume.device, volume.where, durable=durable)
        engine = Engine(source, found, choice, output, progress=progress)
        try:
            engine.run()
        except OutOfSpace:
            raise chooser.too_small(size or 0) from None
        os.ftruncate(fd, choice.layout.blocks * source.block_size)
    except OSError as e:
        raise HostError.from_os(e, where) from e
    finally:
        volume.refresh()  # its records were changed
    return _report(
        source,
        choice,
        engine,
        chooser,
        found_inodes=len(found.used),
        before=(found.extents, found.fragmented),
        seconds=time.perf_counter() - begin,
    )


def _report(
    source: Source,
    choice: Choice,
    engine: Engine,
    chooser: Chooser,
    *,
    found_inodes: int,
    before: tuple[int, int],
    seconds: float,
) -> RebuildReport:
    size, layout = source.block_size, choice.layout
    return RebuildReport(
        size_before=source.super.blocks * size,
        size_after=layout.blocks * size,
        block_size=size,
        used_bytes=(layout.blocks - layout.free_blocks + engine.used_blocks) * size,
        inodes=found_inodes,
        inodes_before=source.super.raw.s_inodes_count,
        inodes_after=layout.inodes,
        renumbered=choice.numbers.changed,
        journal_before=chooser.journal_before * size,
        journal_after=choice.journal_blocks * size,
        extents_before=before[0],
        extents_after=engine.extents,
        fragmented_before=before[1],
        fragmented_after=engine.fragmented,
        seconds=seconds,
    )
