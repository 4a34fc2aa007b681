"""Plain clients of the four dialects: how each asks, and what it hears. For checks; no IO here.

They share no code with the proxy, so that both cannot be wrong in the same way.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

Entries = list[dict[str, Any]]
"""A piece of a conversation, in the form of a dialect."""
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOL = "bash"


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: Any


@dataclass(frozen=True, slots=True)
class Heard:
    """An answer, in no dialect."""

    text: str = ""
    thinking: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    reason: str = ""
    """`stop`, `length` or `calls`."""
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """An HTTP request."""

    path: str
    body: dict[str, Any]


class Speaker(ABC):
    name: ClassVar[str]

    @abstractmethod
    def key(self, key: str) -> dict[str, str]:
        """The headers that show a key."""

    @abstractmethod
    def ask(self, conversation: Entries, *, stream: bool = False, tools: bool = True) -> Ask: ...

    @abstractmethod
    def force(self, ask: Ask) -> None:
        """Change a request so that it forces the model to call the tool."""

    @abstractmethod
    def count(self, ask: Ask) -> Ask:
        """Ask for the tokens of a request instead of its answer."""

    @abstractmethod
    def counted(self, document: dict[str, Any]) -> int: ...

    @abstractmethod
    def models(self, url: str) -> str:
        """Where the models are listed."""

    @abstractmethod
    def listed(self, document: dict[str, Any]) -> list[str]: ...

    @abstractmethod
    def user(self, text: str, picture: str | None = None) -> Entries: ...

    @abstractmethod
    def said(self, document: dict[str, Any]) -> Entries:
        """An answer, as a program sends it back."""

    @abstractmethod
    def results(self, calls: list[ToolCall], texts: list[str], picture: str | None = None) -> Entries: ...

    @abstractmethod
    def hear(self, document: dict[str, Any]) -> Heard: ...

    @abstractmethod
    def gather(self, events: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
        """The document that the events of a stream add up to."""

    @abstractmethod
    def error(self, document: dict[str, Any]) -> str:
        """What a refusal says; raises KeyError or TypeError if it has the wrong shape."""

    @abstractmethod
    def is_overflow(self, document: dict[str, Any]) -> bool:
        """Whether a program that speaks this dialect sees that its conversation is too long."""


class ChatSpeaker(Speaker):
    name = "chat"

    def key(self, key: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {key}"}

    def ask(self, conversation: Entries, *, stream: bool = False, tools: bool = True) -> Ask:
        body: dict[str, Any] = {"model": "m", "messages": conversation}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if tools:
            body["tools"] = [{"type": "function", "function": {"name": TOOL, "parameters": PARAMETERS}}]
        return Ask("/v1/chat/completions", body)

    def force(self, ask: Ask) -> None:
        ask.body["tool_choice"] = "required"

    def count(self, ask: Ask) -> Ask:
        raise NotImplementedError

    def counted(self, document: dict[str, Any]) -> int:
        raise NotImplementedError

    def models(self, url: str) -> str:
        return f"{url}/v1/models"

    def listed(self, document: dict[str, Any]) -> list[str]:
        return [model["id"] for model in document["data"]]

    def user(self, text: str, picture: str | None = None) -> Entries:
        if picture is None:
            return [{"role": "user", "content": text}]
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
        return [{"role": "user", "content": [{"type": "text", "text": text}, image]}]

    def said(self, document: dict[str, Any]) -> Entries:
        return [document["choices"][0]["message"]]

    def results(self, calls: list[ToolCall], texts: list[str], picture: str | None = None) -> Entries:
        made: Entries = [
            {"role": "tool", "tool_call_id": call.id, "content": text}
            for call, text in zip(calls, texts, strict=True)
        ]
        return made if picture is None else made + self.user("the picture", picture)

    def hear(self, document: dict[str, Any]) -> Heard:
        choice = document["choices"][0]
        message, usage = choice["message"], document["usage"]
        calls = [
            ToolCall(call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls") or ()
        ]
        reason = {"tool_calls": "calls"}.get(choice["finish_reason"], choice["finish_reason"])
        tokens = usage["prompt_tokens"], usage["completion_tokens"]
        return Heard(message["content"] or "", message.get("reasoning_content") or "", calls, reason, *tokens)

    def gather(self, events: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
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

    def error(self, document: dict[str, Any]) -> str:
        return str(document["error"]["message"])

    def is_overflow(self, document: dict[str, Any]) -> bool:
        return bool(document["error"]["code"] == "context_length_exceeded")


class ResponsesSpeaker(Speaker):
    name = "responses"

    def key(self, key: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {key}"}

    def ask(self, conversation: Entries, *, stream: bool = False, tools: bool = True) -> Ask:
        body: dict[str, Any] = {"model": "m", "input": conversation, "store": False, "stream": stream}
        body["include"] = ["reasoning.encrypted_content"]
        if tools:
            body["tools"] = [{"type": "function", "name": TOOL, "parameters": PARAMETERS, "strict": False}]
        return Ask("/v1/responses", body)

    def force(self, ask: Ask) -> None:
        ask.body["tool_choice"] = {"type": "function", "name": TOOL}

    def count(self, ask: Ask) -> Ask:
        return Ask("/v1/responses/input_tokens", {name: ask.body[name] for name in ("model", "input", "tools")})

    def counted(self, document: dict[str, Any]) -> int:
        return int(document["input_tokens"])

    def models(self, url: str) -> str:
        return f"{url}/v1/models"

    def listed(self, document: dict[str, Any]) -> list[str]:
        return [model["id"] for model in document["data"]]

    def user(self, text: str, picture: str | None = None) -> Entries:
        parts: Entries = [{"type": "input_text", "text": text}]
        if picture is not None:
            parts.append(self._picture(picture))
        return [{"type": "message", "role": "user", "content": parts}]

    def said(self, document: dict[str, Any]) -> Entries:
        found: Entries = document["output"]
        return found

    def results(self, calls: list[ToolCall], texts: list[str], picture: str | None = None) -> Entries:
        made: Entries = []
        for call, text in zip(calls, texts, strict=True):
            output: Any = text
            if picture is not None:
                output = [{"type": "input_text", "text": text}, self._picture(picture)]
            made.append({"type": "function_call_output", "call_id": call.id, "output": output})
        return made

    def _picture(self, picture: str) -> dict[str, Any]:
        return {"type": "input_image", "image_url": f"data:image/png;base64,{picture}", "detail": "auto"}

    def hear(self, document: dict[str, Any]) -> Heard:
        text, thinking, calls = "", "", []
        for item in document["output"]:
            if item["type"] == "message":
                text += "".join(part["text"] for part in item["content"])
            elif item["type"] == "reasoning":
                thinking += "".join(part["text"] for part in item["content"])
            else:
                calls.append(ToolCall(item["call_id"], item["name"], json.loads(item["arguments"])))
        reason = "length" if document["status"] == "incomplete" else "calls" if calls else "stop"
        usage = document["usage"]
        return Heard(text, thinking, calls, reason, usage["input_tokens"], usage["output_tokens"])

    def gather(self, events: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
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
            raise ValueError("the last event holds other items than were told before")
        for item in whole["output"]:
            told = item.get("arguments") or "".join(part.get("text", "") for part in item.get("content") or ())
            if deltas.get(item["id"], "") != told:
                raise ValueError(f"the pieces add up to {deltas.get(item['id'])!r}, the item says {told!r}")
        return whole

    def error(self, document: dict[str, Any]) -> str:
        return str(document["error"]["message"])

    def is_overflow(self, document: dict[str, Any]) -> bool:
        return bool(document["error"]["code"] == "context_length_exceeded")


class AnthropicSpeaker(Speaker):
    name = "anthropic"

    def key(self, key: str) -> dict[str, str]:
        return {"x-api-key": key, "anthropic-version": "2023-06-01"}

    def ask(self, conversation: Entries, *, stream: bool = False, tools: bool = True) -> Ask:
        body: dict[str, Any] = {"model": "m", "max_tokens": 1000, "messages": conversation, "stream": stream}
        if tools:
            body["tools"] = [{"name": TOOL, "input_schema": PARAMETERS}]
        return Ask("/v1/messages", body)

    def force(self, ask: Ask) -> None:
        ask.body["tool_choice"] = {"type": "any"}

    def count(self, ask: Ask) -> Ask:
        counted = {name: ask.body[name] for name in ("model", "messages", "tools")}
        return Ask("/v1/messages/count_tokens", counted)

    def counted(self, document: dict[str, Any]) -> int:
        return int(document["input_tokens"])

    def models(self, url: str) -> str:
        return f"{url}/v1/models"

    def listed(self, document: dict[str, Any]) -> list[str]:
        return [model["id"] for model in document["data"] if model["type"] == "model"]

    def user(self, text: str, picture: str | None = None) -> Entries:
        blocks: Entries = [{"type": "text", "text": text}]
        if picture is not None:
            blocks.append(self._picture(picture))
        return [{"role": "user", "content": blocks}]

    def said(self, document: dict[str, Any]) -> Entries:
        return [{"role": "assistant", "content": document["content"]}]

    def results(self, calls: list[ToolCall], texts: list[str], picture: str | None = None) -> Entries:
        blocks: Entries = []
        for call, text in zip(calls, texts, strict=True):
            content: Any = text
            if picture is not None:
                content = [{"type": "text", "text": text}, self._picture(picture)]
            blocks.append({"type": "tool_result", "tool_use_id": call.id, "content": content})
        return [{"role": "user", "content": blocks}]

    def _picture(self, picture: str) -> dict[str, Any]:
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": picture}}

    def hear(self, document: dict[str, Any]) -> Heard:
        blocks = document["content"]
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        thinking = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
        calls = [
            ToolCall(block["id"], block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"
        ]
        reasons = {"end_turn": "stop", "max_tokens": "length", "tool_use": "calls"}
        usage = document["usage"]
        reason = reasons[document["stop_reason"]]
        return Heard(text, thinking, calls, reason, usage["input_tokens"], usage["output_tokens"])

    def gather(self, events: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
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

    def error(self, document: dict[str, Any]) -> str:
        if document["type"] != "error":
            raise KeyError("error")
        return str(document["error"]["message"])

    def is_overflow(self, document: dict[str, Any]) -> bool:
        return "prompt is too long" in self.error(document)


class GoogleSpeaker(Speaker):
    name = "google"

    def key(self, key: str) -> dict[str, str]:
        return {"x-goog-api-key": key}

    def ask(self, conversation: Entries, *, stream: bool = False, tools: bool = True) -> Ask:
        body: dict[str, Any] = {"contents": conversation}
        if tools:
            schema = {"type": "OBJECT", "properties": {"command": {"type": "STRING"}}, "required": ["command"]}
            body["tools"] = [{"functionDeclarations": [{"name": TOOL, "parameters": schema}]}]
        method = "streamGenerateContent?alt=sse" if stream else "generateContent"
        return Ask(f"/v1beta/models/m:{method}", body)

    def force(self, ask: Ask) -> None:
        ask.body["toolConfig"] = {"functionCallingConfig": {"mode": "ANY"}}

    def count(self, ask: Ask) -> Ask:
        return Ask("/v1beta/models/m:countTokens", {"generateContentRequest": {**ask.body, "model": "models/m"}})

    def counted(self, document: dict[str, Any]) -> int:
        return int(document["totalTokens"])

    def models(self, url: str) -> str:
        return f"{url}/v1beta/models"

    def listed(self, document: dict[str, Any]) -> list[str]:
        return [model["name"].removeprefix("models/") for model in document["models"]]

    def user(self, text: str, picture: str | None = None) -> Entries:
        parts: Entries = [{"text": text}]
        if picture is not None:
            parts.append({"inlineData": {"mimeType": "image/png", "data": picture}})
        return [{"role": "user", "parts": parts}]

    def said(self, document: dict[str, Any]) -> Entries:
        # Programs drop thoughts from what they send back, and keep signatures.
        content = document["candidates"][0]["content"]
        return [{**content, "parts": [part for part in content["parts"] if not part.get("thought")]}]

    def results(self, calls: list[ToolCall], texts: list[str], picture: str | None = None) -> Entries:
        parts: Entries = []
        for call, text in zip(calls, texts, strict=True):
            result: dict[str, Any] = {"id": call.id, "name": call.name, "response": {"output": text}}
            if picture is not None:
                result["parts"] = [{"inlineData": {"mimeType": "image/png", "data": picture}}]
            parts.append({"functionResponse": result})
        return [{"role": "user", "parts": parts}]

    def hear(self, document: dict[str, Any]) -> Heard:
        candidate, usage = document["candidates"][0], document["usageMetadata"]
        text, thinking, calls = "", "", []
        for part in candidate["content"]["parts"]:
            if part.get("thought"):
                thinking += part["text"]
            elif "functionCall" in part:
                call = part["functionCall"]
                calls.append(ToolCall(call["id"], call["name"], call["args"]))
            else:
                text += part["text"]
        reason = {"STOP": "stop", "MAX_TOKENS": "length"}[candidate["finishReason"]]
        tokens = usage["promptTokenCount"], usage["candidatesTokenCount"] + usage["thoughtsTokenCount"]
        return Heard(text, thinking, calls, "calls" if calls and reason == "stop" else reason, *tokens)

    def gather(self, events: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
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

    def error(self, document: dict[str, Any]) -> str:
        told = document["error"]
        if not isinstance(told["code"], int) or not told["status"].isupper():
            raise KeyError("status")
        return str(told["message"])

    def is_overflow(self, document: dict[str, Any]) -> bool:
        return "exceeds the maximum number of tokens" in self.error(document)


SPEAKERS: dict[str, Speaker] = {
    speaker.name: speaker for speaker in (ChatSpeaker(), ResponsesSpeaker(), AnthropicSpeaker(), GoogleSpeaker())
}
