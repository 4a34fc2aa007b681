"""What each call of a rollout changed in the work folder, from its snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.rollouts.folder_changes import MOST_CHANGES, make_history, read_changes
from paddock.web.calls import find_call, summarize_message
from paddock.web.detail import read_blob
from paddock.web.responses import PageNotFound

if TYPE_CHECKING:
    import sqlite3

    from paddock.rollouts.folder_changes import ShownChange
    from paddock.store.snapshots import SnapshotHistory
    from paddock.web.loaded_rollout import LoadedRollout

LISTED_CHANGES = 30
"""How many changes of a call are listed; all of them are shown with the call."""


def list_call_changes(connection: sqlite3.Connection, rollout: LoadedRollout) -> dict[str, Any]:
    """For each call with a snapshot: the changed paths with numbers of lines, or why they are not known."""
    history = _history(connection, rollout)
    rows: list[dict[str, Any]] = []
    for head in rollout.ordered():
        snapshot = history.get(head.id)
        if snapshot is None:
            continue
        row: dict[str, Any] = {"call": head.id, "gist": summarize_message(head.values.get("message") or {})}
        try:
            changes = _read(connection, history, head.id, LISTED_CHANGES)
        except PageNotFound:
            return {"rows": [], "gone": True, "left_out": {}}
        listed = [each.to_json() | {"before": None, "after": None} for each in changes or ()]
        rows.append({**row, "problem": snapshot.problem, "unknown": changes is None, "changes": listed})
    left_out = (rollout.head.get("snapshots") or {}).get("left_out") or {}
    return {"rows": rows, "gone": False, "left_out": left_out}


def describe_call_changes(
    connection: sqlite3.Connection, rollout: LoadedRollout, call_id: str
) -> list[dict[str, Any]]:
    """What one call changed, with the texts before and after."""
    head = find_call(rollout, call_id)
    changes = _read(connection, _history(connection, rollout), head.id)
    if changes is None:
        raise PageNotFound(f"what {head.id} changed is not known", hint="run it with --snapshots")
    return [each.to_json() for each in changes]


def _read(
    connection: sqlite3.Connection, history: SnapshotHistory, call_id: str, most: int = MOST_CHANGES
) -> list[ShownChange] | None:
    return read_changes(history, call_id, lambda digest: read_blob(connection, digest), most=most)


def _history(connection: sqlite3.Connection, rollout: LoadedRollout) -> SnapshotHistory:
    snapshots = ((head.id, head.values.get("snapshot") or {}) for head in rollout.ordered())
    about = rollout.head.get("snapshots") or {}
    return make_history(snapshots, about, lambda digest: read_blob(connection, digest))
