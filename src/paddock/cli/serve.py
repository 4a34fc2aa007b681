"""`paddock serve TARGET`."""

from __future__ import annotations

import logging
import os
import socket
import sys
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paddock.cli import note, plural, print_json, refuse_unused
from paddock.cli.field_options import field_options, read_field_options
from paddock.cli.interrupts import raise_on_interrupt
from paddock.config import ENABLE_WEB_INTERFACE, ServerConfig
from paddock.errors import ConfigError
from paddock.targets import FORMS

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from paddock.scale.autoscale import ScalingPolicy
    from paddock.scale.gateway import GatewayMode

ALL_ADDRESSES = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class RayOptions:
    """Options that have an effect with `--engine ray` only."""

    hosts: str = "1"
    """With ray: hosts, or auto to follow the load."""
    min_hosts: int | None = None
    """With --hosts auto: minimum. Default: 1."""
    max_hosts: int | None = None
    """With --hosts auto: maximum. Default: one per CPU of the cluster."""
    host_cpus: float = 1.0
    """With ray: CPUs that a host takes of its node."""
    host_memory: int | None = None
    """With ray: MiB that a host takes of its node."""
    host_resources: str | None = None
    """With ray: custom resources of a host, as JSON: {"gpu_node": 1}."""
    ray_address: str | None = None
    """A running cluster, HOST:6379. Also: RAY_ADDRESS. Default: start one here."""
    ship: Path | None = None
    """With ray: a folder to copy to every node."""
    gateway: GatewayMode = field(default="forward", metadata={"choices": ("forward", "redirect")})
    """With ray: forward sockets to their host, or redirect clients there."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Where to listen, and what to print."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0 takes any free one."""
    workers: int = field(default=1, metadata={"minimum": 1})
    """Processes that share the port and the capacity."""
    web: bool = False
    """Serve the page at /web/. Also: ENABLE_WEB_INTERFACE=true."""
    store: Path | None = None
    """The store that the page shows. Also: PADDOCK_STORE."""
    log_level: str = "info"
    """debug, info, warning or error."""
    as_json: bool = field(default=False, metadata={"flags": ("--json",)})
    """Print the address as JSON once it listens."""

    @property
    def has_page(self) -> bool:
        return self.web or ENABLE_WEB_INTERFACE.read()


@click.command("serve", epilog=f"TARGET: {FORMS}")
@click.argument("target")
@field_options(ServeOptions)
@field_options(
    ServerConfig,
    defaults={"limits_max_sessions": None},
    helps={"limits_max_sessions": "Sessions at a time. Default: 100, or 1 if the class allows only one."},
)
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="ray: place hosts over a Ray cluster, behind a gateway.",
)
@field_options(RayOptions)
def command(target: str, engine: str, **options: Any) -> None:
    """Serve an environment over HTTP, WebSocket and MCP until Ctrl-C or SIGTERM."""
    from paddock.targets import environment_of, load_target

    serving, ray = read_field_options(ServeOptions, options), read_field_options(RayOptions, options)
    require_address(serving.host)
    refuse_options_without_effect(engine, has_page=serving.has_page)
    configure_logging(serving.log_level)
    if engine == "local" and target.startswith("openenv:"):
        from paddock.adapters.openenv import exec_in_venv

        exec_in_venv(target, sys.argv[1:])
    make, name = load_target(target)
    scale = parse_scaling(ray.hosts, ray.min_hosts, ray.max_hosts, ray.ray_address) if engine == "ray" else None
    config = read_server_config(make, options, serving.host, hosts=scale.max_hosts if scale else 1)
    config = replace(config, find_environment=partial(environment_of, target))
    if scale is None:
        serve_here(make, name, config, serving)
    else:
        serve_on_cluster(make, target, name, config, serving, ray, scale)


def refuse_options_without_effect(engine: str, *, has_page: bool) -> None:
    if engine == "ray":
        why = "the page of each host shows the store of its node"
        refuse_unused("store", why=why, hint="leave it out, and set PADDOCK_STORE on the nodes")
    else:
        names = (each.name for each in fields(RayOptions))
        refuse_unused(*names, why="the environment is served by this machine", hint="add --engine ray")
    if not has_page:
        refuse_unused("store", why="the page is not offered", hint="add --web")


def read_server_config(make: Any, options: dict[str, Any], host: str, *, hosts: int) -> ServerConfig:
    """The config from the options. Without `--max-sessions` the class decides, on each host of a cluster."""
    from paddock.server.app import default_sessions
    from paddock.sessions.spec import EnvironmentSpec

    sessions = options["limits_max_sessions"] or default_sessions(EnvironmentSpec(make)) * hosts
    config = read_field_options(ServerConfig, {**options, "limits_max_sessions": sessions})
    if host in ALL_ADDRESSES:
        return config
    return replace(config, access=replace(config.access, hosts=config.access.hosts | {host}))


def serve_here(make: Any, name: str, config: ServerConfig, serving: ServeOptions) -> None:
    from paddock.server.app import create_app
    from paddock.server.run import serve

    app: Starlette = create_app(make, env_name=name, config=config)
    if serving.has_page:
        from paddock.web.mounts import page_in_server

        page_in_server(app, serving.store)

    def announce(url: str) -> None:
        print_address(name, config, url, plural(serving.workers, "worker"), serving, workers=serving.workers)
        note(f"  clients: Client({url!r})   MCP: {url}/mcp   docs: {url}/docs   stop: Ctrl-C")
        if serving.has_page:
            note(f"  page: {url}/web/" + ("?token=… (the token you gave)" if config.access.token else ""))

    raise_on_interrupt()
    serve(app, host=serving.host, port=serving.port, workers=serving.workers, announce=announce)
    if app.state.service.left_running:
        exit_at_once()


def serve_on_cluster(
    make: Any,
    target: str,
    name: str,
    config: ServerConfig,
    serving: ServeOptions,
    ray: RayOptions,
    scale: ScalingPolicy,
) -> None:
    from paddock.loopback import is_loopback
    from paddock.scale.cluster import Resources
    from paddock.scale.cluster_service import ClusterConfig, serve_on_ray
    from paddock.sessions.spec import EnvironmentSpec

    EnvironmentSpec(make).require_concurrency(max(scale.shares(config.limits.max_sessions)))
    if not is_loopback(serving.host) and config.access.token is None:
        raise ConfigError(
            f"{serving.host} can be reached from other machines, and no token is set",
            hint="give --auth-token or PADDOCK_AUTH_TOKEN, or listen on 127.0.0.1",
        )
    settings = ClusterConfig(
        target=target if ray.ship is not None else absolute_target(target),
        name=name,
        config=config,
        scale=scale,
        resources=Resources.read(ray.host_cpus, ray.host_memory, ray.host_resources),
        host=serving.host,
        port=serving.port,
        gateways=serving.workers,
        mode=ray.gateway,
        ray_address=ray.ray_address,
        folder=ray.ship,
        page=serving.has_page,
    )
    min_hosts, max_hosts = scale.min_hosts, scale.max_hosts
    hosts = plural(max_hosts, "host") if min_hosts == max_hosts else f"{min_hosts} to {plural(max_hosts, 'host')}"

    def announce(url: str) -> None:
        print_address(name, config, url, f"{hosts} on Ray, gateway: {ray.gateway}", serving, hosts=max_hosts)
        note(f"  clients: Client({url!r})   MCP: {url}/mcp   cluster: {url}/health   stop: Ctrl-C")

    raise_on_interrupt()
    serve_on_ray(settings, announce)


def print_address(
    name: str, config: ServerConfig, url: str, detail: str, serving: ServeOptions, **counts: int
) -> None:
    """Print where the server listens: for programs on stdout, for people on stderr."""
    sessions = config.limits.max_sessions
    if serving.as_json:
        page = {"page": f"{url}/web/"} if serving.has_page else {}
        print_json({"url": url, "environment": name, "max_sessions": sessions, **counts, **page})
        sys.stdout.flush()
    note(f"{name} at {url}  ({plural(sessions, 'session')}, {detail})")


def parse_scaling(hosts: str, min_hosts: int | None, max_hosts: int | None, ray_address: str | None) -> ScalingPolicy:
    """`--hosts 3`, or `--hosts auto` with its two bounds. Raises ConfigError."""
    from paddock.scale import cluster
    from paddock.scale.autoscale import ScalingPolicy

    if hosts == "auto":
        if max_hosts is None:
            cluster.connect(ray_address)
            max_hosts = max(1, int(sum(node.resources.get("CPU", 0) for node in cluster.nodes() if node.alive)))
        return ScalingPolicy(min_hosts or 1, max_hosts)
    if not hosts.isdigit() or min_hosts is not None or max_hosts is not None:
        raise ConfigError(
            f"--hosts is {hosts!r}", hint="give a number, or auto; --min-hosts and --max-hosts belong to auto"
        )
    return ScalingPolicy(int(hosts), int(hosts))


def absolute_target(target: str) -> str:
    """A target in a file with its absolute path: hosts run in another folder."""
    place, colon, attribute = target.rpartition(":")
    return f"{Path(place).resolve()}{colon}{attribute}" if place.endswith(".py") else target


def require_address(host: str) -> None:
    """Raise ConfigError if no port of this address can be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind((host, 0))
    except OSError as error:
        hint = "give --host an address of this machine: 127.0.0.1, or 0.0.0.0 for all of them"
        raise ConfigError(f"cannot listen on {host!r}: {error.strerror or error}", hint=hint) from error


def configure_logging(level: str) -> None:
    number = logging.getLevelName(level.upper())
    if not isinstance(number, int):
        raise ConfigError(f"--log-level is {level!r}", hint="use debug, info, warning or error")
    form = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
    logging.basicConfig(level=number, format=form, stream=sys.stderr, datefmt="%H:%M:%S")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def exit_at_once() -> None:
    """Exit without waiting for threads that cannot be ended, as Python would."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(0)
