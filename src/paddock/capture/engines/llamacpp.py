"""llama.cpp: ids stand beside the logprobs; the ids of the prompt come from its own template and tokenizer.

It gives no logprobs with `top_logprobs: 0`. A stream with logprobs is refused when there are tools, and lacks
the token that ended the answer when there are none, so calls for tokens are never streamed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.capture.engines import InferenceEngine, Post
from paddock.capture.trace import LogprobsKind

if TYPE_CHECKING:
    from collections.abc import Mapping

PROMPT_FIELDS = (
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "reasoning_format"),
    *("reasoning_effort", "add_generation_prompt", "continue_final_message"),
)


def can_stream(body: Mapping[str, Any]) -> bool:
    return not body.get("logprobs")


async def fetch_prompt_ids(post: Post, body: Mapping[str, Any]) -> list[int]:
    template_body = {name: body[name] for name in PROMPT_FIELDS if name in body}
    prompt = (await post("/apply-template", template_body))["prompt"]
    tokenized = await post("/tokenize", {"content": prompt, "add_special": True, "parse_special": True})
    return [int(token) for token in tokenized["tokens"]]


async def count_tokens(post: Post, body: Mapping[str, Any]) -> int:
    return len(await fetch_prompt_ids(post, body))


ENGINE = InferenceEngine(
    "llamacpp",
    owned_by=("llamacpp",),
    detection=("/props", "default_generation_settings"),
    neutral_sampling={"top_k": 0, "min_p": 0.0, "typical_p": 1.0, "repeat_penalty": 1.0},
    min_top_logprobs=1,
    takes_template_arguments=True,
    can_stream=can_stream,
    # `post_sampling_probs`, which is off unless a request asks for it, would give those after the temperature.
    logprobs_kind=LogprobsKind.RAW,
    fetch_prompt_ids=fetch_prompt_ids,
    count_tokens=count_tokens,
    upgrade_hint="start the llama.cpp server with its own chat template (`--jinja`), so that /apply-template answers",
)
