"""`paddock fleet`: the group of commands, and `up`, which runs a plane on this machine or over a Ray cluster."""

from __future__ import annotations

import json
import logging
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paddock.cli import note, plural, print_json, refuse_unused
from paddock.cli.fleet_plane import default_state, envs, ls, publish_address, report, rm, state_option
from paddock.cli.fleet_run import run
from paddock.cli.interrupts import interruptible, raise_on_interrupt
from paddock.cli.store_options import store_option
from paddock.config import FLEET_API_KEY
from paddock.errors import ConfigError, TargetError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paddock.errors import ClusterError
    from paddock.fleet.plane import HostedEnvironment, PlaneSettings
    from paddock.scale.cluster import Resources

DEFAULT_ENVIRONMENTS = ("notes", "echo")
SHIPPED_VERSIONS = {"notes": ("v0.0.1", "v0.0.2")}
"""Versions of shipped environments that have more than one; the last is the default."""
CLUSTER_OPTIONS = ("ray_address", "instance_cpus", "instance_memory", "instance_resources", "ship")
VERSION = re.compile(r"v?\d[\w.-]*|v[\w.-]*")
DESCRIBE_SECONDS = 120.0
DESCRIBE_PROGRAM = """
import json, sys
from paddock.errors import PaddockError
from paddock.sessions.spec import EnvironmentSpec
from paddock.targets import load_target
descriptions = {}
for target in sys.argv[1:]:
    try:
        spec = EnvironmentSpec(load_target(target)[0])
    except PaddockError as error:
        descriptions[target] = {"error": error.message, "hint": error.hint}
    else:
        lines = (spec.cls.__doc__ or "").strip().splitlines()
        descriptions[target] = {"description": lines[0] if lines else None, "tools": spec.has_tools}
sys.__stdout__.write("\\n" + json.dumps(descriptions))
"""
"""Runs in a process of its own, because the plane itself imports no environment."""


@click.group("fleet")
def command() -> None:
    """Start a Fleet-compatible control plane, and run tasks on it or on Fleet itself.

    \b
    paddock fleet up                            host environments on this machine
    paddock fleet run tasks.json --model URL    run tasks with a tool-calling agent
    paddock fleet report                        figures of these rollouts
    """


@command.command("up")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8700, show_default=True, help="Port to listen on; 0 takes any free one.")
@click.option("--api-key", help="The key that clients must send. Better: FLEET_API_KEY. Default: a new one.")
@click.option("--instance-limit", default=100, show_default=True, help="How many instances may run at once.")
@click.option("--gate", is_flag=True, help="Instances require the runner token, or the key.")
@click.option("--warm", default=2, show_default=True, help="Processes started in advance for the next instances.")
@click.option(
    "--env", "environments", multiple=True, metavar="KEY=TARGET[@VERSION]", help="What to host. Repeatable."
)
@click.option("--faults", is_flag=True, help="Offer /_lab/faults, which injects faults. Loopback only.")
@click.option("--web", is_flag=True, help="Serve the web page at /web/.")
@store_option("The store whose rollouts the page shows.")
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="ray: place instances over a Ray cluster.",
)
@click.option("--ray-address", help="A running cluster, HOST:6379. Also: RAY_ADDRESS. Default: start one here.")
@click.option(
    "--instance-cpus", default=0.25, show_default=True, help="With ray: CPUs an instance takes of its node."
)
@click.option("--instance-memory", type=int, help="With ray: MiB that an instance takes of its node.")
@click.option("--instance-resources", help='With ray: custom resources of an instance, as JSON: {"browser": 1}.')
@click.option("--ship", type=click.Path(path_type=Path), help="With ray: a folder to copy to every node.")
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="warning", show_default=True
)
@state_option
@click.option("--json", "as_json", is_flag=True, help="Print the address as JSON once it listens.")
def up(
    api_key: str | None,
    environments: tuple[str, ...],
    web: bool,
    store: Path | None,
    engine: str,
    ray_address: str | None,
    instance_cpus: float,
    instance_memory: int | None,
    instance_resources: str | None,
    ship: Path | None,
    log_level: str,
    state: Path | None,
    as_json: bool,
    **plane_settings: Any,
) -> None:
    """Host environments until Ctrl-C or SIGTERM.

    Every instance is stopped then.

    Without --env, notes and echo are hosted. With --env, notes and the named ones are. TARGET is what `paddock serve`
    takes. The same KEY may be given several times, with a VERSION each.
    """
    from paddock.fleet.plane import PlaneSettings, serve_plane
    from paddock.fleet.plane.settings import KEY_FILE

    if engine == "local":
        refuse_unused(*CLUSTER_OPTIONS, why="instances run on this machine", hint="add --engine ray")
    if not web:
        refuse_unused("store", why="the page is not offered", hint="add --web")
    logging.basicConfig(level=log_level.upper(), format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    folder = (state or default_state()).expanduser().resolve()
    with interruptible():
        hosted = describe(read_environments(add_defaults(environments)))
    # The other options are fields of PlaneSettings.
    settings = PlaneSettings(
        state=folder, environments=hosted, api_key=api_key or FLEET_API_KEY.read(), **plane_settings
    )
    extend = None
    if web:
        from paddock.web.mounts import page_in_plane

        extend = partial(page_in_plane, folder=store)
    with ExitStack() as cleanup:
        placement: dict[str, Any] = {}
        if engine == "ray":
            from paddock.scale.cluster import Resources

            raise_on_interrupt()
            each = Resources.read(instance_cpus, instance_memory, instance_resources)
            settings, placement = place_on_ray(settings, each, ray_address, ship, cleanup)

        def announce(url: str, _: str) -> None:
            cleanup.enter_context(publish_address(folder, url))
            has_key_file = settings.api_key is None
            names = [f"{each.env_key}:{version}" for each in hosted for version in each.versions]
            if as_json:
                key_file = str(folder / KEY_FILE) if has_key_file else None
                print_json({"url": url, "state": str(folder), "api_key_file": key_file, "environments": names})
                sys.stdout.flush()
            limit = plural(settings.instance_limit, "instance")
            note(f"plane at {url}  ({', '.join(names)}; up to {limit})   stop: Ctrl-C")
            key_text = f"$(cat {folder / KEY_FILE})" if has_key_file else "(the key you gave)"
            note(f"  clients: export FLEET_BASE_URL={url} FLEET_API_KEY={key_text}")
            if web:
                note(f"  page: {url}/web/?token={key_text}")

        raise_on_interrupt()
        serve_plane(settings, announce, extend=extend, **placement)


def add_defaults(options: tuple[str, ...]) -> tuple[str, ...]:
    """The `--env` options and `notes`, which clients try first, unless they use that key."""
    if not options:
        return DEFAULT_ENVIRONMENTS
    has_notes = any(text.partition("=")[0].partition("@")[0] == "notes" for text in options)
    return options if has_notes else ("notes", *options)


def read_environments(options: Iterable[str]) -> tuple[HostedEnvironment, ...]:
    """`notes`, `mykey=pkg.mod:Class@v1.0`, …; the versions of a key are combined.

    All begin with a `v`, because Fleet's clients add one to a version.
    """
    from paddock.fleet.plane import HostedEnvironment

    targets: dict[str, str] = {}
    versions: dict[str, list[str]] = {}
    for text in options:
        key, equals, rest = text.partition("=")
        target, at, version = (rest if equals else key).rpartition("@")
        if not at or not VERSION.fullmatch(version):
            target, version = rest if equals else key, ""
        key = key if equals else target
        if not key or not target:
            raise ConfigError(f"--env {text!r} names no environment", hint="write KEY=TARGET, or KEY=TARGET@v1.0")
        if targets.setdefault(key, target) != target:
            raise ConfigError(
                f"--env gives {key!r} two targets: {targets[key]} and {target}",
                hint="the versions of a key have one target; use two keys",
            )
        new = (f"v{version.removeprefix('v')}",) if version else SHIPPED_VERSIONS.get(target, ("v1",))
        versions.setdefault(key, [])
        versions[key] += [each for each in new if each not in versions[key]]
    return tuple(HostedEnvironment(key, target, tuple(versions[key])) for key, target in targets.items())


def describe(environments: tuple[HostedEnvironment, ...]) -> tuple[HostedEnvironment, ...]:
    """The same, with the docstring of each class. Raises TargetError for what cannot be hosted."""
    targets = {each.target for each in environments}
    done = subprocess.run(
        [sys.executable, "-c", DESCRIBE_PROGRAM, *targets],
        capture_output=True,
        text=True,
        timeout=DESCRIBE_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise TargetError(f"loading {', '.join(targets)} failed: {lines[-1]}", hint="run python on it to see where")
    descriptions = json.loads(done.stdout.splitlines()[-1])
    for target, description in descriptions.items():
        if "error" in description:
            raise TargetError(description["error"], hint=description["hint"])
        if not description["tools"]:
            raise TargetError(f"{target} has no tools", hint="a plane hosts classes that extend ToolEnvironment")
    return tuple(replace(each, description=descriptions[each.target]["description"]) for each in environments)


def place_on_ray(
    settings: PlaneSettings, each: Resources, address: str | None, folder: Path | None, cleanup: ExitStack
) -> tuple[PlaneSettings, dict[str, Any]]:
    """Join a Ray cluster until `cleanup` ends; the plane's settings there, and its `launcher` and `verify`."""
    from paddock.scale import cluster
    from paddock.scale.instances import InstancePlacement, RayInstances

    single_machine = cluster.starts_local_cluster(address)
    cleanup.enter_context(cluster.connected(address, folder=folder))
    nodes = [node for node in cluster.nodes() if node.alive]
    cores = int(sum(node.resources.get("CPU", 0) for node in nodes))
    settings = replace(settings, parallel_starts=max(2 * cores, 1))
    failures: list[ClusterError] = []

    def give_up(error: ClusterError) -> None:
        """End the plane, and then the command with the reason."""
        failures.append(error)
        signal.raise_signal(signal.SIGTERM)

    def raise_failure() -> None:
        if failures:
            raise failures[0]

    cleanup.callback(raise_failure)
    instances = RayInstances(settings, InstancePlacement(each, single_machine), give_up)
    note(
        f"instances go to {len(nodes)} node{'s' if len(nodes) > 1 else ''} with {cores} CPUs, {each.cpus:g} for each"
    )
    return settings, {"launcher": instances, "verify": instances.verify}


for each in (envs, ls, run, rm, report):
    command.add_command(each)
