"""vLLM: prompt ids in the first chunk, ids and logprobs in each chunk.

Token ids go to `/v1/completions`, or to `/inference/v1/generate` of a server without it, which does not stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.capture.completion import ID_PREFIX
from paddock.capture.engines import InferenceEngine, Post, SampledPiece, TokenApi, TokenizerApi, TokenRequest
from paddock.capture.trace import LogprobsKind

if TYPE_CHECKING:
    from collections.abc import Mapping

PROMPT_FIELDS = ("model", "messages", "tools", "chat_template_kwargs")


async def count_tokens(post: Post, body: Mapping[str, Any]) -> int:
    prompt = {name: body[name] for name in PROMPT_FIELDS if name in body}
    return int((await post("/tokenize", prompt))["count"])


def write_token_request(request: TokenRequest) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": request.model,
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        **request.sampling,
        "logprobs": request.top_logprobs,
        "return_token_ids": True,
        "skip_special_tokens": False,
        "stop_token_ids": request.stop_ids,
    }
    if request.stop_strings:
        body["stop"] = request.stop_strings
    if request.seed is not None:
        body["seed"] = request.seed
    if request.is_stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def read_token_response(document: dict[str, Any], seen: int) -> SampledPiece:
    choices = document.get("choices") or [{}]
    choice = choices[0]
    logprobs = choice.get("logprobs") or {}
    prompt = choice.get("prompt_token_ids")
    stop = choice.get("stop_reason")
    return SampledPiece(
        ids=choice.get("token_ids") or [],
        logprobs=logprobs.get("token_logprobs") or [],
        tops=[list((each or {}).items()) for each in logprobs.get("top_logprobs") or ()],
        finish_reason=choice.get("finish_reason"),
        usage=document.get("usage"),
        prompt_ids=document.get("prompt_token_ids") if prompt is None else prompt,
        stop_string=stop if isinstance(stop, str) else None,
    )


def write_generate_request(request: TokenRequest) -> dict[str, Any]:
    sampling: dict[str, Any] = {
        **request.sampling,
        "max_tokens": request.max_tokens,
        "logprobs": max(1, request.top_logprobs),
        "skip_special_tokens": False,
        "stop_token_ids": request.stop_ids,
    }
    if request.stop_strings:
        sampling["stop"] = request.stop_strings
    if request.seed is not None:
        sampling["seed"] = request.seed
    return {"model": request.model, "token_ids": request.prompt, "sampling_params": sampling}


def read_generate_response(document: dict[str, Any], seen: int) -> SampledPiece:
    """Its logprobs are those of chat completions, with `token_id:` and the id in place of a text."""
    choice = (document.get("choices") or [{}])[0]
    entries = (choice.get("logprobs") or {}).get("content") or []
    stop = choice.get("stop_reason")
    return SampledPiece(
        ids=choice.get("token_ids") or [],
        logprobs=[entry.get("logprob") for entry in entries],
        tops=[[(_read_id(top), top.get("logprob")) for top in entry.get("top_logprobs") or ()] for entry in entries],
        finish_reason=choice.get("finish_reason"),
        usage=document.get("usage"),
        prompt_ids=document.get("prompt_token_ids"),
        stop_string=stop if isinstance(stop, str) else None,
    )


def _read_id(entry: dict[str, Any]) -> int | str:
    text = str(entry.get("token"))
    number = text.removeprefix(ID_PREFIX)
    return int(number) if number != text and number.isdigit() else text


async def encode_text(post: Post, model: str, text: str) -> list[int]:
    document = await post("/tokenize", {"model": model, "prompt": text, "add_special_tokens": False})
    return [int(token) for token in document["tokens"]]


async def decode_ids(post: Post, model: str, ids: list[int]) -> str:
    return str((await post("/detokenize", {"model": model, "tokens": ids}))["prompt"])


GENERATE = TokenApi("/inference/v1/generate", True, write_generate_request, read_generate_response, can_stream=False)
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
    token_api=TokenApi("/completions", False, write_token_request, read_token_response, other=GENERATE),
    tokenizer=TokenizerApi(encode_text, decode_ids),
    upgrade_hint="run a vLLM that knows `return_token_ids` (0.10.2 or later)",
)
