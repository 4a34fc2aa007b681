"""`paddock e2b up`: E2B's API over sandboxes of this machine."""

from __future__ import annotations

import logging
import shlex
import sys
from typing import TYPE_CHECKING

import click

from paddock.cli import note, plural, print_json
from paddock.cli.interrupts import raise_on_interrupt
from paddock.cli.store_options import store_option
from paddock.config import E2B_API_KEY

if TYPE_CHECKING:
    from pathlib import Path

    from paddock.e2b_server.server import E2bServerAddress


@click.group("e2b")
def command() -> None:
    """Start a local server that E2B's SDK can use."""


@command.command("up")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=3717,
    show_default=True,
    help="Port to listen on; 0 takes any free one.",
)
@click.option(
    "--sandbox",
    type=click.Choice(["bwrap", "process"]),
    default="bwrap",
    show_default=True,
    help="The kind of sandbox; process isolates nothing.",
)
@click.option("--unsafe", is_flag=True, help="Allow --sandbox process, which isolates nothing.")
@click.option("--max-sandboxes", type=click.IntRange(min=1), default=20, show_default=True, help="Sandboxes at once.")
@click.option("--api-key", help="The key that clients must send. Better: E2B_API_KEY. Default: a random one.")
@store_option("The store that records the sandboxes.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="warning",
    show_default=True,
    help="What is logged.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the address and the variables as JSON once it listens.")
def up(
    host: str,
    port: int,
    sandbox: str,
    unsafe: bool,
    max_sandboxes: int,
    api_key: str | None,
    store: Path | None,
    log_level: str,
    as_json: bool,
) -> None:
    """Serve E2B's API until Ctrl-C or SIGTERM; then every sandbox is ended.

    It prints the variables that programs with E2B's SDK need to use it.
    """
    from paddock.e2b_server import E2bServerSettings, serve_e2b
    from paddock.sandbox import choose_backend

    logging.basicConfig(level=log_level.upper(), format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    choose_backend(sandbox, consent=unsafe)
    key = api_key or E2B_API_KEY.read()
    settings = E2bServerSettings(
        host=host,
        port=port,
        backend=sandbox,
        consent=unsafe,
        max_sandboxes=max_sandboxes,
        api_key=key,
        store=store,
    )

    def announce(address: E2bServerAddress) -> None:
        variables = address.variables
        if as_json:
            print_json({"url": address.url, "variables": variables})
            sys.stdout.flush()
        else:
            if key:
                del variables["E2B_API_KEY"]
            click.echo(" ".join(["export", *(f"{name}={shlex.quote(value)}" for name, value in variables.items())]))
            sys.stdout.flush()
        most = plural(max_sandboxes, "sandbox", "sandboxes")
        note(f"E2B's API at {address.url}  ({sandbox}, up to {most})   stop: Ctrl-C")
        note("  sandboxes have the programs of this machine, and no network but their own")

    raise_on_interrupt()
    serve_e2b(settings, announce)
