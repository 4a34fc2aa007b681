"""Anthropic's Messages API: requests as chat completions, and replies as messages of content blocks. No IO."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from paddock.capture.dialects.base import Dialect, DialectRequest, ReplyStore, Route, check_depth, load_body
from paddock.capture.dialects.block_writer import BlockWriter, ReplyBlock, new_id
from paddock.capture.dialects.chat_builder import (
    ChatBuilder,
    Part,
    arguments_object,
    arguments_text,
    copy_fields,
    function_tool,
    image_part,
    media_part,
    require_object,
    require_objects,
    require_text,
    shorten,
    text_part,
)
from paddock.capture.errors import BadRequest
from paddock.protocol.sse import write_event

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paddock.capture.errors import ErrorReply

ROUTES = {
    "/v1/messages": Route("complete"),
    "/messages": Route("complete"),
    "/v1/messages/count_tokens": Route("count_tokens"),
    "/messages/count_tokens": Route("count_tokens"),
}
MODELS = ("/v1/models", "/models")
SAME_FIELDS = {name: name for name in ("temperature", "top_p", "top_k", "max_tokens")} | {"stop_sequences": "stop"}
BILLING = "x-anthropic-billing-header:"
"""A line that some programs put before the system prompt, for Anthropic's billing. It differs from call to call, so
no prompt would continue another."""
CLIENT_TOOLS = re.compile(r"(bash|text_editor)_\d+")
CLIENT_TOOL_SCHEMAS: dict[str, dict[str, Any]] = {
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
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
THREAD_NOT_FOUND = "thread_not_found"
SIGNATURE = "cGFkZG9jaw=="
"""The signature of reasoning; the proxy does not check it."""


class Anthropic(Dialect):
    name: ClassVar[str] = "anthropic"
    path: ClassVar[str] = "/v1/messages"
    key_header: ClassVar[str] = "x-api-key"

    def __init__(self) -> None:
        self._replies = ReplyStore()

    def find_route(self, path: str, query: Mapping[str, str]) -> Route | None:
        if path in ROUTES:
            return ROUTES[path]
        for prefix in MODELS:
            if path == prefix or path.startswith(prefix + "/"):
                return Route("lookup", "GET", name=path[len(prefix) + 1 :])
        return None

    def matches(self, headers: Mapping[str, str], query: Mapping[str, str]) -> bool:
        return "anthropic-version" in headers

    def parse(self, raw: bytes, route: Route) -> DialectRequest:
        body = load_body(raw)
        check_depth(body)
        body = self._with_history(body)
        notes: list[str] = []
        name = body.get("model")
        return DialectRequest(body, to_chat(body, notes), str(name) if name else None, notes, route)

    def to_chat(self, body: dict[str, Any]) -> dict[str, Any]:
        return to_chat(body, [])

    def make_writer(self, request: DialectRequest, model: str, *, include_usage: bool) -> MessageWriter:
        def store(message: dict[str, Any]) -> None:
            self._store(request.body, message)

        return MessageWriter(request.model or model, store)

    def error_body(self, error: ErrorReply) -> bytes:
        return orjson.dumps(error_document(error))

    def token_count_body(self, tokens: int) -> bytes:
        return orjson.dumps({"input_tokens": tokens})

    def lookup_body(self, route: Route, model: str) -> bytes | None:
        entry = {"type": "model", "id": model, "display_name": model, "created_at": "1970-01-01T00:00:00Z"}
        if not route.name:
            return orjson.dumps({"data": [entry], "has_more": False, "first_id": model, "last_id": model})
        return orjson.dumps(entry) if route.name == model else None

    # -- threads: conversations that a program continues by the id of a reply ------------------------------

    def _with_history(self, body: dict[str, Any]) -> dict[str, Any]:
        """The request with the history of its thread, as the program could have sent it."""
        thread = body.get("thread")
        if not isinstance(thread, dict) or thread.get("type") != "continue":
            return body
        previous = thread.get("previous_message_id")
        reply = self._replies.get(previous)
        if reply is None:
            message = f"no thread is known for `previous_message_id` {shorten(previous)} in this rollout"
            raise BadRequest(message, status=404, code=THREAD_NOT_FOUND)
        messages = self._replies.history(previous) + require_objects(body.get("messages"), "`messages`")
        return {**reply.context, **body, "messages": messages}

    def _store(self, body: dict[str, Any], message: dict[str, Any]) -> None:
        thread = body.get("thread")
        if not isinstance(thread, dict):
            return
        previous = thread.get("previous_message_id") if thread.get("type") == "continue" else None
        context: dict[str, Any] = {name: body[name] for name in ("system", "tools") if name in body}
        output = [{"role": "assistant", "content": message["content"]}]
        self._replies.add(message, previous, body["messages"], output, context)


# -- requests -----------------------------------------------------------------------------------------


def to_chat(body: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    builder = ChatBuilder()
    builder.add_system(system_text(body.get("system")))
    tools = {tool["function"]["name"]: tool for tool in read_tools(body.get("tools"), notes)}
    for message in require_objects(body.get("messages"), "`messages`"):
        read_message(builder, message, tools, notes)
    chat: dict[str, Any] = {"model": body.get("model"), "messages": builder.build(), **copy_fields(body, SAME_FIELDS)}
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
    texts = [require_text(block.get("text"), "`system[].text`") for block in require_objects(system, "`system`")]
    return "\n\n".join(each for each in texts if not each.startswith(BILLING))


def read_message(
    builder: ChatBuilder, message: dict[str, Any], tools: dict[str, dict[str, Any]], notes: list[str]
) -> None:
    role, content = message.get("role"), message.get("content")
    if content is None and role == "system":
        content = []
    blocks = [text_part(content)] if isinstance(content, str) else require_objects(content, "`content`")
    if role == "assistant":
        builder.start_assistant_turn()
        for block in blocks:
            read_assistant_block(builder, block, notes)
    elif role == "system":
        texts = [require_text(block.get("text"), "`text`") for block in blocks if block.get("type") == "text"]
        builder.add_system("\n\n".join(texts))
        for block in blocks:
            change_tools(tools, block, notes)
    elif role == "user":
        read_user_blocks(builder, blocks, notes)
    else:
        raise BadRequest(f"{shorten(role)} is no role: use user or assistant")


def change_tools(tools: dict[str, dict[str, Any]], block: dict[str, Any], notes: list[str]) -> None:
    """Add or remove a tool in the middle of a conversation."""
    tool = block.get("tool")
    if not isinstance(tool, dict):
        return
    if block.get("type") == "tool_removal":
        tools.pop(str(tool.get("name")), None)
    elif tool.get("type") == "tool_definition":
        tools |= {each["function"]["name"]: each for each in read_tools([tool.get("definition")], notes)}


def read_assistant_block(builder: ChatBuilder, block: dict[str, Any], notes: list[str]) -> None:
    kind = block.get("type")
    if kind == "text":
        builder.add_text(require_text(block.get("text"), "`text`"))
    elif kind == "thinking":
        builder.add_reasoning(require_text(block.get("thinking"), "`thinking`"))
    elif kind == "tool_use":
        call_id, name = (
            require_text(block.get("id"), "`tool_use.id`"),
            require_text(block.get("name"), "`tool_use.name`"),
        )
        builder.add_tool_call(call_id, name, arguments_text(block.get("input")))
    elif kind != "redacted_thinking":
        notes.append(f"a block of type {shorten(kind)} was left out")


def read_user_blocks(builder: ChatBuilder, blocks: list[dict[str, Any]], notes: list[str]) -> None:
    parts: list[Part] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            builder.add_tool_result(
                require_text(block.get("tool_use_id"), "`tool_use_id`"), result_parts(block, notes)
            )
        else:
            parts += read_part(block, notes)
    if parts:
        builder.add_user(parts)


def result_parts(block: dict[str, Any], notes: list[str]) -> list[Part]:
    content = block.get("content")
    if content is None or isinstance(content, str):
        return [text_part(content or "")]
    return [part for each in require_objects(content, "`tool_result.content`") for part in read_part(each, notes)]


def read_part(block: dict[str, Any], notes: list[str]) -> list[Part]:
    kind = block.get("type")
    if kind == "text":
        return [text_part(require_text(block.get("text"), "`text`"))]
    if kind in ("image", "document"):
        return source_parts(
            require_object(block.get("source"), f"`{kind}.source`"), str(block.get("title") or kind), notes
        )
    if kind == "search_result":
        texts = require_objects(block.get("content"), "`search_result.content`")
        return [text_part(require_text(each.get("text"), "`text`")) for each in texts]
    notes.append(f"a block of type {shorten(kind)} was left out")
    return []


def source_parts(source: dict[str, Any], title: str, notes: list[str]) -> list[Part]:
    kind = source.get("type")
    if kind == "base64":
        media_type = require_text(source.get("media_type"), "`source.media_type`")
        return [media_part(media_type, require_text(source.get("data"), "`source.data`"), title)]
    if kind == "url":
        return [image_part(require_text(source.get("url"), "`source.url`"))]
    if kind == "text":
        return [text_part(require_text(source.get("data"), "`source.data`"))]
    if kind == "content":
        content = source.get("content")
        blocks = [text_part(content)] if isinstance(content, str) else require_objects(content, "`source.content`")
        return [part for block in blocks if block.get("type") != "document" for part in read_part(block, notes)]
    notes.append(f"a source of type {shorten(kind)} was left out")
    return []


def read_tools(tools: Any, notes: list[str]) -> list[dict[str, Any]]:
    functions = []
    for tool in require_objects([] if tools is None else tools, "`tools`"):
        kind = tool.get("type")
        client_tool = CLIENT_TOOLS.fullmatch(kind) if isinstance(kind, str) else None
        if kind in (None, "custom") or client_tool is not None:
            schema = CLIENT_TOOL_SCHEMAS[client_tool[1]] if client_tool is not None else tool.get("input_schema")
            functions.append(
                function_tool(require_text(tool.get("name"), "`tools[].name`"), tool.get("description"), schema)
            )
        else:
            notes.append(f"the tool {shorten(kind)} runs on Anthropic's servers and was left out")
    return functions


def read_tool_choice(chat: dict[str, Any], choice: Any) -> None:
    if choice is None:
        return
    choice = require_object(choice, "`tool_choice`")
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
    """A reply that must match a schema, in the old and the new form."""
    config = body.get("output_config")
    form = body.get("output_format") or (config.get("format") if isinstance(config, dict) else None)
    if isinstance(form, dict) and form.get("type") != "text":
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", **form}}


# -- replies ------------------------------------------------------------------------------------------


class MessageWriter(BlockWriter):
    """A tool call is written when it is complete: programs fail on arguments that are no JSON."""

    def __init__(self, model: str, store: Callable[[dict[str, Any]], None]) -> None:
        super().__init__()
        self._model = model
        self._store = store
        self._id = new_id("msg")
        self._content: list[dict[str, Any]] = []

    def start_reply(self) -> bytes:
        return sse("message_start", {"message": {**self._message(None), "content": []}})

    def open_block(self, block: ReplyBlock) -> bytes:
        if block.kind == "tool_call":
            return b""
        block.index = len(self._content)
        empty: dict[str, Any] = {"type": "text", "text": ""}
        if block.kind == "reasoning":
            empty = {"type": "thinking", "thinking": "", "signature": ""}
        self._content.append(empty)
        return sse("content_block_start", {"index": block.index, "content_block": empty})

    def extend_block(self, block: ReplyBlock, piece: str) -> bytes:
        if block.kind == "tool_call":
            return b""
        delta = {"type": "text_delta", "text": piece}
        if block.kind == "reasoning":
            delta = {"type": "thinking_delta", "thinking": piece}
        return sse("content_block_delta", {"index": block.index, "delta": delta})

    def close_block(self, block: ReplyBlock) -> bytes:
        if block.kind == "tool_call":
            return self._write_call(block)
        out = b""
        if block.kind == "reasoning":
            self._content[block.index] = {"type": "thinking", "thinking": block.text, "signature": SIGNATURE}
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            out = sse("content_block_delta", {"index": block.index, "delta": delta})
        else:
            self._content[block.index] = {"type": "text", "text": block.text}
        return out + sse("content_block_stop", {"index": block.index})

    def _write_call(self, block: ReplyBlock) -> bytes:
        index, value = len(self._content), arguments_object(block.text)
        head = {"type": "tool_use", "id": block.call_id, "name": block.name}
        self._content.append({**head, "input": value})
        delta = {"type": "input_json_delta", "partial_json": orjson.dumps(value).decode()}
        return b"".join(
            (
                sse("content_block_start", {"index": index, "content_block": {**head, "input": {}}}),
                sse("content_block_delta", {"index": index, "delta": delta}),
                sse("content_block_stop", {"index": index}),
            )
        )

    def finish_reply(self) -> bytes:
        message = self._message(self.reason)
        self._store({**message, "content": self._content})
        delta = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
        return sse("message_delta", {"delta": delta, "usage": message["usage"]}) + sse("message_stop", {})

    def build_document(self) -> bytes:
        return orjson.dumps({**self._message(self.reason), "content": self._content})

    def write_error(self, error: ErrorReply) -> bytes:
        return sse("error", error_document(error))

    def write_keep_alive(self) -> bytes:
        return sse("ping", {})

    def _message(self, reason: str | None) -> dict[str, Any]:
        stop = None if reason is None else STOP_REASONS.get(reason, "end_turn")
        if stop == "end_turn" and self.stop_sequence is not None:
            stop = "stop_sequence"
        if stop == "end_turn" and any(block.kind == "refusal" for block in self.blocks):
            stop = "refusal"
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "stop_reason": stop,
            "stop_sequence": self.stop_sequence,
            "usage": {
                "input_tokens": max(0, self.usage.prompt - self.usage.cached),
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": self.usage.cached,
                "output_tokens": self.usage.completion,
            },
        }


def sse(kind: str, data: dict[str, Any]) -> bytes:
    return write_event(orjson.dumps({"type": kind, **data}), kind)


def error_document(error: ErrorReply) -> dict[str, Any]:
    kind = ERROR_TYPES.get(error.status) or ("api_error" if error.status >= 500 else "invalid_request_error")
    message = error.message
    if error.is_context_overflow:
        # Programs compact their history when they read this text.
        sizes = f"{error.sizes[0]} tokens > {error.sizes[1]} maximum" if error.sizes else message
        message = f"prompt is too long: {sizes}"
    elif error.invites_retry:
        kind = "api_error"
    body: dict[str, Any] = {"type": kind, "message": message}
    if error.code == THREAD_NOT_FOUND:
        body["details"] = {"error_code": THREAD_NOT_FOUND}
    return {"type": "error", "error": body}
