"""The completion of one attempt, read from one document or from many chunks: message, token ids, logprobs, usage.

Knows every form that inference engines use: ids at the top or in the choice, ids beside the logprobs. Reading a chunk
also removes the capture fields from it, so that the rest can go to the agent.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from paddock.capture.trace import Level

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paddock.capture.trace import Call

MISSING_LOGPROB = -9999.0
"""vLLM's value for a missing logprob."""
ID_PREFIX = "token_id:"
GIVEN_UP = ("abort", "error")
"""The finish reasons of an answer that the engine gave up, say to load weights. It is no answer."""


class Completion:
    """Grows with each chunk."""

    __slots__ = (
        "_tool_calls",
        "alternatives",
        "completion_ids",
        "content",
        "extra",
        "finish_reason",
        "first_version",
        "logprobs",
        "prompt_ids",
        "reasoning",
        "strip",
        "tokens",
        "usage",
        "weight_version",
    )

    def __init__(self, *, strip: bool) -> None:
        self.strip = strip
        """Whether the proxy requested ids and logprobs: read them, and remove them."""
        self.prompt_ids: list[int] = []
        self.completion_ids: list[int] = []
        self.logprobs: list[float] = []
        self.tokens: list[str] = []
        self.alternatives: list[dict[str, float]] = []
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.extra: dict[str, Any] = {}
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] = {}
        self.weight_version: str | None = None
        self.first_version: str | None = None
        """The first that the engine reported; not the last one if the weights changed during the call."""
        self._tool_calls: dict[int, dict[str, Any]] = {}

    def read(self, document: dict[str, Any]) -> bool:
        """Read a chunk or a whole response. True if fields were removed from it."""
        removed = False
        if self.strip and document.get("prompt_token_ids") is not None:
            self.prompt_ids = document.pop("prompt_token_ids")
            removed = True
        if usage := document.get("usage"):
            self.usage = usage
        self.set_weight_version(read_weight_version(document))
        for choice in document.get("choices") or ():
            if not isinstance(choice, dict) or choice.get("index", 0) != 0:
                continue
            if self.strip and self._remove_tokens(choice):
                removed = True
            part = choice.get("delta") or choice.get("message")
            if part:
                self._read_message(part)
            if reason := choice.get("finish_reason"):
                self.finish_reason = reason
        return removed

    @property
    def has_content(self) -> bool:
        """Whether there is more than the first chunk's role: text, reasoning, a tool call, a token or the end."""
        return any(
            (self.content, self.reasoning, self._tool_calls, self.completion_ids, self.extra, self.finish_reason)
        )

    def set_weight_version(self, version: str | None, *, from_engine: bool = True) -> None:
        """The current weights. A version that the engine reported takes precedence."""
        if version is None or (not from_engine and self.weight_version is not None):
            return
        self.weight_version = version
        if from_engine:
            self.first_version = self.first_version or version

    def _remove_tokens(self, choice: dict[str, Any]) -> bool:
        removed = False
        if choice.get("prompt_token_ids") is not None:
            self.prompt_ids = choice.pop("prompt_token_ids")
            removed = True
        ids = choice.pop("token_ids", None)
        entries: list[dict[str, Any]] = []
        if choice.get("logprobs") is not None:
            entries = choice.pop("logprobs").get("content") or []
            removed = True
        if ids is not None:
            self.completion_ids.extend(ids)
            removed = True
        for entry in entries:
            if ids is None and (token_id := read_token_id(entry)) is not None:
                self.completion_ids.append(token_id)
            self._read_logprob(entry)
        return removed

    def _read_logprob(self, entry: dict[str, Any]) -> None:
        value = entry.get("logprob")
        # A missing value is left out. Then the counts differ, and the call is not trainable.
        if isinstance(value, int | float) and math.isfinite(value) and value > MISSING_LOGPROB:
            self.logprobs.append(float(value))
        self.tokens.append(str(entry.get("token", "")))
        if others := entry.get("top_logprobs"):
            self.alternatives.append({str(other.get("token")): other.get("logprob") for other in others})

    def _read_message(self, part: dict[str, Any]) -> None:
        if text := part.get("content"):
            if isinstance(text, str):
                self.content.append(text)
            else:
                self.extra["content"] = text
        if reasoning := part.get("reasoning_content") or part.get("reasoning"):
            self.reasoning.append(str(reasoning))
        if refusal := part.get("refusal"):
            self.extra["refusal"] = self.extra.get("refusal", "") + str(refusal)
        for position, tool_call in enumerate(part.get("tool_calls") or ()):
            self._read_tool_call(tool_call, position)

    def _read_tool_call(self, piece: dict[str, Any], position: int) -> None:
        index = piece.get("index")
        tool_call = self._tool_calls.setdefault(
            position if index is None else index, {"type": "function", "function": {}}
        )
        if piece.get("id"):
            tool_call["id"] = piece["id"]
        delta, function = piece.get("function") or {}, tool_call["function"]
        if delta.get("name"):
            function["name"] = function.get("name", "") + delta["name"]
        arguments = delta.get("arguments")
        if arguments is not None:
            function["arguments"] = (
                function.get("arguments", "") + arguments if isinstance(arguments, str) else arguments
            )

    @property
    def message(self) -> dict[str, Any]:
        """The assistant message; empty if there is none."""
        if not self.has_content:
            return {}
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.content) or None, **self.extra}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self._tool_calls:
            message["tool_calls"] = [self._tool_calls[index] for index in sorted(self._tool_calls)]
        return message

    @property
    def token_problem(self) -> str | None:
        """Why the ids are not those of the completion: the engine counted another number of tokens than it
        returned."""
        counted, returned = self.usage.get("completion_tokens"), len(self.completion_ids)
        is_counted = isinstance(counted, int) and not isinstance(counted, bool)
        if self.finish_reason is None or not returned or not is_counted or counted == returned:
            return None
        return f"the endpoint counted {counted} sampled tokens in its usage, and returned {returned} token ids"

    @property
    def level(self) -> Level:
        """How much the endpoint returned."""
        ids, logprobs = len(self.completion_ids), len(self.logprobs)
        if self.prompt_ids and ids and self.token_problem is None and ids == logprobs:
            return Level.TOKENS
        return Level.LOGPROBS if logprobs else Level.TEXT

    def copy_to(self, call: Call) -> None:
        """Write everything into the record of the call."""
        call.token_problem, call.level = self.token_problem, self.level
        if call.token_problem is not None:
            self.completion_ids = []
        call.prompt_token_ids = self.prompt_ids
        call.completion_token_ids = self.completion_ids
        call.logprobs = self.logprobs
        call.tokens = self.tokens
        call.top_logprobs = self.alternatives
        call.message = self.message
        call.finish_reason = self.finish_reason
        call.usage = self.usage
        call.weight_version = self.weight_version
        if self.first_version is not None:
            # The trainer may count versions in another way, so its version is not compared with the engine's.
            call.admitted_version = None if self.first_version == self.weight_version else self.first_version


def read_token_id(entry: Mapping[str, Any]) -> int | None:
    """The id in a logprob entry, in the form of llama.cpp or of `return_tokens_as_token_ids`."""
    token_id = entry.get("id")
    if isinstance(token_id, int):
        return token_id
    token = entry.get("token")
    if isinstance(token, str) and token.startswith(ID_PREFIX) and token[len(ID_PREFIX) :].isdigit():
        return int(token[len(ID_PREFIX) :])
    return None


def read_weight_version(document: Mapping[str, Any]) -> str | None:
    version = document.get("weight_version")
    if version is None and isinstance(metadata := document.get("metadata"), dict):
        version = metadata.get("weight_version")
    return None if version is None else str(version)
