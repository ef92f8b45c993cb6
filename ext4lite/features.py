"""Which features ext4lite reads, writes, lays out anew and makes: the one place to add a feature flag.

A feature has a name and a bit in ``layout/constants.py``. What is not in a set here is refused by name by whoever asks
for the set; so a feature first gets its code, then its place here, then its line in ``docs/ext4lite.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ext4lite.layout import constants as c

if TYPE_CHECKING:
    from ext4lite.super import Super

_ALL = 0xFFFFFFFF
_DIR_PREALLOC = 0x1  # a hint, which says nothing about the disk
_READONLY = 0x1000  # a flag for the kernel


class Features(NamedTuple):
    """A set of features: the masks of the superblock's three words."""

    compat: int
    incompat: int
    ro_compat: int

    def beyond(self, sb: Super) -> list[str]:
        """Return the names of a volume's features that are not in the set."""
        return [
            *c.feature_names(sb.compat & ~self.compat, c.COMPAT, "C"),
            *c.feature_names(sb.incompat & ~self.incompat, c.INCOMPAT, "I"),
            *c.feature_names(sb.ro_compat & ~self.ro_compat, c.RO_COMPAT, "R"),
        ]


PROFILE = Features(
    c.COMPAT_EXT_ATTR | c.COMPAT_DIR_INDEX,
    c.INCOMPAT_FILETYPE | c.INCOMPAT_EXTENTS | c.INCOMPAT_64BIT | c.INCOMPAT_FLEX_BG | c.INCOMPAT_CSUM_SEED,
    c.RO_SPARSE_SUPER | c.RO_LARGE_FILE | c.RO_HUGE_FILE | c.RO_DIR_NLINK | c.RO_EXTRA_ISIZE | c.RO_METADATA_CSUM,
)
"""What ``mkfs`` makes (the builder); ``has_journal`` comes with a journal."""

GUEST = Features(_ALL, PROFILE.incompat | c.INCOMPAT_LARGE_DIR, PROFILE.ro_compat | c.RO_GDT_CSUM)
"""What the runtime's driver writes to (``native/internal/ext4/feature.go`` has the same masks)."""

GUEST_READ = Features(_ALL, GUEST.incompat | c.INCOMPAT_META_BG | c.INCOMPAT_MMP | c.INCOMPAT_INLINE_DATA, _ALL)
"""What the runtime's driver reads."""

READ = Features(
    _ALL,
    GUEST_READ.incompat | c.INCOMPAT_RECOVER | c.INCOMPAT_EA_INODE | c.INCOMPAT_ENCRYPT | c.INCOMPAT_CASEFOLD,
    _ALL,
)
"""What is read and recovered (``volume.py``, ``recover.py``, ``jbd2/``)."""

WRITE = Features(
    _ALL,
    GUEST.incompat | c.INCOMPAT_RECOVER | c.INCOMPAT_EA_INODE,
    GUEST.ro_compat | c.RO_ORPHAN_PRESENT,
)
"""What is written to (``writer.py`` and below it)."""

LAYOUT = Features(
    PROFILE.compat
    | c.COMPAT_HAS_JOURNAL
    | c.COMPAT_RESIZE_INODE
    | c.COMPAT_FAST_COMMIT
    | c.COMPAT_STABLE_INODES
    | c.COMPAT_ORPHAN_FILE
    | _DIR_PREALLOC,
    WRITE.incompat & ~c.INCOMPAT_EA_INODE,
    WRITE.ro_compat,
)
"""Whose groups and journal change in place (``resize/``, ``journal/``)."""

REBUILD = Features(
    LAYOUT.compat | c.COMPAT_SPARSE_SUPER2,
    READ.incompat,
    LAYOUT.ro_compat | c.RO_QUOTA | c.RO_BIGALLOC | c.RO_PROJECT | c.RO_VERITY | _READONLY,
)
"""What is written afresh (``rebuild/``, ``compact.py``): everything that one of these features adds is carried over."""
