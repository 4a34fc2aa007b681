"""The request to the inference engine, made from the agent's chat completion request. No IO.

The proxy adds fields for token ids, logprobs and neutral sampling. If an endpoint refuses a field, `adapt` reads its
error and returns what to leave out; `Compatibility` keeps that for later calls.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from paddock.capture.engines import STANDARD_NEUTRAL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paddock.capture.engines import InferenceEngine
    from paddock.capture.settings import CaptureSettings

OTHER_SAMPLING = frozenset(
    (
        *("top_k", "min_p", "top_a", "typical_p", "tfs_z", "top_n_sigma", "mirostat", "mirostat_tau", "mirostat_eta"),
        *("repetition_penalty", "repeat_penalty", "repeat_last_n", "length_penalty", "dynatemp_range", "samplers"),
        *("xtc_probability", "xtc_threshold", "dry_multiplier", "best_of", "use_beam_search", "min_tokens"),
        *("ignore_eos", "stop_token_ids", "truncate_prompt_tokens"),
    )
)
"""They change the distribution or the prompt. Those that an engine knows are set to neutral, the rest is left out."""
CAPTURE_FIELDS = frozenset(
    (
        *("logprobs", "top_logprobs", "prompt_logprobs"),
        *("return_token_ids", "return_tokens_as_token_ids", "include_reasoning"),
    )
)
"""Set by the proxy only, so that the agent cannot change what is captured."""
CHAT_PATH = "/chat/completions"
CONVERSATION = ("messages", "tools", "prompt", "input_ids", "token_ids")
"""The fields that hold the conversation, as messages or as token ids."""
MAX_TOKENS_FIELDS = ("max_tokens", "max_completion_tokens")
CONSTRAINTS = (
    *(
        "logit_bias",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "structured_outputs",
        "grammar",
    ),
    *("json_schema", "regex", "ebnf", "structural_tag", "allowed_token_ids", "bad_words", "logits_processors"),
)
"""Fields that force or forbid tokens."""
FREE_TOOL_CHOICE = (None, "auto", "none")
REFUSED_STATUS = (400, 422)
MISSING_PATH = re.compile(r"^\W*(404\W*)?not found\W*$", re.IGNORECASE)
"""The error of a path that is not there, and not of a model that is not."""
REFUSAL_TEXT = re.compile(
    r"unrecogni[sz]ed|unknown|unsupported|not supported|unexpected|not permitted|not allowed|extra (inputs|fields)"
    r"|additional propert|does not support|invalid (parameter|argument|field)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Compatibility:
    """What an endpoint accepts, as far as its errors have shown."""

    refused_fields: frozenset[str] = frozenset()
    unary_only: bool = False
    """It returns tokens only if it does not stream."""
    uses_other_token_api: bool = False
    """It has no `TokenApi.path`, so `TokenApi.other` is used."""
    max_tokens_field: str | None = None
    """The only one of `MAX_TOKENS_FIELDS` that it accepts."""


@dataclass(slots=True)
class UpstreamRequest:
    """A request for the engine."""

    body: dict[str, Any]
    is_stream: bool
    added_fields: list[frozenset[str]] = field(default_factory=list)
    """Groups of fields that the proxy added, in the order in which to drop them."""
    path: str = CHAT_PATH
    at_root: bool = False
    """Whether the path begins at the server's root."""
    has_other_token_api: bool = False

    @property
    def parameters(self) -> dict[str, Any]:
        """All fields but the conversation."""
        return {name: value for name, value in self.body.items() if name not in CONVERSATION}

    @property
    def temperature(self) -> float | None:
        value = {**self.body, **_as_dict(self.body.get("sampling_params"))}.get("temperature")
        return float(value) if isinstance(value, int | float) else None


def find_constraint(body: Mapping[str, Any]) -> str | None:
    """The field that constrains decoding, so that the call cannot be trained on; None if there is none."""
    choice = body.get("tool_choice")
    if choice not in FREE_TOOL_CHOICE and not (isinstance(choice, dict) and choice.get("type") in ("auto", "none")):
        return f"tool_choice {choice if isinstance(choice, str) else 'naming a tool'!r}"
    if body.get("function_call") not in FREE_TOOL_CHOICE:
        return "function_call"
    response_format = body.get("response_format")
    if response_format is not None and not (
        isinstance(response_format, dict) and response_format.get("type") == "text"
    ):
        return "response_format"
    return next((name for name in CONSTRAINTS if body.get(name)), None)


def build_request(
    chat: Mapping[str, Any],
    *,
    model: str,
    engine: InferenceEngine,
    settings: CaptureSettings,
    compatibility: Compatibility,
    max_tokens: int,
) -> UpstreamRequest:
    """The request for the engine. `max_tokens` is the most that this call may sample."""
    body = dict(chat)
    body["model"] = model
    field_name = engine.max_tokens_field if settings.transparent else "max_tokens"
    _limit_tokens(body, max_tokens, field_name, compatibility)
    if not settings.transparent:
        return UpstreamRequest(body, is_stream=bool(body.get("stream")))
    for field_name in (OTHER_SAMPLING | CAPTURE_FIELDS) & body.keys():
        del body[field_name]
    if "n" in body:
        body["n"] = 1
    sampling = sampling_fields(settings, engine)
    logprobs = {"logprobs": True, "top_logprobs": max(settings.top_logprobs, engine.min_top_logprobs)}
    body.update({**sampling, **logprobs, **engine.token_id_fields})
    if settings.thinking is not None and engine.takes_template_arguments:
        arguments = _as_dict(body.get("chat_template_kwargs"))
        body["chat_template_kwargs"] = arguments | {"enable_thinking": settings.thinking}
    added_fields = [
        frozenset(("chat_template_kwargs", *engine.neutral_sampling)),
        frozenset(engine.token_id_fields),
        frozenset(logprobs),
        frozenset(sampling),
    ]
    if body.get("stream"):
        body["stream_options"] = _as_dict(body.get("stream_options")) | {"include_usage": True}
        added_fields.append(frozenset(("stream_options",)))
    for field_name in compatibility.refused_fields:
        body.pop(field_name, None)
    if body.get("stream") and (compatibility.unary_only or not engine.can_stream(body)):
        body["stream"] = False
        body.pop("stream_options", None)
    return UpstreamRequest(body, bool(body.get("stream")), [group & body.keys() for group in added_fields])


def sampling_fields(settings: CaptureSettings, engine: InferenceEngine) -> dict[str, Any]:
    """The sampling parameters of a call. The temperature is one of them unless it is left to the agent."""
    sampling = {**STANDARD_NEUTRAL, **engine.neutral_sampling}
    if settings.temperature is not None:
        sampling["temperature"] = settings.temperature
    return sampling


def adapt(
    request: UpstreamRequest, compatibility: Compatibility, status: int | None, error: str
) -> Compatibility | None:
    """What to change after this error; None if it is not about a field that the proxy added."""
    if status == 404 and request.has_other_token_api and MISSING_PATH.search(error):
        return replace(compatibility, uses_other_token_api=True)
    if status not in REFUSED_STATUS:
        return None
    words = set(re.findall(r"\w+", error))
    if "max_completion_tokens" in words and compatibility.max_tokens_field is None:
        if "max_tokens" in words and "max_tokens" in request.body:
            return replace(compatibility, max_tokens_field="max_completion_tokens")
        if "max_tokens" not in words and "max_completion_tokens" in request.body:
            return replace(compatibility, max_tokens_field="max_tokens")
    if request.is_stream and request.added_fields and words & {"stream", "streaming"}:
        return replace(compatibility, unary_only=True)
    for group in request.added_fields:
        if named := group & words:
            # `top_logprobs` without `logprobs` would be refused too.
            dependent = {"top_logprobs"} if "logprobs" in named else set()
            return replace(compatibility, refused_fields=compatibility.refused_fields | named | dependent)
    if REFUSAL_TEXT.search(error):
        for group in request.added_fields:
            if group:
                return replace(compatibility, refused_fields=compatibility.refused_fields | group)
    return None


def _limit_tokens(body: dict[str, Any], max_tokens: int, field_name: str, compatibility: Compatibility) -> None:
    fields = [name for name in MAX_TOKENS_FIELDS if body.get(name) is not None]
    for name in fields:
        value = body[name]
        is_usable = isinstance(value, int) and not isinstance(value, bool) and value > 0
        body[name] = min(value, max_tokens) if is_usable else max_tokens
    if not fields:
        fields = [field_name]
        body[field_name] = max_tokens
    if compatibility.max_tokens_field is not None:
        body[compatibility.max_tokens_field] = min([body.pop(name) for name in fields])


def _as_dict(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}
