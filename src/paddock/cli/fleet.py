"""`paddock fleet up|envs|ls|run|rm|report`: a plane of one's own, and what is done with any plane."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paddock.cli import counted, note, print_json, refuse_unused
from paddock.cli.fleet_look import envs, ls, report, rm
from paddock.cli.fleet_place import KEY_FILE, address_left, default_state, state_option
from paddock.cli.fleet_run import run
from paddock.cli.interrupts import interruptible, raise_on_interrupt
from paddock.errors import ConfigError, TargetError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paddock.fleet.control import HostedEnvironment

USUAL = ("notes", "echo")
VERSIONS = {"notes": ("v0.0.1", "v0.0.2")}
"""Of shipped environments that have more than one; the last is what a client gets that asks for none."""
OF_A_CLUSTER = ("ray_address", "instance_cpus", "instance_memory", "instance_resources", "ship")
VERSION = re.compile(r"v?\d[\w.-]*|v[\w.-]*")
CHECK_SECONDS = 120.0
CHECK = """
import json, sys
from paddock.errors import PaddockError
from paddock.sessions.blueprint import Blueprint
from paddock.targets import load_target
found = {}
for target in sys.argv[1:]:
    try:
        blueprint = Blueprint(load_target(target)[0])
    except PaddockError as error:
        found[target] = {"error": error.message, "hint": error.hint}
    else:
        said = (blueprint.cls.__doc__ or "").strip().splitlines()
        found[target] = {"description": said[0] if said else None, "tools": blueprint.has_tools}
sys.__stdout__.write("\\n" + json.dumps(found))
"""
"""Run in a process of its own: the plane itself imports no environment."""


@click.group("fleet")
def command() -> None:
    """Host environments as Fleet does, and run tasks on them or on Fleet itself.

    \b
    paddock fleet up                            host environments on this machine
    paddock fleet run tasks.json --model URL    run tasks with a tool-calling agent
    paddock fleet report                        how those rollouts went
    """


@command.command("up")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8700, show_default=True, help="Port to listen on; 0 takes any free one.")
@click.option("--api-key", help="The key that clients must send. Better: FLEET_API_KEY. Default: one is made up.")
@click.option("--instance-limit", default=100, show_default=True, help="Instances at once.")
@click.option("--gate", is_flag=True, help="Instances answer only to who has the runner token, or the key.")
@click.option("--warm", default=2, show_default=True, help="Processes that wait for the next instance.")
@click.option(
    "--env", "environments", multiple=True, metavar="KEY=TARGET[@VERSION]", help="What to host. Repeatable."
)
@click.option("--faults", is_flag=True, help="Offer /_lab/faults, which breaks things on purpose. Loopback only.")
@click.option("--web", is_flag=True, help="Offer the page at /web/.")
@click.option("--store", type=click.Path(path_type=Path), help="Whose rollouts the page shows. Also: PADDOCK_STORE.")
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
    host: str,
    port: int,
    api_key: str | None,
    instance_limit: int,
    gate: bool,
    warm: int,
    environments: tuple[str, ...],
    faults: bool,
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
) -> None:
    """Host environments until Ctrl-C or SIGTERM; then every instance is stopped.

    Without --env, notes and echo are hosted; with it, notes and what it names. TARGET is what `paddock serve`
    takes. The same KEY may be given several times, with a VERSION each.
    """
    from paddock.fleet.control import PlaneSettings, serve_plane

    if engine == "local":
        refuse_unused(*OF_A_CLUSTER, why="instances run on this machine", hint="add --engine ray")
    if not web:
        refuse_unused("store", why="the page is not offered", hint="add --web")
    logging.basicConfig(level=log_level.upper(), format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    folder = (state or default_state()).expanduser().resolve()
    with interruptible():
        hosted = described(read_environments(with_usual(environments)))
    settings = PlaneSettings(
        state=folder,
        environments=hosted,
        host=host,
        port=port,
        api_key=api_key or os.environ.get("FLEET_API_KEY"),
        instance_limit=instance_limit,
        gate=gate,
        warm=warm,
        faults=faults,
    )
    extend = None
    if web:
        from paddock.web.doors import page_in_plane

        extend = partial(page_in_plane, folder=store)
    with ExitStack() as until_the_end:
        placed: dict[str, Any] = {}
        if engine == "ray":
            from paddock.cli.fleet_ray import place_on_ray
            from paddock.scale.cluster import Resources

            raise_on_interrupt()
            each = Resources.read(instance_cpus, instance_memory, instance_resources)
            settings, placed = place_on_ray(settings, each, ray_address, ship, until_the_end)

        def announce(url: str, _: str) -> None:
            until_the_end.enter_context(address_left(folder, url))
            made_up = settings.api_key is None
            names = [f"{each.env_key}:{version}" for each in hosted for version in each.versions]
            if as_json:
                key_file = str(folder / KEY_FILE) if made_up else None
                print_json({"url": url, "state": str(folder), "api_key_file": key_file, "environments": names})
                sys.stdout.flush()
            note(f"plane at {url}  ({', '.join(names)}; up to {counted(instance_limit, 'instance')})   stop: Ctrl-C")
            shown = f"$(cat {folder / KEY_FILE})" if made_up else "(the key you gave)"
            note(f"  clients: export FLEET_BASE_URL={url} FLEET_API_KEY={shown}")
            if web:
                note(f"  page: {url}/web/?token={shown}")

        raise_on_interrupt()
        serve_plane(settings, announce, extend=extend, **placed)


def with_usual(written: tuple[str, ...]) -> tuple[str, ...]:
    """What was asked for, and `notes`, which clients try first; unless the key is taken."""
    if not written:
        return USUAL
    taken = any(text.partition("=")[0].partition("@")[0] == "notes" for text in written)
    return written if taken else ("notes", *written)


def read_environments(written: Iterable[str]) -> tuple[HostedEnvironment, ...]:
    """`notes`, `mykey=pkg.mod:Class@v1.0`, …; the versions of a key are put together. All begin with a `v`:
    Fleet's clients put one before the version that they are asked for."""
    from paddock.fleet.control import HostedEnvironment

    targets: dict[str, str] = {}
    versions: dict[str, list[str]] = {}
    for text in written:
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
        named = (f"v{version.removeprefix('v')}",) if version else VERSIONS.get(target, ("v1",))
        known = versions.setdefault(key, [])
        known += [each for each in named if each not in known]
    return tuple(HostedEnvironment(key, target, tuple(versions[key])) for key, target in targets.items())


def described(environments: tuple[HostedEnvironment, ...]) -> tuple[HostedEnvironment, ...]:
    """The same, with what each class says of itself. Raises TargetError for what cannot be hosted."""
    targets = {each.target for each in environments}
    done = subprocess.run(
        [sys.executable, "-c", CHECK, *targets], capture_output=True, text=True, timeout=CHECK_SECONDS, check=False
    )
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise TargetError(f"loading {', '.join(targets)} failed: {said[-1]}", hint="run python on it to see where")
    found = json.loads(done.stdout.splitlines()[-1])
    for target, told in found.items():
        if "error" in told:
            raise TargetError(told["error"], hint=told["hint"])
        if not told["tools"]:
            raise TargetError(f"{target} has no tools", hint="a plane hosts classes that extend ToolEnvironment")
    return tuple(replace(each, description=found[each.target]["description"]) for each in environments)


for each in (envs, ls, run, rm, report):
    command.add_command(each)
