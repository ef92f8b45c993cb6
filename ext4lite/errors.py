"""The exceptions of ext4lite: one small tree. A class's docstring says when it is raised; each knows its exit code.

Exit codes of every ``ext4lite`` command (stable, also in docs/exit-codes.md):

=====  ==================================================================
0      done
1      another error (a bug: please report it)
2      wrong usage (typer's own)
3      the volume is in use (:class:`VolumeBusy`)
4      the image is damaged (:class:`CorruptImage`)
5      the image is sound, but uses something unsupported (:class:`Unsupported`)
6      the host answered an error: missing file, disk full, permission (:class:`HostError`)
7      a container image or archive is damaged or incomplete (:class:`ImageError`)
8      reflink was demanded, and the host cannot (:class:`ReflinkUnavailable`)
9      the volume is full (:class:`VolumeFull`)
10     what was asked for is not possible in this tree (:class:`PathError`)
11     a delta's backing file is missing or another one (:class:`BackingError`)
12     ``ext4lite diff --exit-code``: the volumes differ
130    interrupted by Ctrl-C
=====  ==================================================================
"""

from __future__ import annotations

import errno

EXIT_DIFFERENT = 12
"""Not an error: ``ext4lite diff --exit-code`` found a difference."""


class Ext4LiteError(Exception):
    """Base of all errors of ext4lite: what went wrong, where, and what to do."""

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what, self.where, self.hint = what, where, hint
        super().__init__(what)

    def __str__(self) -> str:
        """One line: ``where: what (hint)``."""
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text} ({self.hint})" if self.hint else text


class VolumeBusy(Ext4LiteError):
    """Somebody else holds the volume's lock."""

    exit_code = 3


class CorruptImage(Ext4LiteError):
    """The image breaks a rule of the ext4 format: bad magic, geometry, checksum or pointer."""

    exit_code = 4


class NeedsRecovery(CorruptImage):
    """The volume was not closed cleanly: its journal must be replayed or its structures checked before it is used."""


class Unsupported(Ext4LiteError):
    """The image is sound, but uses a feature that this version does not know."""

    exit_code = 5


class HostError(Ext4LiteError):
    """The host's operating system refused an operation."""

    exit_code = 6

    @classmethod
    def from_os(cls, error: OSError, where: str = "") -> HostError:
        """Return the error for an ``OSError``, in the system's words."""
        return cls((error.strerror or str(error)).lower(), where=where or str(error.filename or ""))


class ImageError(Ext4LiteError):
    """A container image (docker-archive, OCI layout, layer tar) is damaged, incomplete or of an unknown kind."""

    exit_code = 7


class ReflinkUnavailable(Ext4LiteError):
    """``--reflink=always``, and the host file system cannot share blocks."""

    exit_code = 8


class VolumeFull(Ext4LiteError):
    """No free blocks or inodes are left in the volume."""

    exit_code = 9


class BackingError(Ext4LiteError):
    """A delta's backing file is missing, or is not (any more) the one that the delta was made on."""

    exit_code = 11


class PathError(Ext4LiteError):
    """An operation on a volume's tree is not possible as things are. ``errno`` is what the system call would give."""

    exit_code = 10
    errno = errno.EINVAL


class NotFound(PathError):
    """There is nothing of that name."""

    errno = errno.ENOENT


class Exists(PathError):
    """The name is taken."""

    errno = errno.EEXIST


class NotEmpty(PathError):
    """A directory that is not empty cannot be removed or replaced."""

    errno = errno.ENOTEMPTY


class NotADirectory(PathError):
    """A directory is needed."""

    errno = errno.ENOTDIR


class IsADirectory(PathError):
    """A directory is in the way."""

    errno = errno.EISDIR


class Busy(PathError):
    """The root, ``.`` and ``..`` cannot be removed or renamed."""

    errno = errno.EBUSY


class NotPermitted(PathError):
    """ext4 does not do that for this kind of inode (a hard link to a directory, data in a device)."""

    errno = errno.EPERM


class TooManyLinks(PathError):
    """An inode cannot have more names, or a directory more subdirectories."""

    errno = errno.EMLINK


class NameTooLong(PathError):
    """A name has more than 255 bytes, or a symlink's target more than a block."""

    errno = errno.ENAMETOOLONG


class Invalid(PathError):
    """An argument makes no sense: a directory moved into itself, a negative size, a name with a slash."""

    errno = errno.EINVAL


class FileTooLarge(PathError):
    """A file cannot become that large."""

    errno = errno.EFBIG


class NotSupported(PathError):
    """ext4 does not do that for this kind of inode, and says so as for a feature it lacks."""

    errno = errno.EOPNOTSUPP


class AccessDenied(PathError):
    """A default ACL for what is no directory."""

    errno = errno.EACCES


class ValueTooLong(PathError):
    """The value of an extended attribute has more than 65536 bytes."""

    errno = errno.E2BIG


class NoAttribute(PathError):
    """There is no extended attribute of that name."""

    errno = errno.ENODATA


class NoRoomForAttribute(VolumeFull):
    """Extended attributes do not fit into an inode and its block."""


class LoopOfLinks(PathError):
    """Too many symlinks on the way."""

    errno = errno.ELOOP
