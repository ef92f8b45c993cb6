"""The command ``ext4lite``: one module a command, imported only when it is called.

A command ``name`` is a typer-annotated function ``name`` in ``ext4lite.cli.name``, with ``_`` for ``-``; the table
below is all that ``--help`` needs. Errors of :class:`ext4lite.errors.Ext4LiteError` become one line on stderr and their
exit code.
"""

from __future__ import annotations

import functools
import io
import os
import signal
import sys
import threading
from collections.abc import Callable
from importlib import import_module

from ext4lite import __version__

COMMANDS: dict[str, str] = {
    "mkfs": "Make an empty volume.",
    "mkgolden": "Make a volume that holds container images as a ready Docker store.",
    "inspect": "Show what a volume is and holds.",
    "clone": "Make an episode's copy of a golden volume.",
    "manifest": "List a volume's content as JSON Lines.",
    "ls": "List a directory of a volume.",
    "cat": "Print files of a volume.",
    "stat": "Show what inodes of a volume say.",
    "cp-in": "Copy files into a volume.",
    "cp-out": "Copy files out of a volume.",
    "rm": "Remove files and directories of a volume.",
    "mkdir": "Make directories in a volume.",
    "mv": "Move or rename in a volume.",
    "ln": "Make a hard link or symlink in a volume.",
    "xattr": "Show and change extended attributes in a volume.",
    "label": "Show or set a volume's name.",
    "uuid": "Show or set a volume's UUID.",
    "recover": "Replay a volume's journal after a crash and leave it clean.",
}

EXIT_INTERRUPTED = 130
EXIT_HOST = 6


def usage() -> str:
    """Return the text of ``ext4lite --help``."""
    width = max(map(len, COMMANDS))
    lines = [
        "Usage: ext4lite [--version] [--help] COMMAND [ARGS]...",
        "",
        "  ext4 volumes and Docker's overlay2 store in one file, without root and without a kernel.",
        "",
        "Commands:",
    ]
    lines += [f"  {name:{width}}  {text}" for name, text in COMMANDS.items()]
    lines += ["", "  ext4lite COMMAND --help tells more."]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit with its code (see docs/exit-codes.md)."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be UTF-8
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: list[str]) -> int:
    """Run the command line and return its exit code."""
    if not argv or argv[0] in ("--help", "-h"):
        print(usage(), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    if argv[0] in ("--version", "-V"):
        print(f"ext4lite {__version__}")
        return 0
    if argv[0] not in COMMANDS:
        print(f"ext4lite: no such command: {argv[0]} (ext4lite --help lists them)", file=sys.stderr)
        return 2
    return _run_command(argv[0], argv[1:])


def _run_command(name: str, arguments: list[str]) -> int:
    import typer

    function = name.replace("-", "_")
    module = import_module(f"ext4lite.cli.{function}")
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name)(_with_exit_codes(getattr(module, function)))
    rewrite = getattr(module, "rewrite_arguments", None)
    try:
        app(rewrite(arguments) if rewrite else arguments, prog_name=f"ext4lite {name}")
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else 0
    return 0


def _with_exit_codes(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command.

    Errors become a line and an exit code before typer sees them (it has codes and texts of its own).
    """

    @functools.wraps(command)
    def wrapped(*args: object, **kwargs: object) -> None:
        code = _guarded(lambda: command(*args, **kwargs))
        if code:
            raise SystemExit(code)

    return wrapped


def _guarded(call: Callable[[], None]) -> int:
    from ext4lite.errors import Ext4LiteError

    previous = None
    if threading.current_thread() is threading.main_thread():
        previous = signal.signal(signal.SIGTERM, _terminate)  # so that half-made files are removed
    try:
        call()
        sys.stdout.flush()
    except Ext4LiteError as e:
        print(f"ext4lite: {_one_line(e)}", file=sys.stderr)
        return e.exit_code
    except KeyboardInterrupt:
        print("ext4lite: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone: nobody to tell. Let the interpreter's last flush go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as e:
        print(f"ext4lite: {_one_line(e)}", file=sys.stderr)
        return EXIT_HOST
    finally:
        if previous is not None:
            signal.signal(signal.SIGTERM, previous)
    return 0


def _terminate(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split("\n")).strip() or type(error).__name__
