"""The inode tables of a new volume, and the bitmaps that say which inodes are in use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ext4lite.geometry import BLOCK, INODE_SIZE, Geometry
from ext4lite.layout import constants as c


@dataclass(slots=True)
class GroupInodes:
    """The inodes of a group: bitmap with padding marked, free ones, those behind the last used one, directories."""

    bitmap: bytes
    free: int
    unused: int
    directories: int


def write_inode_tables(
    geometry: Geometry, records: Iterator[tuple[int, bool, bytes]], put: Callable[[bytes, int], None]
) -> dict[int, GroupInodes]:
    """Write the inode tables as far as they are used; return what is to be known of each group with inodes.

    ``records`` are (inode number, whether it is a directory, record), ascending.
    """
    per = geometry.inodes_per_group
    groups: dict[int, GroupInodes] = {}
    current, directories, table = 0, 0, bytearray((c.FIRST_INO - 1) * INODE_SIZE)
    used = list(range(c.FIRST_INO - 1))

    def end_group() -> None:
        groups[current] = _summary(used, per, directories)
        put(bytes(table) + bytes(-len(table) % BLOCK), geometry.inode_table(current) * BLOCK)

    for ino, is_directory, raw in records:
        group, index = divmod(ino - 1, per)
        if group != current:
            end_group()
            current, directories, table, used = group, 0, bytearray(), []
        at = index * INODE_SIZE
        if len(table) < at:
            table += bytes(at - len(table))
        table[at : at + INODE_SIZE] = raw
        directories += is_directory
        if ino >= c.FIRST_INO:
            used.append(index)
    end_group()
    return groups


def _summary(used: list[int], per_group: int, directories: int) -> GroupInodes:
    bitmap = bytearray(BLOCK)
    for index in used:
        bitmap[index >> 3] |= 1 << (index & 7)
    bitmap[per_group // 8 :] = b"\xff" * (BLOCK - per_group // 8)
    return GroupInodes(bytes(bitmap), per_group - len(used), per_group - 1 - max(used), directories)
