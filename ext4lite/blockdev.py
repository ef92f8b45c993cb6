"""The image file as a block device: who may use it (locks) and how it is handed to a guest.

Whoever writes holds an exclusive lock on the file, readers and clones in progress a shared one. The locks are
open-file-description locks (Linux): they belong to the descriptor, so a child that inherits it keeps the lock, and they
vanish with the last copy, however its process ends. Such a lock does not tell who holds it; a record ``<image>.lock``
beside the file does.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from types import TracebackType
from uuid import UUID

from ext4lite.backing import open_base, read_header
from ext4lite.device import Device, FileDevice
from ext4lite.errors import HostError, Unsupported, VolumeBusy
from ext4lite.features import GUEST, GUEST_READ
from ext4lite.hostfs import data_runs
from ext4lite.layout import constants as c
from ext4lite.super import Super, read_super

_FLOCK = Struct("@hhqqi4x")  # struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid
_BUSY = (errno.EAGAIN, errno.EACCES)
_MOST_REPLACEMENTS = 100
_NAMED = 2
_READS = ", for reading"
StrPath = str | os.PathLike[str]


def _set_lock(fd: int, kind: int) -> None:
    """Take (F_RDLCK, F_WRLCK) or release (F_UNLCK) a lock on the whole file without waiting. OSError."""
    if sys.platform == "linux":
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0))
    else:
        operation = {fcntl.F_RDLCK: fcntl.LOCK_SH, fcntl.F_WRLCK: fcntl.LOCK_EX, fcntl.F_UNLCK: fcntl.LOCK_UN}[kind]
        fcntl.flock(fd, operation | fcntl.LOCK_NB)


def _refuse_mounted(fd: int, path: StrPath, *, writing: bool) -> None:
    """Raise VolumeBusy if the kernel has the image mounted, itself or through a loop device: it takes no lock.

    A reader only minds a mount that writes. Seen are the mounts of this process's namespace.
    """
    info = os.fstat(fd)
    itself = [f"{os.major(info.st_rdev)}:{os.minor(info.st_rdev)}"] if stat.S_ISBLK(info.st_mode) else []
    for device in (*itself, *_loop_devices(fd)):
        for where, options in _mounts_of(device):
            if writing or "rw" in options:
                raise VolumeBusy(
                    f"the volume is in use: mounted at {where}", where=os.fspath(path), hint=f"umount {where} first"
                )


def _loop_devices(fd: int) -> list[str]:
    """Return the numbers ("7:0") of the loop devices whose backing file is open at ``fd`` (Linux)."""
    out = []
    info = os.fstat(fd)
    with contextlib.suppress(OSError):
        for name in os.listdir("/sys/block"):  # noqa: PTH208 (it is on the way of every clone)
            if not name.startswith("loop"):
                continue
            with contextlib.suppress(OSError):
                backing = Path(f"/sys/block/{name}/loop/backing_file").read_text().removesuffix("\n")
                found = os.stat(backing)  # noqa: PTH116
                if (found.st_dev, found.st_ino) == (info.st_dev, info.st_ino):
                    out.append(Path(f"/sys/block/{name}/dev").read_text().strip())
    return out


def _mounts_of(device: str) -> list[tuple[str, list[str]]]:
    """Return (mount point, options of the file system) of the mounts of a device number."""
    out = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
            fields = line.split(" ")
            if fields[2] == device:
                options = fields[fields.index("-") + 3].split(",")
                out.append((fields[4].replace("\\040", " "), options))
    return out


def record_path(path: StrPath) -> Path:
    """Return the path of the lock record of an image."""
    path = Path(path)
    return path.with_name(path.name + ".lock")


def lock_shared(fd: int, path: StrPath) -> None:
    """Take a shared lock for reading; VolumeBusy (naming the holder) if somebody writes, HostError."""
    _lock(fd, path, fcntl.F_RDLCK)
    _refuse_mounted(fd, path, writing=False)


def lock_exclusive(fd: int, path: StrPath, command: str = "") -> None:
    """Take an exclusive lock for writing and leave a record of it; VolumeBusy if anybody reads or writes, HostError.

    ``fd`` must be open for writing. ``command`` names the holder in the record, by default the running program.
    """
    _lock(fd, path, fcntl.F_WRLCK)
    _refuse_mounted(fd, path, writing=True)
    _write_record(Path(path), command or _program())


def _program() -> str:
    """Return the running program's name for people; python for a ``-c`` or ``-``."""
    name = Path(sys.argv[0] if sys.argv else "").name
    return "python" if not name or name.startswith("-") else name


def unlock(fd: int, path: StrPath) -> None:
    """Release the lock on this descriptor (and all its copies) and remove the record that this process left."""
    remove_record(path)
    with contextlib.suppress(OSError):
        _set_lock(fd, fcntl.F_UNLCK)


def _lock(fd: int, path: StrPath, kind: int) -> None:
    """Lock the file at ``path``, open at ``fd``.

    Compacting and cloning put a new file in the place of the old one. Who opened the old one before that and locks it
    afterwards would have a file without a name, and lose all that he writes. So what has the name is compared once the
    lock is held (it is only ever replaced by who holds the lock of the old one), and opened anew at the same descriptor
    where it is another file.
    """
    for _ in range(_MOST_REPLACEMENTS):
        try:
            _set_lock(fd, kind)
        except OSError as e:
            if e.errno in _BUSY:
                who = holder(path, fd)
                raise VolumeBusy(f"the volume is in use{f' by {who}' if who else ''}", where=os.fspath(path)) from e
            raise HostError.from_os(e, os.fspath(path)) from e
        if _is_named(fd, path):
            return
        _reopen(fd, path)
    raise VolumeBusy("the volume is being replaced again and again", where=os.fspath(path))


def _is_named(fd: int, path: StrPath) -> bool:
    """Tell whether ``path`` names the file open at ``fd``. HostError when it names nothing."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))  # noqa: PTH116 (it is on the way of every clone)
    except OSError as e:
        raise HostError.from_os(e, os.fspath(path)) from e


def _reopen(fd: int, path: StrPath) -> None:
    """Open what has the name now at the same descriptor; the lock on what was open there ends."""
    writes = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    new = open_image(path, write=writes)
    try:
        os.dup2(new, fd, inheritable=False)
    finally:
        os.close(new)


def _write_record(path: Path, command: str) -> None:
    import json

    found = {"pid": os.getpid(), "command": command, "since": int(time.time()), "started": _started(os.getpid())}
    record = json.dumps(found) + "\n"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    # A directory that cannot be written to only costs the name in somebody's error message.
    with contextlib.suppress(OSError):
        fd = os.open(record_path(path), flags, 0o644)
        try:
            os.write(fd, record.encode())
        except OSError:  # a full disk: what is empty tells nothing, and would never be known as ours
            record_path(path).unlink()
        finally:
            os.close(fd)


def remove_record(path: StrPath) -> None:
    """Remove the lock record if this process wrote it."""
    found = _read_record(path)
    if found is not None and found[0] == os.getpid():
        with contextlib.suppress(OSError):
            record_path(path).unlink()


def _read_record(path: StrPath) -> tuple[int, str] | None:
    import json

    try:
        record = json.loads(record_path(path).read_text()[:4096])
        pid, started = int(record["pid"]), int(record.get("started", 0))
        if started and started != _started(pid):
            return None  # whoever wrote it is gone, and its number is another process's now
        return pid, str(record["command"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def holder(path: StrPath, fd: int) -> str:
    """Describe who has the volume locked ("gvx-launch (pid 4711)"); empty when that cannot be found out.

    Only a writer leaves a record. Readers are many and short, and often may not write beside the image; they are found
    as any holder is, by looking through the processes that this one may look at.
    """
    writing = _held(fd) != fcntl.F_RDLCK
    record = _read_record(path) if writing else None
    if record is not None and _alive(record[0]):
        return f"{record[1]} (pid {record[0]})"
    return _holder_from_proc(fd) + ("" if writing else _READS)


def _held(fd: int) -> int:
    """Return the kind of lock that keeps this descriptor from an exclusive one; F_UNLCK where that cannot be asked."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            return int(_FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0])
    return fcntl.F_UNLCK


def _started(pid: int) -> int:
    """Return when a process was started, in clock ticks since the host was; 0 where that cannot be found out."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return 0


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _holder_from_proc(fd: int) -> str:
    """Name the processes whose open file has the lock, two at most.

    /proc/PID/fdinfo lists the locks of each description (own processes only, unless root looks).
    """
    info = os.fstat(fd)
    wanted = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
    found: list[str] = []
    with contextlib.suppress(OSError):
        for process in Path("/proc").iterdir():
            if process.name.isdigit() and _has_lock(process, wanted):
                with contextlib.suppress(OSError):
                    found.append(f"{(process / 'comm').read_text().strip()} (pid {process.name})")
    if len(found) > _NAMED:
        return f"{found[0]} and {len(found) - 1} others"
    return " and ".join(found) or ("" if os.geteuid() == 0 else "a process that only root can see")


def _has_lock(process: Path, wanted: str) -> bool:
    """Tell whether a process has a file open whose lock is the one ("fd:00:1234"); ours never is: it has no lock."""
    with contextlib.suppress(OSError):
        for entry in (process / "fdinfo").iterdir():
            with contextlib.suppress(OSError):
                text = entry.read_text()
                if "OFDLCK" in text and wanted in text:
                    return True
    return False


def open_image(path: StrPath, *, write: bool = False) -> int:
    """Open an image and return its descriptor (close-on-exec).

    HostError, also for what is neither file nor block device.
    """
    where = os.fspath(path)
    if not where:
        raise HostError("an empty path names no file")
    try:
        fd = os.open(where, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as e:
        raise HostError.from_os(e, where) from e
    mode = os.fstat(fd).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
        os.close(fd)
        raise HostError("is not a regular file", where=where)
    return fd


def open_device(path: StrPath, *, write: bool = False, command: str = "") -> Device:
    """Open and lock an image, be it plain or a delta over another: what every command begins with.

    The lock is shared for reading, exclusive with ``write`` (then a record is left: see :func:`lock_exclusive` and
    :func:`remove_record`). A delta's backing file is found, checked and locked too. VolumeBusy, BackingError,
    CorruptImage, Unsupported, HostError.
    """
    fd = open_image(path, write=write)
    try:
        if write:
            lock_exclusive(fd, path, command)
        else:
            lock_shared(fd, path)
    except BaseException:
        os.close(fd)
        raise
    try:
        return device_at(fd, path)
    except BaseException:
        if write:
            remove_record(path)
        os.close(fd)
        raise


def device_at(fd: int, path: StrPath) -> Device:
    """Return the device of the image open and locked at ``fd``; see :func:`open_device`."""
    where = os.fspath(path)
    header = read_header(fd, where)
    if header is None:
        return FileDevice(fd, where)
    from ext4lite.delta import DeltaDevice

    base, found = open_base(header, Path(path))
    try:
        return DeltaDevice(fd, where, header, base, str(found))
    except BaseException:
        os.close(base)
        raise


def target_path(path: StrPath) -> Path:
    """Return where a new image of this name goes: a symlink stays, and what it names is made or replaced.

    HostError for what can be no file's name.
    """
    where = os.fspath(path)
    if not where:
        raise HostError("an empty path names no file")
    if where.endswith("/"):
        raise HostError("is the name of a directory", where=where)
    found = Path(where)
    if found.is_symlink():
        found = Path(os.path.realpath(where))
        if found.is_symlink():
            raise HostError("too many levels of symbolic links", where=where)
    return found


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[None]:
    """Hold the lock of the file at ``path``, if there is one, while the block puts another in its place.

    So nobody can come to the old file meanwhile and go on with it when it has no name any more. VolumeBusy, HostError.
    """
    if not path.exists():
        yield
        return
    fd = open_image(path, write=True)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise HostError("is not a regular file", where=str(path))
        _lock(fd, path, fcntl.F_WRLCK)
        _refuse_mounted(fd, path, writing=True)
        yield
    finally:
        os.close(fd)


def check_target(path: Path, *, force: bool) -> bool:
    """Allow a new image at ``path``: nothing is there, or a file that nobody uses and that is empty or ``force``.

    Return whether a file is there. HostError, VolumeBusy.
    """
    if not path.exists():
        return False
    fd = open_image(path, write=True)
    try:
        if not force and next(data_runs(fd, os.fstat(fd).st_size), None) is not None:
            raise HostError("the target exists", where=str(path), hint="--force replaces it")
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise HostError("is not a regular file", where=str(path))
        _lock(fd, path, fcntl.F_WRLCK)
        _refuse_mounted(fd, path, writing=True)
    finally:
        os.close(fd)
    return True


@dataclass(slots=True)
class GuestVolume:
    """A checked and locked volume, ready to be handed over. Close it when the guest is gone; also a context manager."""

    fd: int
    """Read-write (or read-only) descriptor, close-on-exec. Its copies in children keep the lock."""
    path: Path
    readonly: bool
    uuid: UUID
    size: int
    """Bytes of the file system."""
    base_fd: int = -1
    """Descriptor of the backing file, read-only and under a shared lock; -1 where the volume is no delta."""
    closed: bool = False

    def close(self) -> None:
        """Remove the lock record and close this copy of the descriptor. Harmless when called again."""
        if not self.closed:
            self.closed = True
            if not self.readonly:
                remove_record(self.path)
            for fd in (self.fd, self.base_fd):
                if fd >= 0:
                    os.close(fd)

    def __enter__(self) -> GuestVolume:
        return self

    def __exit__(self, t: type[BaseException] | None, v: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def open_for_guest(path: StrPath, readonly: bool = False, *, command: str = "") -> GuestVolume:
    """Open a volume for a guest: lock it, and check that its superblock is sound and within what the driver can do.

    A journal that needs recovery is replayed first (not for ``readonly``, which writes nothing and so refuses). A clean
    volume costs one read. Raises VolumeBusy, NeedsRecovery, CorruptImage, Unsupported (naming the features), HostError.
    """
    image = open_device(path, write=not readonly, command=command)
    try:
        found = read_super(image, os.fspath(path), torn=True)
        _require_guest_features(found, readonly)
        if found.needs_recovery and not readonly:
            from ext4lite.recover import recover_locked

            recover_locked(image, os.fspath(path))
            found = read_super(image, os.fspath(path))
        found.require_clean()
    except BaseException:
        if not readonly:
            remove_record(path)
        image.close()
        raise
    # Recovery has flushed: nothing of a delta is in memory only, and the guest's driver may read it afresh.
    base = getattr(image, "base", -1)
    return GuestVolume(image.fd, Path(path), readonly, found.uuid, found.blocks * found.block_size, base)


def _require_guest_features(found: Super, readonly: bool) -> None:
    allowed = GUEST_READ.incompat if readonly else GUEST.incompat
    names = c.feature_names(found.incompat & ~(allowed | c.INCOMPAT_RECOVER), c.INCOMPAT, "I")
    what = f"a guest cannot use a volume with {', '.join(names)}"
    if not readonly:
        names += c.feature_names(found.ro_compat & ~GUEST.ro_compat, c.RO_COMPAT, "R")
        what = f"a guest cannot write to a volume with {', '.join(names)}"
        if not names and not found.incompat & c.INCOMPAT_EXTENTS:
            names, what = ["no extents"], "a guest cannot write to a volume without extents (ext2, ext3)"
        if not names and not found.incompat & c.INCOMPAT_FILETYPE:
            names, what = ["no filetype"], "a guest cannot write to a volume without filetype"
    if names:
        raise Unsupported(what, where=found.where, hint="ext4lite mkfs and mkgolden make suitable volumes")
