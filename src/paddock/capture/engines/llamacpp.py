"""llama.cpp: ids stand beside the logprobs; the ids of the prompt come from its own template and tokenizer.

It gives no logprobs with `top_logprobs: 0`. A stream with logprobs is refused when there are tools, and lacks
the token that ended the answer when there are none, so such calls are never streamed. `/completion` takes token ids.
Its stream leaves out every token that ends within a character, so it is not streamed either. The whole response has
all tokens, without the logprobs of those; after a stop string it leaves tokens out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.capture.engines import InferenceEngine, Post, SampledPiece, TokenApi, TokenizerApi, TokenRequest
from paddock.capture.trace import LogprobsKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROMPT_FIELDS = (
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "reasoning_format"),
    *("reasoning_effort", "add_generation_prompt", "continue_final_message"),
)


FINISH_REASONS = {"eos": "stop", "word": "stop", "limit": "length"}


def can_stream(body: Mapping[str, Any]) -> bool:
    return not body.get("logprobs")


async def fetch_prompt_ids(post: Post, body: Mapping[str, Any]) -> list[int]:
    template_body = {name: body[name] for name in PROMPT_FIELDS if name in body}
    prompt = (await post("/apply-template", template_body))["prompt"]
    tokenized = await post("/tokenize", {"content": prompt, "add_special": True, "parse_special": True})
    return [int(token) for token in tokenized["tokens"]]


async def count_tokens(post: Post, body: Mapping[str, Any]) -> int:
    return len(await fetch_prompt_ids(post, body))


def write_token_request(request: TokenRequest) -> dict[str, Any]:
    body = {
        "prompt": request.prompt,
        "n_predict": request.max_tokens,
        **request.sampling,
        "n_probs": request.top_logprobs,
        "return_tokens": True,
        "cache_prompt": True,
        "stream": request.is_stream,
    }
    return body if request.seed is None else {**body, "seed": request.seed}


def read_token_response(document: dict[str, Any], seen: int) -> SampledPiece:
    ids = document.get("tokens") or []
    entries = match_entries(ids, document.get("completion_probabilities") or ())
    usage = {"prompt_tokens": document.get("tokens_evaluated"), "completion_tokens": document.get("tokens_predicted")}
    if (cached := (document.get("timings") or {}).get("cache_n")) is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return SampledPiece(
        ids=ids,
        logprobs=[entry.get("logprob") for entry in entries],
        tops=[[(top.get("id"), top.get("logprob")) for top in entry.get("top_logprobs") or ()] for entry in entries],
        finish_reason=FINISH_REASONS.get(str(document.get("stop_type")), "stop"),
        usage=usage,
    )


def match_entries(ids: Sequence[int], entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The logprob entry of each id; an empty one for a token without."""
    matched: list[dict[str, Any]] = []
    position = 0
    for token in ids:
        entry = entries[position] if position < len(entries) else {}
        is_own = entry.get("id", token) == token
        matched.append(entry if is_own else {})
        position += is_own
    return matched


async def encode_text(post: Post, model: str, text: str) -> list[int]:
    document = await post("/tokenize", {"content": text, "add_special": False, "parse_special": True})
    return [int(token) for token in document["tokens"]]


async def decode_ids(post: Post, model: str, ids: list[int]) -> str:
    return str((await post("/detokenize", {"tokens": ids}))["content"])


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
    token_api=TokenApi(
        "/completion",
        True,
        write_token_request,
        read_token_response,
        takes_stop_strings=False,
        can_stream=False,
    ),
    tokenizer=TokenizerApi(encode_text, decode_ids),
    upgrade_hint="start the llama.cpp server with its own chat template (`--jinja`), so that /apply-template answers",
)
