"""Learning with a stream and with a barrier: reward at equal tokens, and the time to the same reward.

    python -m scripts.peers trl
    .peers/trl/bin/python -m bench.learning [--seeds 0 1 2] [--versions 40] [--json FILE]

The policy, the trainer and the pick game of `examples/grpo_tiny`, in token mode. A step of the game takes a lognormal
time, of which the 1st and the 99th percentile are 1 : 50, as rollouts of agents do.

barrier   `max_staleness=0`: a batch starts when the weights were updated, and all of it is waited for.
stream    `max_staleness=2`: the next groups are rolled out meanwhile. The same slots, groups and updates.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "grpo_tiny"))

import game
import torch
import words
from endpoint import NAME, served
from grpo import Trainer, collate
from policy import Policy, Sampler
from warm_start import warm_start

from bench.stream import MEDIAN_SECONDS, SleepingSession
from paddock.models import Endpoint
from paddock.rollouts import Budget, Task
from paddock.rollouts.loop import LoopAgent, LoopLimits
from paddock.rollouts.loop.session import ToolResult
from paddock.train.sources import Source
from paddock.train.stream import Stream
from paddock.train.stream_config import StreamConfig
from paddock.train.training_view import read_training

if TYPE_CHECKING:
    from paddock.train.training_view import TrainingView

MEMBERS, BATCH = 16, 4
STALENESS = {"barrier": 0, "stream": 2}
STEP_SECONDS = 3.0
"""The median of a step of the game."""
SMOOTH = 5
"""So many versions are averaged."""
GOAL = 0.6
MOST_OF_THE_TIME = 0.6
"""The target: the stream's share of the time that the barrier needs."""
PICK = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}


@dataclass(slots=True)
class Curve:
    """One run: an entry for each version of the weights."""

    kind: str
    seed: int
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """That were trained on up to then."""
    rewards: list[float] = field(default_factory=list)
    staleness: dict[int, int] = field(default_factory=dict)

    def reward_after(self, tokens: int) -> float:
        """The mean of the last versions that so many tokens gave."""
        count = sum(each <= tokens for each in self.tokens)
        return fmean(self.rewards[max(0, count - SMOOTH) : count])

    @property
    def seconds_to_goal(self) -> float | None:
        means = (fmean(self.rewards[end - SMOOTH : end]) for end in range(SMOOTH, len(self.rewards) + 1))
        reached = next((number for number, mean in enumerate(means, SMOOTH) if mean >= GOAL), None)
        return None if reached is None else self.seconds[reached - 1]


class PickSession(SleepingSession):
    """`game.After`, in this process, with a step that takes its time."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._seconds *= STEP_SECONDS / MEDIAN_SECONDS
        self._right = game.first_number(task.metadata["seed"]) + 1
        self._reward = 0.0
        self.prompt = task.instruction

    async def list_tools(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "pick", "parameters": PICK}}]

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        await asyncio.sleep(self._seconds)
        self._reward = float(arguments.get("number") == self._right)
        return ToolResult.of_text("right" if self._reward else "wrong", done=True)


def make_source(model_url: str, store: Path) -> Source:
    seeds = range(game.LARGEST)
    return Source.create(
        Endpoint(model_url, NAME, engine="vllm"),
        [Task(game.after_prompt(seed), id=f"after-{seed}", metadata={"seed": seed}) for seed in seeds],
        environment=lambda task: PickSession(task),
        agent=LoopAgent(LoopLimits(steps=1), system=None),
        budget=Budget(max_tokens_per_call=8),
        token_mode=True,
        tokenizer=str(words.write_tokenizer(store / "tokenizer")),
        renderer="default",
        store=store,
        n=MEMBERS,
        parallel=MEMBERS * BATCH,
        retries=0,
    )


async def learn(kind: str, seed: int, versions: int, store: Path) -> Curve:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    SleepingSession._numbers.clear()
    policy, curve = Policy(), Curve(kind, seed)
    warm_start(policy, seed)
    trainer, serving = Trainer(policy), deepcopy(policy)
    config = StreamConfig(batch_size=BATCH, max_staleness=STALENESS[kind], zero_advantage="keep", shuffle_seed=seed)

    def load() -> None:
        serving.load_state_dict(policy.state_dict())
        serving.version = policy.version

    async with (
        served(Sampler(serving, seed)) as (_, model_url),
        Stream(make_source(model_url, store), config, version=0) as stream,
    ):
        began, tokens = time.monotonic(), 0
        for _ in range(versions):
            report = await asyncio.to_thread(trainer.step, collate(await stream.take()))
            await stream.acknowledge()
            await stream.update_weights(policy.version, load)
            tokens += report.tokens
            curve.tokens.append(tokens)
            curve.seconds.append(time.monotonic() - began)
        curve.staleness = dict(stream.statistics().staleness)
        curve.rewards = rewards_of(read_training(store, stream.name), versions)
    return curve


def rewards_of(view: TrainingView, versions: int) -> list[float]:
    """The mean reward of the rollouts of each version; that of the version before for a few rollouts."""
    means = {each.version: each.reward.mean for each in view.versions if each.reward.count >= MEMBERS}
    rewards: list[float] = []
    for version in range(versions):
        reward = means.get(version)
        rewards.append((rewards[-1] if rewards else 0.0) if reward is None else reward)
    return rewards


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.learning", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--versions", type=int, default=40, help="updates of the weights in one run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every curve to a file")
    options = parser.parse_args()
    curves: list[Curve] = []
    rewards, times = [], []
    for seed in options.seeds:
        pair = {}
        for kind in STALENESS:
            with tempfile.TemporaryDirectory() as store:
                curve = pair[kind] = asyncio.run(learn(kind, seed, options.versions, Path(store)))
            curves.append(curve)
            goal = curve.seconds_to_goal
            print(
                f"{kind:8} seed {seed}: {curve.tokens[-1]} tokens in {curve.seconds[-1]:.0f} s, reward {GOAL:g} "
                f"after {'-' if goal is None else f'{goal:.0f}'} s, staleness {curve.staleness}",
                flush=True,
            )
        equal = min(curve.tokens[-1] for curve in pair.values())
        rewards.append({kind: curve.reward_after(equal) for kind, curve in pair.items()})
        goals = [pair[kind].seconds_to_goal for kind in ("stream", "barrier")]
        if None not in goals:
            times.append(goals[0] / goals[1])  # type: ignore[operator]
        print(f"         seed {seed}: after {equal} tokens {rewards[-1]}", flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(curve) for curve in curves], indent=2))
    share = median(times) if times else float("nan")
    means = {kind: fmean(each[kind] for each in rewards) for kind in STALENESS}
    print(f"reward after equal tokens {means}; time to a reward of {GOAL:g}: {share:.2f} of the barrier's")
    return 0 if share <= MOST_OF_THE_TIME else 1


if __name__ == "__main__":
    raise SystemExit(main())
