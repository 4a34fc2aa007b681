"""The example that searches a tree of rollouts."""

import subprocess
import sys
from pathlib import Path

import pytest

from paddock.store import Store
from rollouts.played import needs_bwrap

pytestmark = [pytest.mark.end_to_end, needs_bwrap]
EXAMPLE = Path(__file__).parents[2] / "examples" / "tree_search.py"


def test_the_search_finds_the_branch_that_solves_the_task(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--store", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "reward 1  (this one)" in ended.stdout
    assert ended.stdout.splitlines()[-1].endswith("reward 1.0")
    with Store.open(tmp_path, read_only=True) as store:
        (first,) = [record for record in store.list() if not record.fork]
        branches = store.tree(first.rollout_id)
        best = next(branch for branch in branches if branch.reward == 1.0)
        assert (len(branches), best.parent) == (5, first.rollout_id)
        replayed = [call for call in store.calls(best.rollout_id) if call.replayed_from]
        assert len(replayed) == best.at
