"""POSIX ACLs: what they say about a mode, and a mode about them (source: acl(5), "CORRESPONDENCE BETWEEN ACL ENTRIES
AND FILE PERMISSION BITS" and "OBJECT CREATION AND DEFAULT ACLs").

An ACL here is a list of entries, read from and written to the form that ext4 stores.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct, iter_unpack

from ext4lite.errors import Invalid
from ext4lite.xattrs import acl_from_disk, acl_to_disk

USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
_ORDER = (USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER)
_NO_ID = 0xFFFFFFFF
_ENTRY = Struct("<HHI")
_VERSION = b"\x02\0\0\0"


@dataclass(slots=True)
class AclEntry:
    """Whom an entry is for (``tag``, and ``ident`` for a named user or group), and the three permission bits."""

    tag: int
    perm: int
    ident: int = _NO_ID


Acl = list[AclEntry]


def parse(stored: bytes, where: str = "") -> Acl:
    """Decode what ext4 stores; CorruptImage with ``where`` when it is malformed."""
    return [AclEntry(*entry) for entry in iter_unpack("<HHI", acl_from_disk(stored, where)[4:])]


def pack(acl: Acl) -> bytes:
    """Return the stored form."""
    return acl_to_disk(_VERSION + b"".join(_ENTRY.pack(e.tag, e.perm, e.ident) for e in acl))


def check(acl: Acl) -> None:
    """Raise Invalid for an ACL that acl_valid(3) would refuse: wrong order, repeated or missing entries, no mask."""
    tags = [e.tag for e in acl]
    if any(tag not in _ORDER for tag in tags) or any(e.perm & ~7 for e in acl):
        raise Invalid("a POSIX ACL has an unknown entry")
    ranks = [_ORDER.index(tag) for tag in tags]
    single = all(tags.count(tag) == 1 for tag in (USER_OBJ, GROUP_OBJ, OTHER)) and tags.count(MASK) <= 1
    named = USER in tags or GROUP in tags
    if ranks != sorted(ranks) or not single or (named and MASK not in tags):
        raise Invalid("a POSIX ACL is not valid")
    if any(e.ident == _NO_ID for e in acl if e.tag in (USER, GROUP)):
        raise Invalid("a POSIX ACL names nobody")


def is_extended(acl: Acl) -> bool:
    """Tell whether an ACL says more than nine permission bits can."""
    return any(e.tag not in (USER_OBJ, GROUP_OBJ, OTHER) for e in acl)


def _group_class(acl: Acl) -> AclEntry:
    """The entry that the group bits of a mode stand for: the mask, else the owning group's."""
    found = {e.tag: e for e in acl}
    return found.get(MASK) or found[GROUP_OBJ]


def mode_of(acl: Acl) -> int:
    """Return the nine permission bits that a valid ACL stands for."""
    found = {e.tag: e.perm for e in acl}
    return found[USER_OBJ] << 6 | _group_class(acl).perm << 3 | found[OTHER]


def with_mode(acl: Acl, mode: int) -> Acl:
    """Return the ACL after chmod: owner, group class and others get the mode's bits."""
    out = [AclEntry(e.tag, e.perm, e.ident) for e in acl]
    for e in out:
        if e.tag == USER_OBJ:
            e.perm = mode >> 6 & 7
        elif e.tag == OTHER:
            e.perm = mode & 7
    _group_class(out).perm = mode >> 3 & 7
    return out


def inherited(default: Acl, mode: int) -> tuple[Acl, int]:
    """Return (access ACL, mode) of a new inode in a directory with a default ACL: what both allow."""
    allowed = mode_of(default) & mode & 0o777
    return with_mode(default, allowed), mode & ~0o777 | allowed
