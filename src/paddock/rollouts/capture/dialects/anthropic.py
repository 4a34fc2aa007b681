"""Anthropic's Messages: requests as chat completions, and answers as messages of content blocks. No IO."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from paddock.rollouts.capture.dialects.anthropic_answers import THREAD_NOT_FOUND, MessageTeller, error
from paddock.rollouts.capture.dialects.base import Asked, Dialect, Place, check_depth, load
from paddock.rollouts.capture.dialects.conversation import (
    Conversation,
    Part,
    arguments_of,
    copied,
    function_tool,
    image_part,
    mapping,
    media_part,
    objects,
    shown,
    text,
    text_part,
)
from paddock.rollouts.capture.dialects.memory import Memory
from paddock.rollouts.capture.refusals import BadRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paddock.rollouts.capture.refusals import Fault

PLACES = {
    "/v1/messages": Place("complete"),
    "/messages": Place("complete"),
    "/v1/messages/count_tokens": Place("count"),
    "/messages/count_tokens": Place("count"),
}
MODELS = ("/v1/models", "/models")
SAME = {name: name for name in ("temperature", "top_p", "top_k", "max_tokens")} | {"stop_sequences": "stop"}
BILLING = "x-anthropic-billing-header:"
"""A line that some programs put before the system prompt. It is meant for Anthropic's own bills and differs
from call to call, so that no prompt would continue another."""
OWN_TOOLS = re.compile(r"(bash|text_editor)_\d+")
OWN_SCHEMAS: dict[str, dict[str, Any]] = {
    "bash": {
        "type": "object",
        "properties": {"command": {"type": "string"}, "restart": {"type": "boolean"}},
    },
    "text_editor": {
        "type": "object",
        "properties": {
            "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
            "path": {"type": "string"},
            "file_text": {"type": "string"},
            "old_str": {"type": "string"},
            "new_str": {"type": "string"},
            "insert_line": {"type": "integer"},
            "insert_text": {"type": "string"},
            "view_range": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["command", "path"],
    },
}
"""Tools that the agent runs itself, but that Anthropic's models know without a schema."""


class Anthropic(Dialect):
    name: ClassVar[str] = "anthropic"

    def __init__(self) -> None:
        self._memory = Memory()

    def find(self, path: str, query: Mapping[str, str]) -> Place | None:
        if path in PLACES:
            return PLACES[path]
        for prefix in MODELS:
            if path == prefix or path.startswith(prefix + "/"):
                return Place("look", "GET", name=path[len(prefix) + 1 :])
        return None

    def recognises(self, headers: Mapping[str, str], query: Mapping[str, str]) -> bool:
        return "anthropic-version" in headers

    def read(self, raw: bytes, place: Place) -> Asked:
        body = load(raw)
        check_depth(body)
        body = self._whole(body)
        notes: list[str] = []
        name = body.get("model")
        return Asked(body, chat_form(body, notes), str(name) if name else None, notes, place)

    def chat_form(self, body: dict[str, Any]) -> dict[str, Any]:
        return chat_form(body, [])

    def writer(self, asked: Asked, name: str, *, usage: bool) -> MessageTeller:
        def remember(message: dict[str, Any]) -> None:
            self._remember(asked.body, message)

        return MessageTeller(asked.model or name, remember)

    def error(self, fault: Fault) -> bytes:
        return orjson.dumps(error(fault))

    def counted(self, tokens: int) -> bytes:
        return orjson.dumps({"input_tokens": tokens})

    def look(self, place: Place, model: str) -> bytes | None:
        described = {"type": "model", "id": model, "display_name": model, "created_at": "1970-01-01T00:00:00Z"}
        if not place.name:
            return orjson.dumps({"data": [described], "has_more": False, "first_id": model, "last_id": model})
        return orjson.dumps(described) if place.name == model else None

    # -- threads: conversations that a program continues by the id of an answer --------------------------

    def _whole(self, body: dict[str, Any]) -> dict[str, Any]:
        """The request with all that its thread holds, as the program could have sent it."""
        thread = body.get("thread")
        if not isinstance(thread, dict) or thread.get("type") != "continue":
            return body
        previous = thread.get("previous_message_id")
        known = self._memory.get(previous)
        if known is None:
            message = f"no thread is known for `previous_message_id` {shown(previous)} in this rollout"
            raise BadRequest(message, status=404, code=THREAD_NOT_FOUND)
        messages = self._memory.history(previous) + objects(body.get("messages"), "`messages`")
        return {**known.frame, **body, "messages": messages}

    def _remember(self, body: dict[str, Any], message: dict[str, Any]) -> None:
        thread = body.get("thread")
        if not isinstance(thread, dict):
            return
        previous = thread.get("previous_message_id") if thread.get("type") == "continue" else None
        frame: dict[str, Any] = {name: body[name] for name in ("system", "tools") if name in body}
        said = [{"role": "assistant", "content": message["content"]}]
        self._memory.keep(message, previous, body["messages"], said, frame)


# -- requests -----------------------------------------------------------------------------------------


def chat_form(body: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    conversation = Conversation()
    conversation.system(system_text(body.get("system")))
    tools = {tool["function"]["name"]: tool for tool in read_tools(body.get("tools"), notes)}
    for message in objects(body.get("messages"), "`messages`"):
        read_message(conversation, message, tools, notes)
    chat: dict[str, Any] = {"model": body.get("model"), "messages": conversation.close(), **copied(body, SAME)}
    if tools:
        chat["tools"] = list(tools.values())
    read_tool_choice(chat, body.get("tool_choice"))
    read_format(chat, body)
    if isinstance(thinking := body.get("thinking"), dict) and thinking.get("type") == "disabled":
        chat["chat_template_kwargs"] = {"enable_thinking": False}
    if body.get("stream"):
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    return chat


def system_text(system: Any) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    texts = [text(block.get("text"), "`system[].text`") for block in objects(system, "`system`")]
    return "\n\n".join(each for each in texts if not each.startswith(BILLING))


def read_message(
    conversation: Conversation, message: dict[str, Any], tools: dict[str, dict[str, Any]], notes: list[str]
) -> None:
    role, told = message.get("role"), message.get("content")
    if told is None and role == "system":
        told = []
    blocks = [text_part(told)] if isinstance(told, str) else objects(told, "`content`")
    if role == "assistant":
        conversation.answered()
        for block in blocks:
            read_said(conversation, block, notes)
    elif role == "system":
        said = [text(block.get("text"), "`text`") for block in blocks if block.get("type") == "text"]
        conversation.system("\n\n".join(said))
        for block in blocks:
            change_tools(tools, block, notes)
    elif role == "user":
        read_given(conversation, blocks, notes)
    else:
        raise BadRequest(f"{shown(role)} is no role: use user or assistant")


def change_tools(tools: dict[str, dict[str, Any]], block: dict[str, Any], notes: list[str]) -> None:
    """A tool that is given or taken away in the middle of a conversation."""
    told = block.get("tool")
    if not isinstance(told, dict):
        return
    if block.get("type") == "tool_removal":
        tools.pop(str(told.get("name")), None)
    elif told.get("type") == "tool_definition":
        tools |= {tool["function"]["name"]: tool for tool in read_tools([told.get("definition")], notes)}


def read_said(conversation: Conversation, block: dict[str, Any], notes: list[str]) -> None:
    kind = block.get("type")
    if kind == "text":
        conversation.said(text(block.get("text"), "`text`"))
    elif kind == "thinking":
        conversation.thought(text(block.get("thinking"), "`thinking`"))
    elif kind == "tool_use":
        call_id, name = text(block.get("id"), "`tool_use.id`"), text(block.get("name"), "`tool_use.name`")
        conversation.called(call_id, name, arguments_of(block.get("input")))
    elif kind != "redacted_thinking":
        notes.append(f"a block of type {shown(kind)} was left out")


def read_given(conversation: Conversation, blocks: list[dict[str, Any]], notes: list[str]) -> None:
    parts: list[Part] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            conversation.result(text(block.get("tool_use_id"), "`tool_use_id`"), result_parts(block, notes))
        else:
            parts += read_part(block, notes)
    if parts:
        conversation.user(parts)


def result_parts(block: dict[str, Any], notes: list[str]) -> list[Part]:
    told = block.get("content")
    if told is None or isinstance(told, str):
        return [text_part(told or "")]
    return [part for each in objects(told, "`tool_result.content`") for part in read_part(each, notes)]


def read_part(block: dict[str, Any], notes: list[str]) -> list[Part]:
    kind = block.get("type")
    if kind == "text":
        return [text_part(text(block.get("text"), "`text`"))]
    if kind in ("image", "document"):
        return source_parts(mapping(block.get("source"), f"`{kind}.source`"), str(block.get("title") or kind), notes)
    if kind == "search_result":
        found = objects(block.get("content"), "`search_result.content`")
        return [text_part(text(each.get("text"), "`text`")) for each in found]
    notes.append(f"a block of type {shown(kind)} was left out")
    return []


def source_parts(source: dict[str, Any], title: str, notes: list[str]) -> list[Part]:
    kind = source.get("type")
    if kind == "base64":
        media_type = text(source.get("media_type"), "`source.media_type`")
        return [media_part(media_type, text(source.get("data"), "`source.data`"), title)]
    if kind == "url":
        return [image_part(text(source.get("url"), "`source.url`"))]
    if kind == "text":
        return [text_part(text(source.get("data"), "`source.data`"))]
    if kind == "content":
        told = source.get("content")
        blocks = [text_part(told)] if isinstance(told, str) else objects(told, "`source.content`")
        return [part for block in blocks if block.get("type") != "document" for part in read_part(block, notes)]
    notes.append(f"a source of type {shown(kind)} was left out")
    return []


def read_tools(tools: Any, notes: list[str]) -> list[dict[str, Any]]:
    made = []
    for tool in objects([] if tools is None else tools, "`tools`"):
        kind = tool.get("type")
        own = OWN_TOOLS.fullmatch(kind) if isinstance(kind, str) else None
        if kind in (None, "custom") or own is not None:
            schema = OWN_SCHEMAS[own[1]] if own is not None else tool.get("input_schema")
            made.append(function_tool(text(tool.get("name"), "`tools[].name`"), tool.get("description"), schema))
        else:
            notes.append(f"the tool {shown(kind)} runs on Anthropic's servers and was left out")
    return made


def read_tool_choice(chat: dict[str, Any], choice: Any) -> None:
    if choice is None:
        return
    choice = mapping(choice, "`tool_choice`")
    kind = choice.get("type")
    if kind == "tool":
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif kind in ("auto", "any", "none"):
        if "tools" in chat or kind == "any":
            chat["tool_choice"] = "required" if kind == "any" else kind
    else:
        raise BadRequest("`tool_choice.type` must be auto, any, none or tool")
    if choice.get("disable_parallel_tool_use") and "tools" in chat:
        chat["parallel_tool_calls"] = False


def read_format(chat: dict[str, Any], body: dict[str, Any]) -> None:
    """An answer that must fit a schema, old and new way of asking."""
    config = body.get("output_config")
    form = body.get("output_format") or (config.get("format") if isinstance(config, dict) else None)
    if isinstance(form, dict) and form.get("type") != "text":
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", **form}}
