"""llama.cpp: ids stand beside the logprobs; the ids of the prompt come from its own template and tokenizer.

It gives no logprobs with `top_logprobs: 0`. A stream with logprobs is refused when there are tools, and lacks
the token that ended the answer when there are none, so calls for tokens are never streamed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.rollouts.capture.engines.base import Ask, Engine
from paddock.rollouts.trace import LogprobsKind

if TYPE_CHECKING:
    from collections.abc import Mapping

SHAPES_THE_PROMPT = (
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "reasoning_format",
    "reasoning_effort",
    "add_generation_prompt",
    "continue_final_message",
)


def streams(body: Mapping[str, Any]) -> bool:
    return not body.get("logprobs")


async def prompt_ids(ask: Ask, body: Mapping[str, Any]) -> list[int]:
    shaping = {name: body[name] for name in SHAPES_THE_PROMPT if name in body}
    prompt = (await ask("/apply-template", shaping))["prompt"]
    tokenized = await ask("/tokenize", {"content": prompt, "add_special": True, "parse_special": True})
    return [int(token) for token in tokenized["tokens"]]


async def count(ask: Ask, body: Mapping[str, Any]) -> int:
    return len(await prompt_ids(ask, body))


ENGINE = Engine(
    "llamacpp",
    neutral={"top_k": 0, "min_p": 0.0, "typical_p": 1.0, "repeat_penalty": 1.0},
    least_alternatives=1,
    template_arguments=True,
    streams=streams,
    # `post_sampling_probs`, which is off unless a request asks for it, would give those after the temperature.
    logprobs_kind=LogprobsKind.RAW,
    prompt_ids=prompt_ids,
    count=count,
)
