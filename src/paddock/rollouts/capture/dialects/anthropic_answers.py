"""Answers as Anthropic's messages of content blocks, whole and streamed, and errors. No IO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from paddock.rollouts.capture.dialects.conversation import object_of
from paddock.rollouts.capture.dialects.teller import Block, Teller, new_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.rollouts.capture.refusals import Fault

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
KINDS = {
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
"""What a thought is signed with: nobody checks it here."""


class MessageTeller(Teller):
    """A call is told when it is whole: programs stumble over arguments that are no JSON."""

    def __init__(self, model: str, remember: Callable[[dict[str, Any]], None]) -> None:
        super().__init__()
        self._model = model
        self._remember = remember
        self._id = new_id("msg")
        self._content: list[dict[str, Any]] = []

    def started(self) -> bytes:
        return sse("message_start", {"message": {**self._message(None), "content": []}})

    def opened(self, block: Block) -> bytes:
        if block.kind == "call":
            return b""
        block.place = len(self._content)
        empty: dict[str, Any] = {"type": "text", "text": ""}
        if block.kind == "thought":
            empty = {"type": "thinking", "thinking": "", "signature": ""}
        self._content.append(empty)
        return sse("content_block_start", {"index": block.place, "content_block": empty})

    def grew(self, block: Block, piece: str) -> bytes:
        if block.kind == "call":
            return b""
        delta = {"type": "text_delta", "text": piece}
        if block.kind == "thought":
            delta = {"type": "thinking_delta", "thinking": piece}
        return sse("content_block_delta", {"index": block.place, "delta": delta})

    def closed(self, block: Block) -> bytes:
        if block.kind == "call":
            return self._tell_call(block)
        out = b""
        if block.kind == "thought":
            self._content[block.place] = {"type": "thinking", "thinking": block.text, "signature": SIGNATURE}
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            out = sse("content_block_delta", {"index": block.place, "delta": delta})
        else:
            self._content[block.place] = {"type": "text", "text": block.text}
        return out + sse("content_block_stop", {"index": block.place})

    def _tell_call(self, block: Block) -> bytes:
        place, value = len(self._content), object_of(block.text)
        head = {"type": "tool_use", "id": block.call_id, "name": block.name}
        self._content.append({**head, "input": value})
        delta = {"type": "input_json_delta", "partial_json": orjson.dumps(value).decode()}
        return b"".join(
            (
                sse("content_block_start", {"index": place, "content_block": {**head, "input": {}}}),
                sse("content_block_delta", {"index": place, "delta": delta}),
                sse("content_block_stop", {"index": place}),
            )
        )

    def finished(self) -> bytes:
        told = self._message(self.reason)
        self._remember({**told, "content": self._content})
        delta = {"stop_reason": told["stop_reason"], "stop_sequence": told["stop_sequence"]}
        return sse("message_delta", {"delta": delta, "usage": told["usage"]}) + sse("message_stop", {})

    def whole(self) -> bytes:
        return orjson.dumps({**self._message(self.reason), "content": self._content})

    def fail(self, fault: Fault) -> bytes:
        return sse("error", error(fault))

    def keep_alive(self) -> bytes:
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
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **data}) + b"\n\n"


def error(fault: Fault) -> dict[str, Any]:
    kind = KINDS.get(fault.status) or ("api_error" if fault.status >= 500 else "invalid_request_error")
    message = fault.message
    if fault.is_context_overflow:
        # Programs make room in their history when they read these words.
        sizes = f"{fault.sizes[0]} tokens > {fault.sizes[1]} maximum" if fault.sizes else message
        message = f"prompt is too long: {sizes}"
    elif fault.again:
        kind = "api_error"
    told: dict[str, Any] = {"type": kind, "message": message}
    if fault.code == THREAD_NOT_FOUND:
        told["details"] = {"error_code": THREAD_NOT_FOUND}
    return {"type": "error", "error": told}
