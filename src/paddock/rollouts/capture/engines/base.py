"""What an engine needs to be told so that it gives back tokens. One value per engine, no IO.

`neutral` names the sampling fields that an engine knows beyond the standard ones, each with the value
that switches it off: what is sampled must follow the model's own distribution, or importance ratios are biased.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paddock.rollouts.trace import LogprobsKind

Ask = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]
"""Post a document to a path of the server's root and return what it answers."""
PromptIds = Callable[[Ask, Mapping[str, Any]], Awaitable[list[int]]]
Count = Callable[[Ask, Mapping[str, Any]], Awaitable[int]]

STANDARD_NEUTRAL: Mapping[str, Any] = {"top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def streams_always(body: Mapping[str, Any]) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Engine:
    name: str
    neutral: Mapping[str, Any] = field(default_factory=dict)
    token_ids: Mapping[str, Any] = field(default_factory=dict)
    """Fields that ask for the ids of prompt and completion."""
    least_alternatives: int = 0
    """The smallest `top_logprobs` with which it gives logprobs at all."""
    template_arguments: bool = False
    """Takes `chat_template_kwargs`."""
    limit_field: str = "max_tokens"
    """How it calls the most tokens of an answer, for an agent that names no limit."""
    streams: Callable[[Mapping[str, Any]], bool] = streams_always
    """Can it stream this call and give its tokens as well?"""
    prompt_ids: PromptIds | None = None
    """Asks the engine's own tokenizer, where its answers hold no prompt ids."""
    logprobs_kind: LogprobsKind = LogprobsKind.UNKNOWN
    """Which logprobs it returns as it is started by default. No engine says so in its answers."""
    count: Count | None = None
    """Counts the tokens of a prompt, where the engine has a tokenizer to ask."""
