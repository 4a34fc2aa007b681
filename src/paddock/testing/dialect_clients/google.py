"""A plain client of Google's generateContent API."""

from __future__ import annotations

from typing import Any

from paddock.testing.dialect_clients import (
    TOOL,
    ClientReply,
    ClientRequest,
    ClientToolCall,
    DialectClient,
    Entries,
)


class GoogleClient(DialectClient):
    name = "google"
    conversation_field = "contents"
    system_field = "systemInstruction"

    def auth_headers(self, key: str) -> dict[str, str]:
        return {"x-goog-api-key": key}

    def request(self, conversation: Entries, *, stream: bool = False, tools: bool = True) -> ClientRequest:
        body: dict[str, Any] = {"contents": conversation}
        if tools:
            schema = {"type": "OBJECT", "properties": {"command": {"type": "STRING"}}, "required": ["command"]}
            body["tools"] = [{"functionDeclarations": [{"name": TOOL, "parameters": schema}]}]
        method = "streamGenerateContent?alt=sse" if stream else "generateContent"
        return ClientRequest(f"/v1beta/models/m:{method}", body)

    def force_tool(self, request: ClientRequest) -> None:
        request.body["toolConfig"] = {"functionCallingConfig": {"mode": "ANY"}}

    def count_request(self, request: ClientRequest) -> ClientRequest:
        return ClientRequest(
            "/v1beta/models/m:countTokens", {"generateContentRequest": {**request.body, "model": "models/m"}}
        )

    def read_count(self, document: dict[str, Any]) -> int:
        return int(document["totalTokens"])

    def models_url(self, url: str) -> str:
        return f"{url}/v1beta/models"

    def read_models(self, document: dict[str, Any]) -> list[str]:
        return [model["name"].removeprefix("models/") for model in document["models"]]

    def user_turn(self, text: str, image: str | None = None) -> Entries:
        parts: Entries = [{"text": text}]
        if image is not None:
            parts.append({"inlineData": {"mimeType": "image/png", "data": image}})
        return [{"role": "user", "parts": parts}]

    def reply_turn(self, document: dict[str, Any]) -> Entries:
        # Programs drop thoughts from what they send back, and keep signatures.
        content = document["candidates"][0]["content"]
        return [{**content, "parts": [part for part in content["parts"] if not part.get("thought")]}]

    def result_turn(self, calls: list[ClientToolCall], texts: list[str], image: str | None = None) -> Entries:
        parts: Entries = []
        for call, text in zip(calls, texts, strict=True):
            result: dict[str, Any] = {"id": call.id, "name": call.name, "response": {"output": text}}
            if image is not None:
                result["parts"] = [{"inlineData": {"mimeType": "image/png", "data": image}}]
            parts.append({"functionResponse": result})
        return [{"role": "user", "parts": parts}]

    def read_reply(self, document: dict[str, Any]) -> ClientReply:
        candidate, usage = document["candidates"][0], document["usageMetadata"]
        text, thinking, calls = "", "", []
        for part in candidate["content"]["parts"]:
            if part.get("thought"):
                thinking += part["text"]
            elif "functionCall" in part:
                call = part["functionCall"]
                calls.append(ClientToolCall(call["id"], call["name"], call["args"]))
            else:
                text += part["text"]
        reason = {"STOP": "stop", "MAX_TOKENS": "length"}[candidate["finishReason"]]
        tokens = usage["promptTokenCount"], usage["candidatesTokenCount"] + usage["thoughtsTokenCount"]
        return ClientReply(text, thinking, calls, "calls" if calls and reason == "stop" else reason, *tokens)

    def assemble(self, events: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
        parts: Entries = []
        for _, data in events:
            for part in data["candidates"][0]["content"]["parts"]:
                same = parts and "text" in part and "text" in parts[-1]
                if same and part.keys() | {"thoughtSignature"} == parts[-1].keys() | {"thoughtSignature"}:
                    parts[-1] = {**parts[-1], **part, "text": parts[-1]["text"] + part["text"]}
                else:
                    parts.append(dict(part))
        last = events[-1][1]
        candidate = {**last["candidates"][0], "content": {"role": "model", "parts": parts}}
        return {**last, "candidates": [candidate]}

    def read_error(self, document: dict[str, Any]) -> str:
        text_of_item = document["error"]
        if not isinstance(text_of_item["code"], int) or not text_of_item["status"].isupper():
            raise KeyError("status")
        return str(text_of_item["message"])

    def is_overflow(self, document: dict[str, Any]) -> bool:
        return "exceeds the maximum number of tokens" in self.read_error(document)
