"""The parts of :class:`ext4lite.builder.ImageBuilder`, one concept a module.

They share one aim beside correctness: about a hundred bytes of memory an inode, its name included, with any number of
them and however they are spread over directories.
"""
