"""`paddock fleet envs|ls|rm|report`: what a plane offers and holds, and how rollouts on planes went."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paddock.cli import note, print_json
from paddock.cli.fleet_place import explained, fetch, find_plane, plane_options
from paddock.cli.interrupts import run_async
from paddock.errors import ConfigError

if TYPE_CHECKING:
    from paddock.fleet.report import FleetReport
    from paddock.fleet.settings import PlaneAddress

ALIVE = ("pending", "running")
WIDTH = 140


@click.command("envs")
@plane_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def envs(url: str | None, api_key: str | None, state: Path | None, as_json: bool) -> None:
    """List the environments that a plane offers."""
    address = find_plane(url, api_key, state)
    with explained(address):
        found = run_async(fetch(address, "/v1/env/"))
    if as_json:
        for environment in found:
            print_json(environment)
        return
    rows = [
        (
            each["env_key"],
            each.get("default_version") or "",
            ", ".join(each["versions"]),
            each.get("description") or "",
        )
        for each in found
    ]
    print_table(("environment", "default", "versions", "description"), rows)


@click.command("ls")
@plane_options
@click.option("--all", "everything", is_flag=True, help="Those that have ended, too.")
@click.option("--run", "run_id", help="Only instances of this run.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def ls(
    url: str | None, api_key: str | None, state: Path | None, everything: bool, run_id: str | None, as_json: bool
) -> None:
    """List instances, the newest first."""
    address = find_plane(url, api_key, state)
    with explained(address):
        found = run_async(fetch(address, "/v1/env/instances", run_id=run_id))
    shown = [each for each in found if everything or each["status"] in ALIVE]
    shown.sort(key=lambda each: str(each.get("created_at")), reverse=True)
    if as_json:
        for instance in shown:
            print_json(instance)
        return
    rows = [
        (
            each["instance_id"],
            f"{each['env_key']}:{each['version']}",
            each["status"],
            each.get("run_id") or "",
            each.get("created_at") or "",
            (each.get("urls") or {}).get("root") or each.get("reason") or "",
        )
        for each in shown
    ]
    print_table(("instance", "environment", "status", "run", "created", "where"), rows)
    alive = sum(each["status"] in ALIVE for each in found)
    note(f"{alive} of {len(found)} instances are alive" + ("" if everything else "; --all shows the others"))


@click.command("rm")
@click.argument("instance_ids", nargs=-1, metavar="[ID…]")
@click.option("--run", "run_id", help="All instances of this run, as of one that was killed.")
@click.option("--left", is_flag=True, help="What processes of this machine left that were killed.")
@click.option("--all", "everything", is_flag=True, help="All instances of the plane.")
@plane_options
@click.option("--json", "as_json", is_flag=True, help="Print what was ended, one JSON object a line.")
def rm(
    instance_ids: tuple[str, ...],
    run_id: str | None,
    left: bool,
    everything: bool,
    url: str | None,
    api_key: str | None,
    state: Path | None,
    as_json: bool,
) -> None:
    """End instances. Those that have ended already are as good."""
    if (bool(instance_ids), run_id is not None, left, everything).count(True) != 1:
        raise ConfigError("say which instances to end", hint="give their ids, or --run RUN, or --left, or --all")
    address = find_plane(url, api_key, state)
    with explained(address):
        ended = run_async(end_left(address) if left else end_instances(address, instance_ids, run_id))
    for instance_id in ended:
        if as_json:
            print_json({"instance_id": instance_id, "status": "stopped"})
        else:
            click.echo(instance_id)
    note(f"{len(ended)} instance{'' if len(ended) == 1 else 's'} ended")


async def end_left(address: PlaneAddress) -> list[str]:
    """End what the leases on disk say that dead processes left. Raises FleetError if some may still be there."""
    from paddock.fleet.errors import FleetError
    from paddock.fleet.recovery import recover

    ended, failures = await recover(address)
    if failures:
        raise FleetError(
            f"{len(ended)} ended, {len(failures)} could not be: {failures[0]}",
            hint="try later: what is left stays written down",
        )
    return ended


async def end_instances(address: PlaneAddress, instance_ids: tuple[str, ...], run_id: str | None) -> list[str]:
    """End those with an id, those of a run, or without either all. The ids of those that were alive."""
    from paddock.fleet.plane import Plane
    from paddock.fleet.recovery import forget_run

    plane = Plane(address)
    if run_id is not None:
        ended = [instance.instance_id for instance in await plane.delete_run(run_id)]
        forget_run(address, run_id)
        return ended
    if instance_ids:
        known = [await plane.get(instance_id) for instance_id in instance_ids]
        wanted = [instance.instance_id for instance in known if not instance.has_ended]
    else:
        found = await fetch(address, "/v1/env/instances")
        wanted = [each["instance_id"] for each in found if each["status"] in ALIVE]
    await asyncio.gather(*(plane.delete(instance_id) for instance_id in wanted))
    return wanted


@click.command("report")
@click.option("--batch", "batch_id", help="Only rollouts of this batch.")
@click.option("--env", "env_key", help="Only rollouts of this environment.")
@click.option("--hours", type=float, help="Only rollouts of the last so many hours.")
@click.option("--store", type=click.Path(path_type=Path), help="Where rollouts are kept. Also: PADDOCK_STORE.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
def report(batch_id: str | None, env_key: str | None, hours: float | None, store: Path | None, as_json: bool) -> None:
    """Tell how rollouts went: outcomes, errors by environment, provisioning times."""
    from contextlib import closing

    from paddock.fleet.report import read_report
    from paddock.rollouts.store import Store

    with closing(Store.open(store, read_only=True)) as kept:
        found = read_report(kept, batch_id=batch_id, env_key=env_key, hours=hours)
    if as_json:
        print_json(found.to_json())
    else:
        print_report(found)


def print_report(found: FleetReport) -> None:
    rows = []
    for each in (*found.environments, found.total):
        outcomes = ", ".join(f"{count} {name}" for name, count in each.outcomes.items())
        times = each.provisioning
        rows.append(
            (
                each.name,
                str(each.rollouts),
                outcomes,
                "–" if each.mean_reward is None else f"{each.mean_reward:.2f} of {each.rewarded}",
                *(("–",) * 3 if times is None else (f"{times[name]:.2f}" for name in ("p50", "p90", "most"))),
            )
        )
    headings = ("environment", "rollouts", "outcomes", "mean reward", "provision p50", "p90", "most")
    print_table(headings, rows, right=("rollouts", "provision p50", "p90", "most"))
    for each in found.environments:
        for problem in each.errors:
            note(f"{each.name}: {problem['count']} × {problem['outcome']}: {problem['error']}")


def print_table(headings: tuple[str, ...], rows: list[tuple[Any, ...]], right: tuple[str, ...] = ()) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in headings:
        table.add_column(name, justify="right" if name in right else "left")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)
