"""The journal as a thing that can be shown, made, resized, moved and removed, in place.

Whatever is killed, the volume stays consistent, and the same call goes on from there:

- **Made**: free blocks get a log that holds one transaction, which writes the journal's inode and marks its blocks. One
  write of the superblock turns the journal on, with RECOVER; what follows is recovery.
- **Larger**: more blocks for its inode (a transaction like any other), then a new length in its superblock.
- **Smaller**: the length first, then blocks are given back.
- **Moved**: new blocks behind the old ones; then the inode's one record is written with both in the other order, while
  the log is empty; then the old ones are given back.
- **Removed**: one write of the superblock turns it off and marks the volume as not closed cleanly, until its blocks are
  free.

Source: Documentation/filesystems/ext4/journal.rst, tune2fs(8).

``admin.py`` is what ``ext4lite journal`` does; ``creation.py``, ``length.py``, ``moving.py`` and ``removal.py`` are the
ways above, ``blocks.py`` what they share: the volume open for that, the journal's inode and its blocks.
"""

from __future__ import annotations

from ext4lite.journal.admin import JournalInfo, create, remove, resize, show
from ext4lite.journal.length import change_length
from ext4lite.journal.moving import move
from ext4lite.journal.removal import unfinished

__all__ = ["JournalInfo", "change_length", "create", "move", "remove", "resize", "show", "unfinished"]
