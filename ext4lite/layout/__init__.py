"""Every on-disk structure of ext4: construct definitions, one module a structure family.

Names as in the format documentation.

The definitions are the only truth; ``_codecs.py`` is derived from them by ``python -m ext4lite.layout.generate`` and is
what hot paths and short commands import (construct costs 119 ms to import and 36–102 µs an inode, a derived codec 2–3
µs). ``constants.py`` holds the numbers and imports nothing.
"""
