"""The tree of a rollout: its forks, where it was forked from, and how each of them ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.store import rows, tree

if TYPE_CHECKING:
    import sqlite3

    from paddock.store.tree import Branch
    from paddock.web.loaded_rollout import LoadedRollout


def describe_tree(connection: sqlite3.Connection, rollout: LoadedRollout) -> dict[str, Any]:
    """All rollouts of the tree, each after its parent. Of one that was pruned, only its place is known."""
    return {"branches": [_describe(connection, branch) for branch in tree.read(connection, rollout.id)]}


def _describe(connection: sqlite3.Connection, branch: Branch) -> dict[str, Any]:
    head = None if branch.key is None else rows.head(connection, branch.key)
    values = head or {}
    return {
        "rollout_id": branch.rollout_id,
        "parent": branch.parent,
        "at": branch.at,
        "replayed": ((values.get("fork") or {}).get("fidelity") or {}).get("replayed_calls"),
        "edit": sorted((values.get("fork") or {}).get("edit") or ()),
        "is_pruned": head is None,
        "outcome": values.get("outcome"),
        "stage": values.get("stage"),
        "reward": values.get("reward"),
        "calls": values.get("calls"),
        "model": values.get("model"),
        "error": values.get("error"),
    }
