"""Google's generateContent: contents and parts in, candidates out, with the model in the path. No IO."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from paddock.rollouts.capture.dialects.base import Asked, Dialect, Place, check_depth, load
from paddock.rollouts.capture.dialects.conversation import (
    Conversation,
    Part,
    arguments_of,
    function_tool,
    image_part,
    mapping,
    media_part,
    objects,
    shown,
    text,
    text_part,
)
from paddock.rollouts.capture.dialects.google_answers import CandidateTeller, error, unsealed
from paddock.rollouts.capture.refusals import BadRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paddock.rollouts.capture.refusals import Fault

METHOD = re.compile(r"(?:/v\w+)?/(?:[\w./-]+/)?models/(?P<name>[^:]+):(?P<method>\w+)")
MODELS = re.compile(r"/v\w+/models(?:/(?P<name>[^:]+))?")
ACTIONS = {
    "generateContent": Place("complete", stream=False),
    "streamGenerateContent": Place("complete", stream=True),
    "countTokens": Place("count", stream=False),
}
SAME = {
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "maxOutputTokens": "max_tokens",
    "stopSequences": "stop",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
    "seed": "seed",
    "candidateCount": "n",
}
MODES = {"AUTO": "auto", "MODE_UNSPECIFIED": "auto", "VALIDATED": "auto", "NONE": "none", "ANY": "required"}
ARRAY = "array"
NUMERIC = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
SUBSCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")


class Google(Dialect):
    name: ClassVar[str] = "google"

    def find(self, path: str, query: Mapping[str, str]) -> Place | None:
        if (found := METHOD.fullmatch(path)) is not None and found["method"] in ACTIONS:
            known = ACTIONS[found["method"]]
            form = ARRAY if known.stream and query.get("alt") != "sse" else ""
            return replace(known, name=found["name"], form=form)
        if (listed := MODELS.fullmatch(path)) is not None:
            return Place("look", "GET", name=listed["name"] or "")
        return None

    def recognises(self, headers: Mapping[str, str], query: Mapping[str, str]) -> bool:
        return "x-goog-api-key" in headers or "x-goog-api-client" in headers or "key" in query

    def read(self, raw: bytes, place: Place) -> Asked:
        body = load(raw)
        check_depth(body)
        notes: list[str] = []
        # Asked for a count, programs may wrap the request that they mean.
        inner = get(body, "generateContentRequest")
        chat = chat_form(inner if place.action == "count" and isinstance(inner, dict) else body, notes)
        if place.stream:
            chat |= {"stream": True, "stream_options": {"include_usage": True}}
        return Asked(body, chat, place.name or None, notes, place)

    def chat_form(self, body: dict[str, Any]) -> dict[str, Any]:
        return chat_form(body, [])

    def writer(self, asked: Asked, name: str, *, usage: bool) -> CandidateTeller:
        return CandidateTeller(asked.model or name, array=asked.place.form == ARRAY)

    def error(self, fault: Fault) -> bytes:
        return orjson.dumps(error(fault, fault.status))

    def counted(self, tokens: int) -> bytes:
        return orjson.dumps({"totalTokens": tokens})

    def look(self, place: Place, model: str) -> bytes | None:
        described = {
            "name": f"models/{model}",
            "displayName": model,
            "version": "1",
            "supportedGenerationMethods": list(ACTIONS),
        }
        if not place.name:
            return orjson.dumps({"models": [described]})
        return orjson.dumps(described) if place.name == model else None


# -- requests -----------------------------------------------------------------------------------------


def get(value: dict[str, Any], name: str) -> Any:
    """A field under either of the names that Google takes: `inlineData` is also `inline_data`."""
    if name in value:
        return value[name]
    return value.get(re.sub(r"([A-Z])", r"_\1", name).lower())


def chat_form(body: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    reader = Reader(notes)
    if (system := get(body, "systemInstruction")) is not None:
        reader.read_system(system)
    contents = body.get("contents")
    for entry in objects([contents] if isinstance(contents, dict) else contents, "`contents`"):
        reader.read_content(entry)
    chat: dict[str, Any] = {"messages": reader.conversation.close()}
    config = get(body, "generationConfig")
    read_config(chat, mapping({} if config is None else config, "`generationConfig`"))
    if tools := read_tools(body.get("tools"), notes):
        chat["tools"] = tools
    calling = get(body, "toolConfig")
    if isinstance(calling, dict) and isinstance(told := get(calling, "functionCallingConfig"), dict):
        mode = MODES.get(str(told.get("mode") or "AUTO").upper())
        if mode is None:
            raise BadRequest("`functionCallingConfig.mode` must be AUTO, ANY, NONE or VALIDATED")
        if tools or mode == "required":
            chat["tool_choice"] = mode
    return chat


class Reader:
    """Reads contents one by one. Calls without an id get one, and results find the call that they answer."""

    def __init__(self, notes: list[str]) -> None:
        self.conversation = Conversation()
        self._notes = notes
        self._waiting: list[tuple[str, str]] = []
        """Id and name of calls without a result."""
        self._calls = 0

    def read_system(self, system: Any) -> None:
        if isinstance(system, str):
            return self.conversation.system(system)
        parts = parts_of(mapping(system, "`systemInstruction`"))
        self.conversation.system("\n\n".join(text(part["text"], "`text`") for part in parts if "text" in part))

    def read_content(self, entry: dict[str, Any]) -> None:
        parts = parts_of(entry)
        role = entry.get("role") or "user"
        if role == "model":
            self._read_said(parts)
        elif role in ("user", "function", "tool"):
            self._read_given(parts)
        else:
            raise BadRequest(f"{shown(role)} is no role: use user or model")

    def _read_said(self, parts: list[dict[str, Any]]) -> None:
        self.conversation.answered()
        thoughts = [text(part.get("text"), "`text`") for part in parts if part.get("thought")]
        if not thoughts:
            thoughts = [found for part in parts if (found := unsealed(get(part, "thoughtSignature")))]
        for thought in thoughts:
            self.conversation.thought(thought)
        for part in parts:
            if part.get("thought"):
                continue
            if (call := get(part, "functionCall")) is not None:
                self._read_call(mapping(call, "`functionCall`"))
            elif "text" in part:
                self.conversation.said(text(part["text"], "`text`"))
            elif (code := get(part, "executableCode")) is not None:
                self.conversation.said(str(mapping(code, "`executableCode`").get("code") or ""))
            elif part.keys() - {"thoughtSignature", "thought_signature"}:
                self._notes.append(f"a part with {shown(list(part))} was left out")

    def _read_call(self, call: dict[str, Any]) -> None:
        name = text(call.get("name"), "`functionCall.name`")
        told = call.get("id")
        call_id = told if isinstance(told, str) and told else f"call_{self._calls}"
        self._calls += 1
        self._waiting.append((call_id, name))
        self.conversation.called(call_id, name, arguments_of(call.get("args")))

    def _read_given(self, parts: list[dict[str, Any]]) -> None:
        given: list[Part] = []
        for part in parts:
            if (result := get(part, "functionResponse")) is not None:
                result = mapping(result, "`functionResponse`")
                self.conversation.result(self._answered(result), self._result_parts(result))
            else:
                given += self._read_part(part)
        if given:
            self.conversation.user(given)

    def _answered(self, result: dict[str, Any]) -> str:
        """The id of the call that this is the result of."""
        told, name = result.get("id"), result.get("name")
        for waiting in self._waiting:
            if waiting[0] == told or (not told and waiting[1] == name):
                self._waiting.remove(waiting)
                return waiting[0]
        return told if isinstance(told, str) and told else text(name, "`functionResponse.name`")

    def _result_parts(self, result: dict[str, Any]) -> list[Part]:
        told = result.get("response")
        parts = [text_part(result_text(told))]
        for part in objects(result.get("parts") or [], "`functionResponse.parts`"):
            parts += self._read_part(part)
        return parts

    def _read_part(self, part: dict[str, Any]) -> list[Part]:
        if "text" in part:
            return [text_part(text(part["text"], "`text`"))]
        if (data := get(part, "inlineData")) is not None:
            data = mapping(data, "`inlineData`")
            media_type = text(get(data, "mimeType"), "`inlineData.mimeType`")
            return [media_part(media_type, text(data.get("data"), "`inlineData.data`"))]
        if (file := get(part, "fileData")) is not None:
            return [image_part(text(get(mapping(file, "`fileData`"), "fileUri"), "`fileData.fileUri`"))]
        if (result := get(part, "codeExecutionResult")) is not None:
            return [text_part(str(mapping(result, "`codeExecutionResult`").get("output") or ""))]
        if part:
            self._notes.append(f"a part with {shown(list(part))} was left out")
        return []


def parts_of(entry: dict[str, Any]) -> list[dict[str, Any]]:
    parts = entry.get("parts")
    return objects([] if parts is None else [parts] if isinstance(parts, dict) else parts, "`parts`")


def result_text(told: Any) -> str:
    if isinstance(told, dict) and len(told) == 1:
        (only,) = told.values()
        if isinstance(only, str):
            return only
    return told if isinstance(told, str) else json.dumps(told, ensure_ascii=False)


def read_config(chat: dict[str, Any], config: dict[str, Any]) -> None:
    for theirs, ours in SAME.items():
        if (value := get(config, theirs)) is not None:
            chat[ours] = value
    schema = get(config, "responseSchema") or get(config, "responseJsonSchema") or get(config, "_responseJsonSchema")
    if schema is not None:
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    elif get(config, "responseMimeType") not in (None, "", "text/plain"):
        chat["response_format"] = {"type": "json_object"}
    thinking = get(config, "thinkingConfig")
    if isinstance(thinking, dict) and get(thinking, "thinkingBudget") == 0:
        chat["chat_template_kwargs"] = {"enable_thinking": False}


def read_tools(tools: Any, notes: list[str]) -> list[dict[str, Any]]:
    made = []
    for tool in objects([] if tools is None else tools, "`tools`"):
        declared = get(tool, "functionDeclarations")
        for function in objects([] if declared is None else declared, "`functionDeclarations`"):
            schema = get(function, "parametersJsonSchema")
            if schema is None:
                schema = json_schema(function.get("parameters"))
            name = text(function.get("name"), "`functionDeclarations[].name`")
            made.append(function_tool(name, function.get("description"), schema))
        for other in tool.keys() - {"functionDeclarations", "function_declarations"}:
            notes.append(f"the tool {shown(other)} runs on Google's servers and was left out")
    return made


def json_schema(schema: Any) -> Any:
    """Google's own schemas as JSON schemas: types in small letters, `nullable` as a type, numbers as numbers."""
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "type" and isinstance(value, str):
            made[name] = value.lower()
        elif name == "properties" and isinstance(value, dict):
            made[name] = {each: json_schema(inner) for each, inner in value.items()}
        elif name in ("items", "additionalProperties"):
            made[name] = json_schema(value)
        elif name in SUBSCHEMAS and isinstance(value, list):
            made[name] = [json_schema(inner) for inner in value]
        elif name in NUMERIC and isinstance(value, str) and value.isascii() and value.isdigit():
            made[name] = int(value)
        elif name not in ("nullable", "propertyOrdering", "property_ordering"):
            made[name] = value
    if schema.get("nullable") is True and isinstance(made.get("type"), str):
        made["type"] = [made["type"], "null"]
    return made
