"""Messages of any dialect as items of a transcript.

Nothing that an agent wrote is trusted: unknown shapes become text, and only raster images become images.
"""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any

import orjson

from paddock.capture.trace import Call

if TYPE_CHECKING:
    from collections.abc import Iterator

    Item = dict[str, Any]

MAX_TEXT_CHARACTERS = 200_000
MAX_IMAGE_BYTES = 8 * 1024 * 1024
IMAGE_SIGNATURES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
}
MODEL_OUTPUT_TYPES = frozenset(
    ("reasoning", "function_call", "custom_tool_call", "local_shell_call", "web_search_call")
)
PATH_ARGUMENTS = ("filePath", "file_path", "path", "filename", "file", "target_file")
CONTENT_ARGUMENTS = ("content", "file_text", "text", "contents")
READING_TOOLS = frozenset(("read", "view", "grep", "glob", "ls", "bash"))
OLD_TEXT_ARGUMENTS = ("oldString", "oldText", "old_string", "old_str", "old_text", "search")
NEW_TEXT_ARGUMENTS = ("newString", "newText", "new_string", "new_str", "new_text", "replace", "replacement")


def chat_messages(dialect: str, name: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The conversation of a request in chat form."""
    if dialect != "chat":
        from paddock.capture import dialects

        try:
            body = dialects.chat_request(Call("c", 0, dialect=dialect, request=body))
        except Exception:
            # A request that the proxy refused is stored as it was sent, and may have any shape.
            return [{"role": "user", "content": _text(item)} for item in body.get(name) or ()]
    messages = body.get("messages")
    return [message for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []


def is_model_output(item: Any) -> bool:
    """Whether the model wrote an item of a conversation, in any dialect."""
    if not isinstance(item, dict):
        return False
    return item.get("role") in ("assistant", "model") or item.get("type") in MODEL_OUTPUT_TYPES


def is_same_answer(messages: list[dict[str, Any]], answer: dict[str, Any]) -> bool:
    """Whether assistant messages equal what was sampled, apart from their notation."""
    if len(messages) == 1 and all(messages[0].get(name) == answer.get(name) for name in ("content", "tool_calls")):
        return True
    return comparable(messages) == comparable([answer])


def comparable(messages: list[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
    """The text and the tool calls of assistant messages, in one notation."""
    text = "".join(_text(message.get("content")).strip() for message in messages)
    called = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict):
                called.append((str(function.get("name")), _canonical(function.get("arguments"))))
    return text, called


def message_items(message: dict[str, Any], tools: dict[str, str]) -> Iterator[Item]:
    """One message as items. `tools` maps ids of tool calls to names; those of this message are added."""
    role = str(message.get("role") or "user")
    if role == "tool":
        yield from _result(message, tools)
        return
    if role == "developer":
        role = "system"
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str) and reasoning.strip():
        yield {"kind": "thinking", "role": role, **_clip(reasoning)}
    yield from _content(message.get("content"), role)
    if message.get("refusal"):
        yield {"kind": "message", "role": role, **_clip(str(message["refusal"]))}
    for call in message.get("tool_calls") or ():
        if isinstance(call, dict):
            yield _tool_call(call, role, tools)


def _content(content: Any, role: str) -> Iterator[Item]:
    if not isinstance(content, list):
        text = _text(content)
        if text.strip():
            yield {"kind": "message", "role": role, **_clip(text)}
        return
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("image_url", "input_image", "image"):
            yield _image(part, role)
        elif kind in ("thinking", "reasoning"):
            yield {"kind": "thinking", "role": role, **_clip(_text(part.get("thinking") or part.get("text")))}
        else:
            text = _text(part)
            if text.strip():
                yield {"kind": "message", "role": role, **_clip(text)}


def _tool_call(call: dict[str, Any], role: str, tools: dict[str, str]) -> Item:
    function = call.get("function")
    values = function if isinstance(function, dict) else {}
    name, call_id = str(values.get("name") or ""), str(call.get("id") or "")
    tools[call_id] = name
    arguments = parse_arguments(values.get("arguments"))
    item: Item = {"kind": "tool_call", "role": role, "id": call_id, "name": name, "arguments": arguments}
    if changes := file_changes(name, arguments):
        item["changes"] = changes
    return item


def _result(message: dict[str, Any], tools: dict[str, str]) -> Iterator[Item]:
    call_id = str(message.get("tool_call_id") or "")
    name = tools.get(call_id) or str(message.get("name") or "")
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    images = [part for part in parts if isinstance(part, dict) and part.get("type") in ("image_url", "image")]
    text = "".join(_text(part) for part in parts if part not in images)
    item: Item = {"kind": "tool_result", "role": "tool", "id": call_id, "name": name, **_clip(text)}
    if message.get("is_error") or text.startswith(("Error:", "error:", "<error>")):
        item["error"] = True
    yield item
    for image in images:
        yield _image(image, "tool")


def _image(part: dict[str, Any], role: str) -> Item:
    """An image if the bytes are those of a raster image; of all others only the address."""
    source = part.get("image_url") or part.get("source") or part
    if isinstance(source, dict):
        address = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
    else:
        address = source
    address = str(address)
    head, comma, data = address.partition(",")
    if address.startswith("data:") and comma and head.endswith(";base64") and len(data) < MAX_IMAGE_BYTES * 4 // 3:
        try:
            start = base64.b64decode(data[:64].strip(), validate=True)
            size = len(base64.b64decode(data, validate=True))
        except (binascii.Error, ValueError):
            start, size = b"", 0
        kind = next((mime for magic, mime in IMAGE_SIGNATURES.items() if start.startswith(magic)), None)
        if kind is not None and size:
            return {"kind": "image", "role": role, "mime": kind, "data": data}
    abbreviated = f"{head[:80]}, …" if address.startswith("data:") else address[:300]
    return {"kind": "note", "role": role, "text": f"an image that is not shown: {abbreviated}"}


def file_changes(name: str, arguments: Any) -> list[dict[str, Any]]:
    """What a tool call edits: the file, with the old and the new text of each place. Empty if it edits none."""
    if not isinstance(arguments, dict) or name.lower() in READING_TOOLS:
        return []
    path = _first(arguments, PATH_ARGUMENTS)
    if path is None:
        return []
    edits = arguments.get("edits")
    places = [each for each in edits if isinstance(each, dict)] if isinstance(edits, list) else []
    changes = [_change(path, place) for place in places or [arguments]]
    return [change for change in changes if change is not None]


def _change(path: str, place: dict[str, Any]) -> dict[str, Any] | None:
    before, after = _first(place, OLD_TEXT_ARGUMENTS), _first(place, NEW_TEXT_ARGUMENTS)
    if after is None and before is None:
        after = _first(place, CONTENT_ARGUMENTS)
        if after is None:
            return None
    return {
        "path": path[:1000],
        "before": None if before is None else before[:MAX_TEXT_CHARACTERS],
        "after": None if after is None else after[:MAX_TEXT_CHARACTERS],
    }


def parse_arguments(arguments: Any) -> Any:
    """The arguments of a tool call as an object, or unchanged if they are none."""
    if isinstance(arguments, str):
        try:
            decoded = orjson.loads(arguments or "{}")
        except orjson.JSONDecodeError:
            return arguments[:MAX_TEXT_CHARACTERS]
        return decoded if isinstance(decoded, dict) else arguments[:MAX_TEXT_CHARACTERS]
    return arguments if isinstance(arguments, dict) else _text(arguments)


def _clip(text: str) -> Item:
    """The text of an item; of a very long one the beginning, and how long it is."""
    if len(text) <= MAX_TEXT_CHARACTERS:
        return {"text": text}
    return {"text": text[:MAX_TEXT_CHARACTERS], "length": len(text)}


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, dict):
        for name in ("text", "input_text", "output_text", "content", "output"):
            if isinstance(value.get(name), str):
                return str(value[name])
    if isinstance(value, list):
        return "".join(_text(each) for each in value)
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        return str(value)


def _first(arguments: dict[str, Any], names: tuple[str, ...]) -> str | None:
    return next((arguments[name] for name in names if isinstance(arguments.get(name), str)), None)


def _canonical(arguments: Any) -> str:
    try:
        return orjson.dumps(parse_arguments(arguments), option=orjson.OPT_SORT_KEYS).decode()
    except TypeError:
        return str(arguments)
