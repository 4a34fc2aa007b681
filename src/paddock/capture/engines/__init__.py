"""The inference engines: what the proxy must know about each to get token ids back, and which one serves an endpoint.

Every module of this package defines one engine, as `ENGINE`. None does IO.

`neutral_sampling` names the sampling fields that an engine has beyond the standard ones, each with the value that
disables it: tokens must be sampled from the model's own distribution, or importance ratios are biased.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paddock.capture.trace import LogprobsKind

Post = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]
"""Posts a document to a path of the server's root and returns the response."""
FetchPromptIds = Callable[[Post, Mapping[str, Any]], Awaitable[list[int]]]
CountTokens = Callable[[Post, Mapping[str, Any]], Awaitable[int]]
EncodeText = Callable[[Post, str, str], Awaitable[list[int]]]
DecodeIds = Callable[[Post, str, list[int]], Awaitable[str]]

STANDARD_NEUTRAL: Mapping[str, Any] = {"top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


@dataclass(frozen=True, slots=True)
class SampledPiece:
    """What a response to token ids says, whole or in part."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    """One for each id; None for a missing one."""
    tops: list[list[tuple[Any, float]]] = field(default_factory=list)
    """For each id, the alternatives: an id or a text, and a logprob."""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    prompt_ids: list[int] | None = None
    """The prompt, if the engine repeats it."""
    stop_string: str | None = None
    """The stop string that ended the answer."""
    weight_version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequest:
    """A prompt as token ids, and how to sample."""

    model: str
    prompt: list[int]
    max_tokens: int
    sampling: Mapping[str, Any]
    """Temperature, `top_p` and what else the engine takes, under the engine's names."""
    top_logprobs: int
    stop_ids: list[int]
    stop_strings: list[str]
    seed: int | None
    is_stream: bool


@dataclass(frozen=True, slots=True)
class TokenApi:
    """How an engine takes token ids and returns token ids."""

    path: str
    at_root: bool
    """Whether the path begins at the server's root, not at the endpoint's URL."""
    write: Callable[[TokenRequest], dict[str, Any]]
    read: Callable[[dict[str, Any], int], SampledPiece]
    """Reads a document or an event. The number is how many ids were read before."""
    takes_stop_strings: bool = True
    """Whether the ids and logprobs are complete if a stop string ends the answer."""
    can_stream: bool = True
    other: TokenApi | None = None
    """What to use if the server has no such path."""


@dataclass(frozen=True, slots=True)
class TokenizerApi:
    """The tokenizer of an engine. The second argument of each is the model's name."""

    encode: EncodeText
    """The ids of a text with special tokens in it; none is added."""
    decode: DecodeIds
    """The text of ids, special tokens included."""


def can_always_stream(body: Mapping[str, Any]) -> bool:
    """For engines whose streams have token ids too."""
    return True


@dataclass(frozen=True, slots=True)
class InferenceEngine:
    """What the proxy has to know about one kind of inference engine."""

    name: str
    owned_by: tuple[str, ...] = ()
    """The `owned_by` of the models that it lists: identifies the engine."""
    detection: tuple[str, str] | None = None
    """A path of the server's root that only this engine has, and a field of the document there."""
    neutral_sampling: Mapping[str, Any] = field(default_factory=dict)
    token_id_fields: Mapping[str, Any] = field(default_factory=dict)
    """Request fields that make it return the ids of prompt and completion."""
    min_top_logprobs: int = 0
    """The smallest `top_logprobs` with which it returns logprobs at all."""
    takes_template_arguments: bool = False
    """Whether it takes `chat_template_kwargs`."""
    max_tokens_field: str = "max_tokens"
    """Its field for the longest completion, for an agent that sets none."""
    can_stream: Callable[[Mapping[str, Any]], bool] = can_always_stream
    """Whether it can stream the response to this body and return token ids as well."""
    fetch_prompt_ids: FetchPromptIds | None = None
    """Asks the engine's own tokenizer, if its responses hold no prompt ids."""
    count_tokens: CountTokens | None = None
    """Counts the tokens of a prompt, if the engine has a tokenizer endpoint."""
    token_api: TokenApi | None = None
    """How it takes token ids, if it does."""
    tokenizer: TokenizerApi | None = None
    logprobs_kind: LogprobsKind = LogprobsKind.UNKNOWN
    """The logprobs that it returns in its default configuration. No engine says so in its responses."""
    upgrade_hint: str = "serve the model with vLLM, SGLang or llama.cpp to train on it"
    """What to change so that it returns token ids."""


# The modules import this package: what they use is defined above this line.
ENGINES: dict[str, InferenceEngine] = {
    module.name: importlib.import_module(f"{__name__}.{module.name}").ENGINE
    for module in pkgutil.iter_modules(__path__)
}
UNKNOWN = InferenceEngine(
    "unknown",
    neutral_sampling=ENGINES["vllm"].neutral_sampling,
    token_id_fields=ENGINES["vllm"].token_id_fields,
    min_top_logprobs=1,
    takes_template_arguments=True,
)
"""Gets vLLM's fields; those that it refuses are left out from then on."""
DETECTION_PATHS = tuple(engine.detection[0] for engine in ENGINES.values() if engine.detection is not None)


def find_engine(name: str | None) -> InferenceEngine:
    """The engine with this name; `UNKNOWN` for any other."""
    return ENGINES.get(name or "", UNKNOWN)


def detect_by_owner(models: Any) -> InferenceEngine | None:
    """The engine that the list of models names as the owner."""
    for model in read_model_list(models):
        owner = str(model.get("owned_by", "")).lower()
        for engine in ENGINES.values():
            if owner in engine.owned_by:
                return engine
    return None


def detect_by_paths(documents: Mapping[str, Any]) -> InferenceEngine | None:
    """The engine whose own path answered, from the documents at `DETECTION_PATHS`."""
    for engine in ENGINES.values():
        if engine.detection is not None:
            path, field = engine.detection
            document = documents.get(path)
            if isinstance(document, dict) and field in document:
                return engine
    return None


def read_model_list(models: Any) -> list[dict[str, Any]]:
    """The models in the answer of `/v1/models`, without what is not an object."""
    entries = models.get("data") if isinstance(models, dict) else None
    return [model for model in entries if isinstance(model, dict)] if isinstance(entries, list) else []
