"""The answer to a request: a pure function of the script and the request.

Which turn is played follows from the messages alone, so parallel conversations and repeated
requests need no state. Nothing here knows HTTP or any engine's wire format.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paddock.models.replay.script import RecordedTurn
from paddock.models.replay.tokenizer import (
    MARKER_TEXT,
    AssistantTurn,
    Marker,
    completion_ids,
    count_turns,
    logprob,
    opening_texts,
    prompt_ids,
    token_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paddock.models.replay.script import Script

SIDE_TEXT = "Scripted rollout"
"""The answer to a request for a title or a summary."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token, and what it adds to a stream."""

    id: int
    data: bytes
    """Its bytes; of a marker, its name."""
    logprob: float
    delta: dict[str, Any] | None
    """What it adds to the message; None while it adds nothing."""

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class ReplayAnswer:
    """All that is sampled for one request."""

    prompt_ids: list[int]
    tokens: list[SampledToken]
    finish_reason: str
    turn: int | None
    """The turn of the script; None for a side call that no script has a turn for."""
    task: str = ""
    """What the user says before the first answer, which names the conversation."""

    @property
    def message(self) -> dict[str, Any]:
        return assemble(self.tokens)


def answer(script: Script, body: dict[str, Any]) -> ReplayAnswer | None:
    """What the script says to a request; None if none of its tasks is for this conversation."""
    messages: list[dict[str, Any]] = body["messages"]
    tools = body.get("tools")
    opening = "\n".join(opening_texts(messages))
    task = next((task for task in script.tasks if task.when in opening), None)
    turn: int | None = count_turns(messages)
    if not tools and (any(each.uses_tools for each in script.tasks) if task is None else task.uses_tools):
        scripted: AssistantTurn | RecordedTurn = AssistantTurn(SIDE_TEXT)
        turn = None
    elif task is None:
        return None
    else:
        scripted = task.turn(turn or 0)
    if isinstance(scripted, RecordedTurn):
        recorded = list(_recorded_tokens(scripted))
        prompt = scripted.prompt_ids or prompt_ids(messages, tools)
        return ReplayAnswer(prompt, recorded, scripted.finish_reason, turn, opening)
    prompt = prompt_ids(messages, tools)
    ids = completion_ids(scripted)
    reason = "tool_calls" if scripted.calls else "stop"
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if isinstance(limit, int) and 0 < limit < len(ids):
        ids, reason = ids[:limit], "length"
    return ReplayAnswer(
        prompt, list(_sampled_tokens(ids, len(prompt), turn or 0, script.seed)), reason, turn, opening
    )


def assemble(tokens: Sequence[SampledToken]) -> dict[str, Any]:
    """The assistant message that the deltas of a stream add up to."""
    texts = {"content": "", "reasoning_content": ""}
    calls: list[dict[str, Any]] = []
    for token in tokens:
        for key, value in (token.delta or {}).items():
            if key != "tool_calls":
                texts[key] += value
                continue
            for part in value:
                if part["index"] == len(calls):
                    calls.append({"id": part["id"], "type": "function", "function": dict(part["function"])})
                else:
                    calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    message: dict[str, Any] = {"role": "assistant", "content": texts["content"] or (None if calls else "")}
    if texts["reasoning_content"]:
        message["reasoning_content"] = texts["reasoning_content"]
    if calls:
        message["tool_calls"] = calls
    return message


def _sampled_tokens(ids: Sequence[int], start: int, turn: int, seed: int) -> Iterator[SampledToken]:
    """The tokens of an answer. A character of several tokens arrives with the last of them."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    part, name, call = "content", b"", -1
    for position, token in enumerate(ids, start):
        delta: dict[str, Any] | None = None
        data = MARKER_TEXT[token].encode() if token in MARKER_TEXT else token_bytes(token)
        if token == Marker.THINK:
            part = "reasoning_content"
        elif token == Marker.THOUGHT:
            part = "content"
        elif token == Marker.CALL:
            part, name, call = "name", b"", call + 1
        elif token == Marker.ARGUMENTS:
            part = "arguments"
            delta = _tool_call_delta(call, f"call_{turn}_{call}", name.decode())
        elif token in (Marker.CALLED, Marker.END):
            pass
        elif part == "name":
            name += data
        elif text := decoder.decode(data):
            if part == "arguments":
                delta = {"tool_calls": [{"index": call, "function": {"arguments": text}}]}
            else:
                delta = {part: text}
        yield SampledToken(token, data, logprob(position, token, seed), delta)


def _recorded_tokens(recorded: RecordedTurn) -> Iterator[SampledToken]:
    """The tokens of a recorded answer.

    Plain text arrives token by token. With tool calls or reasoning the text of each token is unknown, so the whole
    message arrives with the first token.
    """
    content = recorded.message.get("content") or ""
    whole = _whole_delta(recorded.message)
    plain = set(whole) <= {"content"} and "".join(recorded.tokens).startswith(content)
    for number, token in enumerate(recorded.completion_ids):
        text = recorded.tokens[number]
        delta = whole if number == 0 else None
        if plain:
            piece_of_content, content = content[: len(text)], content[len(text) :]
            delta = {"content": piece_of_content} if piece_of_content else None
        yield SampledToken(token, text.encode("utf-8", "surrogatepass"), recorded.logprobs[number], delta)


def _whole_delta(message: dict[str, Any]) -> dict[str, Any]:
    keys = ("reasoning_content", "content")
    delta: dict[str, Any] = {key: message[key] for key in keys if message.get(key)}
    calls = []
    for number, call in enumerate(message.get("tool_calls") or ()):
        function = call.get("function") or {}
        start = _tool_call_delta(number, call.get("id") or f"call_{number}", function.get("name", ""))["tool_calls"][
            0
        ]
        start["function"]["arguments"] = function.get("arguments", "")
        calls.append(start)
    if calls:
        delta["tool_calls"] = calls
    return delta


def _tool_call_delta(index: int, call_id: str, name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": ""}
    return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
