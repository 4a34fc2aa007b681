"""The tree of a rollout as text."""

from paddock.cli.trace_tree import tree_lines
from paddock.store.tree import Branch


def test_each_branch_is_below_its_parent() -> None:
    branches = [
        Branch(rollout_id="one", parent=None, at=None, key=1, outcome="ok", reward=0.0),
        Branch(rollout_id="two", parent="one", at=3, key=None),
        Branch(rollout_id="three", parent="two", at=5, key=3, outcome="ok", reward=1.0),
        Branch(rollout_id="four", parent="one", at=None, key=4),
    ]
    assert list(tree_lines(branches, "three")) == [
        "one  ok, reward 0",
        "├─ c3 two  pruned",
        "│  └─ c5 three  ok, reward 1  (this one)",
        "└─ continued four  running, no reward",
    ]


def test_branches_of_a_deleted_parent_are_beside_each_other() -> None:
    branches = [Branch(rollout_id=name, parent="gone", at=1, key=1, outcome="task") for name in ("one", "two")]
    assert list(tree_lines(branches)) == ["c1 one  task, no reward", "c1 two  task, no reward"]
