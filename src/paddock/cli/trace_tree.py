"""The tree of a rollout as text: who was forked from whom, at which call, and how each ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paddock.store.tree import Branch


def print_tree(branches: Sequence[Branch], current: str | None = None) -> None:
    """Print a tree with more than one rollout; `current` is marked."""
    if len(branches) > 1:
        click.echo(f"\n--- tree of {len(branches)} rollouts ---")
        for line in tree_lines(branches, current):
            click.echo(line)


def tree_lines(branches: Sequence[Branch], current: str | None = None) -> Iterator[str]:
    """One line for each branch, each after its parent."""
    children: dict[str | None, list[Branch]] = {}
    names = {branch.rollout_id for branch in branches}
    for branch in branches:
        children.setdefault(branch.parent if branch.parent in names else None, []).append(branch)
    pending = [(branch, "", "") for branch in reversed(children.get(None, ()))]
    while pending:
        branch, first, following = pending.pop()
        yield first + _describe(branch) + ("  (this one)" if branch.rollout_id == current else "")
        below = children.get(branch.rollout_id, ())
        for number, child in reversed([*enumerate(below, 1)]):
            is_last = number == len(below)
            pending.append(
                (child, f"{following}{'└─ ' if is_last else '├─ '}", f"{following}{'   ' if is_last else '│  '}")
            )


def _describe(branch: Branch) -> str:
    place = "" if branch.parent is None else "continued " if branch.at is None else f"c{branch.at} "
    if branch.key is None:
        return f"{place}{branch.rollout_id}  pruned"
    reward = "no reward" if branch.reward is None else f"reward {branch.reward:g}"
    return f"{place}{branch.rollout_id}  {branch.outcome or 'running'}, {reward}"
