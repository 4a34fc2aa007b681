"""What each call changed in the work folder, for `paddock trace show`: a line for each call, or one call's diff."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

import click

from paddock.cli import print_json
from paddock.errors import StoreError

if TYPE_CHECKING:
    from paddock.capture.trace import Call
    from paddock.rollouts.folder_changes import ShownChange
    from paddock.store import Store
    from paddock.store.record import RolloutRecord
    from paddock.store.snapshots import SnapshotHistory

LISTED_CHANGES = 8
"""How many changed files a line of a call names."""


def print_changes(store: Store, record: RolloutRecord, calls: list[Call]) -> None:
    """A line for each call that changed files, or has no snapshot. Nothing for a rollout without snapshots."""
    history = read_history(store, record, calls)
    if not history:
        return
    click.echo("\nfiles changed by each call:")
    for call in calls:
        snapshot = history.get(call.id)
        try:
            changes = changes_of(store, history, call.id)
        except StoreError:
            click.echo("the snapshots are no longer in the store")
            return
        if snapshot is not None and snapshot.problem is not None:
            click.echo(f"{call.id + ':':<6}no snapshot: {snapshot.problem}; its changes are with those before")
        elif changes:
            click.echo(f"{call.id + ':':<6}{summarize(changes)}")
    for path, reason in record.snapshots.get("left_out", {}).items():
        click.echo(f"not saved: {path}: {reason}")


def print_changes_of(store: Store, record: RolloutRecord, calls: list[Call], call_id: str, *, as_json: bool) -> None:
    """The diff of what one call changed. Raises StoreError if that is not known."""
    changes = find_changes(store, record, calls, call_id)
    if as_json:
        print_json([change.to_json() for change in changes])
        return
    if not changes:
        click.echo("nothing changed")
    for change in changes:
        click.secho(describe(change), bold=True)
        for line in diff_lines(change):
            click.secho(line, fg={"+": "green", "-": "red"}.get(line[:1]))


def find_changes(store: Store, record: RolloutRecord, calls: list[Call], call_id: str) -> list[ShownChange]:
    """What one call changed. Raises StoreError if that is not known."""
    call = next((call for call in calls if call.id == f"c{call_id.removeprefix('c')}"), None)
    if call is None:
        raise StoreError(f"rollout {record.rollout_id} has no call {call_id}", hint="paddock trace show lists them")
    history = read_history(store, record, calls)
    snapshot = history.get(call.id)
    if snapshot is None:
        hint = "run it with --snapshots"
        raise StoreError(f"rollout {record.rollout_id} has no snapshot at {call.id}", hint=hint)
    changes = None if snapshot.problem is not None else changes_of(store, history, call.id)
    if changes is None:
        reason = snapshot.problem or "no snapshot follows it"
        raise StoreError(f"what {call.id} changed is not known: {reason}", hint="look at another call")
    return changes


def read_history(store: Store, record: RolloutRecord, calls: list[Call]) -> SnapshotHistory:
    from paddock.rollouts.folder_changes import make_history

    return make_history(((call.id, call.snapshot) for call in calls), record.snapshots, store.get_blob)


def changes_of(store: Store, history: SnapshotHistory, call_id: str) -> list[ShownChange] | None:
    from paddock.rollouts.folder_changes import read_changes

    return read_changes(history, call_id, store.get_blob)


def summarize(changes: list[ShownChange]) -> str:
    named = ", ".join(map(describe, changes[:LISTED_CHANGES]))
    left = sum(change.entries for change in changes[LISTED_CHANGES:])
    return named + (f" and {left} more" if left else "")


def describe(change: ShownChange) -> str:
    parts = [change.path]
    if change.before is not None or change.after is not None:
        added, removed = change.count_lines()
        parts.append(f"+{added} −{removed}")
    words = [change.kind if change.kind != "changed" else "", "binary" if change.is_binary else "", change.note]
    about = ", ".join(word for word in words if word)
    return " ".join(parts) + (f" ({about})" if about else "")


def diff_lines(change: ShownChange) -> list[str]:
    before, after = (change.before or "").splitlines(), (change.after or "").splitlines()
    return list(difflib.unified_diff(before, after, lineterm="", n=3))[2:]
