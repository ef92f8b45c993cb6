"""Damaged images: small ones with every structure, changes to a structure's fields, and all that is done to an image.

Everything must end soon, with little memory, in an Ext4LiteError if at all; what only reads changes no byte, and what
writes stays inside the image.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from ext4lite import manifest, paths
from ext4lite.blockdev import open_for_guest
from ext4lite.cli import run as cli
from ext4lite.errors import Ext4LiteError
from ext4lite.inspect import report
from ext4lite.mkfs import mkfs
from ext4lite.volume import Volume
from ext4lite.writer import WritableVolume
from support.ext4_judges import mounted, run, tool
from support.feature_images import count_quotas, fallocate
from support.structures import Image, Locator, Structure

Change = tuple[int, int, int, int, int]
"""(kind of structure, which of them, which field, what to do, a number for that)."""
SECONDS = 10
MEMORY = 400 << 20

IMAGES = {
    "profile": "",
    "checksums": "-t ext4 -b 1024 -I 256 -O metadata_csum,orphan_file,metadata_csum_seed",
    "gdt_csum": "-t ext4 -b 1024 -O ^metadata_csum,uninit_bg,^64bit,meta_bg,^resize_inode",
    "block maps": "-t ext2 -b 1024",
    "data in inodes": "-t ext4 -b 1024 -I 512 -O inline_data,ea_inode,large_dir,mmp,^has_journal",
    "everything odd": "-t ext4 -b 2048 -O bigalloc,casefold,verity,quota,project,^metadata_csum -I 256",
    "many groups": "-t ext4 -b 1024 -g 1024 -G 2 -O ^metadata_csum,sparse_super2,^has_journal",
    "quotas and orphans": "-t ext4 -b 1024 -O quota,project -I 256",
    "crashed": "-t ext4 -b 1024 -J size=1 -O orphan_file,metadata_csum",
    "crashed, no checksums": "-t ext3 -b 1024 -J size=1",
    "fast commits": "-t ext4 -b 1024 -O fast_commit,^metadata_csum",
}


def fill_small(root: Path, large: int = 3000) -> None:
    """Make one of everything, small."""
    r = random.Random(1)
    (root / "d").mkdir()
    for i in range(90):
        (root / "d" / f"a-name-of-some-length-{i}").touch()
    (root / "few").mkdir()
    (root / "few" / "x").write_bytes(b"few")
    for i, size in enumerate((10, 100, 1000, 5000, 30_000)):
        (root / f"f{i}").write_bytes(r.randbytes(size))
    os.link(root / "f1", root / "few" / "link")
    (root / "short").symlink_to("f1")
    (root / "long").symlink_to("t" * 200)
    os.mknod(root / "null", 0o20666, os.makedev(1, 3))
    with (root / "holes").open("wb") as f:
        for i in range(12):
            f.seek(i * 40_000)
            f.write(b"%d" % i)
    with contextlib.suppress(OSError):
        fallocate(root / "f3", 8000, 5000)
    with (root / "tall").open("wb") as f:
        f.seek(67_400 << 10)
        f.write(b"three levels of pointers")
    with contextlib.suppress(OSError):
        for i in range(2):
            os.setxattr(root / f"f{i}", "user.shared", b"v" * 500)
        os.setxattr(root / "f2", "user.small", b"s")
        os.setxattr(root / "f3", "user.large", b"v" * large)
        acl = bytes.fromhex("0200000001000700ffffffff02000500e803000004000500ffffffff10000700ffffffff20000500ffffffff")
        os.setxattr(root / "few", "system.posix_acl_default", acl)


def prepare(name: str, image: Path) -> None:
    """Make one of IMAGES; needs root."""
    options = IMAGES[name].split()
    words: list[str | Path] = [*options, "-N", "192", image, "5M"]
    mount = image.parent / "mnt"
    if name in ("everything odd", "quotas and orphans"):  # not for this kernel
        tree = image.parent / "tree"
        tree.mkdir()
        fill_small(tree, 700)
        run(tool("mke2fs"), "-q", "-F", "-d", tree, *words)
        if name == "everything odd":
            run(tool("debugfs"), "-w", "-R", "sif /few flags 0x40080000", image)
        else:
            count_quotas(image)
            _orphan(image, "/f4", "/holes")
        return
    if options:
        run(tool("mke2fs"), "-q", "-F", *words)
    else:
        mkfs(image, size=8 << 20, journal_size=4 << 20)
    with mounted(image, mount) as root:
        fill_small(root)
    if name not in ("crashed", "crashed, no checksums", "fast commits"):
        return
    with mounted(image, mount, "rw,commit=300") as root:
        _crash(root, image, fast=name == "fast commits")


def _orphan(image: Path, *names: str) -> None:
    """Make orphans of files, and a volume in need of recovery."""
    with Volume.open(image) as volume:
        inos = [volume.lookup(name) for name in names]
    requests = [f"unlink {name}" for name in names] + [f"sif <{ino}> links_count 0" for ino in inos]
    requests += [f"sif <{inos[0]}> dtime {inos[1]}", f"ssv last_orphan {inos[0]}", "feature needs_recovery"]
    run(tool("debugfs"), "-w", "-f", "-", image, stdin="\n".join(requests))


def _crash(root: Path, image: Path, *, fast: bool) -> None:
    """Take a copy of a mounted image between two checkpoints, with orphans and revocations."""
    copy = image.with_suffix(".copy")
    if not fast:
        shutil.rmtree(root / "d")
        os.sync()
    (root / "new").mkdir()
    (root / "new" / "file").write_bytes(b"new" * 2000)
    (root / "f1").unlink()
    held = os.open(root / "f4", os.O_RDWR)
    (root / "f4").unlink()
    fds = [os.open(root / "new" / f"g{i}", os.O_CREAT | os.O_RDWR) for i in range(4)]
    for fd in fds:
        os.pwrite(fd, b"fast" * 1000, 0)
        os.fsync(fd)
    (root / "f0").rename(root / "new" / "renamed")
    os.truncate(root / "f2", 10)
    os.fsync(fds[0])
    run("cp", image, copy)
    for fd in (held, *fds):
        os.close(fd)
    copy.rename(image.with_suffix(".crashed"))


class Sample:
    """An image in memory, with its structures."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name, self.directory = name, directory
        path = directory / "image"
        prepare(name, path)
        crashed = path.with_suffix(".crashed")
        if crashed.exists():
            crashed.rename(path)
        self.data = path.read_bytes()
        self.locator = Locator(path)
        self.kinds = list(self.locator.by_kind)

    def changed(self, changes: list[Change], fixed: bool) -> Image:
        """Return the image with changes, checksums made right again if ``fixed``."""
        image = Image(self.data)
        touched: list[Structure] = []
        for kind, which, field, how, number in changes:
            found = self.locator.by_kind[self.kinds[kind % len(self.kinds)]]
            structure = found[which % len(found)]
            self._change(image, structure, field, how, number)
            touched.append(structure)
        for structure in touched:
            if fixed and structure.fix is not None:
                structure.fix(image)
        return image

    def _change(self, image: Image, s: Structure, field: int, how: int, number: int) -> None:
        if how % 16 == 15 or not s.fields:  # any byte
            image[s.at + field % s.size] = number & 0xFF
            return
        f = s.fields[field % len(s.fields)]
        at = s.at + f.at
        old = int.from_bytes(image[at : at + f.size], f.order)
        most = (1 << 8 * f.size) - 1
        numbers = self.locator.numbers
        value = (
            *(0, 1, most, most >> 1, most ^ most >> 1, old + 1, old - 1, old ^ 1 << number % (8 * f.size)),
            *(numbers[number % len(numbers)], s.at // self.locator.size, number, old * 2, old // 2),
            *(numbers[number // 7 % len(numbers)], old + number % 8),
        )[how % 15]
        image[at : at + f.size] = (value & most).to_bytes(f.size, f.order)

    def describe(self, changes: list[Change]) -> str:
        """Say in words what changes change."""
        out = []
        for kind, which, field, how, number in changes:
            name = self.kinds[kind % len(self.kinds)]
            found = self.locator.by_kind[name]
            s = found[which % len(found)]
            what = s.fields[field % len(s.fields)].name if how % 16 != 15 and s.fields else f"byte {field % s.size}"
            out.append(f"{name} at {s.at}: {what} ({how % 16}, {number})")
        return "; ".join(out)


# -- what is done to an image ----------------------------------------------------------------------------------------


def _everything(volume: Volume) -> None:
    for path, ino in volume.walk():
        s = volume.stat(ino)
        with contextlib.suppress(Ext4LiteError):
            volume.xattrs(ino)
        with contextlib.suppress(Ext4LiteError):
            if s.kind == "file":
                volume.read(ino, 50_000, 100_000)
                list(volume.pieces(ino))
            elif s.kind == "symlink":
                volume.readlink(ino)
            elif s.kind == "dir":
                volume.iterdir_by_hash(ino)
        with contextlib.suppress(Ext4LiteError):
            paths.resolve(volume, path)


def _with(path: Path, use: Callable[[Volume], object], **how: bool) -> None:
    with Volume.open(path, **how) as volume:  # type: ignore[call-overload]
        use(volume)


def _manifest(volume: Volume) -> None:
    for entry in manifest.entries(volume):
        manifest.to_line(entry)


def _named(volume: Volume) -> None:
    for name in ("/d/a-name-of-some-length-7", "/holes", "/few/X", "/few/../short", "/tall", "/none", "/f3", "/long"):
        with contextlib.suppress(Ext4LiteError):
            ino = paths.resolve(volume, name)
            volume.stat(ino)
            volume.read(ino, 4000, 200_000)


def _raw_inodes(volume: Volume) -> None:
    for ino in range(1, 40):
        with contextlib.suppress(Ext4LiteError):
            volume.stat(ino)
        with contextlib.suppress(Ext4LiteError):
            volume.extents(ino)
        with contextlib.suppress(Ext4LiteError):
            volume.xattrs(ino)


def _command(*words: str | Path) -> None:
    """Run a command; only documented exit codes are fine, and a bug's traceback comes through."""
    with contextlib.redirect_stdout(_Sink()), contextlib.redirect_stderr(io.StringIO()):
        code = cli([str(word) for word in words])
    assert code == 0 or 3 <= code <= 10, f"{words}: exit code {code}"
    if code:
        raise CommandFailed(f"exit code {code}")


def _cat(path: Path, *names: str) -> None:
    """Print files, unless they are very large now: that may take as long as it takes."""
    with Volume.open(path, verify=False) as volume:
        sizes = [volume.stat(paths.resolve(volume, name)).size for name in names]
    if max(sizes) < 1 << 30:
        _command("cat", path, *names)


class CommandFailed(Ext4LiteError):
    """A command ended with a documented exit code that is not 0."""


class _Sink(io.TextIOWrapper):
    """A standard output that keeps nothing."""

    def __init__(self) -> None:
        super().__init__(open(os.devnull, "wb"), encoding="utf-8", errors="backslashreplace")  # noqa: SIM115


def _touch(v: WritableVolume, name: str) -> None:
    v.set_attributes(v.resolve(name, follow=False), mode=0o700)


def _mark(v: WritableVolume, name: str) -> None:
    v.set_xattr(v.resolve(name), b"user.new", b"n" * 600)


def _workload(path: Path) -> None:
    with Volume.open(path, mode="rw") as v:

        def attempt(call: Callable[[], object]) -> None:
            with contextlib.suppress(Ext4LiteError):
                call()

        for name in (
            "/f0",
            "/d",
            "/few",
            "/holes",
            "/tall",
            "/f3",
            "/short",
            "/long",
            "/null",
            "/d/a-name-of-some-length-3",
        ):
            attempt(partial(_touch, v, name))
            attempt(partial(_mark, v, name))
        attempt(lambda: v.pwrite(v.create("/created"), 3000, b"c" * 20_000))
        for i in range(40):
            attempt(partial(v.create, f"/d/another-name-of-some-length-{i}"))
        attempt(lambda: v.mkdir("/d/sub"))
        attempt(lambda: v.rename("/few", "/d/sub/few"))
        attempt(lambda: v.rename("/f0", "/f3"))
        attempt(lambda: v.link("/f4", "/another"))
        attempt(lambda: v.symlink("/s", "t" * 100))
        attempt(lambda: v.truncate(v.resolve("/holes"), 100_000))
        attempt(lambda: v.punch(v.resolve("/f4"), 2000, 9000))
        attempt(lambda: v.pwrite(v.resolve("/tall"), 5000, b"m" * 5000))
        attempt(lambda: v.fallocate(v.resolve("/f2"), 0, 50_000))
        attempt(v.sync)
        attempt(lambda: v.remove_xattr(v.resolve("/f1"), b"user.shared"))
        for name in ("/tall", "/holes", "/f1", "/f4", "/long", "/null", "/d/a-name-of-some-length-5"):
            attempt(partial(v.unlink, name))
        attempt(lambda: v.rmdir("/d"))
        attempt(lambda: v.unlink("/d/a-name-of-some-length-6"))


def readers(path: Path, scratch: Path) -> dict[str, Callable[[], None]]:
    """Return everything that only reads, by name."""
    return {
        "everything": lambda: _with(path, _everything),
        "everything, unverified": lambda: _with(path, _everything, verify=False),
        "everything, raw": lambda: _with(path, _everything, replay=False, verify=False),
        "manifest": lambda: _with(path, _manifest),
        "inspect": lambda: _with(path, lambda v: report(v).as_dict(), dirty=True),
        "names": lambda: _with(path, _named, dirty=True, verify=False),
        "inodes": lambda: _with(path, _raw_inodes, verify=False),
        "guest": lambda: open_for_guest(path, readonly=True).close(),
        "ls": lambda: _command("ls", "-lR", path),
        "ls --json": lambda: _command("ls", "-R", "--json", "--no-verify", path),
        "cat": lambda: _cat(path, "/f4", "/short", "/holes"),
        "stat": lambda: _command("stat", "--json", path, "/f0", "/d", "/null", "/long", "/tall"),
        "xattr": lambda: _command("xattr", "--json", path, "/f3"),
        "cp-out": lambda: _command("cp-out", "-r", "--no-verify", path, "/", scratch),
        "clone": lambda: _command("clone", "--reflink=never", path, scratch / "clone"),
        "journal": lambda: _command("journal", path),
        "inspect command": lambda: _command("inspect", "--no-replay", "--no-verify", path),
    }


def writers(path: Path, scratch: Path) -> dict[str, Callable[[], None]]:
    """Return everything that writes, by name; each may change the image."""
    source = scratch / "source"
    return {
        "workload": lambda: _workload(path),
        "recover": lambda: _command("recover", path),
        "guest": lambda: open_for_guest(path).close(),
        "label": lambda: _command("label", path, "name"),
        "uuid": lambda: _command("uuid", "--csum-seed", path, "01234567-89ab-cdef-0123-456789abcdef"),
        "rm": lambda: _command("rm", "-rf", path, "/d", "/few", "/holes", "/tall", "/f3"),
        "cp-in": lambda: _command("cp-in", "-r", path, source, "/d"),
        "mv": lambda: _command("mv", path, "/f1", "/f2", "/few"),
        "compact": lambda: _command("compact", path),
        "grow": lambda: _command("resize", path, "7M"),
        "shrink": lambda: _command("resize", "--minimum", path),
        "remove journal": lambda: _command("journal", "--remove", path),
        "resize journal": lambda: _command("journal", "--resize", "2M", path),
        "create journal": lambda: _command("journal", "--create", "1M", path),
    }


ALL_OR_NOTHING = ("compact", "label", "uuid", "recover", "guest", "create journal")
"""What changes nothing when it fails on a volume that needs no recovery."""
KEEPS_CONTENT = ("compact", "label", "uuid", "recover", "guest")
"""What leaves a tree that could be read before as it was, whether it fails or not."""
MAY_RESIZE = ("compact", "grow", "shrink")


class TooLong(BaseException):
    """An operation took longer than it may."""


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Limit the processor time and the memory of what is done inside; for one operation."""

    def stop(number: int, frame: object) -> None:
        raise TooLong(f"more than {SECONDS} s of processor time")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGPROF, stop)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, before)


def _content(path: Path) -> str:
    """Return the manifest of an image as text, "" when it cannot be read."""
    try:
        with limits(), Volume.open(path) as volume:
            return "\n".join(manifest.to_line(entry) for entry in manifest.entries(volume))
    except Ext4LiteError:
        return ""


def survive(image: bytes | Image, directory: Path, name: str, *, writing: bool) -> str:
    """Do one operation to an image; return the error's class name, "" for none. AssertionError for what is wrong."""
    path = directory / "damaged"
    path.write_bytes(image)
    before = _content(path) if name in KEEPS_CONTENT else ""
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        scratch = Path(temporary)
        (scratch / "source").mkdir()
        (scratch / "source" / "file").write_bytes(b"in" * 3000)
        call = (writers if writing else readers)(path, scratch)[name]
        outcome = ""
        try:
            with limits():
                call()
        except Ext4LiteError as e:
            outcome = type(e).__name__
            assert str(e), "an error without words"
            assert "\n" not in str(e), f"an error of several lines: {e}"
    size = path.stat().st_size
    assert (writing and name in MAY_RESIZE) or size == len(image), f"the image has {size} bytes now"
    crashed = image[0x460:0x464] and image[0x460] & 4
    if not writing or (outcome and not crashed and name in ALL_OR_NOTHING):
        assert path.read_bytes() == image, "the image is not as it was"
    assert not before or _content(path) == before, "the content is not as it was"
    left = [p.name for p in directory.iterdir() if p.name.startswith((".damaged", "damaged."))]
    assert not left, f"left behind: {left}"
    return outcome


def main() -> None:
    """A campaign: ``damage.py SECONDS SEED [IMAGE…]``; prints each new kind of finding with what leads to it.

    A quarter of the images is read, the others are written to, where more can go wrong.
    """
    import time
    import traceback

    seconds, seed, *names = float(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    end = time.monotonic() + seconds
    manifest.ZEROS_ALLOWED = 256 << 20
    r = random.Random(seed)
    with tempfile.TemporaryDirectory() as temporary:
        samples = []
        for name in names or IMAGES:
            directory = Path(temporary) / name.replace(" ", "-")
            directory.mkdir()
            samples.append(Sample(name, directory))
            print(name, {k: len(v) for k, v in samples[-1].locator.by_kind.items()}, flush=True)
        seen: dict[str, int] = {}
        outcomes: dict[str, int] = {}
        count = 0
        while time.monotonic() < end:
            sample = r.choice(samples)
            changes = [
                (r.randrange(1 << 16), r.randrange(1 << 16), r.randrange(1 << 16), r.randrange(16), r.getrandbits(32))
                for _ in range(r.choice((1, 1, 1, 2, 3)))
            ]
            fixed = r.random() < 0.8
            image = sample.changed(changes, fixed)
            path = sample.directory
            for writing in r.choices((True, False), (3, 1)):
                every = writers(path, path) if writing else readers(path, path)
                for operation in r.sample(list(every), 5):
                    count += 1
                    begin = time.process_time()
                    try:
                        result = survive(image, path, operation, writing=writing)
                        outcomes[result] = outcomes.get(result, 0) + 1
                        assert time.process_time() - begin < SECONDS / 5, "slow"
                    except KeyboardInterrupt:
                        raise
                    except BaseException as e:
                        frames = traceback.extract_tb(e.__traceback__)
                        ours = [f for f in frames if "ext4lite/" in f.filename] or frames
                        key = f"{type(e).__name__} {ours[-1].filename.rpartition('/')[2]}:{ours[-1].lineno}"
                        seen[key] = seen.get(key, 0) + 1
                        if seen[key] == 1:
                            print(f"--- {key}: {operation} of {sample.name}: {sample.describe(changes)}")
                            print(f"    {changes} fixed={fixed}: {str(e)[:300]}")
                            print("    " + " < ".join(f"{f.name}:{f.lineno}" for f in reversed(ours[-6:])), flush=True)
                        for p in path.iterdir():
                            if p.name.startswith((".damaged", "damaged")):
                                p.unlink()
        print(count, "operations", outcomes, seen)


if __name__ == "__main__":
    main()
