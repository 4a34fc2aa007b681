"""`paddock fleet envs|ls|rm|report`, and how `paddock fleet` commands find their plane.

A plane of this machine writes its address to its state folder, where the other commands find it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paddock.cli import note, print_json
from paddock.cli.interrupts import run_async
from paddock.cli.store_options import store_option
from paddock.config import FLEET_API_KEY, FLEET_BASE_URL
from paddock.errors import ConfigError
from paddock.fleet.client.models import ALIVE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paddock.fleet.client.settings import PlaneAddress
    from paddock.fleet.report import FleetReport

ADDRESS_FILE = "plane.json"
REQUEST_SECONDS = 20.0


def default_state() -> Path:
    """`$PADDOCK_FLEET`, or `paddock/fleet` where the user's data lives."""
    from paddock.fleet.client.settings import state_folder

    return state_folder()


state_option = click.option(
    "--state", type=click.Path(path_type=Path), help="The folder of a plane of this machine. Also: PADDOCK_FLEET."
)


def plane_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--url, --api-key and --state: which plane to use."""
    for option in (
        state_option,
        click.option("--api-key", help="The key of the plane. Better: FLEET_API_KEY."),
        click.option("--url", help="URL of the plane. Also: FLEET_BASE_URL. Default: the plane of this machine."),
    ):
        command = option(command)
    return command


def find_plane(url: str | None, api_key: str | None, state: Path | None) -> PlaneAddress:
    """The plane in `url`, else the one in FLEET_BASE_URL, else the one of this machine."""
    from paddock.fleet.client.settings import PlaneAddress, plane_address

    folder = state or default_state()
    local = read_address(folder)
    wanted = url or (None if state is not None else FLEET_BASE_URL.read())
    key = api_key or FLEET_API_KEY.read()
    if wanted is None and local is not None:
        wanted = local
    if wanted is not None and local is not None and wanted.rstrip("/") == local:
        key = api_key or read_key(folder) or key
    if wanted is None and (state is not None or key is None):
        raise ConfigError(
            "no plane runs on this machine, and none is named",
            hint="start one with `paddock fleet up`, or set FLEET_BASE_URL and FLEET_API_KEY",
        )
    if wanted is not None and key is None:
        raise ConfigError(f"the key of the plane at {wanted} is not known", hint="set FLEET_API_KEY")
    if wanted is None:
        return plane_address(key)
    assert key is not None
    return PlaneAddress(wanted.rstrip("/"), key)


@contextmanager
def publish_address(state: Path, url: str) -> Iterator[None]:
    """Keep the plane's address in its state folder while the block runs."""
    file = state / ADDRESS_FILE
    file.write_text(json.dumps({"url": url, "pid": os.getpid()}))
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def read_address(state: Path) -> str | None:
    try:
        document = json.loads((state / ADDRESS_FILE).read_text())
    except (OSError, ValueError):
        return None
    url = document.get("url") if isinstance(document, dict) else None
    return url if isinstance(url, str) else None


def read_key(state: Path) -> str | None:
    from paddock.fleet.plane.settings import KEY_FILE

    try:
        return (state / KEY_FILE).read_text().strip() or None
    except OSError:
        return None


@contextmanager
def add_hints(address: PlaneAddress) -> Iterator[None]:
    """Add a hint to the error of a plane that does not answer, or refuses the key."""
    from paddock.fleet.client.errors import FleetError, InstanceGone, PlaneError, Unreachable

    try:
        yield
    except FleetError as error:
        if error.hint is None and isinstance(error, Unreachable):
            error.hint = f"is a plane running at {address.base_url}? `paddock fleet up` starts one"
        elif error.hint is None and isinstance(error, PlaneError) and error.status in (401, 403):
            error.hint = "set FLEET_API_KEY to the key of this plane"
        elif error.hint is None and isinstance(error, InstanceGone):
            error.hint = "`paddock fleet ls --all` lists those it knows"
        raise


async def get_json(address: PlaneAddress, path: str, **params: str | None) -> Any:
    """The response of the plane to a GET."""
    from paddock.fleet.client.http import send

    query = {name: value for name, value in params.items() if value is not None}
    reply = await send(
        "GET", f"{address.base_url}{path}", timeout=REQUEST_SECONDS, headers=address.headers, params=query or None
    )
    return reply.json()


TABLE_WIDTH = 140


@click.command("envs")
@plane_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def envs(url: str | None, api_key: str | None, state: Path | None, as_json: bool) -> None:
    """List the environments that a plane offers."""
    address = find_plane(url, api_key, state)
    with add_hints(address):
        environments = run_async(get_json(address, "/v1/env/"))
    if as_json:
        for environment in environments:
            print_json(environment)
        return
    rows = [
        (
            each["env_key"],
            each.get("default_version") or "",
            ", ".join(each["versions"]),
            each.get("description") or "",
        )
        for each in environments
    ]
    print_table(("environment", "default", "versions", "description"), rows)


@click.command("ls")
@plane_options
@click.option("--all", "everything", is_flag=True, help="Include those that have ended.")
@click.option("--run", "run_id", help="Only instances of this run.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def ls(
    url: str | None, api_key: str | None, state: Path | None, everything: bool, run_id: str | None, as_json: bool
) -> None:
    """List instances, the newest first."""
    address = find_plane(url, api_key, state)
    with add_hints(address):
        instances = run_async(get_json(address, "/v1/env/instances", run_id=run_id))
    listed = [each for each in instances if everything or each["status"] in ALIVE]
    listed.sort(key=lambda each: str(each.get("created_at")), reverse=True)
    if as_json:
        for instance in listed:
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
        for each in listed
    ]
    print_table(("instance", "environment", "status", "run", "created", "where"), rows)
    alive = sum(each["status"] in ALIVE for each in instances)
    note(f"{alive} of {len(instances)} instances are alive" + ("" if everything else "; --all shows the others"))


@click.command("rm")
@click.argument("instance_ids", nargs=-1, metavar="[ID…]")
@click.option("--run", "run_id", help="All instances of this run, such as one that was killed.")
@click.option("--left", is_flag=True, help="Instances that killed processes of this machine left.")
@click.option("--all", "everything", is_flag=True, help="All instances of the plane.")
@plane_options
@click.option("--json", "as_json", is_flag=True, help="Print the ended instances, one JSON object per line.")
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
    """End instances. Instances that have ended already are no error."""
    if (bool(instance_ids), run_id is not None, left, everything).count(True) != 1:
        raise ConfigError("say which instances to end", hint="give their ids, or --run RUN, or --left, or --all")
    address = find_plane(url, api_key, state)
    with add_hints(address):
        ended = run_async(end_orphans(address) if left else end_instances(address, instance_ids, run_id))
    for instance_id in ended:
        if as_json:
            print_json({"instance_id": instance_id, "status": "stopped"})
        else:
            click.echo(instance_id)
    note(f"{len(ended)} instance{'' if len(ended) == 1 else 's'} ended")


async def end_orphans(address: PlaneAddress) -> list[str]:
    """End what dead processes left, according to the lease journals. Raises FleetError if some may still exist."""
    from paddock.fleet.client.errors import FleetError
    from paddock.fleet.client.lease_deletion import recover

    ended, failures = await recover(address)
    if failures:
        raise FleetError(
            f"{len(ended)} ended, {len(failures)} could not be: {failures[0]}",
            hint="try later: what is left stays written down",
        )
    return ended


async def end_instances(address: PlaneAddress, instance_ids: tuple[str, ...], run_id: str | None) -> list[str]:
    """End the instances with these ids, those of a run, or all. The ids of those that were alive."""
    from paddock.fleet.client.lease_deletion import forget_run
    from paddock.fleet.client.plane_client import PlaneClient

    plane = PlaneClient(address)
    if run_id is not None:
        ended = [instance.instance_id for instance in await plane.delete_run(run_id)]
        forget_run(address, run_id)
        return ended
    if instance_ids:
        instances = [await plane.get(instance_id) for instance_id in instance_ids]
        alive = [instance.instance_id for instance in instances if not instance.has_ended]
    else:
        documents = await get_json(address, "/v1/env/instances")
        alive = [each["instance_id"] for each in documents if each["status"] in ALIVE]
    await asyncio.gather(*(plane.delete(instance_id) for instance_id in alive))
    return alive


@click.command("report")
@click.option("--batch", "batch_id", help="Only rollouts of this batch.")
@click.option("--env", "env_key", help="Only rollouts of this environment.")
@click.option("--hours", type=float, help="Only rollouts of the last HOURS hours.")
@store_option()
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
def report(batch_id: str | None, env_key: str | None, hours: float | None, store: Path | None, as_json: bool) -> None:
    """Summarize rollouts.

    Prints outcomes, errors by environment, and provisioning times."""
    from contextlib import closing

    from paddock.fleet.report import read_report
    from paddock.store import Store

    with closing(Store.open(store, read_only=True)) as opened:
        fleet_report = read_report(opened, batch_id=batch_id, env_key=env_key, hours=hours)
    if as_json:
        print_json(fleet_report.to_json())
    else:
        print_report(fleet_report)


def print_report(fleet_report: FleetReport) -> None:
    rows = []
    for each in (*fleet_report.environments, fleet_report.total):
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
    for each in fleet_report.environments:
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
    Console(width=None if sys.stdout.isatty() else TABLE_WIDTH).print(table)
