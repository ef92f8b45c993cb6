"""Block maps of ext2 and ext3: 12 direct blocks, then blocks of pointers, one, two and three levels deep."""

from __future__ import annotations

from struct import unpack

from ext4lite.errors import CorruptImage
from ext4lite.extents import BlockReader, Extent

DIRECT = 12


def read_map(
    block_map: bytes, io: BlockReader, block_size: int, file_blocks: int, where: str
) -> tuple[list[Extent], int]:
    """Read the 60 bytes of ``i_block`` as far as the file's first ``file_blocks`` blocks; return (runs.

    Number of pointer blocks).

    Work is bounded: no pointer block may be met twice. CorruptImage with ``where`` for pointers outside the volume.
    """
    out: list[Extent] = []
    seen: set[int] = set()
    pointers = unpack("<15I", block_map)
    per = block_size // 4

    def add(logical: int, physical: int) -> None:
        if not io.first_data_block <= physical < io.blocks:
            raise CorruptImage(f"file block {logical} points to block {physical}, outside the volume", where=where)
        last = out[-1] if out else None
        if last is not None and last.logical + last.count == logical and last.physical + last.count == physical:
            last.count += 1
        else:
            out.append(Extent(logical, physical, 1))

    def descend(number: int, level: int, logical: int) -> None:
        if number in seen:
            raise CorruptImage(f"block map meets pointer block {number} twice", where=where)
        seen.add(number)
        step = per ** (level - 1)
        for pointer in unpack(f"<{per}I", io.block(number, f"{where}, pointer block {number}")):
            if logical >= file_blocks:
                return
            if pointer:
                if level == 1:
                    add(logical, pointer)
                else:
                    descend(pointer, level - 1, logical)
            logical += step

    for logical in range(min(DIRECT, file_blocks)):
        if pointers[logical]:
            add(logical, pointers[logical])
    logical = DIRECT
    for level in (1, 2, 3):
        if pointers[DIRECT + level - 1] and logical < file_blocks:
            descend(pointers[DIRECT + level - 1], level, logical)
        logical += per**level
    return out, len(seen)
