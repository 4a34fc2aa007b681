"""SGLang: ids in each choice, but only when the response is not streamed. `/generate` streams them.

The events of `/generate` repeat all earlier tokens, unless the server was started with incremental output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.capture.engines import InferenceEngine, Post, SampledPiece, TokenApi, TokenizerApi, TokenRequest
from paddock.capture.trace import LogprobsKind

if TYPE_CHECKING:
    from collections.abc import Mapping


def can_stream(body: Mapping[str, Any]) -> bool:
    return not body.get("return_token_ids")


def write_token_request(request: TokenRequest) -> dict[str, Any]:
    sampling: dict[str, Any] = {
        **request.sampling,
        "max_new_tokens": request.max_tokens,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "stop_token_ids": request.stop_ids,
    }
    if request.stop_strings:
        sampling["stop"] = request.stop_strings
    if request.seed is not None:
        sampling["sampling_seed"] = request.seed
    return {
        "input_ids": request.prompt,
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": request.top_logprobs,
        "stream": request.is_stream,
    }


def read_token_response(document: dict[str, Any], seen: int) -> SampledPiece:
    about = document.get("meta_info") or {}
    total = int(about.get("completion_tokens") or 0)
    new = max(0, total - seen)
    # From the end: an event holds all tokens, or only the new ones.
    entries = (about.get("output_token_logprobs") or [])[-new:] if new else []
    tops = (about.get("output_top_logprobs") or [])[-new:] if new else []
    finish = about.get("finish_reason") or {}
    matched = finish.get("matched")
    usage = {"prompt_tokens": about.get("prompt_tokens"), "completion_tokens": total}
    if about.get("cached_tokens") is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": about["cached_tokens"]}
    version = about.get("weight_version")
    return SampledPiece(
        ids=list((document.get("output_ids") or [])[-new:]) if new else [],
        logprobs=[entry[0] for entry in entries],
        tops=[[(each[1], each[0]) for each in top or ()] for top in tops],
        finish_reason=finish.get("type"),
        usage=usage if finish else None,
        stop_string=matched if isinstance(matched, str) else None,
        weight_version=None if version is None else str(version),
    )


async def encode_text(post: Post, model: str, text: str) -> list[int]:
    document = await post("/tokenize", {"model": model, "prompt": text, "add_special_tokens": False})
    return [int(token) for token in document["tokens"]]


async def decode_ids(post: Post, model: str, ids: list[int]) -> str:
    body = {"model": model, "tokens": ids, "skip_special_tokens": False}
    return str((await post("/detokenize", body))["text"])


ENGINE = InferenceEngine(
    "sglang",
    owned_by=("sglang",),
    detection=("/get_model_info", "model_path"),
    neutral_sampling={"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    token_id_fields={"return_token_ids": True},
    takes_template_arguments=True,
    can_stream=can_stream,
    token_api=TokenApi("/generate", True, write_token_request, read_token_response),
    tokenizer=TokenizerApi(encode_text, decode_ids),
    # Its sampler divides by the temperature first, unless RETURN_ORIGINAL_LOGPROB is set for the server.
    logprobs_kind=LogprobsKind.PROCESSED,
    upgrade_hint="run an SGLang whose chat completions know `return_token_ids`",
)
