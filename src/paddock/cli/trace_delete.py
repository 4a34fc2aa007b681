"""`paddock trace rm|prune`: delete rollouts from the store."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import click

from paddock.cli import note, plural, print_json
from paddock.cli.quantities import AgeType, SizeType, show_size
from paddock.cli.store_options import store_option
from paddock.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from pathlib import Path

    from paddock.store import Store
    from paddock.store.retention import Pruned

json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


@click.command("rm")
@click.argument("rollout_ids", nargs=-1, metavar="ID…")
@click.option("--batch", "batch_id", help="All rollouts of this batch.")
@store_option()
@json_option
def remove_command(rollout_ids: tuple[str, ...], batch_id: str | None, store: Path | None, as_json: bool) -> int:
    """Delete rollouts, with their calls and files.

    ID is an id, a unique beginning of one, or `latest`.
    """
    if not rollout_ids and batch_id is None:
        raise ConfigError("no rollout is named", hint="give an ID, or --batch BATCH")
    with closing(open_existing(store)) as opened:
        names = [find_finished(opened, rollout_id) for rollout_id in rollout_ids]
        if batch_id is not None:
            names += finished_of_batch(opened, batch_id)
        result = opened.delete(list(dict.fromkeys(names)))
        report(result, opened, as_json)
    return 0


@click.command("prune")
@click.option("--older-than", type=AgeType(), metavar="AGE", help="Delete rollouts that ended longer ago: 30d, 12h.")
@click.option("--max-size", type=SizeType(), help="Delete the oldest rollouts until the store fits: 20GB.")
@click.option(
    "--snapshots-older-than",
    "snapshot_age",
    type=AgeType(),
    metavar="AGE",
    help="Delete only the snapshots of rollouts that ended longer ago.",
)
@store_option()
@json_option
def prune_command(
    older_than: float | None, max_size: int | None, snapshot_age: float | None, store: Path | None, as_json: bool
) -> int:
    """Delete the oldest rollouts, or their snapshots. Running rollouts are kept."""
    if older_than is None and max_size is None and snapshot_age is None:
        raise ConfigError("nothing says which rollouts to delete", hint="give --older-than AGE or --max-size SIZE")
    with closing(open_existing(store)) as opened:
        if snapshot_age is not None:
            note(f"snapshots of {plural(opened.expire_snapshots(snapshot_age), 'rollout')} deleted")
        report(opened.prune(max_age_seconds=older_than, max_bytes=max_size), opened, as_json)
    return 0


def open_existing(folder: Path | None) -> Store:
    """The store. Raises StoreError if there is none: a command that deletes does not make one."""
    from paddock.store import Store

    Store.open(folder, read_only=True).close()
    return Store.open(folder)


def find_finished(store: Store, rollout_id: str) -> str:
    record = store.get(rollout_id)
    if record is None:
        raise StoreError(f"there is no rollout {rollout_id!r}", hint="paddock trace list shows them")
    if not record.finished:
        raise StoreError(f"rollout {record.rollout_id} still runs", hint="wait for its end, or abort it")
    return record.rollout_id


def finished_of_batch(store: Store, batch_id: str) -> list[str]:
    if not store.count(batch_id=batch_id):
        raise StoreError(f"there is no batch {batch_id!r}", hint="paddock trace list --json shows the batches")
    if running := store.count(batch_id=batch_id, finished=False):
        raise StoreError(f"{plural(running, 'rollout')} of {batch_id} still run", hint="wait for their end")
    return [record.rollout_id for record in store.list(batch_id=batch_id)]


def report(result: Pruned, store: Store, as_json: bool) -> None:
    left = store.size_bytes()
    if as_json:
        print_json({"rollouts": result.rollouts, "freed_bytes": result.bytes_freed, "left_bytes": left})
        return
    count = plural(len(result.rollouts), "rollout")
    note(f"{count} deleted, {show_size(result.bytes_freed)} freed, {show_size(left)} left")
