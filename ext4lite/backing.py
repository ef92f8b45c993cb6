"""The header of a delta file and the backing file that it names; the format is docs/delta.md."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from ext4lite.checksum import crc32c, superblock_checksum
from ext4lite.device import pread_full
from ext4lite.errors import BackingError, CorruptImage, HostError, Unsupported
from ext4lite.hostfs import pwrite_all
from ext4lite.layout import constants as c
from ext4lite.layout._codecs import DeltaHeader, DeltaPage, SuperBlock

MAGIC = b"gvxdelta"
VERSION = 1
BLOCK = 4096
"""Bytes of a block of the bitmap, whatever the file system's blocks are."""
PAGE_BITS = 8 * 4064
"""Blocks that a page of the bitmap speaks for."""
PAIR = 2 * DeltaPage.SIZE
"""Bytes of the two places of a page."""
_SEED = 0xFFFFFFFF
_MAX_PATH = 2000


def aligned(size: int) -> int:
    """Round up to whole blocks."""
    return -(-size // BLOCK) * BLOCK


def pages_of(size: int) -> int:
    """Return how many pages the bitmap of a volume of ``size`` bytes has."""
    return -(-(aligned(size) // BLOCK) // PAGE_BITS)


def file_size(size: int) -> int:
    """Return how long the delta file of a volume of ``size`` bytes is: data, two places a page, two headers."""
    return aligned(size) + pages_of(size) * PAIR + 2 * DeltaHeader.SIZE


def seal(raw: bytes, offset: int) -> bytes:
    """Return ``raw`` with its checksum at ``offset``: crc32c from ~0 without inversion, the field itself as zero."""
    raw = raw[:offset] + bytes(4) + raw[offset + 4 :]
    return raw[:offset] + crc32c(_SEED, raw).to_bytes(4, "little") + raw[offset + 4 :]


@dataclass(slots=True, frozen=True)
class Identity:
    """What tells one backing file from another, and from what it was before somebody changed it."""

    uuid: UUID
    size: int
    """Bytes of the file."""
    mtime_ns: int
    super_checksum: int
    """crc32c of its superblock's first 1020 bytes; with the four behind, its own checksum, it would be a constant."""

    def differences(self, other: Identity) -> str:
        """Tell in words what of ``other`` differs; empty when nothing does."""
        parts = []
        if self.uuid != other.uuid:
            parts.append(f"UUID {other.uuid} instead of {self.uuid}")
        if self.size != other.size:
            parts.append(f"{other.size} bytes instead of {self.size}")
        if self.super_checksum != other.super_checksum:
            parts.append("its superblock has changed")
        if self.mtime_ns != other.mtime_ns:
            parts.append("its modification time has changed")
        return ", ".join(parts)


def identify(fd: int, where: str) -> Identity:
    """Return the identity of the plain image open at ``fd``. BackingError if it is none, HostError."""
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        raise BackingError("a backing file must be a regular file", where=where)
    if read_header(fd, where) is not None:
        raise BackingError("the backing file is a delta itself", where=where, hint="ext4lite flatten it first")
    raw = pread_full(fd, c.SUPERBLOCK_SIZE, c.SUPERBLOCK_OFFSET, where)
    if len(raw) < c.SUPERBLOCK_SIZE or SuperBlock.unpack(raw).s_magic != c.MAGIC:
        raise BackingError("the backing file is no ext4 image", where=where)
    uuid = UUID(bytes=SuperBlock.unpack(raw).s_uuid)
    return Identity(uuid, info.st_size, info.st_mtime_ns, superblock_checksum(raw))


def identity_of(header: DeltaHeader) -> Identity:
    """Return the identity that a delta expects of its backing file."""
    uuid = UUID(bytes=header.d_base_uuid)
    return Identity(uuid, header.d_base_size, header.d_base_mtime_ns, header.d_base_super)


def base_paths(header: DeltaHeader, path: Path) -> list[Path]:
    """Return where a delta at ``path`` looks for its backing file: beside itself first, then where it once was."""
    out = []
    if header.d_relative_len:
        relative = os.fsdecode(header.d_relative[: header.d_relative_len])
        out.append(Path(os.path.normpath(Path(os.path.realpath(path)).parent / relative)))
    if header.d_path_len:
        absolute = Path(os.fsdecode(header.d_path[: header.d_path_len]))
        if absolute not in out:
            out.append(absolute)
    return out


def make_header(
    size: int, base: Path, identity: Identity, directory: Path, *, own_id: bytes, sequence: int
) -> DeltaHeader:
    """Return the header of a delta in ``directory`` over ``base``. Unsupported for a path that has no room in it."""
    absolute = os.fsencode(os.path.realpath(base))
    relative = os.fsencode(os.path.relpath(os.path.realpath(base), os.path.realpath(directory)))
    absolute = absolute if len(absolute) <= _MAX_PATH else b""
    relative = relative if len(relative) <= _MAX_PATH else b""
    if not absolute and not relative:
        raise Unsupported(f"a backing file's path has at most {_MAX_PATH} bytes", where=str(base))
    return DeltaHeader(
        d_magic=MAGIC,
        d_version=VERSION,
        d_sequence=sequence,
        d_id=own_id,
        d_size=size,
        d_block_size=BLOCK,
        d_base_uuid=identity.uuid.bytes,
        d_base_size=identity.size,
        d_base_mtime_ns=identity.mtime_ns,
        d_base_super=identity.super_checksum,
        d_path_len=len(absolute),
        d_relative_len=len(relative),
        d_path=absolute.ljust(_MAX_PATH, b"\0"),
        d_relative=relative.ljust(_MAX_PATH, b"\0"),
    )


def write_header(fd: int, header: DeltaHeader) -> None:
    """Write a header into the place that its sequence number says. OSError."""
    at = file_size(header.d_size) - DeltaHeader.SIZE * (1 + (header.d_sequence & 1))
    pwrite_all(fd, seal(header.pack(), DeltaHeader.OFFSET_d_checksum), at)


def _covered_by_volume(fd: int, length: int, where: str) -> bool:
    """Tell whether a file's own superblock says that the volume reaches to where a delta has its headers.

    What lies there is then a guest's data, whatever it looks like.
    """
    raw = pread_full(fd, c.SUPERBLOCK_SIZE, c.SUPERBLOCK_OFFSET, where)
    if len(raw) < c.SUPERBLOCK_SIZE:
        return False
    sb = SuperBlock.unpack(raw)
    if sb.s_magic != c.MAGIC:
        return False
    wide = sb.s_feature_incompat & c.INCOMPAT_64BIT
    blocks = sb.s_blocks_count_lo | (sb.s_blocks_count_hi << 32 if wide else 0)
    return blocks << 10 + min(sb.s_log_block_size, 6) > length - 2 * DeltaHeader.SIZE


def read_header(fd: int, where: str) -> DeltaHeader | None:
    """Return the header of the delta file open at ``fd``; None for a plain image.

    CorruptImage (both copies are damaged, sizes that disagree), Unsupported (a later version), HostError.
    """
    info = os.fstat(fd)
    length = info.st_size
    least = 2 * DeltaHeader.SIZE
    if not stat.S_ISREG(info.st_mode) or length <= least or length % BLOCK or _covered_by_volume(fd, length, where):
        return None
    raw = pread_full(fd, least, length - least, where)
    best: DeltaHeader | None = None
    damaged = False
    for at in (0, DeltaHeader.SIZE):
        piece = raw[at : at + DeltaHeader.SIZE]
        if piece[: len(MAGIC)] != MAGIC:
            continue
        found = DeltaHeader.unpack(piece)
        if seal(piece, DeltaHeader.OFFSET_d_checksum) != piece:
            damaged = True
        elif best is None or found.d_sequence > best.d_sequence:
            best = found
    if best is None:
        if damaged:
            raise CorruptImage("both copies of the delta's header are damaged", where=where)
        return None
    _check_header(best, length, where)
    return best


def _check_header(header: DeltaHeader, length: int, where: str) -> None:
    if header.d_version != VERSION or header.d_flags:
        what = f"a delta of version {header.d_version} with flags {header.d_flags:#x}"
        raise Unsupported(f"{what} is unknown to this program", where=where)
    if header.d_block_size != BLOCK or max(header.d_path_len, header.d_relative_len) > _MAX_PATH:
        raise CorruptImage("the delta's header makes no sense", where=where)
    if not 0 < header.d_size < 1 << 62 or file_size(header.d_size) != length:
        raise CorruptImage(
            f"the delta is {length} bytes long instead of {file_size(header.d_size)}",
            where=where,
            hint="was it copied whole?",
        )


def create(fd: int, base_fd: int, base: Path, target: Path) -> None:
    """Make the empty file ``fd`` (that will be ``target``) a delta over the image ``base``, open at ``base_fd``.

    The time does not depend on the volume's size. BackingError, Unsupported, OSError.
    """
    identity = identify(base_fd, str(base))
    header = make_header(identity.size, base, identity, target.parent, own_id=os.urandom(16), sequence=1)
    os.ftruncate(fd, file_size(identity.size))
    write_header(fd, header)


def open_base(header: DeltaHeader, path: Path) -> tuple[int, Path]:
    """Open the backing file of the delta at ``path``, under a shared lock; return its descriptor and path.

    BackingError where there is none or it is another one (nothing but its superblock has been read then), VolumeBusy.
    """
    from ext4lite.blockdev import lock_shared, open_image

    wanted = identity_of(header)
    reasons = []
    for candidate in base_paths(header, path):
        try:
            fd = open_image(candidate)
        except HostError as e:
            reasons.append(str(e))
            continue
        try:
            lock_shared(fd, candidate)
            differences = wanted.differences(identify(fd, str(candidate)))
            if not differences:
                return fd, candidate
            reasons.append(f"{candidate}: {differences}")
        except BackingError as e:
            reasons.append(str(e))
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
    raise BackingError(
        f"the backing file is missing or has changed: {'; '.join(reasons)}",
        where=str(path),
        hint="ext4lite rebase gives the delta another one",
    )
