"""A few updates of the example that learns, watched from within: what was sampled, and what is trained on."""

import asyncio
import math
import sys
import tempfile
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples" / "grpo_tiny"))

import torch
import words
from endpoint import served
from episodes import open_sources
from grpo import Trainer, advantages, collate, difference
from policy import Policy, Sampler
from report import report
from warm_start import warm_start

from paddock.capture.tokens.tokenizer import open_tokenizer
from paddock.train.stream import Stream
from paddock.train.stream_config import StreamConfig

STEPS, MEMBERS, BATCH = 3, 4, 4


class Watched(Sampler):
    """Remembers each answer that was sampled, with its prompt."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy, seed=0)
        self.answers: dict[tuple[int, ...], int] = Counter()

    def __call__(self, prompts: list[list[int]], limits: list[int]) -> Any:
        answers, version = super().__call__(prompts, limits)
        for prompt, answer in zip(prompts, answers, strict=True):
            self.answers[(*prompt, *answer.ids)] += 1
        return answers, version


async def loop() -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    policy = Policy()
    warm_start(policy, 0)
    serving = deepcopy(policy)
    sampler, trainer, steps = Watched(serving), Trainer(policy), []

    def load() -> None:
        serving.load_state_dict(policy.state_dict())
        serving.version = policy.version

    config = StreamConfig(batch_size=BATCH, max_staleness=1, zero_advantage="keep", timeout=60.0)
    with tempfile.TemporaryDirectory() as folder:
        async with (
            served(sampler) as (_, model_url),
            open_sources(model_url, Path(folder), MEMBERS, 8) as sources,
            Stream(sources, config, version=0) as stream,
        ):
            for _ in range(STEPS):
                groups = await stream.take()
                samples = [sample for group in groups for sample in group.samples]
                before = [each.detach().clone() for each in policy.parameters()]
                off = difference(policy, samples, policy.version)
                trainer.step(collate(groups))
                await stream.acknowledge()
                await stream.update_weights(policy.version, load)
                steps.append(
                    {
                        "groups": len(groups),
                        "samples": len(samples),
                        "rollouts": len({sample.rollout_id for sample in samples}),
                        "sources": sorted({group.source for group in groups}),
                        "staleness": max(group.staleness for group in groups),
                        "invented": sum(sampler.answers[ids] == 0 for ids in map(sampled_ids, samples)),
                        "trained": sum(sum(sample.mask) for sample in samples),
                        "difference": None if math.isnan(off) else off,
                        "moved": any(bool((a != b).any()) for a, b in zip(before, policy.parameters(), strict=True)),
                        "control": sum(map(abs, advantages(groups, "zero"))),
                    }
                )
    return steps


def sampled_ids(sample: Any) -> tuple[int, ...]:
    """The prompt and the answer of the last call of a sample: all its tokens."""
    return (*sample.prompt_ids, *sample.response_ids)


def steps() -> list[dict[str, Any]]:
    return asyncio.run(loop())


def tokenizer() -> dict[str, Any]:
    """The tokenizer that token mode opens, beside the words of the example."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "find a number from 1 to 7"},
        words.read(words.decode(words.call_ids("guess", 4)), [{"function": {"name": "guess"}}]),
        {"role": "tool", "content": "higher"},
    ]
    with tempfile.TemporaryDirectory() as folder:
        opened = open_tokenizer(str(words.write_tokenizer(Path(folder))))
        text = opened.apply_chat_template(messages, tokenize=False)
        return {
            "same": opened.encode(text) == words.prompt_ids(messages),
            "text": opened.decode(opened.encode(text)) == text,
        }


if __name__ == "__main__":
    report(steps, tokenizer)
