"""What an engine answered, put together from one document or from many chunks.

Reads every shape that an engine is known to use: ids on top or in the choice, ids beside the logprobs.
Taking a chunk also takes the capture fields out of it, so that what is left can go to the agent.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from paddock.rollouts.trace import Level

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paddock.rollouts.trace import Call

MISSING_LOGPROB = -9999.0
"""What vLLM writes where it has none."""
ID_AS_TEXT = "token_id:"


class Answer:
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
        """Whether ids and logprobs are ours: read them, and take them out."""
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
        """The first that the engine told; another than the last if the weights changed under way."""
        self._tool_calls: dict[int, dict[str, Any]] = {}

    def take(self, document: dict[str, Any]) -> bool:
        """Read a chunk or a whole answer. True if something was taken out of it."""
        taken = False
        if self.strip and document.get("prompt_token_ids") is not None:
            self.prompt_ids = document.pop("prompt_token_ids")
            taken = True
        if usage := document.get("usage"):
            self.usage = usage
        self.tell_version(weight_version(document))
        for choice in document.get("choices") or ():
            if not isinstance(choice, dict) or choice.get("index", 0) != 0:
                continue
            if self.strip and self._take_tokens(choice):
                taken = True
            part = choice.get("delta") or choice.get("message")
            if part:
                self._read_message(part)
            if reason := choice.get("finish_reason"):
                self.finish_reason = reason
        return taken

    @property
    def says_something(self) -> bool:
        """Whether there is more than an opening: a text, a thought, a tool call, a token or the end."""
        said = (self.content, self.reasoning, self._tool_calls, self.completion_ids, self.extra, self.finish_reason)
        return any(said)

    def tell_version(self, version: str | None, *, engine: bool = True) -> None:
        """The weights as of now. What an engine tells counts more than what others say."""
        if version is None or (not engine and self.weight_version is not None):
            return
        self.weight_version = version
        if engine:
            self.first_version = self.first_version or version

    def _take_tokens(self, choice: dict[str, Any]) -> bool:
        taken = False
        if choice.get("prompt_token_ids") is not None:
            self.prompt_ids = choice.pop("prompt_token_ids")
            taken = True
        ids = choice.pop("token_ids", None)
        entries: list[dict[str, Any]] = []
        if choice.get("logprobs") is not None:
            entries = choice.pop("logprobs").get("content") or []
            taken = True
        if ids is not None:
            self.completion_ids.extend(ids)
            taken = True
        for entry in entries:
            if ids is None and (found := entry_id(entry)) is not None:
                self.completion_ids.append(found)
            self._read_logprob(entry)
        return taken

    def _read_logprob(self, entry: dict[str, Any]) -> None:
        value = entry.get("logprob")
        # A value that is missing is left out, so that the numbers differ and nobody trains on the call.
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
        if thought := part.get("reasoning_content") or part.get("reasoning"):
            self.reasoning.append(str(thought))
        if refusal := part.get("refusal"):
            self.extra["refusal"] = self.extra.get("refusal", "") + str(refusal)
        for position, tool_call in enumerate(part.get("tool_calls") or ()):
            self._read_tool_call(tool_call, position)

    def _read_tool_call(self, piece: dict[str, Any], position: int) -> None:
        index = piece.get("index")
        whole = self._tool_calls.setdefault(
            position if index is None else index, {"type": "function", "function": {}}
        )
        if piece.get("id"):
            whole["id"] = piece["id"]
        told, function = piece.get("function") or {}, whole["function"]
        if told.get("name"):
            function["name"] = function.get("name", "") + told["name"]
        arguments = told.get("arguments")
        if arguments is not None:
            function["arguments"] = (
                function.get("arguments", "") + arguments if isinstance(arguments, str) else arguments
            )

    @property
    def message(self) -> dict[str, Any]:
        """The assistant message. Empty if nothing came."""
        if not self.says_something:
            return {}
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.content) or None, **self.extra}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self._tool_calls:
            message["tool_calls"] = [self._tool_calls[index] for index in sorted(self._tool_calls)]
        return message

    @property
    def token_problem(self) -> str | None:
        """Why the ids cannot be those of the answer: the engine counted another number of tokens than it named.

        With fewer, the end of the answer is missing; with more, some belong to something else.
        """
        counted, named = self.usage.get("completion_tokens"), len(self.completion_ids)
        is_counted = isinstance(counted, int) and not isinstance(counted, bool)
        if self.finish_reason is None or not named or not is_counted or counted == named:
            return None
        return f"the endpoint counted {counted} sampled tokens in its usage, and returned {named} token ids"

    @property
    def level(self) -> Level:
        """What really came back."""
        counted = len(self.logprobs)
        named = len(self.completion_ids)
        if self.prompt_ids and named and self.token_problem is None and named == counted:
            return Level.TOKENS
        return Level.LOGPROBS if counted else Level.TEXT

    def apply(self, call: Call) -> None:
        """Write all that was read into the call."""
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
            # Where the engine tells, what others say is not compared with it: they may count otherwise.
            call.admitted_version = None if self.first_version == self.weight_version else self.first_version


def entry_id(entry: Mapping[str, Any]) -> int | None:
    """The id in a logprob entry, as llama.cpp and `return_tokens_as_token_ids` tell it."""
    found = entry.get("id")
    if isinstance(found, int):
        return found
    token = entry.get("token")
    if isinstance(token, str) and token.startswith(ID_AS_TEXT) and token[len(ID_AS_TEXT) :].isdigit():
        return int(token[len(ID_AS_TEXT) :])
    return None


def weight_version(document: Mapping[str, Any]) -> str | None:
    found = document.get("weight_version")
    if found is None and isinstance(metadata := document.get("metadata"), dict):
        found = metadata.get("weight_version")
    return None if found is None else str(found)
