"""OpenAI's Responses: items in, items out, and a memory of the responses of one rollout. No IO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from paddock.rollouts.capture.dialects.base import Asked, Dialect, Place, check_depth, load
from paddock.rollouts.capture.dialects.conversation import (
    Conversation,
    Part,
    copied,
    image_part,
    objects,
    shown,
    text,
    text_part,
)
from paddock.rollouts.capture.dialects.memory import Memory
from paddock.rollouts.capture.dialects.responses_answers import ResponseTeller, unsealed
from paddock.rollouts.capture.dialects.responses_tools import call_of, joined, read_tools
from paddock.rollouts.capture.refusals import BadRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paddock.rollouts.capture.refusals import Fault

PLACES = {
    "/v1/responses": Place("complete"),
    "/responses": Place("complete"),
    "/v1/responses/input_tokens": Place("count"),
    "/responses/input_tokens": Place("count"),
}
STORED = ("/v1/responses/", "/responses/")
SAME = {
    "temperature": "temperature",
    "top_p": "top_p",
    "max_output_tokens": "max_tokens",
    "parallel_tool_calls": "parallel_tool_calls",
}
EFFORTS = ("low", "medium", "high")
"""Those that every engine with a reasoning effort knows."""
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

    def __init__(self) -> None:
        self._memory = Memory()
        self._items: dict[str, dict[str, Any]] = {}

    def find(self, path: str, query: Mapping[str, str]) -> Place | None:
        if path in PLACES:
            return PLACES[path]
        prefix = next((each for each in STORED if path.startswith(each)), None)
        return None if prefix is None else Place("look", "GET", name=path[len(prefix) :])

    def read(self, raw: bytes, place: Place) -> Asked:
        body = load(raw)
        check_depth(body)
        for unserved in NOT_SERVED:
            if body.get(unserved) is not None:
                raise BadRequest(f"`{unserved}` is kept on OpenAI's servers only; send the items as `input`")
        whole = {**body, "input": self._whole_input(body)} if self._refers(body) else body
        asked = Asked(whole, {}, str(body["model"]) if body.get("model") else None, place=place)
        asked.chat = chat_form(whole, asked.tools, asked.notes)
        return asked

    def chat_form(self, body: dict[str, Any]) -> dict[str, Any]:
        return chat_form(body, {}, [])

    def writer(self, asked: Asked, name: str, *, usage: bool) -> ResponseTeller:
        return ResponseTeller(asked, asked.model or name, self._remember)

    def error(self, fault: Fault) -> bytes:
        told = {"message": fault.message, "type": fault.kind, "param": fault.param, "code": fault.code}
        return orjson.dumps({"error": told})

    def counted(self, tokens: int) -> bytes:
        return orjson.dumps({"object": "response.input_tokens", "input_tokens": tokens})

    def look(self, place: Place, model: str) -> bytes | None:
        found = self._memory.get(place.name)
        return None if found is None else orjson.dumps(found.answer)

    # -- memory -------------------------------------------------------------------------------------

    def _refers(self, body: dict[str, Any]) -> bool:
        if body.get("previous_response_id") is not None:
            return True
        given = body.get("input")
        return isinstance(given, list) and any(is_reference(item) for item in given)

    def _whole_input(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        previous = body.get("previous_response_id")
        if previous is not None and self._memory.get(previous) is None:
            message = f"`previous_response_id` {shown(previous)} is not known in this rollout, or was not stored"
            raise BadRequest(message, code="previous_response_not_found", param="previous_response_id")
        items = self._memory.history(previous)
        for item in input_items(body):
            if is_reference(item):
                known = self._items.get(str(item.get("id")))
                if known is None:
                    raise BadRequest(f"item {shown(item.get('id'))} is not known in this rollout", param="input")
                item = known
            items.append(item)
        return items

    def _remember(self, asked: Asked, response: dict[str, Any]) -> None:
        if asked.body.get("store") is False:
            return
        given = input_items(asked.body)
        self._memory.keep(response, asked.body.get("previous_response_id"), given, response["output"])
        items = given + response["output"]
        self._items |= {item["id"]: item for item in items if isinstance(item.get("id"), str)}


# -- requests -----------------------------------------------------------------------------------------


def chat_form(body: dict[str, Any], special: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    conversation = Conversation()
    tools = read_tools(body.get("tools"), special, notes)
    if (instructions := body.get("instructions")) is not None:
        conversation.system(text(instructions, "`instructions`"))
    for item in input_items(body):
        read_item(conversation, item, notes)
        if item.get("type") in ("tool_search_output", "additional_tools"):
            tools += read_tools(item.get("tools"), special, notes)
    chat: dict[str, Any] = {"model": body.get("model"), "messages": conversation.close(), **copied(body, SAME)}
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
    given = body.get("input")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return objects([] if given is None else given, "`input`")


def is_reference(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") == "item_reference"


def read_item(conversation: Conversation, item: dict[str, Any], notes: list[str]) -> None:
    kind = item.get("type")
    if kind in (None, "message"):
        read_message(conversation, item, notes)
    elif kind == "reasoning":
        if thought := thought_in(item):
            conversation.thought(thought)
    elif kind in OUTPUTS:
        answered = text(item.get("call_id") or item.get("id"), f"`{kind}.call_id`")
        conversation.result(answered, output_parts(item, notes))
    elif (call := call_of(item)) is not None:
        conversation.called(text(item.get("call_id") or item.get("id"), f"`{kind}.call_id`"), *call)
    elif kind == "tool_search_output":
        found = [joined(None, str(tool.get("name"))) for tool in objects(item.get("tools"), "`tools`")]
        call_id = item.get("call_id")
        if isinstance(call_id, str):
            conversation.result(call_id, [text_part("found: " + ", ".join(found))])
    elif kind != "additional_tools":
        notes.append(f"an item of type {shown(kind)} was left out")


def read_message(conversation: Conversation, item: dict[str, Any], notes: list[str]) -> None:
    role = item.get("role")
    parts = read_parts(item.get("content"), notes)
    if role == "assistant":
        conversation.answered()
        for part in parts:
            if part["type"] == "text":
                conversation.said(part["text"])
    elif role in ("system", "developer"):
        conversation.system("\n".join(part["text"] for part in parts if part["type"] == "text"))
    elif role == "user":
        conversation.user(parts)
    else:
        raise BadRequest(f"{shown(role)} is no role: use user, assistant, system or developer")


def read_parts(told: Any, notes: list[str]) -> list[Part]:
    if isinstance(told, str):
        return [text_part(told)]
    parts: list[Part] = []
    for part in objects(told, "`content`"):
        kind = part.get("type")
        if kind in ("input_text", "output_text", "text"):
            parts.append(text_part(text(part.get("text"), "`text`")))
        elif kind == "refusal":
            parts.append(text_part(text(part.get("refusal"), "`refusal`")))
        elif kind == "input_image" and isinstance(part.get("image_url"), str):
            parts.append(image_part(part["image_url"], part.get("detail")))
        elif kind == "input_file" and isinstance(part.get("file_data"), str):
            parts.append({"type": "file", "file": {"filename": part.get("filename"), "file_data": part["file_data"]}})
        elif kind == "input_audio" and isinstance(part.get("input_audio"), dict):
            parts.append({"type": "input_audio", "input_audio": part["input_audio"]})
        else:
            notes.append(f"a part of type {shown(kind)} was left out")
    return parts


def output_parts(item: dict[str, Any], notes: list[str]) -> list[Part]:
    """What a tool gave back, in each of the ways in which it can be written."""
    told = item.get("output")
    if item["type"] == "shell_call_output":
        runs = objects(told, "`shell_call_output.output`")
        return [text_part("\n".join(f"{run.get('stdout', '')}{run.get('stderr', '')}" for run in runs))]
    if told is None:
        return [text_part(str(item.get("status") or ""))]
    if isinstance(told, dict):
        # Some programs wrap it once more.
        told = told.get("content", told.get("output", ""))
    return read_parts(told, notes)


def thought_in(item: dict[str, Any]) -> str:
    for name in ("content", "encrypted_content", "summary"):
        told = item.get(name)
        found = (
            unsealed(told)
            if isinstance(told, str)
            else "".join(
                str(part.get("text") or "")
                for part in (told if isinstance(told, list) else ())
                if isinstance(part, dict)
            )
        )
        if found:
            return found
    return ""


def read_tool_choice(chat: dict[str, Any], choice: Any) -> None:
    if choice is None or (choice in ("auto", "none") and "tools" not in chat):
        return
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = {str(tool.get("name")) for tool in objects(choice.get("tools"), "`tool_choice.tools`")}
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
