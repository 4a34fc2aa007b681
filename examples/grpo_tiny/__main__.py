"""A complete GRPO loop on the processor: python examples/grpo_tiny.

A transformer made from nothing plays two games that Paddock servers host. A stream rolls them out in token mode while
the policy is trained, and paces itself so that no sample gets too old. Ends with 1 if the reward did not rise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import tempfile
import time
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import torch
import uvloop
from endpoint import served
from episodes import open_sources
from grpo import Control, Trainer, collate, difference
from plot import sparkline, svg
from policy import Policy, Sampler
from warm_start import warm_start

from paddock.train.stream import Stream
from paddock.train.stream_config import StreamConfig
from paddock.train.training_view import read_training

if TYPE_CHECKING:
    from paddock.train.training_view import TrainingView

MOST_DIFFERENCE = 1e-4
"""How far a logprob that was captured may lie from the same one computed again: rounding, and nothing else."""
SOME = 5
"""So many versions are averaged, for a single one says little."""
CLEARLY = 0.2
"""How much the reward must rise from the first of them to the last."""
PARALLEL = 56
"""Rollouts of each game at a time."""


@dataclass(frozen=True, slots=True)
class Options:
    steps: int
    n: int
    batch_size: int
    max_staleness: int
    seed: int
    control: Control
    goal: float
    store: Path


@dataclass(slots=True)
class Run:
    """What happened, version by version."""

    rewards: dict[str, list[float]] = field(default_factory=dict)
    """By game, and of both: the mean of all rollouts with a reward, also of those that were left out."""
    differences: list[float] = field(default_factory=list)
    staleness: dict[int, int] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    trained_tokens: int = 0
    sampled_tokens: int = 0
    samples: int = 0
    rollouts: int = 0
    seconds: float = 0.0

    @property
    def all_rewards(self) -> list[float]:
        return self.rewards["both"]

    @property
    def first(self) -> float:
        return fmean(self.all_rewards[:SOME])

    @property
    def last(self) -> float:
        return fmean(self.all_rewards[-SOME:])


async def learn(options: Options) -> Run:
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    policy, run = Policy(), Run()
    began = time.monotonic()
    loss = warm_start(policy, options.seed)
    count = sum(each.numel() for each in policy.parameters())
    print(f"{count} weights know the words after {time.monotonic() - began:.1f} s (loss {loss:.2f})", flush=True)
    trainer, serving = Trainer(policy), deepcopy(policy)
    config = StreamConfig(batch_size=options.batch_size, max_staleness=options.max_staleness, timeout=300.0)

    def load() -> None:
        serving.load_state_dict(policy.state_dict())
        serving.version = policy.version

    async with (
        served(Sampler(serving, options.seed)) as (endpoint, model_url),
        open_sources(model_url, options.store, options.n, PARALLEL) as sources,
        Stream(sources, config, version=0) as stream,
    ):
        for _ in range(options.steps):
            groups = await stream.take()
            samples = [sample for group in groups for sample in group.samples]
            off = difference(policy, samples, policy.version)
            assert not off > MOST_DIFFERENCE, f"the captured logprobs are off by {off}"
            report = await asyncio.to_thread(trainer.step, collate(groups, options.control))
            await stream.acknowledge()
            figures = {"entropy": report.entropy, "ratio": report.ratio, "tokens": report.tokens}
            if not math.isnan(off):
                figures["logprob_difference"] = off
                run.differences.append(off)
            await stream.report(policy.version - 1, **figures)
            await stream.update_weights(policy.version, load)
            run.trained_tokens += report.tokens
            run.samples += len(samples)
            run.rollouts += len({sample.rollout_id for sample in samples})
            view = await asyncio.to_thread(read_training, options.store, stream.name)
            keep_rewards(run, view)
            oldest = max(group.staleness for group in groups)
            # Only tokens that the current weights sampled can be compared.
            compared = "" if math.isnan(off) else f", captured logprobs off by {off:.0e}"
            print(
                f"version {policy.version:3}  reward {run.all_rewards[-1]:.3f}  {len(samples)} samples, "
                f"{report.tokens} tokens, at most {oldest} versions old, entropy {report.entropy:.2f}{compared}"
                f"  ({time.monotonic() - began:.0f} s)",
                flush=True,
            )
            if len(run.all_rewards) >= 2 * SOME and run.last >= options.goal:
                break
        statistics = stream.statistics()
        run.sampled_tokens = endpoint.sampled
    run.staleness, run.left_out = dict(statistics.staleness), dict(statistics.left_out)
    run.seconds = time.monotonic() - began
    return run


def keep_rewards(run: Run, view: TrainingView) -> None:
    """The reward of each version, of all rollouts and of those of each game."""
    run.rewards = {
        "both": [each.reward.mean for each in view.versions if each.reward.mean is not None],
        **{
            name: [each.mean for each in series.values() if each.mean is not None]
            for name, series in view.sources.items()
        },
    }


def read_options() -> tuple[Options, argparse.Namespace]:
    parser = argparse.ArgumentParser(description="A small policy learns two games.")
    parser.add_argument("--steps", type=int, default=120, help="updates of the weights, at most")
    parser.add_argument("--goal", type=float, default=0.7, help="stop at this reward")
    parser.add_argument("-n", type=int, default=16, help="rollouts in a group")
    parser.add_argument("--batch-size", type=int, default=7, help="groups for an update of the weights")
    parser.add_argument("--max-staleness", type=int, default=1, help="how many versions old a sample may be")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--control", nargs="?", const="zero", choices=["zero", "shuffled"], help="learn from nothing")
    parser.add_argument("--store", type=Path, help="where the rollouts are kept")
    parser.add_argument("--json", type=Path, help="write what happened to this file")
    parser.add_argument("--svg", type=Path, help="draw the rewards into this file")
    given = parser.parse_args()
    store = given.store or Path(tempfile.mkdtemp(prefix="grpo-tiny-"))
    sizes = (given.steps, given.n, given.batch_size, given.max_staleness)
    return Options(*sizes, given.seed, given.control, given.goal, store), given


def main() -> int:
    options, given = read_options()
    run = uvloop.run(learn(options))
    assert run.samples == run.rollouts, "a conversation became several samples"
    assert max(run.staleness) <= options.max_staleness, "a sample was too old"
    learned = run.last - run.first > CLEARLY
    for name, rewards in run.rewards.items():
        print(f"reward, {name:6} {sparkline(rewards)}")
    curve = given.svg or options.store / "learning.svg"
    curve.write_text(svg(run.rewards))
    print(
        f"\nfrom {run.first:.2f} to {run.last:.2f} in {run.seconds:.0f} s; staleness {run.staleness}, left out "
        f"{run.left_out or 'nothing'}\ncaptured logprobs were off by {max(run.differences):.0e} at most\n"
        f"curve: {curve}\npage:  paddock view --store {options.store}"
    )
    if given.json:
        given.json.write_text(json.dumps({**asdict(run), "first": run.first, "last": run.last}))
    print("it learned" if learned else "it did not learn")
    return 0 if learned == (options.control is None) else 1


if __name__ == "__main__":
    sys.exit(main())
