"""SGLang: ids in each choice, but only when the answer is not streamed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.rollouts.capture.engines.base import Engine
from paddock.rollouts.trace import LogprobsKind

if TYPE_CHECKING:
    from collections.abc import Mapping


def streams(body: Mapping[str, Any]) -> bool:
    return not body.get("return_token_ids")


ENGINE = Engine(
    "sglang",
    neutral={"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    token_ids={"return_token_ids": True},
    template_arguments=True,
    streams=streams,
    # Its sampler divides by the temperature first, unless RETURN_ORIGINAL_LOGPROB is set for the server.
    logprobs_kind=LogprobsKind.PROCESSED,
)
