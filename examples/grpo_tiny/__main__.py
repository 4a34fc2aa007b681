"""A complete GRPO loop on the processor: python examples/grpo_tiny.

A transformer made from nothing plays a guessing game that a Paddock server hosts. Every token it samples goes
through the capture into the store; the export gives the training batch; GRPO updates the weights. Ends with 1
if the reward did not rise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean

import torch
import uvloop
from endpoint import served
from episodes import Episodes, environment
from grpo import Control, Trainer, collate
from plot import sparkline, svg
from policy import Policy, Sampler
from warm_start import warm_start

MOST_DIFFERENCE = 1e-4
"""How far a logprob that was captured may lie from the same one computed again: rounding, and nothing else."""
AVERAGED_STEPS = 5
"""So many steps are averaged, for a single one says little."""
MIN_RISE = 0.2
"""How much the reward must rise from the first of them to the last."""


@dataclass(frozen=True, slots=True)
class Options:
    steps: int
    n: int
    seed: int
    control: Control
    goal: float
    store: Path


@dataclass(slots=True)
class Run:
    """What happened, step by step."""

    rewards: list[float] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)
    trained_tokens: int = 0
    sampled_tokens: int = 0
    versions: list[str | None] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def first(self) -> float:
        return fmean(self.rewards[:AVERAGED_STEPS])

    @property
    def last(self) -> float:
        return fmean(self.rewards[-AVERAGED_STEPS:])


async def learn(options: Options) -> Run:
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    policy, run = Policy(), Run()
    began = time.monotonic()
    loss = warm_start(policy, options.seed)
    weights = sum(each.numel() for each in policy.parameters())
    print(f"{weights} weights know the words after {time.monotonic() - began:.1f} s (loss {loss:.2f})", flush=True)
    trainer = Trainer(policy)
    async with (
        environment() as url,
        served(Sampler(policy, options.seed)) as (endpoint, model_url),
        Episodes(url, model_url, options.store, options.n) as episodes,
    ):
        for step in range(options.steps):
            samples = await episodes.play(step)
            assert {version for sample in samples for version in sample.weight_versions} == {str(policy.version)}
            reward = sum(sample.reward or 0.0 for sample in samples) / len(samples)
            report = await asyncio.to_thread(trainer.step, collate(samples, options.control))
            assert report.difference < MOST_DIFFERENCE, f"the captured logprobs are off by {report.difference}"
            run.rewards.append(reward)
            run.differences.append(report.difference)
            run.trained_tokens += report.tokens
            run.versions.append(samples[0].weight_versions[0])
            print(
                f"step {step:3}  reward {reward:.3f}  {len(samples)} rollouts, {report.tokens} tokens of version "
                f"{run.versions[-1]}, captured logprobs off by {report.difference:.0e}, "
                f"ratio then {report.ratio:.2f}  ({time.monotonic() - began:.0f} s)",
                flush=True,
            )
            if len(run.rewards) >= AVERAGED_STEPS and run.last >= options.goal:
                break
        run.sampled_tokens = endpoint.sampled
    run.seconds = time.monotonic() - began
    return run


def read_options() -> tuple[Options, argparse.Namespace]:
    parser = argparse.ArgumentParser(description="A small policy learns to find a number.")
    parser.add_argument("--steps", type=int, default=120, help="at most")
    parser.add_argument("--goal", type=float, default=0.65, help="stop at this reward")
    parser.add_argument("-n", type=int, default=16, help="rollouts in a group")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--control", nargs="?", const="zero", choices=["zero", "shuffled"], help="learn from nothing")
    parser.add_argument("--store", type=Path, help="where the rollouts are kept")
    parser.add_argument("--json", type=Path, help="write what happened to this file")
    parser.add_argument("--svg", type=Path, help="draw the rewards into this file")
    arguments = parser.parse_args()
    store = arguments.store or Path(tempfile.mkdtemp(prefix="grpo-tiny-"))
    return Options(arguments.steps, arguments.n, arguments.seed, arguments.control, arguments.goal, store), arguments


def main() -> int:
    options, arguments = read_options()
    run = uvloop.run(learn(options))
    assert run.trained_tokens == run.sampled_tokens, "not every sampled token was trained on, or some others were"
    has_learned = run.last - run.first > MIN_RISE
    print(f"\nreward  {sparkline(run.rewards)}")
    print(
        f"        from {run.first:.2f} to {run.last:.2f} in {run.seconds:.0f} s; the rollouts are in {options.store}"
    )
    print(f"        captured logprobs were off by {max(run.differences):.0e} at most, ratios by as little")
    if arguments.json:
        arguments.json.write_text(json.dumps({**asdict(run), "first": run.first, "last": run.last}))
    if arguments.svg:
        name = "GRPO" if options.control is None else f"control: advantages {options.control}"
        arguments.svg.write_text(svg({name: run.rewards}))
    print("it learned" if has_learned else "it did not learn")
    return 0 if has_learned == (options.control is None) else 1


if __name__ == "__main__":
    sys.exit(main())
