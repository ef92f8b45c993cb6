"""The parts of :class:`ext4lite.builder.ImageBuilder`, one concept a module.

They share one aim beside correctness: some ninety bytes of memory an inode, its name included, however many there are.
"""
