"""``gvx-launch run``: one episode in the foreground."""

from __future__ import annotations

import math
import signal
from types import FrameType
from typing import Annotated

import typer

from gvx.cli.app import GuestExit
from gvx.config import (
    Config,
    Mount,
    Publish,
    Resources,
    parse_cpus,
    parse_env,
    parse_memory,
    parse_mount,
    parse_publish,
)
from gvx.errors import ConfigError, SandboxTimeout
from gvx.sandbox import FORWARDED, Sandbox

_DEADLY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end the launcher while there is no guest yet to hand them to (an image may be importing)."""


def register(app: typer.Typer) -> None:
    """Add the command. Everything after IMAGE is the guest's, options too."""
    app.command("run", context_settings={"allow_interspersed_args": False})(run)


def run(
    *,
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="An archive, an OCI layout, or a name in the cache.")],
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="The guest's arguments.")] = None,
    memory: Annotated[str | None, typer.Option("--memory", "-m", metavar="SIZE", help="RAM, like 4g.")] = None,
    cpus: Annotated[str | None, typer.Option(metavar="N", help="CPUs, a whole number.")] = None,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", metavar="K[=V]", help="Set a variable.")] = None,
    publish: Annotated[
        list[str] | None,
        typer.Option(
            "--publish",
            "-p",
            metavar="unix:SOCK:PORT",
            help="Make a guest's TCP port reachable: also [[IP:]HOSTPORT:]PORT.",
        ),
    ] = None,
    mount: Annotated[
        list[str] | None,
        typer.Option(metavar="type=volume,src=EP.ext4,dst=DIR[,readonly]", help="Mount a volume, or a tmpfs."),
    ] = None,
    net: Annotated[str, typer.Option("--net", "--network", metavar="nat|none", help="The network.")] = "nat",
    net_allow: Annotated[
        list[str] | None,
        typer.Option(metavar="CIDR[:PORT]", help="Let the guest reach a private destination, also NAME:PORT."),
    ] = None,
    timeout: Annotated[float | None, typer.Option(metavar="S", min=0, help="End the episode after S seconds.")] = None,
    stop_timeout: Annotated[float, typer.Option(metavar="S", min=0, help="Seconds from SIGTERM to SIGKILL.")] = 10.0,
    entrypoint: Annotated[
        str | None, typer.Option(metavar="PROGRAM", help="Instead of the image's; '' resets it.")
    ] = None,
    workdir: Annotated[str | None, typer.Option("--workdir", "-w", metavar="DIR", help="Working directory.")] = None,
    user: Annotated[str | None, typer.Option("--user", "-u", metavar="USER[:GROUP]", help="Names or numbers.")] = None,
    hostname: Annotated[str | None, typer.Option(metavar="NAME", help="The guest's host name.")] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="The episode's id.")] = None,
) -> None:
    """Run IMAGE in the foreground and end with the guest's exit code (124 on --timeout, 125 when gvx fails).

    stdin, stdout, stderr and signals are the guest's; a second Ctrl-C kills it. Nothing is left afterwards.
    """
    if net not in ("nat", "none"):
        raise ConfigError(f"unknown network mode {net!r}", hint="nat or none")
    for seconds in (timeout, stop_timeout):
        if seconds is not None and not math.isfinite(seconds):
            raise ConfigError(f"{seconds} is no number of seconds")
    mounts: tuple[Mount, ...] = tuple(map(parse_mount, mount or ()))
    ports: tuple[Publish, ...] = tuple(map(parse_publish, publish or ()))
    config = Config(
        image=image,
        command=tuple(args or ()),
        entrypoint=entrypoint,
        env=parse_env(env or ()),
        workdir=workdir,
        user=user,
        hostname=hostname,
        name=name,
        resources=Resources(parse_memory(memory) if memory else None, parse_cpus(cpus) if cpus else None),
        mounts=mounts,
        publish=ports,
        allow=tuple(net_allow or ()),
        network="none" if net == "none" else "nat",
    )
    raise GuestExit(foreground(Sandbox(config), timeout, stop_timeout))


def foreground(box: Sandbox, timeout: float | None, stop_timeout: float) -> int:
    """Run ``box`` to its end with our signals forwarded. Returns the guest's exit code.

    Raises:
        SandboxTimeout: it took longer than ``timeout`` seconds; it is gone by then.
    """
    interrupts = 0
    running = False

    def forward(number: int, _frame: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += number == signal.SIGINT
        if not running:
            if number in _DEADLY:
                raise GuestExit(128 + number)
        elif interrupts > 1 and number == signal.SIGINT:
            box.stop(0)
        else:
            box.send_signal(number)

    before = {name: signal.signal(signal.Signals[name], forward) for name in FORWARDED}
    try:
        with box:
            running = True
            try:
                return box.wait(timeout).code
            except SandboxTimeout:
                box.stop(stop_timeout)
                raise SandboxTimeout(f"ended after {timeout:g} s", where=box.id) from None
    finally:
        for name, handler in before.items():
            signal.signal(signal.Signals[name], handler)
