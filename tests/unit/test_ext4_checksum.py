"""Checksums: known answers, and the two crc32c implementations agree."""

from __future__ import annotations

import random

from ext4lite import checksum


def test_crc32c_known_answer() -> None:
    assert checksum.crc32c(0xFFFFFFFF, b"123456789") ^ 0xFFFFFFFF == 0xE3069283


def test_crc32c_goes_on_from_a_register() -> None:
    data = random.Random(1).randbytes(1000)
    whole = checksum.crc32c(5, data)
    assert checksum.crc32c(checksum.crc32c(5, data[:333]), data[333:]) == whole


def test_crcmod_agrees_with_google() -> None:
    other = checksum._crcmod_crc32c()
    r = random.Random(2)
    for size in (0, 1, 15, 256, 4096):
        data, seed = r.randbytes(size), r.getrandbits(32)
        assert other(seed, data) == checksum.crc32c(seed, data)


def test_crc16_known_answer() -> None:
    assert checksum.crc16(0, b"123456789") == 0xBB3D
    assert checksum.crc16(0xFFFF, b"123456789") == 0x4B37
