"""``gvx-launch``: one module a command, imported only when its command is given."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line in sys.argv. Ends by SystemExit with an exit code of ``gvx.errors``."""
    _keep_standard_descriptors()
    if sys.argv[1:] == ["--version"]:
        from gvx import __version__

        print(f"gvx-launch {__version__}")
        raise SystemExit(0)
    from gvx.cli import app

    app.run()


def _keep_standard_descriptors() -> None:
    """Open 0, 1 and 2 where the caller closed them: else a volume would get the number of the guest's stdio."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
