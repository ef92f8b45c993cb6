"""Applying a container layer's tar to a directory of a volume, in the way dockerd's overlay2 driver does.

The judge is dockerd (``pkg/archive`` with the overlay whiteout format, native diff) on the same layer. Rules, and
where this module goes on although dockerd gives up or loses something (docs/docker-store.md lists them with reasons):

- ``.wh.NAME`` becomes a character device 0/0 named NAME, mode 0, owned as the marker; ``.wh..wh..opq`` becomes
  ``trusted.overlay.opaque=y`` on its directory, whatever came before it in the layer stays.
- Names are cleaned lexically, a leading ``/`` falls away; a name that climbs out is refused. Symlinks *made by this
  layer* are followed in the directory part, with the layer as root directory; symlinks of lower layers are not seen.
- Missing parents are made: mode 0755, root, with the build's timestamp.
- A later member wins over an earlier one of the same name: a directory merges into a directory, all else is replaced.
  A directory that takes the place of a non-directory or a whiteout of the same layer is opaque.
- ``./`` keeps its fixed metadata (0755, root), as in dockerd.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, field
from struct import Struct

from ext4lite.builder import ImageBuilder, Kind, Meta
from ext4lite.errors import ImageError
from ext4lite.overlay import tarstream
from ext4lite.overlay.tarsplit import TarSplitWriter, crc64
from ext4lite.overlay.tarstream import Member, TarReader, clean_name, show

WHITEOUT_PREFIX = b".wh."
OPAQUE_MARKER = b".wh..wh..opq"
OPAQUE_XATTR = b"trusted.overlay.opaque"
_NAME_MAX = 255
_PATH_MAX = 4096
_MAX_SYMLINKS = 40
# ext4's 34-bit seconds: 1901-12-13 … 2446-05-10.
_TIME_MIN = -(1 << 31) * 1_000_000_000
_TIME_MAX = ((1 << 34) - (1 << 31)) * 1_000_000_000 - 1
_SPECIAL: dict[int, Kind] = {tarstream.CHAR: "char", tarstream.BLOCKDEV: "block", tarstream.FIFO: "fifo"}
_XATTR_NAMESPACES = (b"user.", b"trusted.", b"security.")
_ACL_ACCESS, _ACL_DEFAULT = b"system.posix_acl_access", b"system.posix_acl_default"
_ACL_USER_OBJ, _ACL_GROUP_OBJ, _ACL_MASK, _ACL_OTHER = 0x01, 0x04, 0x10, 0x20
_ACL_ENTRY = Struct("<HHI")  # tag, permissions, id
_NO_XATTRS: dict[bytes, bytes] = {}


@dataclass(slots=True)
class LayerStats:
    """What applying a layer made of it.

    ``size``: bytes as dockerd's layerdb counts them (every inode once, symlinks by the length of their target);
    ``members``: tar members; ``files``: regular files; ``content_bytes``: bytes of their content in the tar;
    ``superseded``: members whose content is not under their name any more (indices from 0).
    """

    size: int = 0
    members: int = 0
    files: int = 0
    content_bytes: int = 0
    whiteouts: int = 0
    superseded: set[int] = field(default_factory=set)


class LayerApplier:
    """Applies one layer's members under ``root``, an inode of ``builder``; ``timestamp_ns`` dates what has no date."""

    def __init__(self, builder: ImageBuilder, root: int, *, timestamp_ns: int, where: str) -> None:
        self._builder = builder
        self._root = root
        self._timestamp_ns = timestamp_ns
        self.where = where
        self.stats = LayerStats()
        self._dirs: dict[bytes, int] = {b"": root}  # clean path → directory, only paths free of symlinks
        self._targets: dict[int, bytes] = {}  # symlinks of this layer
        self._sizes: dict[int, int] = {}  # inode → size as layerdb counts it
        self._links: dict[int, int] = {}  # inode → names, for those with more than one
        self._content_of: dict[int, int] = {}  # inode → index of the member whose content it holds
        self._whiteouts: set[int] = set()
        self._followed: set[int] = set()  # symlinks that lie on the way to some member …
        self._through: set[int] = set()  # … and indices of the members with content behind any of them
        self._via_symlink = False  # the last member's directory part went through a symlink …
        self._via_absolute = False  # … one that leads elsewhere when the layer is not the root directory

    # -- the walk over a tar ----------------------------------------------------------------------------------------

    def apply(self, reader: TarReader, split: TarSplitWriter) -> None:
        """Apply every member of ``reader`` and record the tar in ``split``. Afterwards :attr:`stats` is complete.

        If ``stats.superseded`` is not empty, ``split`` refers to contents that later members replaced: it must be
        made anew with :func:`split_again`.
        """
        seen: set[bytes] = set()
        stats = self.stats
        regular, contiguous = tarstream.REGULAR, tarstream.CONTIGUOUS
        index = -1
        while (member := reader.next()) is not None:
            index += 1
            clean = clean_name(member.name)
            size, crc = member.size, 0
            if clean in seen:
                # The name has its entry already: this member, content and all, is kept as raw bytes.
                split.segment(member.raw)
                inline: TarSplitWriter | None = split
            else:
                seen.add(clean)
                inline = None
            if member.type in (regular, contiguous):
                stats.files += 1
                stats.content_bytes += size
                crc = self._file(member, clean, index, reader, inline)
            elif member.type != tarstream.PAX_GLOBAL:
                self._other(member, clean)
            if inline is None:
                split.member(member.raw, member.name, size, crc)
        for raw in reader.tail():
            split.segment(raw)
        stats.members = index + 1
        stats.size = sum(self._sizes.values())

    def _file(self, member: Member, clean: bytes, index: int, reader: TarReader, inline: TarSplitWriter | None) -> int:
        """A regular file (or a whiteout marker, which is one): returns the CRC-64 of its content.

        With ``inline`` the content also goes there as segments, since no file entry can name it.
        """
        parent, base = self._place(member, clean)
        if base.startswith(WHITEOUT_PREFIX):
            self._whiteout(member, parent, base)
            crc = 0
            for piece in reader.data():
                crc = crc64(piece, crc)
                if inline is not None:
                    inline.segment(piece)
            if member.size and inline is None:
                self.stats.superseded.add(index)
            return crc
        if self._builder.lookup(parent, base) is not None:
            self._remove(member, parent, base)
        size = member.size
        sink = self._builder.add_file(parent, base, self._meta(member), size)
        ino = sink.ino
        crc = 0
        if size:
            whole = reader.whole()
            if whole is not None:
                crc = crc64(whole)
                sink.write(whole)
                if inline is not None:
                    inline.segment(whole)
            else:
                for piece in reader.data():
                    crc = crc64(piece, crc)
                    sink.write(piece)
                    if inline is not None:
                        inline.segment(piece)
            self._sizes[ino] = size
            self._content_of[ino] = index
            if self._via_symlink:
                self._through.add(index)
            if self._via_absolute and inline is None:
                # dockerd looks contents up by name with the host's root directory, and would leave the layer.
                self.stats.superseded.add(index)
        sink.close()
        return crc

    def _other(self, member: Member, clean: bytes) -> None:
        kind = member.type
        if kind == tarstream.DIRECTORY:
            self._directory(member, clean)
            return
        parent, base = self._place(member, clean)
        if base.startswith(WHITEOUT_PREFIX):
            self._whiteout(member, parent, base)
            return
        if self._builder.lookup(parent, base) is not None:
            self._remove(member, parent, base)
        if kind == tarstream.SYMLINK:
            target = member.linkname
            if not target or len(target) >= _PATH_MAX or b"\0" in target:
                raise self._error(member, "bad symlink target")
            ino = self._builder.add_symlink(parent, base, target, self._meta(member))
            self._targets[ino] = target
            self._sizes[ino] = len(target)
        elif kind == tarstream.LINK:
            self._hardlink(member, parent, base)
        else:
            if not 0 <= member.major < 1 << 12 or not 0 <= member.minor < 1 << 20:
                raise self._error(member, f"bad device number {member.major}/{member.minor}")
            self._builder.add_node(parent, base, self._meta(member), _SPECIAL[kind], member.major, member.minor)

    # -- one kind of member each ------------------------------------------------------------------------------------

    def _directory(self, member: Member, clean: bytes) -> None:
        if not clean:
            if posixpath.normpath(member.name) == b"/":
                # Spelt "/", dockerd does apply it; spelt "./", it does not.
                self._builder.set_meta(self._root, self._merged(self._root, self._meta(member)))
            else:
                root = self._builder.meta(self._root)
                root.mtime_ns = self._time(member)
                self._builder.set_meta(self._root, root)
            return
        parent, base = self._place(member, clean)
        if base.startswith(WHITEOUT_PREFIX):
            self._whiteout(member, parent, base)
            return
        builder = self._builder
        meta = self._meta(member)
        existing = builder.lookup(parent, base)
        if existing is not None:
            if builder.kind(existing) == "dir":
                builder.set_meta(existing, self._merged(existing, meta))
                return
            self._remove(member, parent, base)
            meta.xattrs = {**meta.xattrs, OPAQUE_XATTR: b"y"}
        ino = builder.add_dir(parent, base, meta)
        if not self._via_symlink:
            self._dirs[clean] = ino

    def _hardlink(self, member: Member, parent: int, base: bytes) -> None:
        builder = self._builder
        target = clean_name(member.linkname)
        if target.startswith(b"../") or target in (b"..", b""):
            raise self._error(member, f"hard link to {show(member.linkname)} leaves the layer")
        directory, _, name = target.rpartition(b"/")
        holder = self._find_dir(directory, member)
        ino = None if holder is None else builder.lookup(holder, name)
        if ino is None:
            raise self._error(member, f"hard link to {show(member.linkname)}, which this layer does not have")
        kind = builder.kind(ino)
        if kind == "dir":
            raise self._error(member, f"hard link to the directory {show(member.linkname)}")
        builder.add_link(parent, base, ino)
        self._links[ino] = self._links.get(ino, 1) + 1
        meta = self._meta(member)
        old = builder.meta(ino)
        if kind == "symlink":
            # dockerd changes the owner (lchown) and leaves mode and time alone.
            meta.mode, meta.mtime_ns = old.mode, old.mtime_ns
        if (old.mode, old.uid, old.gid, old.mtime_ns) != (meta.mode, meta.uid, meta.gid, meta.mtime_ns) or meta.xattrs:
            builder.set_meta(ino, self._merged(ino, meta))

    def _whiteout(self, member: Member, parent: int, base: bytes) -> None:
        builder = self._builder
        self.stats.whiteouts += 1
        if base == OPAQUE_MARKER:
            meta = builder.meta(parent)
            if OPAQUE_XATTR not in meta.xattrs:
                meta.xattrs = {**meta.xattrs, OPAQUE_XATTR: b"y"}
                builder.set_meta(parent, meta)
            return
        hidden = base[len(WHITEOUT_PREFIX) :]
        if hidden in (b"", b".", b".."):
            raise self._error(member, "a whiteout of nothing")
        if builder.lookup(parent, hidden) is not None:
            self._remove(member, parent, hidden)
        meta = Meta(mode=0, uid=member.uid, gid=member.gid, mtime_ns=self._time(member), xattrs=_NO_XATTRS)
        self._whiteouts.add(builder.add_node(parent, hidden, meta, "char", 0, 0))

    # -- paths ------------------------------------------------------------------------------------------------------

    def _place(self, member: Member, clean: bytes) -> tuple[int, bytes]:
        """The directory a member belongs in (made if it is missing) and its last name."""
        directory, _, base = clean.rpartition(b"/")
        if not base or base == b".." or len(base) > _NAME_MAX or b"\0" in base:
            raise self._error(member, "bad name")
        self._via_symlink = self._via_absolute = False
        parent = self._dirs.get(directory)
        if parent is None:
            parent = self._make_dirs(directory, member)
        return parent, base

    def _make_dirs(self, path: bytes, member: Member) -> int:
        if len(path) > _PATH_MAX:
            raise self._error(member, "the name is too long")
        ino = self._walk(path, member, make=True)
        assert ino is not None
        return ino

    def _find_dir(self, path: bytes, member: Member) -> int | None:
        known = self._dirs.get(path)
        return self._walk(path, member, make=False) if known is None else known

    def _walk(self, path: bytes, member: Member, *, make: bool) -> int | None:
        """Follow a directory path from the layer's root, through this layer's symlinks; make what is missing if
        asked."""
        builder = self._builder
        stack: list[tuple[int, bytes]] = []  # the directories above the current one, with clean paths
        current, clean = self._root, b""
        todo = path.split(b"/")[::-1]
        followed = 0
        while todo:
            name = todo.pop()
            if name in (b"", b"."):
                continue
            if name == b"..":
                if not followed:
                    raise self._error(member, "the name climbs out of the layer")
                if stack:
                    current, clean = stack.pop()
                else:
                    self._via_absolute = True
                continue
            if len(name) > _NAME_MAX:
                raise self._error(member, "a component of the name is longer than 255 bytes")
            ino = builder.lookup(current, name)
            kind = None if ino is None else builder.kind(ino)
            if ino is not None and kind == "symlink":
                followed += 1
                self._followed.add(ino)
                self._via_symlink = True
                if followed > _MAX_SYMLINKS:
                    raise self._error(member, "too many levels of symlinks in the name")
                target = self._targets[ino]
                if target.startswith(b"/"):
                    stack, current, clean = [], self._root, b""
                    self._via_absolute = True
                todo.extend(target.split(b"/")[::-1])
                continue
            opaque = False
            if ino is not None and kind != "dir":
                if not make:
                    return None
                if ino not in self._whiteouts:
                    raise self._error(member, f"{show(name)} in the name is not a directory")
                self._remove(member, current, name)
                ino, opaque = None, True
            below = clean + b"/" + name if clean else name
            if ino is None:
                if not make:
                    return None
                xattrs = {OPAQUE_XATTR: b"y"} if opaque else _NO_XATTRS
                ino = builder.add_dir(current, name, Meta(0o755, 0, 0, self._timestamp_ns, xattrs))
            self._dirs[below] = ino
            stack.append((current, clean))
            current, clean = ino, below
        return current

    def _remove(self, member: Member, parent: int, name: bytes) -> None:
        """Remove an earlier member of this layer that a later one replaces, with all that is under it."""
        builder = self._builder
        ino = builder.lookup(parent, name)
        assert ino is not None
        if builder.kind(ino) == "dir":
            if ino == self._root:
                raise self._error(member, "would replace the layer's root")
            for below in [child for child, _ in builder.children(ino)]:
                self._remove(member, ino, below)
            self._dirs = {b"": self._root}
        index = self._content_of.get(ino)
        if index is not None:
            self.stats.superseded.add(index)
        if ino in self._followed:
            self.stats.superseded |= self._through
        names = self._links.get(ino, 1)
        if names > 1:
            self._links[ino] = names - 1
        else:
            self._sizes.pop(ino, None)
            self._targets.pop(ino, None)
            self._content_of.pop(ino, None)
            self._links.pop(ino, None)
        self._whiteouts.discard(ino)
        builder.remove(parent, name)

    # -- metadata ---------------------------------------------------------------------------------------------------

    def _time(self, member: Member) -> int:
        return min(max(member.mtime_ns, _TIME_MIN), _TIME_MAX)

    def _meta(self, member: Member) -> Meta:
        mtime = member.mtime_ns
        if not _TIME_MIN <= mtime <= _TIME_MAX:
            mtime = self._time(member)
        kind = member.type
        mode = 0o777 if kind == tarstream.SYMLINK else member.mode
        xattrs = _NO_XATTRS
        if member.xattrs is not None:
            try:
                xattrs = _usable_xattrs(member)
            except ValueError as error:
                raise self._error(member, str(error)) from error
        return Meta(mode, member.uid, member.gid, mtime, xattrs)

    def _merged(self, ino: int, meta: Meta) -> Meta:
        """``meta`` over what the inode has: extended attributes add up, all else is replaced."""
        old = self._builder.meta(ino).xattrs
        if old:
            meta.xattrs = {**old, **meta.xattrs}
        return meta

    def _error(self, member: Member, what: str) -> ImageError:
        return ImageError(f"{show(member.name)}: {what}, at byte {member.offset} of the tar", where=self.where)


def split_again(reader: TarReader, superseded: set[int]) -> TarSplitWriter:
    """A second pass over a tar that only makes tar-split; contents of ``superseded`` members become segments.

    Needed for layers in which a later member replaces an earlier one, or that write through a symlink.
    """
    split = TarSplitWriter()
    seen: set[bytes] = set()
    index = -1
    while (member := reader.next()) is not None:
        index += 1
        split.segment(member.raw)
        clean = clean_name(member.name)
        inline = index in superseded or clean in seen
        crc = 0
        for piece in reader.data():
            if inline:
                split.segment(piece)
            else:
                crc = crc64(piece, crc)
        if not inline:
            seen.add(clean)
            split.file(member.name, member.size, crc)
    for raw in reader.tail():
        split.segment(raw)
    return split


def _usable_xattrs(member: Member) -> dict[bytes, bytes]:
    """The extended attributes that the kernel would keep if dockerd set them on this kind of file.

    dockerd ignores refusals (ENOTSUP for unknown namespaces, EPERM for ``user.`` on anything but files and
    directories). Overlay's own marks but "opaque" (redirect, metacopy, origin …) would make the layer show what it
    does not hold. Raises ValueError for a malformed ACL, which the kernel refuses with EINVAL and dockerd with it.
    """
    plain = member.type in (tarstream.REGULAR, tarstream.CONTIGUOUS, tarstream.DIRECTORY, tarstream.LINK)
    out: dict[bytes, bytes] = {}
    for name, value in (member.xattrs or {}).items():
        if name.startswith(b"trusted.overlay.") and name != OPAQUE_XATTR:
            continue
        if name.startswith(b"user.") and not plain:
            continue
        if name == _ACL_DEFAULT:
            if member.type == tarstream.DIRECTORY and _acl_entries(value):
                out[name] = value
        elif name == _ACL_ACCESS:
            if member.type != tarstream.SYMLINK and (acl := _acl_after_chmod(value, member.mode)):
                out[name] = acl
        elif name.startswith(_XATTR_NAMESPACES) and name not in _XATTR_NAMESPACES:
            out[name] = value
    return out


def _acl_entries(value: bytes) -> list[tuple[int, int, int]]:
    """The (tag, permissions, id) entries of a POSIX ACL in the form of the system calls (version 2)."""
    if len(value) < 4 or (len(value) - 4) % 8 or value[:4] != b"\2\0\0\0":
        raise ValueError("malformed POSIX ACL")
    return list(_ACL_ENTRY.iter_unpack(value[4:]))


def _acl_after_chmod(value: bytes, mode: int) -> bytes:
    """What is left of an access ACL when dockerd sets the mode after it; b"" if the mode says it all.

    As the kernel's posix_acl_chmod: owner and others from the mode, the mask (else the owning group) from the group
    bits.
    """
    entries = _acl_entries(value)
    tags = {tag for tag, _, _ in entries}
    if tags <= {_ACL_USER_OBJ, _ACL_GROUP_OBJ, _ACL_OTHER}:
        return b""
    group = _ACL_MASK if _ACL_MASK in tags else _ACL_GROUP_OBJ
    bits = {_ACL_USER_OBJ: mode >> 6 & 7, group: mode >> 3 & 7, _ACL_OTHER: mode & 7}
    return value[:4] + b"".join(_ACL_ENTRY.pack(tag, bits.get(tag, perm), ident) for tag, perm, ident in entries)
