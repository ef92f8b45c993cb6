"""Images with every feature set that mke2fs 1.47 can make, and a tree that uses them."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ext4lite.volume import Volume
from support.ext4_judges import fill, run, tool

Judge = Literal["kernel", "kernel read-only", "tree"]
YEARS = (-(1 << 31), -1, 0, (1 << 31) - 1, 1 << 31, 1 << 32, (1 << 33) + 5, (1 << 34) - (1 << 31) - 1)
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Case:
    """A feature set: options of mke2fs, megabytes, and who says what is in the image.

    ``kernel``: it fills the image and lists it. ``kernel read-only`` and ``tree``: mke2fs fills it from a directory
    (and the kernel cannot write to it, or not mount it).
    """

    name: str
    options: str
    megabytes: int = 32
    judge: Judge = "kernel"
    after: str = ""
    """A request to debugfs between making and filling."""
    extras: frozenset[str] = field(default_factory=frozenset)


def _case(name: str, options: str, megabytes: int = 32, judge: Judge = "kernel", *extras: str, after: str = "") -> Case:
    return Case(name, options, megabytes, judge, after, frozenset(extras))


MANY, SMALL = "many", "small inodes"
CASES = [
    *(_case(f"{k} 1024", f"-t {k} -b 1024 -N 8192", 48, "kernel", MANY) for k in ("ext2", "ext3", "ext4")),
    *(_case(f"{k} {b}", f"-t {k} -b {b}") for k in ("ext2", "ext3", "ext4") for b in (2048, 4096)),
    *(_case(f"ext4 {b}", f"-t ext4 -b {b} -O ^has_journal", b // 1024 * 4, "tree") for b in (8192, 16384, 32768)),
    _case("ext4 65536", "-t ext4 -b 65536 -O ^has_journal -I 512", 300, "tree"),
    _case("ext2 8192", "-t ext2 -b 8192", 40, "tree"),
    _case("revision 0", "-t ext2 -r 0 -b 1024", 32, "kernel", SMALL),
    _case("hurd", "-t ext2 -o hurd -b 4096", 32, "kernel", SMALL),
    _case("plain ext2", "-t ext2 -O none -b 1024"),
    _case("inodes of 128 bytes", "-t ext4 -I 128", 32, "kernel", SMALL),
    _case("inodes of 512 bytes", "-t ext4 -I 512"),
    _case("inodes of 1024 bytes", "-t ext4 -I 1024 -b 1024"),
    _case("inodes of 4096 bytes", "-t ext4 -I 4096 -b 4096 -N 2000"),
    _case("no checksums", "-t ext4 -O ^metadata_csum"),
    _case("gdt_csum", "-t ext4 -O ^metadata_csum,uninit_bg"),
    _case("gdt_csum, descriptors of 128 bytes", "-t ext4 -b 1024 -O ^metadata_csum,uninit_bg -E desc_size=128", 48),
    _case("descriptors of 32 bytes", "-t ext4 -O ^64bit -b 1024"),
    _case("descriptors of 64 bytes", "-t ext4 -E desc_size=64 -b 1024"),
    _case("descriptors of 256 bytes", "-t ext4 -E desc_size=256 -b 1024 -g 1024"),
    _case("descriptors of 1024 bytes", "-t ext4 -E desc_size=1024 -b 1024 -g 2048 -O ^resize_inode"),
    _case("metadata_csum_seed", "-t ext4 -O metadata_csum_seed", 32, "kernel", "new UUID"),
    _case("meta_bg", "-t ext4 -O ^flex_bg,meta_bg,^resize_inode"),
    _case("meta_bg 1024", "-t ext4 -b 1024 -g 256 -O meta_bg,^resize_inode"),
    _case("flex_bg of 4", "-t ext4 -G 4 -g 1024 -b 1024"),
    _case("no flex_bg", "-t ext4 -O ^flex_bg -b 1024"),
    _case("sparse_super2", "-t ext4 -O sparse_super2 -b 1024 -g 2048"),
    _case("sparse_super2 with one backup", "-t ext4 -O sparse_super2,^resize_inode -b 1024 -g 2048 -E num_backup_sb=1"),
    _case("no sparse_super", "-t ext4 -O ^sparse_super,^resize_inode -b 1024 -g 2048"),
    _case("resize_inode", "-t ext4 -O resize_inode -E resize=2000000"),
    _case("no filetype, no large_file", "-t ext3 -O ^filetype,^large_file,^ext_attr -b 1024"),
    _case("no dir_index", "-t ext4 -O large_dir,^dir_index"),
    _case("bigalloc", "-t ext4 -O bigalloc -C 16384"),
    _case("bigalloc 1024", "-t ext4 -O bigalloc -C 8192 -b 1024"),
    _case("bigalloc, meta_bg", "-t ext4 -O bigalloc,meta_bg,^resize_inode -C 4096 -b 1024"),
    _case("inline_data", "-t ext4 -O inline_data -I 256", 32, "kernel", "inline"),
    _case(
        "inline_data, inodes of 1024 bytes", "-t ext4 -O inline_data -I 1024 -b 4096 -N 4000", 32, "kernel", "inline"
    ),
    _case("inline_data without checksums", "-t ext4 -O inline_data,^metadata_csum -I 512", 32, "kernel", "inline"),
    _case("ea_inode", "-t ext4 -O ea_inode", 32, "kernel", "ea_inode"),
    _case("ea_inode without checksums", "-t ext4 -O ea_inode,^metadata_csum -b 1024", 32, "kernel", "ea_inode"),
    _case(
        "ea_inode, inline_data, bigalloc",
        "-t ext4 -O ea_inode,inline_data,bigalloc -I 512 -b 4096",
        48,
        "kernel",
        "ea_inode",
        "inline",
    ),
    _case("orphan_file", "-t ext4 -O metadata_csum_seed,orphan_file"),
    _case("stable_inodes, fast_commit", "-t ext4 -O stable_inodes,fast_commit"),
    _case("mmp", "-t ext4 -O mmp"),
    _case("no extra fields", "-t ext4 -O ^extra_isize,^dir_nlink,^huge_file -b 1024"),
    _case("legacy hash", "-t ext4 -b 1024", 32, "kernel", "legacy"),
    _case("tea hash, unsigned", "-t ext4 -b 1024", 32, "kernel", "tea", after="set_super_value flags 2"),
    _case("half_md4 hash, unsigned", "-t ext4 -b 1024", after="set_super_value flags 2"),
    _case("own hash seed", "-t ext4 -b 1024 -E hash_seed=11111111-2222-3333-4444-555555555555"),
    _case("quota", "-t ext4 -O quota,project -I 256 -E quotatype=usrquota:grpquota:prjquota", 32, "kernel read-only"),
    _case("quota without checksums", "-t ext4 -O quota,^metadata_csum", 32, "kernel read-only"),
    _case("verity", "-t ext4 -O verity"),
    _case("encrypt", "-t ext4 -O encrypt"),
    _case("casefold", "-t ext4 -O casefold -b 1024", 32, "tree"),
    _case("casefold, large_dir 8192", "-t ext4 -b 8192 -O casefold,large_dir", 40, "tree"),
    _case(
        "nearly everything",
        "-t ext4 -I 512 -O bigalloc,inline_data,ea_inode,large_dir,sparse_super2,metadata_csum_seed,orphan_file,"
        "encrypt,casefold,verity,project,quota,stable_inodes,fast_commit",
        64,
        "tree",
    ),
]


def fallocate(path: Path, offset: int, length: int, *, mode: int = 0) -> None:
    """fallocate(2)."""
    fd = os.open(path, os.O_RDWR)
    try:
        if _LIBC.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(length)):
            raise OSError(ctypes.get_errno(), "fallocate", str(path))
    finally:
        os.close(fd)


def corners(root: Path, case: Case) -> None:
    """Add what only some feature sets can hold to a tree: times, holes, attributes, data in inodes."""
    here = root / "corners"
    here.mkdir()
    wide = SMALL not in case.extras
    for seconds in YEARS if wide else YEARS[:4]:
        (here / f"at{seconds}").touch()
        ns = seconds * 1_000_000_000 + (999_999_999 if wide else 0)
        os.utime(here / f"at{seconds}", ns=(ns, ns))
    _holes(here, "-b 1024" in case.options)
    if "^ext_attr" not in case.options:
        _attributes(here, more=["gnu.translator"] if case.judge == "kernel" else [])
    r = random.Random(case.name)
    if "inline" in case.extras:
        for size in (0, 1, 59, 60, 61, 100, 159, 160, 161, 400, 900):
            (here / f"inline{size}").write_bytes(r.randbytes(size))
            (here / f"inline-dir{size}").mkdir()
            for i in range(size // 12):
                (here / f"inline-dir{size}" / f"n{i}").touch()
            (here / f"inline-link{size}").symlink_to("l" * max(1, size))
        os.setxattr(here / "inline61", "user.beside", b"inline")
    if "ea_inode" in case.extras:
        for i, size in enumerate((3000, 20_000, 65_536)):
            (here / f"value{i}").touch()
            os.setxattr(here / f"value{i}", "user.huge", r.randbytes(size))


def _holes(here: Path, far: bool) -> None:
    for name in ("unwritten", "beyond", "trailing", "tall"):
        (here / name).touch()
    try:
        fallocate(here / "unwritten", 0, 100_000)
        fallocate(here / "beyond", 0, 200_000, mode=1)  # keeps the size: blocks behind the file's end
    except OSError:
        pass  # block maps have none
    with (here / "unwritten").open("r+b") as f:
        f.seek(40_000)
        f.write(b"written")
    (here / "beyond").write_bytes(b"short")
    with (here / "trailing").open("wb") as f:
        f.write(b"x" * 10_000)
        f.truncate(5_000_000)
    with (here / "tall").open("wb") as f:  # through all three levels of pointer blocks of 1 KiB
        for at in (0, 11 << 10, 12 << 10, 100 << 10, 268 << 10, 5 << 20, *((65_804 << 10, 66 << 20) if far else ())):
            f.seek(at)
            f.write(b"%d" % at)


def _attributes(here: Path, more: list[str]) -> None:
    (here / "attributes").touch()
    for name in ("user.a", "trusted.b", "security.c", "user." + "n" * 200, "user.\udcff\udcfe", *more):
        os.setxattr(here / "attributes", name, name.encode("utf-8", "surrogateescape") * 2)
    for i in range(3):  # equal sets share one block
        (here / f"shared{i}").touch()
        os.setxattr(here / f"shared{i}", "user.same", b"s" * 700)
    acl = bytes.fromhex("0200000001000700ffffffff02000500e803000004000500ffffffff10000700ffffffff20000500ffffffff")
    (here / "acl").mkdir()
    os.setxattr(here / "acl", "system.posix_acl_access", acl)
    os.setxattr(here / "acl", "system.posix_acl_default", acl)


def make(case: Case, image: Path, tree: Path | None = None) -> None:
    """Run mke2fs for a case; ``tree`` is what it fills the image from."""
    words: list[str | Path] = [*case.options.split()]
    if tree is not None:
        words += ["-d", tree]
    if "-E" not in words:
        words += ["-E", "lazy_itable_init=1,nodiscard"]
    run(tool("mke2fs"), "-q", "-F", *words, image, f"{case.megabytes}M")
    for name in ("legacy", "tea"):
        if name in case.extras:
            run(tool("tune2fs"), "-E", f"hash_alg={name}", image)
    if "new UUID" in case.extras:
        run(tool("tune2fs"), "-U", "01234567-89ab-cdef-0123-456789abcdef", image)
    if "quota" in case.options and tree is not None:
        count_quotas(image)
    if case.after:
        run(tool("debugfs"), "-w", "-R", case.after, image)


def count_quotas(image: Path) -> None:
    """Have e2fsck count the quotas: mke2fs does not count what it copies."""
    done = subprocess.run([tool("e2fsck"), "-fy", str(image)], capture_output=True, timeout=60, check=False)
    assert done.returncode <= 1, done.stdout


def populate(root: Path, case: Case) -> None:
    """Fill a mounted image, or a directory that mke2fs is to copy, as root."""
    attributes = "^ext_attr" not in case.options and SMALL not in case.extras
    fill(root, xattrs=attributes, many=3000 if MANY in case.extras else 300)
    corners(root, case)
    if case.judge == "tree" and "inline_data" in case.options:
        for name in ("sparse", "corners/trailing", "corners/unwritten"):
            (root / name).unlink()  # mke2fs -d loses the hole at the end


def stats(root: Path, volume: Volume) -> list[str]:
    """Compare every number that the kernel gives for a mounted tree with the volume's; return what differs."""
    wrong = []
    inline = 0x10000000  # the kernel adds sectors for inline data of files (ext4_file_getattr)
    for path, ino in [(b"", volume.root), *volume.walk()]:
        s = os.lstat(os.fsencode(root) + path)
        ours = volume.stat(ino)
        got: dict[str, Any] = {
            "ino": ino,
            "nlink": ours.nlink,
            "size": ours.size,
            "blocks": ours.blocks512 + (-(-ours.size // 512) if ours.flags & inline and ours.kind == "file" else 0),
            "atime": ours.atime_ns,
            "mtime": ours.mtime_ns,
            "ctime": ours.ctime_ns,
            "owner": (ours.uid, ours.gid, ours.mode),
            "rdev": ours.rdev,
        }
        wanted: dict[str, Any] = {
            "ino": s.st_ino,
            "nlink": s.st_nlink,
            "size": s.st_size if ours.kind in ("file", "dir", "symlink") else ours.size,
            "blocks": s.st_blocks,
            "atime": s.st_atime_ns,
            "mtime": s.st_mtime_ns,
            "ctime": s.st_ctime_ns,
            "owner": (s.st_uid, s.st_gid, s.st_mode & 0o7777),
            "rdev": (os.major(s.st_rdev), os.minor(s.st_rdev)),
        }
        wrong += [f"{os.fsdecode(path)}: {k} {got[k]} instead of {wanted[k]}" for k in got if got[k] != wanted[k]]
    return wrong


def copy_of(image: Path, to: Path) -> Path:
    """Copy a sparse image."""
    run("cp", "--sparse=always", image, to)
    return to


def remove(*paths: Path) -> None:
    """Remove images that are large."""
    for path in paths:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
