"""A few steps of the example that learns, watched from within: what was sampled, and what is trained on."""

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples" / "grpo_tiny"))

import torch
from endpoint import served
from episodes import Episodes, environment
from grpo import Trainer, advantages, collate
from policy import Policy, Sampler
from report import report
from warm_start import warm_start

STEPS, MEMBERS = 2, 4


class Watched(Sampler):
    """Remembers each answer that was sampled, with its prompt."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy, seed=0)
        self.answers: list[tuple[list[int], list[int], list[float]]] = []

    def __call__(self, prompts: list[list[int]], limits: list[int]) -> Any:
        answers, version = super().__call__(prompts, limits)
        self.answers += [(p, a.ids, a.logprobs) for p, a in zip(prompts, answers, strict=True)]
        return answers, version


async def loop() -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    policy = Policy()
    warm_start(policy, 0)
    sampler, trainer, steps = Watched(policy), Trainer(policy), []
    with tempfile.TemporaryDirectory() as folder:
        async with (
            environment() as url,
            served(sampler) as (_, model_url),
            Episodes(url, model_url, Path(folder), MEMBERS) as episodes,
        ):
            for step in range(STEPS):
                sampler.answers.clear()
                before = [each.detach().clone() for each in policy.parameters()]
                samples = await episodes.play(step)
                report = trainer.step(collate(samples))
                steps.append(
                    {
                        "rollouts": len({sample.rollout_id for sample in samples}),
                        "groups": len({sample.group_id for sample in samples}),
                        "samples": len(samples),
                        "calls": max(len(sample.calls) for sample in samples),
                        "versions": sorted({str(v) for sample in samples for v in sample.weight_versions}),
                        "sampled": sorted(ids for _, ids, _ in sampler.answers),
                        "trained": sorted(piece for sample in samples for piece in pieces(sample)),
                        "logprobs": sum(sum(logprobs) for _, _, logprobs in sampler.answers),
                        "captured": sum(sum(sample.logprobs) for sample in samples),
                        "difference": report.difference,
                        "moved": any(bool((a != b).any()) for a, b in zip(before, policy.parameters(), strict=True)),
                        "control": sum(map(abs, advantages(samples, "zero"))),
                        "advantages": sum(map(abs, advantages(samples))),
                    }
                )
    return steps


def pieces(sample: Any) -> list[list[int]]:
    """The runs of tokens that are trained on."""
    collected: list[list[int]] = []
    for previous, mask, token in zip([0, *sample.mask], sample.mask, sample.response_ids, strict=False):
        if mask and not previous:
            collected.append([])
        if mask:
            collected[-1].append(token)
    return collected


def steps() -> list[dict[str, Any]]:
    return asyncio.run(loop())


if __name__ == "__main__":
    report(steps)
