"""`paddock serve TARGET`."""

from __future__ import annotations

import logging
import sys

import click

from paddock.cli import note, print_json
from paddock.config import MEBIBYTE, Access, Limits, ServerConfig, parse_mode, read_variables
from paddock.errors import ConfigError


@click.command("serve", epilog="TARGET: echo | counter | pkg.mod:Class | path/to/file.py:Class")
@click.argument("target")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, help="Port to listen on; 0 takes any free one.")
@click.option("--max-sessions", type=int, help="Sessions at once. Default: 100, or 1 if the class allows only one.")
@click.option(
    "--session-timeout",
    default=1800.0,
    show_default=True,
    help="Seconds an unused session is kept; 0: for ever.",
)
@click.option(
    "--queue-timeout",
    default=0.0,
    show_default=True,
    help="Seconds a newcomer waits when full; 0 refuses at once.",
)
@click.option(
    "--resume-window",
    default=60.0,
    show_default=True,
    help="Seconds the session of a dropped socket is kept.",
)
@click.option(
    "--step-timeout",
    default=300.0,
    show_default=True,
    help="Seconds a reset, step or tool call may take; 0: any.",
)
@click.option("--drain-grace", default=10.0, show_default=True, help="Seconds running steps get after SIGTERM.")
@click.option("--max-message-mb", default=100, show_default=True, help="Largest message, in MiB.")
@click.option("--threads", default=64, show_default=True, help="Threads for environments that are not async.")
@click.option("--workers", default=1, show_default=True, help="Processes that share the port and the capacity.")
@click.option("--mode", help="simulation (default) or production: agents get no HTTP reset, step and state.")
@click.option("--auth-token", help="Token every request must carry. Better: PADDOCK_AUTH_TOKEN.")
@click.option("--allow-host", multiple=True, help="A host name that is ours, beside the loopback ones.")
@click.option("--allow-origin", multiple=True, help="A browser origin that may connect.")
@click.option("--log-level", default="info", show_default=True, help="debug, info, warning or error.")
@click.option("--json", "as_json", is_flag=True, help="Print the address as JSON once it listens.")
def command(
    target: str, host: str, port: int, max_sessions: int | None, session_timeout: float, queue_timeout: float,
    resume_window: float, step_timeout: float, drain_grace: float, max_message_mb: int, threads: int, workers: int,
    mode: str | None, auth_token: str | None, allow_host: tuple[str, ...], allow_origin: tuple[str, ...],
    log_level: str, as_json: bool,
) -> None:  # fmt: skip
    """Serve an environment over HTTP, WebSocket and MCP until Ctrl-C or SIGTERM."""
    from paddock.server.app import create_app, default_sessions
    from paddock.server.run import serve
    from paddock.sessions.blueprint import Blueprint
    from paddock.targets import load_target

    _log(log_level)
    variables = read_variables()
    make, name = load_target(target)
    limits = Limits(
        max_sessions=max_sessions if max_sessions is not None else variables.max_sessions
        or default_sessions(Blueprint(make)),
        session_timeout=session_timeout or None,
        queue_timeout=queue_timeout,
        resume_window=resume_window,
        step_timeout=step_timeout or None,
        drain_grace=drain_grace,
        message_bytes=max_message_mb * MEBIBYTE,
        threads=threads,
    )  # fmt: skip
    token = auth_token or variables.auth_token
    hosts = frozenset((*allow_host, host)) if host not in ("0.0.0.0", "::") else frozenset(allow_host)
    config = ServerConfig(
        limits=limits,
        access=Access(token=token, hosts=hosts, origins=frozenset(allow_origin)),
        mode=parse_mode(mode) if mode else variables.mode,
    )
    app = create_app(make, env_name=name, config=config)

    def announce(url: str) -> None:
        if as_json:
            print_json({"url": url, "environment": name, "max_sessions": limits.max_sessions, "workers": workers})
            sys.stdout.flush()
        note(f"{name} at {url}  ({limits.max_sessions} sessions, {workers} worker{'s' if workers > 1 else ''})")
        note(f"  clients: Client({url!r})   MCP: {url}/mcp   docs: {url}/docs   stop: Ctrl-C")

    serve(app, host=host, port=port, workers=workers, announce=announce)


def _log(level: str) -> None:
    number = logging.getLevelName(level.upper())
    if not isinstance(number, int):
        raise ConfigError(f"--log-level is {level!r}", hint="use debug, info, warning or error")
    form = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
    logging.basicConfig(level=number, format=form, stream=sys.stderr, datefmt="%H:%M:%S")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
