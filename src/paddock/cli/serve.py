"""`paddock serve TARGET`."""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
from functools import partial
from pathlib import Path

import click

from paddock.cli import counted, note, print_json, refuse_unused
from paddock.cli.interrupts import raise_on_interrupt
from paddock.config import MEBIBYTE, Access, IsolationKind, Limits, ServerConfig, parse_mode, read_variables
from paddock.errors import ConfigError
from paddock.targets import FORMS

USUAL = Limits()
OF_A_CLUSTER = (
    *("hosts", "min_hosts", "max_hosts", "host_cpus", "host_memory", "host_resources"),
    *("ray_address", "ship", "door"),
)


@click.command("serve", epilog=f"TARGET: {FORMS}")
@click.argument("target")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, help="Port to listen on; 0 takes any free one.")
@click.option("--max-sessions", type=int, help="Sessions at once. Default: 100, or 1 if the class allows only one.")
@click.option(
    "--max-waiting", type=int, help="Newcomers that may wait at once. Default: 10,000. Also: PADDOCK_MAX_WAITING."
)
@click.option("--max-connections", type=int, help="Open connections per process. Default: what the system allows.")
@click.option(
    "--session-timeout",
    default=USUAL.session_timeout,
    show_default=True,
    help="Seconds an unused session is kept; 0: for ever.",
)
@click.option(
    "--queue-timeout",
    default=USUAL.queue_timeout,
    show_default=True,
    help="Seconds a newcomer waits when full; 0 refuses at once.",
)
@click.option(
    "--resume-window",
    default=USUAL.resume_window,
    show_default=True,
    help="Seconds the session of a dropped socket is kept.",
)
@click.option(
    "--step-timeout",
    default=USUAL.step_timeout,
    show_default=True,
    help="Seconds a reset, step or tool call may take; 0: any.",
)
@click.option(
    "--drain-grace", default=USUAL.drain_grace, show_default=True, help="Seconds running steps get after SIGTERM."
)
@click.option(
    "--max-message-mb", default=USUAL.message_bytes // MEBIBYTE, show_default=True, help="Largest message, in MiB."
)
@click.option(
    "--threads", default=USUAL.threads, show_default=True, help="Threads for environments that are not async."
)
@click.option("--workers", default=1, show_default=True, help="Processes that share the port and the capacity.")
@click.option(
    "--isolation",
    type=click.Choice(["thread", "process"]),
    help="process: sessions in child processes, a crash is theirs alone. Default: as the class says, or thread.",
)
@click.option("--sessions-per-process", type=int, help="With --isolation process: sessions that share a process. [1]")
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="ray: place hosts over a Ray cluster, behind one door.",
)
@click.option("--hosts", default="1", show_default=True, help="With ray: how many hosts, or auto (with the queue).")
@click.option("--min-hosts", type=int, help="With --hosts auto: keep at least so many. Default: 1.")
@click.option("--max-hosts", type=int, help="With --hosts auto: at most so many. Default: one for each node's CPU.")
@click.option("--host-cpus", default=1.0, show_default=True, help="With ray: CPUs that a host takes of its node.")
@click.option("--host-memory", type=int, help="With ray: MiB that a host takes of its node.")
@click.option("--host-resources", help='With ray: custom resources of a host, as JSON: {"gpu_node": 1}.')
@click.option("--ray-address", help="A running cluster, HOST:6379. Also: RAY_ADDRESS. Default: start one here.")
@click.option("--ship", type=click.Path(path_type=Path), help="With ray: a folder to copy to every node.")
@click.option(
    "--door",
    type=click.Choice(["forward", "redirect"]),
    default="forward",
    show_default=True,
    help="With ray: bring sockets to their host, or send clients there.",
)
@click.option("--mode", help="simulation (default) or production: agents get no HTTP reset, step and state.")
@click.option("--auth-token", help="Token every request must carry. Better: PADDOCK_AUTH_TOKEN.")
@click.option("--allow-host", multiple=True, help="A host name that is ours, beside the loopback ones.")
@click.option("--allow-origin", multiple=True, help="A browser origin that may connect.")
@click.option("--web", is_flag=True, help="Offer the page at /web/. Also: ENABLE_WEB_INTERFACE=true.")
@click.option("--store", type=click.Path(path_type=Path), help="Whose rollouts the page shows. Also: PADDOCK_STORE.")
@click.option("--log-level", default="info", show_default=True, help="debug, info, warning or error.")
@click.option("--json", "as_json", is_flag=True, help="Print the address as JSON once it listens.")
def command(
    target: str, host: str, port: int, max_sessions: int | None, max_waiting: int | None,
    max_connections: int | None, session_timeout: float,
    queue_timeout: float,
    resume_window: float, step_timeout: float, drain_grace: float, max_message_mb: int, threads: int, workers: int,
    isolation: IsolationKind | None, sessions_per_process: int | None,
    mode: str | None, auth_token: str | None, allow_host: tuple[str, ...], allow_origin: tuple[str, ...],
    web: bool, store: Path | None, log_level: str, as_json: bool,
    engine: str, hosts: str, min_hosts: int | None, max_hosts: int | None, host_cpus: float,
    host_memory: int | None, host_resources: str | None, ray_address: str | None, ship: Path | None, door: str,
) -> None:  # fmt: skip
    """Serve an environment over HTTP, WebSocket and MCP until Ctrl-C or SIGTERM."""
    from paddock.server.app import create_app, default_sessions
    from paddock.server.run import serve
    from paddock.sessions.blueprint import Blueprint
    from paddock.targets import environment_of, load_target

    require_at_least(
        1,
        "a whole number, 1 or more",
        max_sessions=max_sessions,
        max_waiting=max_waiting,
        threads=threads,
        workers=workers,
    )
    require_at_least(1, "a whole number, 1 or more", max_connections=max_connections)
    require_at_least(1, "MiB, 1 or more", max_message_mb=max_message_mb)
    require_at_least(0, "seconds; 0 is no limit", session_timeout=session_timeout, step_timeout=step_timeout)
    require_at_least(
        0, "seconds, 0 or more", queue_timeout=queue_timeout, resume_window=resume_window, drain_grace=drain_grace
    )
    require_address(host)
    variables = read_variables()
    token = usable_token(variables.auth_token if auth_token is None else auth_token)
    shown = web or variables.web
    if engine == "ray":
        why = "the page of each host shows the store of its node"
        refuse_unused("store", why=why, hint="leave it out, and set PADDOCK_STORE on the nodes")
    else:
        refuse_unused(*OF_A_CLUSTER, why="the environment is served by this machine", hint="add --engine ray")
    if not shown:
        refuse_unused("store", why="the page is not offered", hint="add --web")
    _log(log_level)
    if engine == "local" and target.startswith("openenv:"):
        from paddock.adapters.openenv.moving import move_in

        move_in(target, sys.argv[1:])
    make, name = load_target(target)
    scale = None
    if engine == "ray":
        from paddock.cli.serve_ray import read_scale

        scale = read_scale(hosts, min_hosts, max_hosts, ray_address)
    limits = Limits(
        max_sessions=max_sessions if max_sessions is not None else variables.max_sessions
        or default_sessions(Blueprint(make)) * (scale.most if scale else 1),
        max_waiting=max_waiting or variables.max_waiting or USUAL.max_waiting,
        max_connections=max_connections or variables.max_connections,
        session_timeout=session_timeout or None,
        queue_timeout=queue_timeout,
        resume_window=resume_window,
        step_timeout=step_timeout or None,
        drain_grace=drain_grace,
        message_bytes=max_message_mb * MEBIBYTE,
        threads=threads,
    )  # fmt: skip
    own_names = frozenset((*allow_host, host)) if host not in ("0.0.0.0", "::") else frozenset(allow_host)
    config = ServerConfig(
        limits=limits,
        access=Access(token=token, hosts=own_names, origins=frozenset(allow_origin)),
        mode=parse_mode(mode) if mode else variables.mode,
        isolation=isolation,
        sessions_per_process=sessions_per_process,
        find_environment=partial(environment_of, target),
    )
    if scale is not None:
        from paddock.cli.serve_ray import serve_on_cluster
        from paddock.scale.cluster import Resources

        each = Resources.read(host_cpus, host_memory, host_resources)
        serve_on_cluster(
            target, Blueprint(make), name, config, scale, each, host=host, port=port, doors=workers, mode=door,
            ray_address=ray_address, folder=ship, page=shown, as_json=as_json,
        )  # fmt: skip
        return
    app = create_app(make, env_name=name, config=config)
    if shown:
        from paddock.web.doors import page_in_server

        page_in_server(app, store)
    announce = partial(tell, name, config, workers=workers, shown=shown, as_json=as_json)
    raise_on_interrupt()
    serve(app, host=host, port=port, workers=workers, announce=announce)
    if app.state.service.left_running:
        _leave_at_once()


def usable_token(given: str | None) -> str | None:
    if given is not None and not given.strip():
        raise ConfigError("the token is blank", hint="give --auth-token or PADDOCK_AUTH_TOKEN a word, or neither")
    return given


def tell(name: str, config: ServerConfig, url: str, *, workers: int, shown: bool, as_json: bool) -> None:
    """Say where it listens, and what can be done there."""
    most = config.limits.max_sessions
    page = f"{url}/web/" if shown else None
    if as_json:
        told = {"url": url, "environment": name, "max_sessions": most, "workers": workers}
        print_json(told | ({"page": page} if page else {}))
        sys.stdout.flush()
    note(f"{name} at {url}  ({counted(most, 'session')}, {counted(workers, 'worker')})")
    note(f"  clients: Client({url!r})   MCP: {url}/mcp   docs: {url}/docs   stop: Ctrl-C")
    if page:
        note(f"  page: {page}" + ("?token=… (the token you gave)" if config.access.token else ""))


def require_at_least(least: float, form: str, **given: float | None) -> None:
    """Raise ConfigError for the first of these options that is less, or no number at all."""
    for name, value in given.items():
        if value is not None and not least <= value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} is {value:g}", hint=f"give {form}")


def require_address(host: str) -> None:
    """Raise ConfigError if nothing can listen there, whatever the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind((host, 0))
    except OSError as error:
        hint = "give --host an address of this machine: 127.0.0.1, or 0.0.0.0 for all of them"
        raise ConfigError(f"cannot listen on {host!r}: {error.strerror or error}", hint=hint) from error


def _log(level: str) -> None:
    number = logging.getLevelName(level.upper())
    if not isinstance(number, int):
        raise ConfigError(f"--log-level is {level!r}", hint="use debug, info, warning or error")
    form = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
    logging.basicConfig(level=number, format=form, stream=sys.stderr, datefmt="%H:%M:%S")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def _leave_at_once() -> None:
    """Without waiting for threads that nobody can end, as Python would."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(0)
