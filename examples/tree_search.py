"""Tree search over rollouts: fork at the calls where the model was least certain, and keep the best branches.

    .venv/bin/python examples/tree_search.py                              # a scripted model, a few seconds
    .venv/bin/python examples/tree_search.py --model local                # a small model on this machine
    .venv/bin/python examples/tree_search.py fix-test --model http://127.0.0.1:8000/v1 -n 4 --rounds 3

Each round takes the calls with the highest entropy among the rollouts that were kept, forks each of them `-n` times,
and keeps the rollouts with the highest rewards. A fork replays what came before its call: no token is sampled again.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from tiny_agent import Tiny

from paddock.cli.trace_tree import tree_lines
from paddock.rollouts import Budget, RunConfig, Store, fork, load_tasks, run_rollout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paddock.capture.trace import Call
    from paddock.rollouts import RolloutRecord
    from paddock.tasks.task import Task

MERGE = "sed -i 's/merged\\[-1\\]\\[0\\], end/merged[-1][0], max(merged[-1][1], end)/' intervals.py"
CLIP = "sed -i 's/in merge(intervals):/in merge((max(a, start), min(b, end)) for a, b in intervals):/' intervals.py"
WRONG = "sed -i 's/position = right/position = min(right, end)/' intervals.py"
TEST = "python3 -m unittest test_intervals 2>&1 | tail -1"
SCRIPTED_WAYS = (
    ("cat intervals.py", MERGE),
    ("cat intervals.py", MERGE, WRONG),
    ("cat intervals.py", MERGE, CLIP, TEST),
)
"""What the scripted model does on `fix-test`, in turn: it stops too early, corrects one bug wrongly, or solves it."""
CALLS = 12
"""A rollout may make so many model calls."""


@dataclass
class TreeSearch:
    """One search. `models` take turns: of a real model there is one, of the scripted one there are several."""

    task: Task
    store: Store
    models: Iterator[str]
    config: RunConfig
    rollouts: list[RolloutRecord] = field(default_factory=list)
    expanded: set[tuple[str, int]] = field(default_factory=set)

    async def run(self, *, rounds: int, width: int, branches: int, keep: int) -> RolloutRecord:
        """The rollout with the highest reward."""
        self.rollouts.append(await run_rollout(self.task, self.config.with_fields({"model": next(self.models)})))
        for number in range(1, rounds + 1):
            if reward_of(self.best(1)[0]) >= 1.0:
                break
            places = self.uncertain_calls(self.best(keep))[:width]
            for entropy, record, index in places:
                print(f"round {number}: c{index} of {record.rollout_id}, entropy {entropy:.2f}, {branches} branches")
            forks = await asyncio.gather(
                *(self.expand(record, index) for _, record, index in places for _ in range(branches))
            )
            self.rollouts += itertools.chain.from_iterable(forks)
        return self.best(1)[0]

    async def expand(self, record: RolloutRecord, index: int) -> Sequence[RolloutRecord]:
        self.expanded.add((record.rollout_id, index))
        forked = await fork(
            record, at=index, task=self.task, config=self.config, store=self.store, model=next(self.models)
        )
        return forked.records

    def best(self, count: int) -> list[RolloutRecord]:
        """The rollouts with the highest rewards, of equal ones the earliest."""
        return sorted(self.rollouts, key=reward_of, reverse=True)[:count]

    def uncertain_calls(self, records: Sequence[RolloutRecord]) -> list[tuple[float, RolloutRecord, int]]:
        """Calls that were sampled in these rollouts and not forked yet, those with the highest entropy first."""
        places = [
            (entropy_of(call), record, call.index)
            for record in records
            for call in self.store.calls(record.rollout_id)
            if call.replayed_from is None and call.logprobs and (record.rollout_id, call.index) not in self.expanded
        ]
        return sorted(places, key=lambda place: place[0], reverse=True)


def reward_of(record: RolloutRecord) -> float:
    """For comparisons: a rollout without a reward is the worst."""
    return -math.inf if record.reward is None else record.reward


def entropy_of(call: Call) -> float:
    """The mean entropy of a call's tokens in nats. Where the endpoint returns no alternatives, the mean surprise."""
    entropies = [entropy_of_token(alternatives) for alternatives in call.top_logprobs if len(alternatives) > 1]
    return fmean(entropies) if entropies else fmean(-logprob for logprob in call.logprobs)


def entropy_of_token(alternatives: dict[str, float]) -> float:
    """The rest of the probability counts as one more alternative."""
    shares = [math.exp(logprob) for logprob in alternatives.values()]
    rest = max(0.0, 1.0 - sum(shares))
    return -sum(share * math.log(share) for share in (*shares, rest) if share > 0)


def scripted_models(folder: Path) -> list[str]:
    """Replay models for `fix-test`, one for each of `SCRIPTED_WAYS`."""
    models = []
    for number, commands in enumerate(SCRIPTED_WAYS):
        turns: list[dict[str, Any]] = [{"tool": "bash", "arguments": {"command": command}} for command in commands]
        file = folder / f"way-{number}.json"
        file.write_text(json.dumps({"turns": [*turns, {"text": "Both functions are correct now."}]}))
        models.append(f"replay:{file}")
    return models


async def search(options: argparse.Namespace, folder: Path) -> RolloutRecord:
    (task,) = load_tasks(options.task)
    models = scripted_models(folder) if options.model is None else [options.model]
    with Store.open(options.store or folder / "store") as store:
        config = RunConfig(
            model=models[0], agent=Tiny(), store=store, top_logprobs=options.alternatives, budget=Budget(calls=CALLS),
            agent_timeout=options.seconds or (20.0 if options.model == "local" else 600.0), retries=0,
        )  # fmt: skip
        run = TreeSearch(task, store, itertools.cycle(models), config)
        best = await run.run(rounds=options.rounds, width=options.width, branches=options.n, keep=options.keep)
        print("\n".join(tree_lines(store.tree(best.rollout_id), best.rollout_id)))
        print(f"best: {best.rollout_id}, reward {best.reward if best.reward is not None else best.reward_reason}")
        return best


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("task", nargs="?", default="fix-test")
    parser.add_argument("--model", help="`local`, or the URL of an endpoint. Without it, a scripted model.")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--width", type=int, default=2, help="calls that are forked in each round")
    parser.add_argument("-n", type=int, default=2, help="branches of each call")
    parser.add_argument("--keep", type=int, default=3, help="rollouts whose calls are looked at")
    parser.add_argument("--alternatives", type=int, default=8, help="logprobs that the endpoint returns for a token")
    parser.add_argument("--seconds", type=float, help="how long a rollout's agent may take; default 600, local 20")
    parser.add_argument("--store", type=Path, help="where to keep the rollouts; without it they are deleted")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(search(options, Path(folder)))


if __name__ == "__main__":
    main()
