"""The messages of a chat completion, put together from the pieces in which other dialects tell them. No IO."""

from __future__ import annotations

import json
from typing import Any

import orjson

from paddock.rollouts.capture.refusals import BadRequest

Part = dict[str, Any]
"""A part of a message's content, as chat completions have it."""
INVALID = "invalid_arguments"
"""Dialects whose tool calls hold an object get what the model wrote under this name, if it wrote none."""


LONGEST_SHOWN = 60


class Conversation:
    """Takes the pieces in their order. Whatever the assistant says in a row is one message.

    Chat templates know a system prompt at the beginning and nowhere else, and no pictures in the result of
    a tool: a later system message becomes the user's, and pictures follow the results in a message of the user.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._system: list[str] = []
        self._said: dict[str, Any] | None = None
        self._pictures: list[Part] = []

    def system(self, written: str) -> None:
        if not written:
            return
        if self.messages or self._said is not None:
            self.user([text_part(written)])
        else:
            self._system.append(written)

    def user(self, parts: list[Part]) -> None:
        self._end_turn()
        pictures, self._pictures = self._pictures, []
        if pictures or parts:
            self.messages.append({"role": "user", "content": content(pictures + parts)})

    def thought(self, written: str) -> None:
        self._speaks().setdefault("reasoning", []).append(written)

    def said(self, written: str) -> None:
        self._speaks().setdefault("content", []).append(written)

    def called(self, call_id: str, name: str, arguments: str) -> None:
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._speaks().setdefault("calls", []).append(call)

    def answered(self) -> None:
        """The assistant had its turn, though perhaps it said nothing."""
        self._speaks()

    def result(self, call_id: str, parts: list[Part]) -> None:
        """What a tool gave back."""
        self._end_turn()
        texts = [part if part["type"] == "text" else text_part("[image]") for part in parts]
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content(texts)})
        self._pictures += [part for part in parts if part["type"] != "text"]

    def close(self) -> list[dict[str, Any]]:
        """All messages. Raises BadRequest if there is none."""
        self._end_turn()
        if self._pictures:
            self.user([])
        if self._system:
            self.messages.insert(0, {"role": "system", "content": "\n\n".join(self._system)})
            self._system = []
        if not self.messages:
            raise BadRequest("the conversation is empty")
        return self.messages

    def _speaks(self) -> dict[str, Any]:
        if self._said is None:
            if self._pictures:
                self.user([])
            self._said = {}
        return self._said

    def _end_turn(self) -> None:
        if self._said is None:
            return
        said, self._said = self._said, None
        message: dict[str, Any] = {"role": "assistant", "content": "".join(said.get("content", ())) or None}
        if said.get("reasoning"):
            message["reasoning_content"] = "".join(said["reasoning"])
        if said.get("calls"):
            message["tool_calls"] = said["calls"]
        elif message["content"] is None:
            message["content"] = ""
        self.messages.append(message)


def text_part(written: str) -> Part:
    return {"type": "text", "text": written}


def image_part(url: str, detail: Any = None) -> Part:
    image = {"url": url, "detail": detail} if isinstance(detail, str) else {"url": url}
    return {"type": "image_url", "image_url": image}


def data_url(media_type: Any, data: Any) -> str:
    return f"data:{text(media_type, 'media type')};base64,{text(data, 'data')}"


def media_part(media_type: str, data: str, name: str = "file") -> Part:
    """Bytes in base64 as the part that chat completions have for them."""
    if media_type.startswith("image/"):
        return image_part(data_url(media_type, data))
    if media_type.startswith("audio/"):
        return {"type": "input_audio", "input_audio": {"data": data, "format": media_type.partition("/")[2]}}
    return {"type": "file", "file": {"filename": name, "file_data": data_url(media_type, data)}}


def content(parts: list[Part]) -> str | list[Part]:
    """Plain text where nothing else is in it: every engine takes that."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def function_tool(name: str, description: Any, parameters: Any) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name}
    if isinstance(description, str):
        function["description"] = description
    function["parameters"] = parameters if isinstance(parameters, dict) else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def arguments_of(value: Any) -> str:
    """The arguments of a call as text, from the object that an agent sends back."""
    if isinstance(value, dict) and value.keys() == {INVALID} and isinstance(raw := value[INVALID], str):
        return raw
    return json.dumps({} if value is None else value, ensure_ascii=False)


def object_of(arguments: str) -> dict[str, Any]:
    """The arguments of a call as an object, from the text that the model wrote."""
    found = parsed(arguments or "{}")
    return found if isinstance(found, dict) else {INVALID: arguments}


def parsed(arguments: str) -> Any:
    """JSON that can be written again; None for everything else that a model may write."""
    try:
        found = json.loads(arguments)
        orjson.dumps(found)
    except (ValueError, TypeError, RecursionError):
        return None
    return found


def shown(value: Any) -> str:
    """Something that an agent sent, short enough for a message."""
    written = repr(value)
    return written if len(written) <= LONGEST_SHOWN else written[:LONGEST_SHOWN] + "…"


# -- checks: each returns its value or raises BadRequest ----------------------------------------------


def text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"{where} must be a string")
    return value


def mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest(f"{where} must be an object")
    return value


def objects(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise BadRequest(f"{where} must be a list of objects")
    return value


def copied(body: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The fields that only change their name, where they are set."""
    return {ours: body[theirs] for theirs, ours in names.items() if body.get(theirs) is not None}
