"""Names in directories with the casefold flag (``chattr +F``): equal when they are after folding.

The rule is utf8-12.1 (``s_encoding`` 1), the only one there is: the canonical decomposition (NFD) of the full case
folding, code points that are ignorable by default left out; letters that Unicode 12.1 does not know stay as they are. A
name that is no UTF-8 is compared byte by byte. Sources: the kernel's Documentation/filesystems/ext4 and fs/unicode;
``debugfs -R 'dx_hash -c -e utf8-12.1 …'`` is the judge in the tests.
"""

from __future__ import annotations

import re
import unicodedata

# Default_Ignorable_Code_Point of Unicode 12.1 (DerivedCoreProperties.txt).
_IGNORABLE = dict.fromkeys(
    code
    for first, last in (
        *((0xAD, 0xAD), (0x34F, 0x34F), (0x61C, 0x61C), (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180E)),
        *((0x200B, 0x200F), (0x202A, 0x202E), (0x2060, 0x206F), (0x3164, 0x3164), (0xFE00, 0xFE0F), (0xFEFF, 0xFEFF)),
        *((0xFFA0, 0xFFA0), (0xFFF0, 0xFFF8), (0x1BCA0, 0x1BCA3), (0x1D173, 0x1D17A), (0xE0000, 0xE0FFF)),
    )
    for code in range(first, last + 1)
)
# What Python's younger tables (Unicode 13 to 17) fold, decompose or put in order, and 12.1 does not know.
_YOUNGER = re.compile(
    "([\u1c89\u2c2f\ua7c0\ua7c7\ua7c9\ua7cb\ua7cc\ua7ce\ua7d0\ua7d2\ua7d4\ua7d6\ua7d8\ua7da\ua7dc\ua7f5"
    "\u0897-\u089f\u08ca-\u08d2\u0c3c\u0ece\u1715\u1abf-\u1aff\u1dfa\ua82c\U00016ff0\U00016ff1\U00010d69-\U00010d6d\U00010eab\U00010eac"
    "\U00010efa-\U00010eff\U00010f82-\U00010f85\U00011070\U000113ce-\U000113e2\U0001193d\U0001193e\U00011943"
    "\U00011f41\U00011f42\U0001612f\U0001e08f\U0001e2ae\U0001e4ec-\U0001e4ef\U0001e5ee\U0001e5ef\U0001e6e0-\U0001e6f5"
    "\U00010570-\U00010595\U000105c9\U000105e4\U00010d50-\U00010d65\U00011383\U00011385\U0001138e\U00011391"
    "\U000113c5\U000113c7\U000113c8\U00011938\U00016121-\U00016128\U00016d68-\U00016d6a\U00016ea0-\U00016eb8])"
)


def fold(name: bytes) -> bytes:
    """Return what a name is compared (and hashed) by; a name that is not UTF-8 as it is."""
    if name.isascii():
        return name.lower()
    try:
        text = name.decode()
    except UnicodeDecodeError:
        return name
    pieces = _YOUNGER.split(text)  # every second one is such a letter
    pieces[::2] = map(_fold, pieces[::2])
    return "".join(pieces).encode()


def _fold(text: str) -> str:
    # In this order: what is ignorable still keeps the marks on both its sides apart.
    return unicodedata.normalize("NFD", text.casefold()).translate(_IGNORABLE)
