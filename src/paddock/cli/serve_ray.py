"""`paddock serve TARGET --engine ray`: what it adds to `serve`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddock.cli import counted, note, print_json
from paddock.cli.interrupts import raise_on_interrupt
from paddock.errors import ConfigError
from paddock.scale import cluster
from paddock.scale.autoscale import Scale
from paddock.server.access import is_loopback

if TYPE_CHECKING:
    from paddock.config import ServerConfig
    from paddock.scale.cluster import Resources
    from paddock.sessions.blueprint import Blueprint


def read_scale(hosts: str, fewest: int | None, most: int | None, ray_address: str | None) -> Scale:
    """`--hosts 3`, or `--hosts auto` with its two bounds. Raises ConfigError."""
    if hosts == "auto":
        if most is None:
            cluster.connect(ray_address)
            most = max(1, int(sum(node.resources.get("CPU", 0) for node in cluster.nodes() if node.alive)))
        return Scale(fewest or 1, most)
    if not hosts.isdigit() or fewest is not None or most is not None:
        raise ConfigError(
            f"--hosts is {hosts!r}", hint="give a number, or auto; --min-hosts and --max-hosts belong to auto"
        )
    return Scale(int(hosts), int(hosts))


def serve_on_cluster(
    target: str,
    blueprint: Blueprint,
    name: str,
    config: ServerConfig,
    scale: Scale,
    resources: Resources,
    *,
    as_json: bool,
    folder: Path | None,
    **options: Any,
) -> None:
    """Serve until Ctrl-C or SIGTERM. Raises ConfigError for what no host could do, before anything is started."""
    from paddock.scale.supervisor import ServePlan, serve_on_ray

    blueprint.require_concurrency(max(scale.shares(config.limits.max_sessions)))
    if not is_loopback(options["host"]) and config.access.token is None:
        raise ConfigError(
            f"{options['host']} can be reached from other machines, and no token is set",
            hint="give --auth-token or PADDOCK_AUTH_TOKEN, or listen on 127.0.0.1",
        )
    plan = ServePlan(
        target if folder is not None else absolute(target), name, config, scale, resources, folder=folder, **options
    )
    many = counted(scale.most, "host")
    if scale.fewest != scale.most:
        many = f"{scale.fewest} to {many}"

    def announce(url: str) -> None:
        page = f"{url}/web/" if plan.page else None
        if as_json:
            told = {"url": url, "environment": name, "max_sessions": config.limits.max_sessions, "hosts": scale.most}
            print_json(told | ({"page": page} if page else {}))
            sys.stdout.flush()
        sessions = counted(config.limits.max_sessions, "session")
        note(f"{name} at {url}  ({sessions}, {many} on Ray, door: {plan.mode})")
        note(f"  clients: Client({url!r})   MCP: {url}/mcp   cluster: {url}/health   stop: Ctrl-C")

    raise_on_interrupt()
    serve_on_ray(plan, announce)


def absolute(target: str) -> str:
    """A target in a file, as a host finds it whose current folder is another."""
    place, colon, attribute = target.rpartition(":")
    return f"{Path(place).resolve()}{colon}{attribute}" if place.endswith(".py") else target
