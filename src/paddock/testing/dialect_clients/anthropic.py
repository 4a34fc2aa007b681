"""A plain client of Anthropic's Messages API."""

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


class AnthropicClient(DialectClient):
    name = "anthropic"
    system_field = "system"

    def auth_headers(self, key: str) -> dict[str, str]:
        return {"x-api-key": key, "anthropic-version": "2023-06-01"}

    def request(self, conversation: Entries, *, stream: bool = False, tools: bool = True) -> ClientRequest:
        body: dict[str, Any] = {"model": "m", "max_tokens": 1000, "messages": conversation, "stream": stream}
        if tools:
            body["tools"] = [{"name": TOOL, "input_schema": PARAMETERS}]
        return ClientRequest("/v1/messages", body)

    def force_tool(self, request: ClientRequest) -> None:
        request.body["tool_choice"] = {"type": "any"}

    def count_request(self, request: ClientRequest) -> ClientRequest:
        counted = {name: request.body[name] for name in ("model", "messages", "tools")}
        return ClientRequest("/v1/messages/count_tokens", counted)

    def read_count(self, document: dict[str, Any]) -> int:
        return int(document["input_tokens"])

    def models_url(self, url: str) -> str:
        return f"{url}/v1/models"

    def read_models(self, document: dict[str, Any]) -> list[str]:
        return [model["id"] for model in document["data"] if model["type"] == "model"]

    def user_turn(self, text: str, image: str | None = None) -> Entries:
        blocks: Entries = [{"type": "text", "text": text}]
        if image is not None:
            blocks.append(self._image(image))
        return [{"role": "user", "content": blocks}]

    def reply_turn(self, document: dict[str, Any]) -> Entries:
        return [{"role": "assistant", "content": document["content"]}]

    def result_turn(self, calls: list[ClientToolCall], texts: list[str], image: str | None = None) -> Entries:
        blocks: Entries = []
        for call, text in zip(calls, texts, strict=True):
            content: Any = text
            if image is not None:
                content = [{"type": "text", "text": text}, self._image(image)]
            blocks.append({"type": "tool_result", "tool_use_id": call.id, "content": content})
        return [{"role": "user", "content": blocks}]

    def _image(self, image: str) -> dict[str, Any]:
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": image}}

    def read_reply(self, document: dict[str, Any]) -> ClientReply:
        blocks = document["content"]
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        thinking = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
        calls = [
            ClientToolCall(block["id"], block["name"], block["input"])
            for block in blocks
            if block["type"] == "tool_use"
        ]
        reasons = {"end_turn": "stop", "max_tokens": "length", "tool_use": "calls"}
        usage = document["usage"]
        reason = reasons[document["stop_reason"]]
        return ClientReply(text, thinking, calls, reason, usage["input_tokens"], usage["output_tokens"])

    def assemble(self, events: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
        message: dict[str, Any] = {}
        pieces: dict[int, str] = {}
        for kind, data in events:
            if data["type"] != kind:
                raise ValueError(f"an event {kind} says that it is {data['type']}")
            if kind == "message_start":
                message = data["message"]
            elif kind == "content_block_start":
                if data["index"] != len(message["content"]):
                    raise ValueError(f"block {data['index']} begins after {len(message['content'])} blocks")
                message["content"].append(data["content_block"])
            elif kind == "content_block_delta":
                self._grow(message["content"][data["index"]], data["delta"], pieces, data["index"])
            elif kind == "content_block_stop" and data["index"] in pieces:
                message["content"][data["index"]]["input"] = json.loads(pieces[data["index"]] or "{}")
            elif kind == "message_delta":
                message |= {**data["delta"], "usage": data["usage"]}
        if events[-1][0] != "message_stop":
            raise ValueError(f"the last event is {events[-1][0]}")
        return message

    def _grow(self, block: dict[str, Any], delta: dict[str, Any], pieces: dict[int, str], index: int) -> None:
        if delta["type"] == "input_json_delta":
            pieces[index] = pieces.get(index, "") + delta["partial_json"]
        else:
            name = delta["type"].removesuffix("_delta")
            block[name] += delta[name]

    def read_error(self, document: dict[str, Any]) -> str:
        if document["type"] != "error":
            raise KeyError("error")
        return str(document["error"]["message"])

    def is_overflow(self, document: dict[str, Any]) -> bool:
        return "prompt is too long" in self.read_error(document)
