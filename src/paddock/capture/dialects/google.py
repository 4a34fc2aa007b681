"""Google's generateContent API: contents and parts in, candidates out, with the model in the path. No IO."""

from __future__ import annotations

import base64
import binascii
import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from paddock.capture.dialects.base import JSON, Dialect, DialectRequest, Route, check_depth, load_body
from paddock.capture.dialects.block_writer import BlockWriter, ReplyBlock, new_id
from paddock.capture.dialects.chat_builder import (
    ChatBuilder,
    Part,
    arguments_object,
    arguments_text,
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
    from collections.abc import Mapping

    from paddock.capture.errors import ErrorReply

METHOD = re.compile(r"(?:/v\w+)?/(?:[\w./-]+/)?models/(?P<name>[^:]+):(?P<method>\w+)")
MODELS = re.compile(r"/v\w+/models(?:/(?P<name>[^:]+))?")
ACTIONS = {
    "generateContent": Route("complete", stream=False),
    "streamGenerateContent": Route("complete", stream=True),
    "countTokens": Route("count_tokens", stream=False),
}
SAME_FIELDS = {
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
FINISH_REASONS = {"length": "MAX_TOKENS", "content_filter": "SAFETY"}
STATUSES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
}
SIGNATURE_PREFIX = b"paddock."
"""Before reasoning in a signature: programs that drop the reasoning itself send the signature back."""
SEPARATOR = b",\r\n"
LINE_ENDS = {"\u2028".encode(): b"\\u2028", "\u2029".encode(): b"\\u2029"}


class Google(Dialect):
    name: ClassVar[str] = "google"
    path: ClassVar[str] = "/v1beta/models/NAME:generateContent"
    key_header: ClassVar[str] = "x-goog-api-key"

    def find_route(self, path: str, query: Mapping[str, str]) -> Route | None:
        if (match := METHOD.fullmatch(path)) is not None and match["method"] in ACTIONS:
            route = ACTIONS[match["method"]]
            format_ = ARRAY if route.stream and query.get("alt") != "sse" else ""
            return replace(route, name=match["name"], format=format_)
        if (listed := MODELS.fullmatch(path)) is not None:
            return Route("lookup", "GET", name=listed["name"] or "")
        return None

    def matches(self, headers: Mapping[str, str], query: Mapping[str, str]) -> bool:
        return "x-goog-api-key" in headers or "x-goog-api-client" in headers or "key" in query

    def parse(self, raw: bytes, route: Route) -> DialectRequest:
        body = load_body(raw)
        check_depth(body)
        notes: list[str] = []
        # A request to count tokens may wrap the request whose tokens are counted.
        inner = get(body, "generateContentRequest")
        chat = to_chat(inner if route.action == "count_tokens" and isinstance(inner, dict) else body, notes)
        if route.stream:
            chat |= {"stream": True, "stream_options": {"include_usage": True}}
        return DialectRequest(body, chat, route.name or None, notes, route)

    def to_chat(self, body: dict[str, Any]) -> dict[str, Any]:
        return to_chat(body, [])

    def make_writer(self, request: DialectRequest, model: str, *, include_usage: bool) -> CandidateWriter:
        return CandidateWriter(request.model or model, array=request.route.format == ARRAY)

    def error_body(self, error: ErrorReply) -> bytes:
        return orjson.dumps(error_document(error, error.status))

    def token_count_body(self, tokens: int) -> bytes:
        return orjson.dumps({"totalTokens": tokens})

    def lookup_body(self, route: Route, model: str) -> bytes | None:
        entry = {
            "name": f"models/{model}",
            "displayName": model,
            "version": "1",
            "supportedGenerationMethods": list(ACTIONS),
        }
        if not route.name:
            return orjson.dumps({"models": [entry]})
        return orjson.dumps(entry) if route.name == model else None


# -- requests -----------------------------------------------------------------------------------------


def get(value: dict[str, Any], name: str) -> Any:
    """A field under either of Google's names: `inlineData` is also `inline_data`."""
    if name in value:
        return value[name]
    return value.get(re.sub(r"([A-Z])", r"_\1", name).lower())


def to_chat(body: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    reader = ContentReader(notes)
    if (system := get(body, "systemInstruction")) is not None:
        reader.read_system(system)
    contents = body.get("contents")
    for entry in require_objects([contents] if isinstance(contents, dict) else contents, "`contents`"):
        reader.read_content(entry)
    chat: dict[str, Any] = {"messages": reader.builder.build()}
    config = get(body, "generationConfig")
    read_config(chat, require_object({} if config is None else config, "`generationConfig`"))
    if tools := read_tools(body.get("tools"), notes):
        chat["tools"] = tools
    calling = get(body, "toolConfig")
    if isinstance(calling, dict) and isinstance(config := get(calling, "functionCallingConfig"), dict):
        mode = MODES.get(str(config.get("mode") or "AUTO").upper())
        if mode is None:
            raise BadRequest("`functionCallingConfig.mode` must be AUTO, ANY, NONE or VALIDATED")
        if tools or mode == "required":
            chat["tool_choice"] = mode
    return chat


class ContentReader:
    """Reads contents one by one. Calls without an id get one, and results are matched to their call."""

    def __init__(self, notes: list[str]) -> None:
        self.builder = ChatBuilder()
        self._notes = notes
        self._pending: list[tuple[str, str]] = []
        """Id and name of calls without a result."""
        self._calls = 0

    def read_system(self, system: Any) -> None:
        if isinstance(system, str):
            return self.builder.add_system(system)
        parts = parts_of(require_object(system, "`systemInstruction`"))
        self.builder.add_system("\n\n".join(require_text(part["text"], "`text`") for part in parts if "text" in part))

    def read_content(self, entry: dict[str, Any]) -> None:
        parts = parts_of(entry)
        role = entry.get("role") or "user"
        if role == "model":
            self._read_model_parts(parts)
        elif role in ("user", "function", "tool"):
            self._read_user_parts(parts)
        else:
            raise BadRequest(f"{shorten(role)} is no role: use user or model")

    def _read_model_parts(self, parts: list[dict[str, Any]]) -> None:
        self.builder.start_assistant_turn()
        thoughts = [require_text(part.get("text"), "`text`") for part in parts if part.get("thought")]
        if not thoughts:
            thoughts = [thought for part in parts if (thought := read_signature(get(part, "thoughtSignature")))]
        for thought in thoughts:
            self.builder.add_reasoning(thought)
        for part in parts:
            if part.get("thought"):
                continue
            if (call := get(part, "functionCall")) is not None:
                self._read_call(require_object(call, "`functionCall`"))
            elif "text" in part:
                self.builder.add_text(require_text(part["text"], "`text`"))
            elif (code := get(part, "executableCode")) is not None:
                self.builder.add_text(str(require_object(code, "`executableCode`").get("code") or ""))
            elif part.keys() - {"thoughtSignature", "thought_signature"}:
                self._notes.append(f"a part with {shorten(list(part))} was left out")

    def _read_call(self, call: dict[str, Any]) -> None:
        name = require_text(call.get("name"), "`functionCall.name`")
        own_id = call.get("id")
        call_id = own_id if isinstance(own_id, str) and own_id else f"call_{self._calls}"
        self._calls += 1
        self._pending.append((call_id, name))
        self.builder.add_tool_call(call_id, name, arguments_text(call.get("args")))

    def _read_user_parts(self, parts: list[dict[str, Any]]) -> None:
        user_parts: list[Part] = []
        for part in parts:
            if (result := get(part, "functionResponse")) is not None:
                result = require_object(result, "`functionResponse`")
                self.builder.add_tool_result(self._call_id(result), self._result_parts(result))
            else:
                user_parts += self._read_part(part)
        if user_parts:
            self.builder.add_user(user_parts)

    def _call_id(self, result: dict[str, Any]) -> str:
        """The id of the call that this is the result of."""
        own_id, name = result.get("id"), result.get("name")
        for pending in self._pending:
            if pending[0] == own_id or (not own_id and pending[1] == name):
                self._pending.remove(pending)
                return pending[0]
        return own_id if isinstance(own_id, str) and own_id else require_text(name, "`functionResponse.name`")

    def _result_parts(self, result: dict[str, Any]) -> list[Part]:
        parts = [text_part(result_text(result.get("response")))]
        for part in require_objects(result.get("parts") or [], "`functionResponse.parts`"):
            parts += self._read_part(part)
        return parts

    def _read_part(self, part: dict[str, Any]) -> list[Part]:
        if "text" in part:
            return [text_part(require_text(part["text"], "`text`"))]
        if (data := get(part, "inlineData")) is not None:
            data = require_object(data, "`inlineData`")
            media_type = require_text(get(data, "mimeType"), "`inlineData.mimeType`")
            return [media_part(media_type, require_text(data.get("data"), "`inlineData.data`"))]
        if (file := get(part, "fileData")) is not None:
            return [
                image_part(require_text(get(require_object(file, "`fileData`"), "fileUri"), "`fileData.fileUri`"))
            ]
        if (result := get(part, "codeExecutionResult")) is not None:
            return [text_part(str(require_object(result, "`codeExecutionResult`").get("output") or ""))]
        if part:
            self._notes.append(f"a part with {shorten(list(part))} was left out")
        return []


def parts_of(entry: dict[str, Any]) -> list[dict[str, Any]]:
    parts = entry.get("parts")
    return require_objects([] if parts is None else [parts] if isinstance(parts, dict) else parts, "`parts`")


def result_text(response: Any) -> str:
    if isinstance(response, dict) and len(response) == 1:
        (only,) = response.values()
        if isinstance(only, str):
            return only
    return response if isinstance(response, str) else json.dumps(response, ensure_ascii=False)


def read_config(chat: dict[str, Any], config: dict[str, Any]) -> None:
    for theirs, ours in SAME_FIELDS.items():
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
    functions = []
    for tool in require_objects([] if tools is None else tools, "`tools`"):
        declared = get(tool, "functionDeclarations")
        for function in require_objects([] if declared is None else declared, "`functionDeclarations`"):
            schema = get(function, "parametersJsonSchema")
            if schema is None:
                schema = json_schema(function.get("parameters"))
            name = require_text(function.get("name"), "`functionDeclarations[].name`")
            functions.append(function_tool(name, function.get("description"), schema))
        for other in tool.keys() - {"functionDeclarations", "function_declarations"}:
            notes.append(f"the tool {shorten(other)} runs on Google's servers and was left out")
    return functions


def json_schema(schema: Any) -> Any:
    """Google's own schema as a JSON schema: types in lower case, `nullable` as a type, numbers as numbers."""
    if not isinstance(schema, dict):
        return schema
    converted: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "type" and isinstance(value, str):
            converted[name] = value.lower()
        elif name == "properties" and isinstance(value, dict):
            converted[name] = {each: json_schema(inner) for each, inner in value.items()}
        elif name in ("items", "additionalProperties"):
            converted[name] = json_schema(value)
        elif name in SUBSCHEMAS and isinstance(value, list):
            converted[name] = [json_schema(inner) for inner in value]
        elif name in NUMERIC and isinstance(value, str) and value.isascii() and value.isdigit():
            converted[name] = int(value)
        elif name not in ("nullable", "propertyOrdering", "property_ordering"):
            converted[name] = value
    if schema.get("nullable") is True and isinstance(converted.get("type"), str):
        converted["type"] = [converted["type"], "null"]
    return converted


# -- replies ------------------------------------------------------------------------------------------


class CandidateWriter(BlockWriter):
    """Every event is a response with a part of the content. Tool calls are written when they are complete."""

    def __init__(self, model: str, *, array: bool) -> None:
        super().__init__()
        self.content_type = JSON if array else BlockWriter.content_type
        self._array = array
        self._model = model
        self._id = new_id("resp")
        self._parts: list[dict[str, Any]] = []
        self._separator = b"["
        self._signature: str | None = None

    def start_reply(self) -> bytes:
        return self.write_keep_alive()

    def open_block(self, block: ReplyBlock) -> bytes:
        block.index = len(self._parts)
        if block.kind != "tool_call":
            self._parts.append({})
        return b""

    def extend_block(self, block: ReplyBlock, piece: str) -> bytes:
        return b"" if block.kind == "tool_call" else self._event(part_of(block, piece))

    def close_block(self, block: ReplyBlock) -> bytes:
        if block.kind != "tool_call":
            self._parts[block.index] = part_of(block, block.text)
            if block.kind == "reasoning":
                self._signature = make_signature(block.text)
            return b""
        call = {"id": block.call_id, "name": block.name, "args": arguments_object(block.text)}
        part = self._signed({"functionCall": call})
        self._parts.append(part)
        return self._event(part)

    def finish_reply(self) -> bytes:
        last = self._signed({"text": ""})
        if "thoughtSignature" in last:
            self._parts.append(last)
        return self._event(last, last=True) + (b"]" if self._array else b"")

    def build_document(self) -> bytes:
        return orjson.dumps(self._response(self._parts or [{"text": ""}], last=True))

    def write_error(self, error: ErrorReply) -> bytes:
        event = self._frame(orjson.dumps(error_document(error, 500 if error.invites_retry else 400)))
        return event + b"]" if self._array else event

    def write_keep_alive(self) -> bytes:
        # Not every program ignores comments, but all ignore an empty line.
        return b"\n\n"

    def _signed(self, part: dict[str, Any]) -> dict[str, Any]:
        signature, self._signature = self._signature, None
        return part if signature is None else {**part, "thoughtSignature": signature}

    def _event(self, part: dict[str, Any], *, last: bool = False) -> bytes:
        return self._frame(orjson.dumps(self._response([part], last=last)))

    def _frame(self, data: bytes) -> bytes:
        if not self._array:
            # Google's JavaScript client takes these two characters for line ends.
            for sign, escaped in LINE_ENDS.items():
                data = data.replace(sign, escaped)
            return write_event(data)
        separator, self._separator = self._separator, SEPARATOR
        return separator + data

    def _response(self, parts: list[dict[str, Any]], *, last: bool) -> dict[str, Any]:
        candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": 0}
        response: dict[str, Any] = {"candidates": [candidate], "modelVersion": self._model, "responseId": self._id}
        if last:
            candidate["finishReason"] = FINISH_REASONS.get(self.reason, "STOP")
            response["usageMetadata"] = {
                "promptTokenCount": self.usage.prompt,
                "candidatesTokenCount": max(0, self.usage.completion - self.usage.reasoning),
                "thoughtsTokenCount": self.usage.reasoning,
                "cachedContentTokenCount": self.usage.cached,
                "totalTokenCount": self.usage.prompt + self.usage.completion,
            }
        return response


def part_of(block: ReplyBlock, text: str) -> dict[str, Any]:
    return {"text": text, "thought": True} if block.kind == "reasoning" else {"text": text}


def error_document(error: ErrorReply, status: int) -> dict[str, Any]:
    message = error.message
    if error.is_context_overflow and (sizes := error.sizes):
        message = f"The input token count ({sizes[0]}) exceeds the maximum number of tokens allowed ({sizes[1]})."
    name = STATUSES.get(status) or ("INTERNAL" if status >= 500 else "INVALID_ARGUMENT")
    return {"error": {"code": status, "message": message, "status": name}}


def make_signature(thought: str) -> str:
    return base64.b64encode(SIGNATURE_PREFIX + thought.encode("utf-8", "surrogatepass")).decode()


def read_signature(signature: Any) -> str:
    if not isinstance(signature, str):
        return ""
    try:
        # Some programs use the URL-safe alphabet of base64.
        data = base64.b64decode(signature.replace("-", "+").replace("_", "/"), validate=True)
        return (
            data[len(SIGNATURE_PREFIX) :].decode("utf-8", "surrogatepass")
            if data.startswith(SIGNATURE_PREFIX)
            else ""
        )
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return ""
