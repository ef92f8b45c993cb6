"""Images that the builder makes for tests: small, with one of everything."""

from __future__ import annotations

import random
from pathlib import Path
from uuid import UUID

from ext4lite.builder import ImageBuilder, Meta

SAMPLE_UUID = UUID("12345678-1234-5678-1234-567812345678")


def build_sample(path: Path, *, size: int = 64 << 20, seed: int = 1, many: int = 3000, force: bool = False) -> None:
    """Build the sample image; equal arguments give equal bytes."""
    r = random.Random(seed)
    with ImageBuilder(path, size=size, uuid=SAMPLE_UUID, label="sample", timestamp=1_700_000_000, force=force) as b:
        etc = b.add_dir(b.root, b"etc", Meta(0o755, 1, 2, 1_700_000_000_123_456_789))
        with b.add_file(etc, b"hostname", Meta(0o4755, 70_000, 80_000, -5_000_000_001)) as f:
            f.write(b"box\n")
        b.add_link(etc, b"hostname-again", f.ino)
        for i, length in enumerate((1, 4095, 4096, 4097, 65_535, 65_536, 65_537, 300_001)):
            with b.add_file(etc, b"size%d" % i, Meta(0o644, mtime_ns=4_000_000_000_000_000_007)) as f:
                f.write(r.randbytes(length))
        with b.add_file(b.root, b"sparse", Meta(0o600)) as f:
            f.write(b"x" * 100)
            f.write(bytes(300_000))
            f.write(b"y" * 5)
            f.write(bytes(1 << 20))
        with b.add_file(b.root, b"holes", Meta(0o600)) as f:
            for _ in range(400):
                f.write(b"d" * 4096 + bytes(65536 - 4096) + bytes(65536))
        for length in (1, 59, 60, 61, 4095):
            b.add_symlink(b.root, b"link%d" % length, b"t" * length, Meta(0o777))
        b.add_link(b.root, b"link-to-link", b.add_symlink(etc, b"s", b"hostname", Meta(0o777)))
        b.add_node(b.root, b"null", Meta(0o666), "char", 1, 3)
        b.add_node(b.root, b"whiteout", Meta(0), "char", 0, 0)
        b.add_node(b.root, b"wide", Meta(0o600), "block", 300, 70_000)
        b.add_node(b.root, b"fifo", Meta(0o600), "fifo")
        b.add_node(b.root, b"socket", Meta(0o600), "socket")
        b.add_dir(b.root, b"opaque", Meta(0o755, xattrs={b"trusted.overlay.opaque": b"y"}))
        acl = bytes.fromhex("0200000001000700ffffffff02000500e803000004000500ffffffff10000700ffffffff20000500ffffffff")
        b.add_dir(
            b.root, b"acl", Meta(0o775, xattrs={b"system.posix_acl_default": acl, b"system.posix_acl_access": acl})
        )
        shared = b.add_dir(b.root, b"shared-xattrs", Meta())
        for i in range(1100):
            with b.add_file(
                shared, b"file%d" % i, Meta(0o644, xattrs={b"user.large": b"v" * 500, b"user.a": b""})
            ) as f:
                f.write(b"%d" % i)
        capability = bytes.fromhex("0100000200200000000000000000000000000000")
        everywhere = {b"user.large": b"w" * 3980, b"security.capability": capability, b"trusted.x": b"z" * 30}
        with b.add_file(b.root, b"capable", Meta(0o755, xattrs=everywhere)) as f:
            f.write(b"#!")
        directory = b.add_dir(b.root, b"many-files", Meta())
        for i in range(many):
            with b.add_file(directory, b"file-%d" % i + b"-\xc3\xa9" * (i % 30), Meta(0o644)) as f:
                f.write(b"%d" % i)
        many_dirs = b.add_dir(b.root, b"many-dirs", Meta())
        for i in range(200):
            b.add_dir(many_dirs, b"d%d" % i, Meta())
        gone = b.add_dir(b.root, b"gone", Meta())
        with b.add_file(gone, b"file", Meta()) as f:
            f.write(r.randbytes(100_000))
        b.remove(b.root, b"gone")
        b.remove(many_dirs, b"d7")
        b.finish()
