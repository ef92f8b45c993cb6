"""Derive fast codecs from the construct definitions.

``python -m ext4lite.layout.generate [--check]`` writes ``_codecs.py``.

A definition of fixed size is walked once, and a slotted class with one precompiled ``struct.Struct`` comes out:
``unpack(data, offset)``, ``pack()``, ``SIZE``, ``STRUCT`` and ``OFFSET_<field>`` for fields that checksums must skip.
Variable structures (a directory entry's name) are written as their fixed header; the code that reads them adds the
rest.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from construct import Array, Bytes, FormatField, Renamed, Struct

from ext4lite.jbd2 import layout as jbd2
from ext4lite.layout import delta, directory, extent, group, inode, quota, superblock, xattr

TARGET = Path(__file__).with_name("_codecs.py")

DEFINITIONS: dict[str, Any] = {
    "SuperBlock": superblock.SUPERBLOCK,
    "GroupDesc32": group.GROUP_DESC_32,
    "GroupDesc": group.GROUP_DESC,
    "InodeSmall": inode.INODE_SMALL,
    "Inode": inode.INODE,
    "ExtentHeader": extent.EXTENT_HEADER,
    "ExtentIdx": extent.EXTENT_IDX,
    "Extent": extent.EXTENT,
    "ExtentTail": extent.EXTENT_TAIL,
    "DirEntryHeader": directory.DIR_ENTRY_HEADER,
    "DirEntryTail": directory.DIR_ENTRY_TAIL,
    "DxRootInfo": directory.DX_ROOT_INFO,
    "DxCountLimit": directory.DX_COUNTLIMIT,
    "DxEntry": directory.DX_ENTRY,
    "DxTail": directory.DX_TAIL,
    "XattrIbodyHeader": xattr.XATTR_IBODY_HEADER,
    "XattrHeader": xattr.XATTR_HEADER,
    "XattrEntryHeader": xattr.XATTR_ENTRY_HEADER,
    "JournalHeader": jbd2.JOURNAL_HEADER,
    "JournalSuperBlock": jbd2.JOURNAL_SUPERBLOCK,
    "JournalTag3": jbd2.JOURNAL_TAG3,
    "JournalTag": jbd2.JOURNAL_TAG,
    "JournalRevokeHeader": jbd2.JOURNAL_REVOKE_HEADER,
    "JournalCommit": jbd2.JOURNAL_COMMIT,
    "FcTag": jbd2.FC_TAG,
    "FcHead": jbd2.FC_HEAD,
    "FcTail": jbd2.FC_TAIL,
    "FcAddRange": jbd2.FC_ADD_RANGE,
    "FcDelRange": jbd2.FC_DEL_RANGE,
    "FcDentry": jbd2.FC_DENTRY,
    "QuotaHeader": quota.QUOTA_HEADER,
    "QuotaNode": quota.QUOTA_NODE,
    "QuotaLeaf": quota.QUOTA_LEAF,
    "QuotaEntry": quota.QUOTA_ENTRY,
    "DeltaHeader": delta.DELTA_HEADER,
    "DeltaPage": delta.DELTA_PAGE,
}
"""Class name of the codec → its definition."""


@dataclass(slots=True)
class Field:
    """One field of a definition.

    Its name, its ``struct`` code, its size in bytes, and how many values it unpacks to (0: one, plain).
    """

    name: str
    code: str
    size: int
    count: int
    order: str
    is_bytes: bool


def fields_of(definition: Any) -> list[Field]:
    """Walk the fields of a construct ``Struct``. Raises TypeError for a field that has no fixed ``struct`` code."""
    if not isinstance(definition, Struct):
        raise TypeError(f"not a Struct: {definition!r}")
    return [_field(sub) for sub in definition.subcons]


def _field(sub: Any) -> Field:
    if not isinstance(sub, Renamed) or not sub.name:
        raise TypeError(f"field without a name: {sub!r}")
    kind: Any = sub.subcon
    if isinstance(kind, Bytes) and isinstance(kind.length, int):
        return Field(sub.name, f"{kind.length}s", kind.length, 0, "", True)
    count = 0
    if isinstance(kind, Array) and isinstance(kind.count, int):
        count, kind = kind.count, kind.subcon
    if not isinstance(kind, FormatField):
        raise TypeError(f"field {sub.name} is of variable or unknown shape: {kind!r}")
    order, code = kind.fmtstr[0], kind.fmtstr[1:]
    return Field(sub.name, (str(count) if count else "") + code, kind.sizeof() * (count or 1), count, order, False)


def codec_source(name: str, definition: Any) -> str:
    """Return the Python source of the codec class ``name`` for ``definition``."""
    fields = fields_of(definition)
    orders = {f.order for f in fields if f.order and f.size > (f.count or 1)} or {"<"}
    if len(orders) != 1:
        raise TypeError(f"{name} mixes byte orders")
    fmt = orders.pop() + "".join(f.code for f in fields)
    out = [
        f"class {name}:",
        f'    """Codec derived from the construct definition of ``{name}`` ({sum(f.size for f in fields)} bytes)."""',
        "",
    ]
    out += [f"    __slots__ = ({', '.join(repr(f.name) for f in fields)},)"]
    out += [f'    STRUCT: Final = Struct("{fmt}")', f"    SIZE: Final = {sum(f.size for f in fields)}"]
    offset = 0
    for f in fields:
        if "checksum" in f.name or f.name in ("inode_bitmap_csum", "h_hash", "h_chksum"):
            out.append(f"    OFFSET_{f.name}: Final = {offset}")
        offset += f.size
    arguments, values, slots, at = [], [], [], 0
    for f in fields:
        kind, default = ("bytes", f"bytes({f.size})") if f.is_bytes else ("int", "0")
        if f.count:
            kind, default = "tuple[int, ...]", f"(0,) * {f.count}"
        out.append(f"    {f.name}: {kind}")
        arguments.append(f"{f.name}: {kind} = {default}")
        values.append(("*" if f.count else "") + f"self.{f.name}")
        slots.append(f"v[{at}:{at + f.count}]" if f.count else f"v[{at}]")
        at += f.count or 1
    out += ["", f"    def __init__(self, {', '.join(arguments)}) -> None:"]
    out += [f"        self.{f.name} = {f.name}" for f in fields]
    out += ["", "    @classmethod", f'    def unpack(cls, data: Buffer, offset: int = 0) -> "{name}":']
    out += [
        '        """Read one from ``data`` at ``offset``; struct.error if it is too short."""',
        "        self = cls.__new__(cls)",
    ]
    if any(f.count for f in fields):
        out += ["        v = cls.STRUCT.unpack_from(data, offset)"]
        out += [f"        self.{f.name} = {slot}" for f, slot in zip(fields, slots, strict=True)]
    else:
        out += [f"        ({', '.join(f'self.{f.name}' for f in fields)},) = cls.STRUCT.unpack_from(data, offset)"]
    out += [
        "        return self",
        "",
        "    def pack(self) -> bytes:",
        '        """Return the bytes on disk; struct.error if a value is out of range."""',
    ]
    out += [f"        return self.STRUCT.pack({', '.join(values)})", "", ""]
    return "\n".join(out)


def module_source() -> str:
    """Return the whole source of ``_codecs.py``, formatted by ruff where it is installed."""
    head = '"""Generated by ``python -m ext4lite.layout.generate`` from the construct definitions. Do not edit."""\n\n'
    head += "# ruff: noqa\nfrom __future__ import annotations\n\n"
    head += "from struct import Struct\nfrom typing import Final, Union\n\n"
    head += "Buffer = Union[bytes, bytearray, memoryview]\n\n\n"
    source = head + "\n".join(codec_source(name, definition) for name, definition in DEFINITIONS.items())
    ruff = shutil.which("ruff", path=f"{Path(sys.executable).parent}:/usr/bin:/usr/local/bin")
    if ruff is None:
        return source
    done = subprocess.run(
        [ruff, "format", "--line-length=120", "--stdin-filename=_codecs.py", "-"],
        input=source, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


def main() -> int:
    """Write the module, or with ``--check`` only tell (exit code 1) whether it is out of date."""
    source = module_source()
    if "--check" in sys.argv[1:]:
        return 0 if TARGET.read_text() == source else 1
    TARGET.write_text(source)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
