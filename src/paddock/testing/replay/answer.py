"""The answer to a request: a pure function of the script and the request.

Which turn is played follows from the messages alone, so parallel conversations and repeated
requests need no state. Nothing here knows HTTP or any engine's wire format.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paddock.testing.replay.script import Recorded
from paddock.testing.replay.template import Said, completion_ids, first_user_text, prompt_ids, turns_taken
from paddock.testing.replay.tokens import MARKER_TEXT, Marker, logprob, piece

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paddock.testing.replay.script import Script

SIDE_TEXT = "Scripted rollout"
"""What a title or a summary is answered with."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One sampled token, and what a stream tells when it arrives."""

    token: int
    data: bytes
    """The bytes of it, of a marker too."""
    logprob: float
    delta: dict[str, Any] | None
    """What it adds to the message; None while it adds nothing."""

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Answer:
    """All that is sampled for one request."""

    prompt_ids: list[int]
    pieces: list[Piece]
    finish_reason: str
    turn: int | None
    """The turn of the script; None for a side call that no script has a turn for."""
    task: str = ""
    """The first message of the user, which names the conversation."""

    @property
    def message(self) -> dict[str, Any]:
        return assemble(self.pieces)


def answer(script: Script, body: dict[str, Any]) -> Answer | None:
    """What the script says to a request; None if none of its tasks is for this conversation."""
    messages: list[dict[str, Any]] = body["messages"]
    tools = body.get("tools")
    first = first_user_text(messages)
    task = next((task for task in script.tasks if task.when in first), None)
    turn: int | None = turns_taken(messages)
    if not tools and (any(known.uses_tools for known in script.tasks) if task is None else task.uses_tools):
        said: Said | Recorded = Said(SIDE_TEXT)
        turn = None
    elif task is None:
        return None
    else:
        said = task.turn(turn or 0)
    if isinstance(said, Recorded):
        recorded = list(_recorded_pieces(said))
        return Answer(said.prompt_ids or prompt_ids(messages, tools), recorded, said.finish_reason, turn, first)
    prompt = prompt_ids(messages, tools)
    ids = completion_ids(said)
    reason = "tool_calls" if said.calls else "stop"
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if isinstance(limit, int) and 0 < limit < len(ids):
        ids, reason = ids[:limit], "length"
    return Answer(prompt, list(_pieces(ids, len(prompt), turn or 0, script.seed)), reason, turn, first)


def assemble(pieces: Sequence[Piece]) -> dict[str, Any]:
    """The assistant message that the deltas of a stream add up to."""
    texts = {"content": "", "reasoning_content": ""}
    calls: list[dict[str, Any]] = []
    for one in pieces:
        for key, value in (one.delta or {}).items():
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


def _pieces(ids: Sequence[int], start: int, turn: int, seed: int) -> Iterator[Piece]:
    """The tokens of an answer. A character of several tokens arrives with the last of them."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    place, name, call = "content", b"", -1
    for position, token in enumerate(ids, start):
        delta: dict[str, Any] | None = None
        data = MARKER_TEXT[token].encode() if token in MARKER_TEXT else piece(token)
        if token == Marker.THINK:
            place = "reasoning_content"
        elif token == Marker.THOUGHT:
            place = "content"
        elif token == Marker.CALL:
            place, name, call = "name", b"", call + 1
        elif token == Marker.ARGUMENTS:
            place = "arguments"
            delta = _call_begins(call, f"call_{turn}_{call}", name.decode())
        elif token in (Marker.CALLED, Marker.END):
            pass
        elif place == "name":
            name += data
        elif text := decoder.decode(data):
            if place == "arguments":
                delta = {"tool_calls": [{"index": call, "function": {"arguments": text}}]}
            else:
                delta = {place: text}
        yield Piece(token, data, logprob(position, token, seed), delta)


def _recorded_pieces(recorded: Recorded) -> Iterator[Piece]:
    """The tokens of a recorded answer.

    Plain text arrives token by token. With tool calls or thoughts nobody knows which token told what,
    so the whole message arrives with the first one.
    """
    content = recorded.message.get("content") or ""
    whole = _whole_delta(recorded.message)
    plain = set(whole) <= {"content"} and "".join(recorded.tokens).startswith(content)
    for number, token in enumerate(recorded.completion_ids):
        told = recorded.tokens[number]
        delta = whole if number == 0 else None
        if plain:
            text, content = content[: len(told)], content[len(told) :]
            delta = {"content": text} if text else None
        yield Piece(token, told.encode("utf-8", "surrogatepass"), recorded.logprobs[number], delta)


def _whole_delta(message: dict[str, Any]) -> dict[str, Any]:
    keys = ("reasoning_content", "content")
    delta: dict[str, Any] = {key: message[key] for key in keys if message.get(key)}
    calls = []
    for number, call in enumerate(message.get("tool_calls") or ()):
        function = call.get("function") or {}
        begun = _call_begins(number, call.get("id") or f"call_{number}", function.get("name", ""))["tool_calls"][0]
        begun["function"]["arguments"] = function.get("arguments", "")
        calls.append(begun)
    if calls:
        delta["tool_calls"] = calls
    return delta


def _call_begins(index: int, call_id: str, name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": ""}
    return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
