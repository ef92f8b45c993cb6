"""gvx: a private, unprivileged Docker for every agent episode."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gvx.config import Config as Config
    from gvx.config import Mount as Mount
    from gvx.config import Publish as Publish
    from gvx.config import Resources as Resources
    from gvx.errors import GvxError as GvxError
    from gvx.images import ImageCache as ImageCache
    from gvx.sandbox import ExitStatus as ExitStatus
    from gvx.sandbox import Sandbox as Sandbox

__version__ = "0.1.0"

_HOMES = {
    "Config": "config",
    "Mount": "config",
    "Publish": "config",
    "Resources": "config",
    "GvxError": "errors",
    "ImageCache": "images",
    "ExitStatus": "sandbox",
    "Sandbox": "sandbox",
}
__all__ = [*_HOMES, "__version__"]  # noqa: PLE0604 (names of a dict literal above)


def __getattr__(name: str) -> object:
    """Import a public name's module when the name is first used: ``import gvx`` alone costs next to nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"gvx.{_HOMES[name]}"), name)
