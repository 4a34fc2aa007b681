"""OpenAI's Responses API: items in, items out, and the stored responses of one rollout. No IO.

Replies are written by `_responses_reply.py`; tools that are no plain functions are in `_responses_tools.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from paddock.capture.dialects._responses_reply import ResponseWriter, unseal
from paddock.capture.dialects._responses_tools import function_call_of, read_tools
from paddock.capture.dialects.base import Dialect, DialectRequest, ReplyStore, Route, check_depth, load_body
from paddock.capture.dialects.chat import write_openai_error
from paddock.capture.dialects.chat_builder import (
    ChatBuilder,
    Part,
    copy_fields,
    image_part,
    require_objects,
    require_text,
    shorten,
    text_part,
)
from paddock.capture.errors import BadRequest
from paddock.capture.roles import SYSTEM_ROLES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paddock.capture.errors import ErrorReply

ROUTES = {
    "/v1/responses": Route("complete"),
    "/responses": Route("complete"),
    "/v1/responses/input_tokens": Route("count_tokens"),
    "/responses/input_tokens": Route("count_tokens"),
}
STORED = ("/v1/responses/", "/responses/")
SAME_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "max_output_tokens": "max_tokens",
    "parallel_tool_calls": "parallel_tool_calls",
}
EFFORTS = ("low", "medium", "high")
"""Those that every engine with a reasoning effort accepts."""
NOT_SERVED = ("conversation", "prompt")
OUTPUTS = (
    "function_call_output",
    "custom_tool_call_output",
    "local_shell_call_output",
    "shell_call_output",
    "apply_patch_call_output",
)


class Responses(Dialect):
    name: ClassVar[str] = "responses"
    path: ClassVar[str] = "/v1/responses"

    def __init__(self) -> None:
        self._replies = ReplyStore()
        self._items: dict[str, dict[str, Any]] = {}

    def find_route(self, path: str, query: Mapping[str, str]) -> Route | None:
        if path in ROUTES:
            return ROUTES[path]
        prefix = next((each for each in STORED if path.startswith(each)), None)
        return None if prefix is None else Route("lookup", "GET", name=path[len(prefix) :])

    def parse(self, raw: bytes, route: Route) -> DialectRequest:
        body = load_body(raw)
        check_depth(body)
        for unserved in NOT_SERVED:
            if body.get(unserved) is not None:
                raise BadRequest(f"`{unserved}` is kept on OpenAI's servers only; send the items as `input`")
        whole = {**body, "input": self._whole_input(body)} if self._has_references(body) else body
        request = DialectRequest(whole, {}, str(body["model"]) if body.get("model") else None, route=route)
        request.chat = to_chat(whole, request.special_tools, request.notes)
        return request

    def to_chat(self, body: dict[str, Any]) -> dict[str, Any]:
        return to_chat(body, {}, [])

    def make_writer(self, request: DialectRequest, model: str, *, include_usage: bool) -> ResponseWriter:
        return ResponseWriter(request, request.model or model, self._store)

    def error_body(self, error: ErrorReply) -> bytes:
        return write_openai_error(error)

    def token_count_body(self, tokens: int) -> bytes:
        return orjson.dumps({"object": "response.input_tokens", "input_tokens": tokens})

    def lookup_body(self, route: Route, model: str) -> bytes | None:
        reply = self._replies.get(route.name)
        return None if reply is None else orjson.dumps(reply.document)

    # -- stored responses ---------------------------------------------------------------------------

    def _has_references(self, body: dict[str, Any]) -> bool:
        if body.get("previous_response_id") is not None:
            return True
        items = body.get("input")
        return isinstance(items, list) and any(is_reference(item) for item in items)

    def _whole_input(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        previous = body.get("previous_response_id")
        if previous is not None and self._replies.get(previous) is None:
            message = f"`previous_response_id` {shorten(previous)} is not known in this rollout, or was not stored"
            raise BadRequest(message, code="previous_response_not_found", param="previous_response_id")
        items = self._replies.history(previous)
        for item in input_items(body):
            if is_reference(item):
                stored = self._items.get(str(item.get("id")))
                if stored is None:
                    raise BadRequest(f"item {shorten(item.get('id'))} is not known in this rollout", param="input")
                item = stored
            items.append(item)
        return items

    def _store(self, request: DialectRequest, response: dict[str, Any]) -> None:
        if request.body.get("store") is False:
            return
        items = input_items(request.body)
        self._replies.add(response, request.body.get("previous_response_id"), items, response["output"])
        items = items + response["output"]
        self._items |= {item["id"]: item for item in items if isinstance(item.get("id"), str)}


# -- requests -----------------------------------------------------------------------------------------


def to_chat(body: dict[str, Any], special: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    builder = ChatBuilder()
    tools = read_tools(body.get("tools"), special, notes)
    if (instructions := body.get("instructions")) is not None:
        builder.add_system(require_text(instructions, "`instructions`"))
    for item in input_items(body):
        read_item(builder, item, notes)
        if item.get("type") in ("tool_search_output", "additional_tools"):
            tools += read_tools(item.get("tools"), special, notes)
    chat: dict[str, Any] = {"model": body.get("model"), "messages": builder.build(), **copy_fields(body, SAME_FIELDS)}
    if tools:
        chat["tools"] = list({tool["function"]["name"]: tool for tool in tools}.values())
    else:
        chat.pop("parallel_tool_calls", None)
    read_tool_choice(chat, body.get("tool_choice"))
    read_reasoning(chat, body.get("reasoning"))
    config = body.get("text")
    form = config.get("format") if isinstance(config, dict) else None
    if isinstance(form, dict) and form.get("type") != "text":
        chat["response_format"] = form
    if body.get("stream"):
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    return chat


def input_items(body: dict[str, Any]) -> list[dict[str, Any]]:
    items = body.get("input")
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    return require_objects([] if items is None else items, "`input`")


def is_reference(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") == "item_reference"


def read_item(builder: ChatBuilder, item: dict[str, Any], notes: list[str]) -> None:
    kind = item.get("type")
    if kind in (None, "message"):
        read_message(builder, item, notes)
    elif kind == "reasoning":
        if reasoning := reasoning_of(item):
            builder.add_reasoning(reasoning)
    elif kind in OUTPUTS:
        call_id = require_text(item.get("call_id") or item.get("id"), f"`{kind}.call_id`")
        builder.add_tool_result(call_id, output_parts(item, notes))
    elif (call := function_call_of(item)) is not None:
        builder.add_tool_call(require_text(item.get("call_id") or item.get("id"), f"`{kind}.call_id`"), *call)
    elif kind == "tool_search_output":
        names = [str(tool.get("name")) for tool in require_objects(item.get("tools"), "`tools`")]
        search_id = item.get("call_id")
        if isinstance(search_id, str):
            builder.add_tool_result(search_id, [text_part("found: " + ", ".join(names))])
    elif kind != "additional_tools":
        notes.append(f"an item of type {shorten(kind)} was left out")


def read_message(builder: ChatBuilder, item: dict[str, Any], notes: list[str]) -> None:
    role = item.get("role")
    parts = read_parts(item.get("content"), notes)
    if role == "assistant":
        builder.start_assistant_turn()
        for part in parts:
            if part["type"] == "text":
                builder.add_text(part["text"])
    elif role in SYSTEM_ROLES:
        builder.add_system("\n".join(part["text"] for part in parts if part["type"] == "text"))
    elif role == "user":
        builder.add_user(parts)
    else:
        raise BadRequest(f"{shorten(role)} is no role: use user, assistant, system or developer")


def read_parts(content: Any, notes: list[str]) -> list[Part]:
    if isinstance(content, str):
        return [text_part(content)]
    parts: list[Part] = []
    for part in require_objects(content, "`content`"):
        kind = part.get("type")
        if kind in ("input_text", "output_text", "text"):
            parts.append(text_part(require_text(part.get("text"), "`text`")))
        elif kind == "refusal":
            parts.append(text_part(require_text(part.get("refusal"), "`refusal`")))
        elif kind == "input_image" and isinstance(part.get("image_url"), str):
            parts.append(image_part(part["image_url"], part.get("detail")))
        elif kind == "input_file" and isinstance(part.get("file_data"), str):
            parts.append({"type": "file", "file": {"filename": part.get("filename"), "file_data": part["file_data"]}})
        elif kind == "input_audio" and isinstance(part.get("input_audio"), dict):
            parts.append({"type": "input_audio", "input_audio": part["input_audio"]})
        else:
            notes.append(f"a part of type {shorten(kind)} was left out")
    return parts


def output_parts(item: dict[str, Any], notes: list[str]) -> list[Part]:
    """The output of a tool, in each of its forms."""
    output = item.get("output")
    if item["type"] == "shell_call_output":
        runs = require_objects(output, "`shell_call_output.output`")
        return [text_part("\n".join(f"{run.get('stdout', '')}{run.get('stderr', '')}" for run in runs))]
    if output is None:
        return [text_part(str(item.get("status") or ""))]
    if isinstance(output, dict):
        # Some programs wrap it once more.
        output = output.get("content", output.get("output", ""))
    return read_parts(output, notes)


def reasoning_of(item: dict[str, Any]) -> str:
    for name in ("content", "encrypted_content", "summary"):
        value = item.get(name)
        if isinstance(value, str):
            text = unseal(value)
        else:
            parts = value if isinstance(value, list) else ()
            text = "".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))
        if text:
            return text
    return ""


def read_tool_choice(chat: dict[str, Any], choice: Any) -> None:
    if choice is None or (choice in ("auto", "none") and "tools" not in chat):
        return
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = {str(tool.get("name")) for tool in require_objects(choice.get("tools"), "`tool_choice.tools`")}
        chat["tools"] = [tool for tool in chat.get("tools", ()) if tool["function"]["name"] in allowed]
        if not chat["tools"]:
            raise BadRequest("`tool_choice` allows no tool that is there")
        choice = choice.get("mode")
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": choice.get("name") or choice.get("type")}}
    elif choice not in ("auto", "none", "required"):
        raise BadRequest("`tool_choice` must be auto, none, required, or an object that names a tool")
    chat["tool_choice"] = choice


def read_reasoning(chat: dict[str, Any], reasoning: Any) -> None:
    effort = reasoning.get("effort") if isinstance(reasoning, dict) else None
    if effort == "none":
        chat["chat_template_kwargs"] = {"enable_thinking": False}
    elif effort in EFFORTS:
        chat["reasoning_effort"] = effort
