"""Messages as the items of a transcript, whatever dialect they were spoken in.

Nothing an agent wrote is trusted here: unknown shapes become text, and only raster images are images.
"""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any

import orjson

from paddock.rollouts.trace import Call

if TYPE_CHECKING:
    from collections.abc import Iterator

    Item = dict[str, Any]

LONGEST_TEXT = 200_000
LARGEST_IMAGE = 8 * 1024 * 1024
RASTER = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
}
OWN_TYPES = frozenset(("reasoning", "function_call", "custom_tool_call", "local_shell_call", "web_search_call"))
PATHS = ("filePath", "file_path", "path", "filename", "file", "target_file")
WHOLE = ("content", "file_text", "text", "contents")
BEFORE = ("oldString", "old_string", "old_str", "old_text", "search")
AFTER = ("newString", "new_string", "new_str", "new_text", "replace", "replacement")


def chat_messages(dialect: str, name: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The conversation of a request in chat form."""
    if dialect != "chat":
        from paddock.rollouts.capture import dialects

        try:
            body = dialects.chat_request(Call("c", 0, dialect=dialect, request=body))
        except Exception:
            # A request that was refused is kept as it was sent.
            return [{"role": "user", "content": _text(item)} for item in body.get(name) or ()]
    messages = body.get("messages")
    return [message for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []


def is_own(item: Any) -> bool:
    """Whether an item of a conversation is the model's own, in any dialect."""
    if not isinstance(item, dict):
        return False
    return item.get("role") in ("assistant", "model") or item.get("type") in OWN_TYPES


def is_same(came: list[dict[str, Any]], answer: dict[str, Any]) -> bool:
    """Whether assistant messages say what was sampled, however they are written."""
    if len(came) == 1 and all(came[0].get(name) == answer.get(name) for name in ("content", "tool_calls")):
        return True
    return essence(came) == essence([answer])


def essence(messages: list[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
    """What assistant messages say and call, to compare them whichever way they are written."""
    said = "".join(_text(message.get("content")).strip() for message in messages)
    called = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict):
                called.append((str(function.get("name")), _canonical(function.get("arguments"))))
    return said, called


def items_of(message: dict[str, Any], tools: dict[str, str]) -> Iterator[Item]:
    """One message as items. `tools` has the names of tool calls by their ids, and learns those of this message."""
    role = str(message.get("role") or "user")
    if role == "tool":
        yield from _result(message, tools)
        return
    if role == "developer":
        role = "system"
    thought = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(thought, str) and thought.strip():
        yield {"kind": "thinking", "role": role, **_clipped(thought)}
    yield from _content(message.get("content"), role)
    if message.get("refusal"):
        yield {"kind": "message", "role": role, **_clipped(str(message["refusal"]))}
    for call in message.get("tool_calls") or ():
        if isinstance(call, dict):
            yield _tool_call(call, role, tools)


def _content(content: Any, role: str) -> Iterator[Item]:
    if not isinstance(content, list):
        text = _text(content)
        if text.strip():
            yield {"kind": "message", "role": role, **_clipped(text)}
        return
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("image_url", "input_image", "image"):
            yield _image(part, role)
        elif kind in ("thinking", "reasoning"):
            yield {"kind": "thinking", "role": role, **_clipped(_text(part.get("thinking") or part.get("text")))}
        else:
            text = _text(part)
            if text.strip():
                yield {"kind": "message", "role": role, **_clipped(text)}


def _tool_call(call: dict[str, Any], role: str, tools: dict[str, str]) -> Item:
    function = call.get("function")
    known = function if isinstance(function, dict) else {}
    name, own = str(known.get("name") or ""), str(call.get("id") or "")
    tools[own] = name
    arguments = parsed(known.get("arguments"))
    item: Item = {"kind": "tool_call", "role": role, "id": own, "name": name, "arguments": arguments}
    change = change_of(name, arguments)
    if change is not None:
        item["change"] = change
    return item


def _result(message: dict[str, Any], tools: dict[str, str]) -> Iterator[Item]:
    own = str(message.get("tool_call_id") or "")
    name = tools.get(own) or str(message.get("name") or "")
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    images = [part for part in parts if isinstance(part, dict) and part.get("type") in ("image_url", "image")]
    text = "".join(_text(part) for part in parts if part not in images)
    item: Item = {"kind": "tool_result", "role": "tool", "id": own, "name": name, **_clipped(text)}
    if message.get("is_error") or text.startswith(("Error:", "error:", "<error>")):
        item["error"] = True
    yield item
    for image in images:
        yield _image(image, "tool")


def _image(part: dict[str, Any], role: str) -> Item:
    """An image whose bytes are those of a raster image; of all others only the address is told."""
    given = part.get("image_url") or part.get("source") or part
    if isinstance(given, dict):
        address = given.get("url") or f"data:{given.get('media_type')};base64,{given.get('data')}"
    else:
        address = given
    address = str(address)
    head, comma, data = address.partition(",")
    if address.startswith("data:") and comma and head.endswith(";base64") and len(data) < LARGEST_IMAGE * 4 // 3:
        try:
            start = base64.b64decode(data[:64].strip(), validate=True)
            size = len(base64.b64decode(data, validate=True))
        except (binascii.Error, ValueError):
            start, size = b"", 0
        kind = next((mime for magic, mime in RASTER.items() if start.startswith(magic)), None)
        if kind is not None and size:
            return {"kind": "image", "role": role, "mime": kind, "data": data}
    shown = f"{head[:80]}, …" if address.startswith("data:") else address[:300]
    return {"kind": "note", "role": role, "text": f"an image that is not shown: {shown}"}


def change_of(name: str, arguments: Any) -> dict[str, Any] | None:
    """The file that a tool call edits, with what it takes away and puts there; None if it edits none."""
    if not isinstance(arguments, dict) or name.lower() in ("read", "view", "grep", "glob", "ls", "bash"):
        return None
    path = _first(arguments, PATHS)
    before, after = _first(arguments, BEFORE), _first(arguments, AFTER)
    if path is None:
        return None
    if after is None and before is None:
        after = _first(arguments, WHOLE)
        if after is None:
            return None
    return {
        "path": path[:1000],
        "before": None if before is None else before[:LONGEST_TEXT],
        "after": None if after is None else after[:LONGEST_TEXT],
    }


def parsed(arguments: Any) -> Any:
    """The arguments of a tool call as an object, or as they stand if they are none."""
    if isinstance(arguments, str):
        try:
            found = orjson.loads(arguments or "{}")
        except orjson.JSONDecodeError:
            return arguments[:LONGEST_TEXT]
        return found if isinstance(found, dict) else arguments[:LONGEST_TEXT]
    return arguments if isinstance(arguments, dict) else _text(arguments)


def _clipped(text: str) -> Item:
    """The text of an item; of a very long one the beginning, and how long it is."""
    if len(text) <= LONGEST_TEXT:
        return {"text": text}
    return {"text": text[:LONGEST_TEXT], "length": len(text)}


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
        return orjson.dumps(parsed(arguments), option=orjson.OPT_SORT_KEYS).decode()
    except TypeError:
        return str(arguments)
