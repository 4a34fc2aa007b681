"""vLLM: prompt ids in the first chunk, ids and logprobs in each chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.rollouts.capture.engines.base import Ask, Engine
from paddock.rollouts.trace import LogprobsKind

if TYPE_CHECKING:
    from collections.abc import Mapping

COUNTED = ("model", "messages", "tools", "chat_template_kwargs")


async def count(ask: Ask, body: Mapping[str, Any]) -> int:
    asked = {name: body[name] for name in COUNTED if name in body}
    return int((await ask("/tokenize", asked))["count"])


ENGINE = Engine(
    "vllm",
    neutral={"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    token_ids={"return_token_ids": True},
    template_arguments=True,
    # `--logprobs-mode raw_logprobs`; with `processed_logprobs` they are those after the temperature.
    logprobs_kind=LogprobsKind.RAW,
    count=count,
)
