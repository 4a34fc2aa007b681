"""vLLM: prompt ids in the first chunk, ids and logprobs in each chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.capture.engines import InferenceEngine, Post
from paddock.capture.trace import LogprobsKind

if TYPE_CHECKING:
    from collections.abc import Mapping

PROMPT_FIELDS = ("model", "messages", "tools", "chat_template_kwargs")


async def count_tokens(post: Post, body: Mapping[str, Any]) -> int:
    prompt = {name: body[name] for name in PROMPT_FIELDS if name in body}
    return int((await post("/tokenize", prompt))["count"])


ENGINE = InferenceEngine(
    "vllm",
    owned_by=("vllm",),
    detection=("/version", "version"),
    neutral_sampling={"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    token_id_fields={"return_token_ids": True},
    takes_template_arguments=True,
    # `--logprobs-mode raw_logprobs`; with `processed_logprobs` they are those after the temperature.
    logprobs_kind=LogprobsKind.RAW,
    count_tokens=count_tokens,
    upgrade_hint="run a vLLM that knows `return_token_ids` (0.10.2 or later)",
)
