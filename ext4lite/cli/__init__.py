"""The command ``ext4lite``: one module a command, imported only when it is called.

A command ``name`` is a typer-annotated function ``name`` in ``ext4lite.cli.name``, with ``_`` for ``-``; the table
below is all that ``--help`` needs. Errors of :class:`ext4lite.errors.Ext4LiteError` become one line on stderr and their
exit code.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

from ext4lite import __version__
from ext4lite.units import printable

COMMANDS: dict[str, str] = {
    "mkfs": "Make an empty volume.",
    "mkgolden": "Make a volume that holds container images as a ready Docker store.",
    "inspect": "Show what a volume is and holds.",
    "clone": "Make an episode's copy of a golden volume.",
    "flatten": "Make a delta over a golden volume a plain image.",
    "rebase": "Give a delta another backing file.",
    "diff": "Tell which blocks of two volumes differ.",
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
    "compact": "Defragment a volume and drop its free blocks.",
    "recover": "Replay a volume's journal after a crash and leave it clean.",
    "resize": "Make a volume larger or smaller.",
    "journal": "Show, make, resize or remove a volume's journal.",
}

EXIT_USAGE = 2
EXIT_HOST = 6
EXIT_INTERRUPTED = 130


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
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller: no file of ours may get its number
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names of files need not be UTF-8: scripts get their bytes, people something to read.
        sys.stdout.reconfigure(errors="backslashreplace" if sys.stdout.isatty() else "surrogateescape")
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: list[str]) -> int:
    """Run the command line and return its exit code."""
    return _guarded(lambda: _dispatch(argv))


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("--help", "-h"):
        print(usage(), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else EXIT_USAGE
    if argv[0] in ("--version", "-V"):
        print(f"ext4lite {__version__}")
        return 0
    if argv[0] not in COMMANDS:
        print(f"ext4lite: no such command: {printable(argv[0])} (ext4lite --help lists them)", file=sys.stderr)
        return EXIT_USAGE
    return _run_command(argv[0], argv[1:])


def _run_command(name: str, arguments: list[str]) -> int:
    import typer

    function = name.replace("-", "_")
    module = import_module(f"ext4lite.cli.{function}")
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name)(getattr(module, function))
    rewrite = getattr(module, "rewrite_arguments", None)
    # typer's own error class is not public, but the base of one that is.
    usage_error: Any = next(t for t in typer.BadParameter.__mro__ if t.__name__ == "UsageError")
    command = typer.main.get_command(app)
    try:
        # Not app(…): it has texts and exit codes of its own for usage errors, Ctrl-C and closed pipes.
        with command.make_context(f"ext4lite {name}", rewrite(arguments) if rewrite else list(arguments)) as context:
            command.invoke(context)
    except typer.Exit as e:
        return e.exit_code
    except usage_error as e:
        text = printable(e.format_message()).rstrip(".")
        print(f"ext4lite: {text} (ext4lite {name} --help tells more)", file=sys.stderr)
        return EXIT_USAGE
    return 0


def _guarded(call: Callable[[], int]) -> int:
    """Return the exit code of ``call``; an error becomes a line on stderr and its code."""
    previous = None
    if threading.current_thread() is threading.main_thread():
        previous = signal.signal(signal.SIGTERM, _terminate)  # so that half-made files are removed
    try:
        code = call()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("ext4lite: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _silence_stdout()  # The reader of our output is gone: nobody to tell.
        return 0
    except OSError as e:
        # What reading and writing volumes brings has become a HostError; what is left is our output.
        _silence_stdout()
        where = os.fsdecode(e.filename) if e.filename else "output"
        print(f"ext4lite: {printable(where)}: {(e.strerror or str(e)).lower()}", file=sys.stderr)
        return EXIT_HOST
    except Exception as e:
        from ext4lite.errors import Ext4LiteError

        if not isinstance(e, Ext4LiteError):
            raise
        print(f"ext4lite: {printable(e)}", file=sys.stderr)
        return e.exit_code
    finally:
        if previous is not None:
            signal.signal(signal.SIGTERM, previous)
    return code


def _silence_stdout() -> None:
    """Let the interpreter's last flush go nowhere."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _terminate(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)
