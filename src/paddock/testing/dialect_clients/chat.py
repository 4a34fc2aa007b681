"""A plain client of OpenAI chat completions."""

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


class ChatCompletionsClient(DialectClient):
    name = "chat"

    def auth_headers(self, key: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {key}"}

    def request(self, conversation: Entries, *, stream: bool = False, tools: bool = True) -> ClientRequest:
        body: dict[str, Any] = {"model": "m", "messages": conversation}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if tools:
            body["tools"] = [{"type": "function", "function": {"name": TOOL, "parameters": PARAMETERS}}]
        return ClientRequest("/v1/chat/completions", body)

    def force_tool(self, request: ClientRequest) -> None:
        request.body["tool_choice"] = "required"

    def count_request(self, request: ClientRequest) -> ClientRequest:
        raise NotImplementedError

    def read_count(self, document: dict[str, Any]) -> int:
        raise NotImplementedError

    def models_url(self, url: str) -> str:
        return f"{url}/v1/models"

    def read_models(self, document: dict[str, Any]) -> list[str]:
        return [model["id"] for model in document["data"]]

    def user_turn(self, text: str, image: str | None = None) -> Entries:
        if image is None:
            return [{"role": "user", "content": text}]
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
        return [{"role": "user", "content": [{"type": "text", "text": text}, part]}]

    def reply_turn(self, document: dict[str, Any]) -> Entries:
        return [document["choices"][0]["message"]]

    def result_turn(self, calls: list[ClientToolCall], texts: list[str], image: str | None = None) -> Entries:
        entries: Entries = [
            {"role": "tool", "tool_call_id": call.id, "content": text}
            for call, text in zip(calls, texts, strict=True)
        ]
        return entries if image is None else entries + self.user_turn("the image", image)

    def read_reply(self, document: dict[str, Any]) -> ClientReply:
        choice = document["choices"][0]
        message, usage = choice["message"], document["usage"]
        calls = [
            ClientToolCall(call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls") or ()
        ]
        reason = {"tool_calls": "calls"}.get(choice["finish_reason"], choice["finish_reason"])
        tokens = usage["prompt_tokens"], usage["completion_tokens"]
        return ClientReply(message["content"] or "", message.get("reasoning_content") or "", calls, reason, *tokens)

    def assemble(self, events: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        document: dict[str, Any] = {"choices": [{"message": message}]}
        calls: list[dict[str, Any]] = []
        for _, chunk in events:
            document["usage"] = chunk.get("usage") or document.get("usage")
            for choice in chunk["choices"]:
                for name in ("content", "reasoning_content"):
                    if piece := choice["delta"].get(name):
                        message[name] = message.get(name, "") + piece
                for piece in choice["delta"].get("tool_calls") or ():
                    if piece["index"] == len(calls):
                        calls.append({"type": "function", "id": piece["id"], "function": dict(piece["function"])})
                    else:
                        calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
                if choice.get("finish_reason"):
                    document["choices"][0]["finish_reason"] = choice["finish_reason"]
        if calls:
            message["tool_calls"] = calls
        return document

    def read_error(self, document: dict[str, Any]) -> str:
        return str(document["error"]["message"])

    def is_overflow(self, document: dict[str, Any]) -> bool:
        return bool(document["error"]["code"] == "context_length_exceeded")
