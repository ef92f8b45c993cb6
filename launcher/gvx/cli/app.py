"""The tree of commands."""

from __future__ import annotations

import sys

import typer

from gvx.errors import GvxError


class GuestExit(SystemExit):
    """The guest's own exit code, which is not to be mistaken for one of ours."""


def build(first: str) -> typer.Typer:
    """Make the command tree; only the module of the command ``first`` is imported, all of them for help."""
    app = typer.Typer(
        name="gvx-launch",
        help="Run container images in private, unprivileged sandboxes.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
    )

    @app.callback()
    def _top(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
        """Run container images in private, unprivileged sandboxes."""

    if first != "images":
        from gvx.cli import run as run_module

        run_module.register(app)
    if first != "run":
        from gvx.cli import images

        images.register(app)
    return app


def run() -> None:
    """Run the command line, and turn errors into one line and an exit code."""
    first = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    try:
        build(first)()
    except GuestExit:
        raise
    except SystemExit as error:
        # Docker's `run` answers wrong usage with 125, since 2 may be the guest's.
        raise SystemExit(125 if first == "run" and error.code == 2 else error.code) from None
    except GvxError as error:
        if not error.reported:
            print(f"gvx-launch: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
