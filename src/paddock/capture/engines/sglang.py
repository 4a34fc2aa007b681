"""SGLang: ids in each choice, but only when the response is not streamed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.capture.engines import InferenceEngine
from paddock.capture.trace import LogprobsKind

if TYPE_CHECKING:
    from collections.abc import Mapping


def can_stream(body: Mapping[str, Any]) -> bool:
    return not body.get("return_token_ids")


ENGINE = InferenceEngine(
    "sglang",
    owned_by=("sglang",),
    detection=("/get_model_info", "model_path"),
    neutral_sampling={"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    token_id_fields={"return_token_ids": True},
    takes_template_arguments=True,
    can_stream=can_stream,
    # Its sampler divides by the temperature first, unless RETURN_ORIGINAL_LOGPROB is set for the server.
    logprobs_kind=LogprobsKind.PROCESSED,
    upgrade_hint="run an SGLang whose chat completions know `return_token_ids`",
)
