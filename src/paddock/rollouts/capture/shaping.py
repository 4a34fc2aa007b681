"""The body that goes to the engine, made from the body that the agent sent. No IO.

What an endpoint refuses is learned: `lesson` reads a refusal and says what to leave out, `Lessons` keeps it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from paddock.rollouts.capture.engines.base import STANDARD_NEUTRAL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paddock.rollouts.capture.engines.base import Engine
    from paddock.rollouts.capture.settings import CaptureSettings

OTHER_SAMPLING = frozenset(
    (
        *("top_k", "min_p", "top_a", "typical_p", "tfs_z", "top_n_sigma", "mirostat", "mirostat_tau", "mirostat_eta"),
        *("repetition_penalty", "repeat_penalty", "repeat_last_n", "length_penalty", "dynatemp_range", "samplers"),
        *("xtc_probability", "xtc_threshold", "dry_multiplier", "best_of", "use_beam_search", "min_tokens"),
        *("ignore_eos", "stop_token_ids", "truncate_prompt_tokens"),
    )
)
"""Bends the distribution or the prompt; what an engine knows of it is set to neutral, the rest is left out."""
CAPTURE_FIELDS = frozenset(
    (
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "include_reasoning",
    )
)
"""Ours to set: the agent's own wish must not change what is captured."""
LIMIT_FIELDS = ("max_tokens", "max_completion_tokens")
CONSTRAINTS = (
    *("logit_bias", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
    *(
        "grammar",
        "json_schema",
        "regex",
        "ebnf",
        "structural_tag",
        "allowed_token_ids",
        "bad_words",
        "logits_processors",
    ),
)
FREE_TOOL_CHOICE = (None, "auto", "none")
REFUSING_STATUS = (400, 422)
REFUSAL_WORDS = re.compile(
    r"unrecogni[sz]ed|unknown|unsupported|not supported|unexpected|not permitted|not allowed|extra (inputs|fields)"
    r"|additional propert|does not support|invalid (parameter|argument|field)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Lessons:
    """What an endpoint is known to refuse."""

    refused: frozenset[str] = frozenset()
    unary: bool = False
    """Gives its tokens only when it does not stream."""
    limit_field: str | None = None
    """The only name under which it takes the most tokens of an answer."""


@dataclass(slots=True)
class Shaped:
    """A body ready to go."""

    body: dict[str, Any]
    streams: bool
    injected: list[frozenset[str]] = field(default_factory=list)
    """The fields that we added, in the order in which to give them up."""

    @property
    def parameters(self) -> dict[str, Any]:
        """All but the conversation."""
        return {name: value for name, value in self.body.items() if name not in ("messages", "tools")}


def constraint(body: Mapping[str, Any]) -> str | None:
    """Why this call cannot be trained on: it forces what the model may say. None if it does not."""
    choice = body.get("tool_choice")
    if choice not in FREE_TOOL_CHOICE and not (isinstance(choice, dict) and choice.get("type") in ("auto", "none")):
        return f"tool_choice {choice if isinstance(choice, str) else 'naming a tool'!r}"
    if body.get("function_call") not in FREE_TOOL_CHOICE:
        return "function_call"
    form = body.get("response_format")
    if form is not None and not (isinstance(form, dict) and form.get("type") == "text"):
        return "response_format"
    return next((name for name in CONSTRAINTS if body.get(name)), None)


def shape(
    asked: Mapping[str, Any], *, name: str, engine: Engine, settings: CaptureSettings, lessons: Lessons, room: int
) -> Shaped:
    """The body for the engine. `room` is the most tokens that this call may sample."""
    body = dict(asked)
    body["model"] = name
    _limit(body, room, engine.limit_field if settings.transparent else "max_tokens", lessons)
    if not settings.transparent:
        return Shaped(body, streams=bool(body.get("stream")))
    for field_name in (OTHER_SAMPLING | CAPTURE_FIELDS) & body.keys():
        del body[field_name]
    if "n" in body:
        body["n"] = 1
    sampling = {**STANDARD_NEUTRAL, **engine.neutral}
    if settings.temperature is not None:
        sampling["temperature"] = settings.temperature
    logprobs = {"logprobs": True, "top_logprobs": max(settings.top_logprobs, engine.least_alternatives)}
    body.update({**sampling, **logprobs, **engine.token_ids})
    if settings.thinking is not None and engine.template_arguments:
        given = body.get("chat_template_kwargs")
        arguments = dict(given) if isinstance(given, dict) else {}
        body["chat_template_kwargs"] = arguments | {"enable_thinking": settings.thinking}
    injected = [
        frozenset(("chat_template_kwargs", *engine.neutral)),
        frozenset(engine.token_ids),
        frozenset(logprobs),
        frozenset(sampling),
    ]
    if body.get("stream"):
        given = body.get("stream_options")
        body["stream_options"] = (dict(given) if isinstance(given, dict) else {}) | {"include_usage": True}
        injected.append(frozenset(("stream_options",)))
    for field_name in lessons.refused:
        body.pop(field_name, None)
    if body.get("stream") and (lessons.unary or not engine.streams(body)):
        body["stream"] = False
        body.pop("stream_options", None)
    return Shaped(body, bool(body.get("stream")), [group & body.keys() for group in injected])


def lesson(shaped: Shaped, lessons: Lessons, status: int | None, complaint: str) -> Lessons | None:
    """What to do differently after this refusal; None if it is not about what we added."""
    if status not in REFUSING_STATUS:
        return None
    named = set(re.findall(r"\w+", complaint))
    if "max_completion_tokens" in named and lessons.limit_field is None:
        if "max_tokens" in named and "max_tokens" in shaped.body:
            return replace(lessons, limit_field="max_completion_tokens")
        if "max_tokens" not in named and "max_completion_tokens" in shaped.body:
            return replace(lessons, limit_field="max_tokens")
    if shaped.streams and shaped.injected and named & {"stream", "streaming"}:
        return replace(lessons, unary=True)
    for group in shaped.injected:
        if blamed := group & named:
            # Alternatives without logprobs are a contradiction that an engine refuses in turn.
            also = {"top_logprobs"} if "logprobs" in blamed else set()
            return replace(lessons, refused=lessons.refused | blamed | also)
    if REFUSAL_WORDS.search(complaint):
        for group in shaped.injected:
            if group:
                return replace(lessons, refused=lessons.refused | group)
    return None


def _limit(body: dict[str, Any], room: int, name: str, lessons: Lessons) -> None:
    given = [body[each] for each in LIMIT_FIELDS if body.get(each) is not None]
    for each in LIMIT_FIELDS:
        if body.get(each) is not None:
            wanted = body[each]
            is_usable = isinstance(wanted, int) and not isinstance(wanted, bool) and wanted > 0
            body[each] = min(wanted, room) if is_usable else room
    if not given:
        body[name] = room
    if lessons.limit_field is not None:
        limits = [body.pop(each) for each in LIMIT_FIELDS if body.get(each) is not None]
        body[lessons.limit_field] = min(limits)
