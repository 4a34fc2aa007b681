"""A plain client of the Responses API."""

from __future__ import annotations

import json
from typing import Any

from paddock.testing.dialect_clients import (
    PARAMETERS,
    TOOL,
    ClientReply,
    ClientRequest,
    ClientToolCall,
    DialectClient,
    Entries,
)


class ResponsesClient(DialectClient):
    name = "responses"
    conversation_field = "input"
    system_field = "instructions"

    def auth_headers(self, key: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {key}"}

    def request(self, conversation: Entries, *, stream: bool = False, tools: bool = True) -> ClientRequest:
        body: dict[str, Any] = {"model": "m", "input": conversation, "store": False, "stream": stream}
        body["include"] = ["reasoning.encrypted_content"]
        if tools:
            body["tools"] = [{"type": "function", "name": TOOL, "parameters": PARAMETERS, "strict": False}]
        return ClientRequest("/v1/responses", body)

    def force_tool(self, request: ClientRequest) -> None:
        request.body["tool_choice"] = {"type": "function", "name": TOOL}

    def count_request(self, request: ClientRequest) -> ClientRequest:
        return ClientRequest(
            "/v1/responses/input_tokens", {name: request.body[name] for name in ("model", "input", "tools")}
        )

    def read_count(self, document: dict[str, Any]) -> int:
        return int(document["input_tokens"])

    def models_url(self, url: str) -> str:
        return f"{url}/v1/models"

    def read_models(self, document: dict[str, Any]) -> list[str]:
        return [model["id"] for model in document["data"]]

    def user_turn(self, text: str, image: str | None = None) -> Entries:
        parts: Entries = [{"type": "input_text", "text": text}]
        if image is not None:
            parts.append(self._image(image))
        return [{"type": "message", "role": "user", "content": parts}]

    def reply_turn(self, document: dict[str, Any]) -> Entries:
        output: Entries = document["output"]
        return output

    def result_turn(self, calls: list[ClientToolCall], texts: list[str], image: str | None = None) -> Entries:
        entries: Entries = []
        for call, text in zip(calls, texts, strict=True):
            output: Any = text
            if image is not None:
                output = [{"type": "input_text", "text": text}, self._image(image)]
            entries.append({"type": "function_call_output", "call_id": call.id, "output": output})
        return entries

    def _image(self, image: str) -> dict[str, Any]:
        return {"type": "input_image", "image_url": f"data:image/png;base64,{image}", "detail": "auto"}

    def read_reply(self, document: dict[str, Any]) -> ClientReply:
        text, thinking, calls = "", "", []
        for item in document["output"]:
            if item["type"] == "message":
                text += "".join(part["text"] for part in item["content"])
            elif item["type"] == "reasoning":
                thinking += "".join(part["text"] for part in item["content"])
            else:
                calls.append(ClientToolCall(item["call_id"], item["name"], json.loads(item["arguments"])))
        reason = "length" if document["status"] == "incomplete" else "calls" if calls else "stop"
        usage = document["usage"]
        return ClientReply(text, thinking, calls, reason, usage["input_tokens"], usage["output_tokens"])

    def assemble(self, events: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
        deltas: dict[str, str] = {}
        done: dict[int, dict[str, Any]] = {}
        for number, (kind, data) in enumerate(events):
            if data["type"] != kind or data["sequence_number"] != number:
                raise ValueError(f"event {number} is {kind}, and says that it is {data}")
            if kind.endswith(".delta"):
                deltas[data["item_id"]] = deltas.get(data["item_id"], "") + data["delta"]
            elif kind == "response.output_item.done":
                done[data["output_index"]] = data["item"]
        whole: dict[str, Any] = events[-1][1]["response"]
        if whole["output"] != [done[index] for index in sorted(done)]:
            raise ValueError("the last event holds other items than were sent before")
        for item in whole["output"]:
            text = item.get("arguments") or "".join(part.get("text", "") for part in item.get("content") or ())
            if deltas.get(item["id"], "") != text:
                raise ValueError(f"the pieces add up to {deltas.get(item['id'])!r}, the item says {text!r}")
        return whole

    def read_error(self, document: dict[str, Any]) -> str:
        return str(document["error"]["message"])

    def is_overflow(self, document: dict[str, Any]) -> bool:
        return bool(document["error"]["code"] == "context_length_exceeded")
