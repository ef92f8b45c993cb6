"""The image cache: content-addressed root file systems, made once and shared read-only by all episodes.

``gvx-sentry image`` writes it (its layout is described there): ``DIR/<config digest>/{root.erofs,config.json}`` and
``DIR/names.json``. Here it is only read, and names are understood as docker's CLI understands them.
"""

from __future__ import annotations

import builtins
import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gvx.errors import ImageError, InfraError
from gvx.spec import ImageConfig

_DIGEST = re.compile(r"(?:sha256:)?([0-9a-f]{12,64})")
_COMMAND_TIMEOUT = 1800.0
"""Seconds that importing may take: gigabytes of compressed layers on a slow disk."""


def sentry_binary() -> Path:
    """Return the path of ``gvx-sentry``: $GVX_SENTRY, or the one in the package.

    Raises:
        InfraError: there is none.
    """
    given = os.environ.get("GVX_SENTRY")
    path = Path(given) if given else Path(__file__).with_name("bin") / "gvx-sentry"
    if not os.access(path, os.X_OK):
        raise InfraError("no gvx-sentry here", where=str(path), hint="make build, or install the linux x86_64 wheel")
    return path


def default_cache() -> Path:
    """Return $XDG_CACHE_HOME/gvx/images, or ~/.cache/gvx/images."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gvx", "images")


def familiar(name: str) -> str:
    """Shorten a reference as docker shows it: no docker.io, no library/, a tag.

    >>> familiar("docker.io/library/docker"), familiar("host:5000/a")
    ('docker:latest', 'host:5000/a:latest')
    """
    for prefix in ("docker.io/", "index.docker.io/"):
        name = name.removeprefix(prefix)
    name = name.removeprefix("library/")
    return name if ":" in name.rpartition("/")[2] or "@" in name else f"{name}:latest"


@dataclass(slots=True, frozen=True)
class CachedImage:
    """An image that is ready to run: its erofs file and what it says about its containers."""

    digest: str
    root: Path
    config: ImageConfig


@dataclass(slots=True, frozen=True)
class ImageCache:
    """The cache in directory ``path``."""

    path: Path

    @classmethod
    def default(cls) -> ImageCache:
        """Return the user's own cache."""
        return cls(default_cache())

    def names(self) -> dict[str, str]:
        """Return names.json: name → digest (hex). {} where there is no cache yet."""
        try:
            found = json.loads(Path(self.path, "names.json").read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise ImageError(f"unreadable: {error}", where=str(self.path / "names.json")) from error
        return {str(name): str(digest).removeprefix("sha256:") for name, digest in found.items()}

    def find(self, reference: str) -> str | None:
        """Look a name, or a digest's beginning (12 digits or more), up. Returns the digest or None."""
        names = self.names()
        for name in (reference, familiar(reference)):
            if name in names:
                return names[name]
        digits = _DIGEST.fullmatch(reference)
        if digits and self.path.is_dir():
            found = [entry.name for entry in self.path.iterdir() if entry.name.startswith(digits[1])]
            if len(found) > 1:
                raise ImageError(f"{len(found)} images begin with {reference}", where=str(self.path))
            return found[0] if found else None
        return None

    def resolve(self, image: str) -> CachedImage:
        """Find IMAGE: a name or digest in the cache, or else the path of an archive or layout, which is imported.

        What begins with ``/``, ``./`` or ``../`` is a path and nothing else.

        Raises:
            ImageError: there is no such image.
        """
        path = Path(image)
        digest = None if image.startswith(("/", "./", "../")) else self.find(image)
        if digest is None:
            if not path.exists():
                raise ImageError(
                    "neither a name in the cache nor an archive or layout",
                    where=image,
                    hint="gvx-launch images import ARCHIVE",
                )
            found = self.import_(path)
            if len(found) != 1:
                names = ", ".join(name for one in found for name in one["names"])
                raise ImageError(
                    f"holds {len(found)} images", where=image, hint=f"they are in the cache now: name one of {names}"
                )
            digest = str(found[0]["digest"])
        return self.open(digest)

    def open(self, digest: str) -> CachedImage:
        """Read a cached image's configuration."""
        digest = digest.removeprefix("sha256:")
        home = self.path / digest
        try:
            document = json.loads((home / "config.json").read_bytes())
            root = home / "root.erofs"
            root.stat()
        except (OSError, ValueError) as error:
            raise ImageError(
                f"not usable: {error}", where=str(home), hint="gvx-launch images rm, and import it again"
            ) from error
        looked_up = document.get("gvx") or {}  # what gvx-sentry read from the image while it made the root
        users = {name: str(looked_up.get(name) or "") for name in ("passwd", "group")}
        return CachedImage(digest, root, ImageConfig.from_json(digest, document, **users))

    def import_(self, archive: Path, *, name: str | None = None) -> builtins.list[dict[str, Any]]:
        """Make the roots of an archive (docker-archive, OCI layout directory, tar of one). Quick where they are there.

        Returns:
            for each image of the archive ``digest``, ``names``, ``size`` (bytes on disk), ``path``.
        """
        named = ["--name", familiar(name)] if name else []
        return [json.loads(line) for line in self._command("import", *named, str(archive)).splitlines()]

    def list(self) -> builtins.list[dict[str, Any]]:
        """Return all images: ``digest``, ``names``, ``size`` (bytes), ``path``."""
        return [json.loads(line) for line in self._command("ls", "--json").splitlines()]

    def remove(self, reference: str) -> dict[str, Any]:
        """Remove a name, and with its last name the image. Episodes that run from it go on.

        Raises:
            ImageError: there is no such image.
        """
        return dict(json.loads(self._command("rm", "--json", reference) or "{}"))

    def _command(self, verb: str, *words: str) -> str:
        argv = [str(sentry_binary()), "image", verb, "--cache", str(self.path), *words]
        try:
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise InfraError(f"image {verb} did not end within {_COMMAND_TIMEOUT:.0f} s") from error
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
            raise ImageError(lines[-1].removeprefix("gvx-sentry: "))
        return done.stdout
