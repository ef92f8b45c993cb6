"""Hashed directories: the hash functions, and the index blocks as they are written.

Which hash is in use says ``hash_version`` of the directory's root; whether name bytes count as signed says the
superblock's ``s_flags``, set by whoever made the image (on x86: signed). ``debugfs -R 'dx_hash …'`` is the judge in the
tests.
"""

from __future__ import annotations

from collections.abc import Sequence

LEGACY, HALF_MD4, TEA, LEGACY_UNSIGNED, HALF_MD4_UNSIGNED, TEA_UNSIGNED = range(6)

_M = 0xFFFFFFFF
_DEFAULT_SEED = (0x67452301, 0xEFCDAB89, 0x98BADCFE, 0x10325476)
_EOF = 0x7FFFFFFF << 1
_K2 = 0x5A827999
_K3 = 0x6ED9EBA1


def effective_version(version: int, unsigned: bool) -> int:
    """Return the version with signedness folded in.

    What the root stores is 0 to 2, the superblock's flag makes it 3 to 5.
    """
    return version + 3 if unsigned and version <= TEA else version


def name_hash(name: bytes, version: int, seed: Sequence[int]) -> tuple[int, int]:
    """Return (hash, minor hash) of a directory entry's name, ``version`` from :func:`effective_version`.

    ValueError if unknown.
    """
    signed = version <= TEA
    if version in (LEGACY, LEGACY_UNSIGNED):
        major, minor = _legacy(name, signed), 0
    elif version in (HALF_MD4, HALF_MD4_UNSIGNED):
        state = tuple(seed) if any(seed) else _DEFAULT_SEED
        for start in range(0, len(name), 32):
            state = _half_md4(state, _words(name[start:], 8, signed))
        major, minor = state[1], state[2]
    elif version in (TEA, TEA_UNSIGNED):
        state = tuple(seed) if any(seed) else _DEFAULT_SEED
        for start in range(0, len(name), 16):
            state = _tea(state, _words(name[start:], 4, signed))
        major, minor = state[0], state[1]
    else:
        raise ValueError(f"unknown directory hash version {version}")
    major &= ~1
    if major == _EOF:
        major = (0x7FFFFFFF - 1) << 1
    return major, minor


def _words(rest: bytes, count: int, signed: bool) -> list[int]:
    """The next ``count`` 32-bit words of a name, big-endian, padded with its remaining length in every byte."""
    pad = (len(rest) | len(rest) << 8) & _M
    pad |= pad << 16 & _M
    chunk = rest[: count * 4]
    out = []
    full = len(chunk) // 4
    if not signed or chunk.isascii():
        out = [int.from_bytes(chunk[4 * i : 4 * i + 4], "big") for i in range(full)]
    else:
        out = [_accumulate(pad, chunk[4 * i : 4 * i + 4], signed) for i in range(full)]
    if full < count:
        out.append(_accumulate(pad, chunk[4 * full :], signed))
        out += [pad] * (count - full - 1)
    return out


def _accumulate(value: int, piece: bytes, signed: bool) -> int:
    for byte in piece:
        value = ((byte - 256 if signed and byte > 127 else byte) + (value << 8)) & _M
    return value


def _legacy(name: bytes, signed: bool) -> int:
    before, now = 0x37ABE8F9, 0x12A3FE2D
    for byte in name:
        value = (before + (now ^ (byte - 256 if signed and byte > 127 else byte) * 7152373 & _M)) & _M
        if value & 0x80000000:
            value -= 0x7FFFFFFF
        before, now = now, value & _M
    return now << 1 & _M


def _tea(state: Sequence[int], words: Sequence[int]) -> tuple[int, ...]:
    x, y, total = state[0], state[1], 0
    a, b, c, d = words
    for _ in range(16):
        total = (total + 0x9E3779B9) & _M
        x = (x + (((y << 4) + a) ^ (y + total) ^ ((y >> 5) + b))) & _M
        y = (y + (((x << 4) + c) ^ (x + total) ^ ((x >> 5) + d))) & _M
    return (state[0] + x) & _M, (state[1] + y) & _M, state[2], state[3]


def _half_md4(state: Sequence[int], words: Sequence[int]) -> tuple[int, ...]:
    """One block of the cut-down MD4.

    Three rounds of eight steps, written out since this is the hot loop of large directories.
    """
    a, b, c, d = state
    i0, i1, i2, i3, i4, i5, i6, i7 = words

    for x0, x1, x2, x3 in ((i0, i1, i2, i3), (i4, i5, i6, i7)):
        t = (a + (d ^ (b & (c ^ d))) + x0) & _M
        a = (t << 3 | t >> 29) & _M
        t = (d + (c ^ (a & (b ^ c))) + x1) & _M
        d = (t << 7 | t >> 25) & _M
        t = (c + (b ^ (d & (a ^ b))) + x2) & _M
        c = (t << 11 | t >> 21) & _M
        t = (b + (a ^ (c & (d ^ a))) + x3) & _M
        b = (t << 19 | t >> 13) & _M

    for x0, x1, x2, x3 in ((i1, i3, i5, i7), (i0, i2, i4, i6)):
        t = (a + ((b & c) + ((b ^ c) & d)) + x0 + _K2) & _M
        a = (t << 3 | t >> 29) & _M
        t = (d + ((a & b) + ((a ^ b) & c)) + x1 + _K2) & _M
        d = (t << 5 | t >> 27) & _M
        t = (c + ((d & a) + ((d ^ a) & b)) + x2 + _K2) & _M
        c = (t << 9 | t >> 23) & _M
        t = (b + ((c & d) + ((c ^ d) & a)) + x3 + _K2) & _M
        b = (t << 13 | t >> 19) & _M

    for x0, x1, x2, x3 in ((i3, i7, i2, i6), (i1, i5, i0, i4)):
        t = (a + (b ^ c ^ d) + x0 + _K3) & _M
        a = (t << 3 | t >> 29) & _M
        t = (d + (a ^ b ^ c) + x1 + _K3) & _M
        d = (t << 9 | t >> 23) & _M
        t = (c + (d ^ a ^ b) + x2 + _K3) & _M
        c = (t << 11 | t >> 21) & _M
        t = (b + (c ^ d ^ a) + x3 + _K3) & _M
        b = (t << 15 | t >> 17) & _M

    return (state[0] + a) & _M, (state[1] + b) & _M, (state[2] + c) & _M, (state[3] + d) & _M
