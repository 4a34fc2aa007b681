"""vLLM: prompt ids in the first chunk, ids and logprobs in each chunk."""

from __future__ import annotations

from paddock.rollouts.capture.engines.base import Engine

ENGINE = Engine(
    "vllm",
    neutral={"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    token_ids={"return_token_ids": True},
    template_arguments=True,
)
