"""Builds the messages of a chat completion from the items of other dialects, and checks those items. No IO."""

from __future__ import annotations

import json
from typing import Any

import orjson

from paddock.capture.errors import BadRequest

Part = dict[str, Any]
"""A part of a message's content, as chat completions have it."""
INVALID_ARGUMENTS = "invalid_arguments"
"""In dialects whose tool calls hold an object: the key for arguments of the model that are no JSON object."""

MAX_SHOWN_CHARACTERS = 60


class ChatBuilder:
    """Takes the items in order. Consecutive items of the assistant become one message.

    Chat templates accept a system prompt only at the start, and no images in the result of a tool. So a later system
    message becomes a user message, and images follow the tool results in a user message.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._system: list[str] = []
        self._turn: dict[str, Any] | None = None
        self._images: list[Part] = []

    def add_system(self, text: str) -> None:
        if not text:
            return
        if self.messages or self._turn is not None:
            self.add_user([text_part(text)])
        else:
            self._system.append(text)

    def add_user(self, parts: list[Part]) -> None:
        self._end_turn()
        images, self._images = self._images, []
        if images or parts:
            self.messages.append({"role": "user", "content": join_parts(images + parts)})

    def add_reasoning(self, text: str) -> None:
        self._open_turn().setdefault("reasoning", []).append(text)

    def add_text(self, text: str) -> None:
        self._open_turn().setdefault("content", []).append(text)

    def add_tool_call(self, call_id: str, name: str, arguments: str) -> None:
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._open_turn().setdefault("calls", []).append(call)

    def start_assistant_turn(self) -> None:
        """The assistant has a message here, even if it is empty."""
        self._open_turn()

    def add_tool_result(self, call_id: str, parts: list[Part]) -> None:
        self._end_turn()
        texts = [part if part["type"] == "text" else text_part("[image]") for part in parts]
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": join_parts(texts)})
        self._images += [part for part in parts if part["type"] != "text"]

    def build(self) -> list[dict[str, Any]]:
        """All messages. Raises BadRequest if there is none."""
        self._end_turn()
        if self._images:
            self.add_user([])
        if self._system:
            self.messages.insert(0, {"role": "system", "content": "\n\n".join(self._system)})
            self._system = []
        if not self.messages:
            raise BadRequest("the conversation is empty")
        return self.messages

    def _open_turn(self) -> dict[str, Any]:
        if self._turn is None:
            if self._images:
                self.add_user([])
            self._turn = {}
        return self._turn

    def _end_turn(self) -> None:
        if self._turn is None:
            return
        turn, self._turn = self._turn, None
        message: dict[str, Any] = {"role": "assistant", "content": "".join(turn.get("content", ())) or None}
        if turn.get("reasoning"):
            message["reasoning_content"] = "".join(turn["reasoning"])
        if turn.get("calls"):
            message["tool_calls"] = turn["calls"]
        elif message["content"] is None:
            message["content"] = ""
        self.messages.append(message)


def text_part(text: str) -> Part:
    return {"type": "text", "text": text}


def image_part(url: str, detail: Any = None) -> Part:
    image = {"url": url, "detail": detail} if isinstance(detail, str) else {"url": url}
    return {"type": "image_url", "image_url": image}


def data_url(media_type: Any, data: Any) -> str:
    return f"data:{require_text(media_type, 'media type')};base64,{require_text(data, 'data')}"


def media_part(media_type: str, data: str, name: str = "file") -> Part:
    """Base64 data as a content part."""
    if media_type.startswith("image/"):
        return image_part(data_url(media_type, data))
    if media_type.startswith("audio/"):
        return {"type": "input_audio", "input_audio": {"data": data, "format": media_type.partition("/")[2]}}
    return {"type": "file", "file": {"filename": name, "file_data": data_url(media_type, data)}}


def join_parts(parts: list[Part]) -> str | list[Part]:
    """A plain string if there are only texts, which every engine accepts."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def function_tool(name: str, description: Any, parameters: Any) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name}
    if isinstance(description, str):
        function["description"] = description
    function["parameters"] = parameters if isinstance(parameters, dict) else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def arguments_text(value: Any) -> str:
    """The arguments of a tool call as text, from the object that an agent sends back."""
    if (
        isinstance(value, dict)
        and value.keys() == {INVALID_ARGUMENTS}
        and isinstance(raw := value[INVALID_ARGUMENTS], str)
    ):
        return raw
    return json.dumps({} if value is None else value, ensure_ascii=False)


def arguments_object(arguments: str) -> dict[str, Any]:
    """The arguments of a tool call as an object, from the text that the model wrote."""
    value = parse_json(arguments or "{}")
    return value if isinstance(value, dict) else {INVALID_ARGUMENTS: arguments}


def parse_json(arguments: str) -> Any:
    """The value of JSON that can be serialized again; None for other text."""
    try:
        value = json.loads(arguments)
        orjson.dumps(value)
    except (ValueError, TypeError, RecursionError):
        return None
    return value


def shorten(value: Any) -> str:
    """A value that an agent sent, short enough for a message."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else text[:MAX_SHOWN_CHARACTERS] + "…"


# -- checks: each returns its value or raises BadRequest ----------------------------------------------


def require_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"{where} must be a string")
    return value


def require_object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest(f"{where} must be an object")
    return value


def require_objects(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise BadRequest(f"{where} must be a list of objects")
    return value


def copy_fields(body: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The fields of `body` that are set, under the names of chat completions."""
    return {ours: body[theirs] for theirs, ours in names.items() if body.get(theirs) is not None}
