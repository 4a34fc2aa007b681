"""Answers as Google's candidates, whole and streamed, thoughts in signatures, and errors. No IO."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any

import orjson

from paddock.rollouts.capture.dialects.base import JSON
from paddock.rollouts.capture.dialects.conversation import object_of
from paddock.rollouts.capture.dialects.teller import Block, Teller, new_id

if TYPE_CHECKING:
    from paddock.rollouts.capture.refusals import Fault

FINISH_REASONS = {"length": "MAX_TOKENS", "content_filter": "SAFETY"}
STATUSES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
}
SEALED = b"paddock."
"""Before a thought in a signature: programs send that back where they drop the thought itself."""
SEPARATOR = b",\r\n"
LINE_ENDS = {"\u2028".encode(): b"\\u2028", "\u2029".encode(): b"\\u2029"}


class CandidateTeller(Teller):
    """Every event is an answer of its own with a part of the content. Calls are told when they are whole."""

    def __init__(self, model: str, *, array: bool) -> None:
        super().__init__()
        self.content_type = JSON if array else Teller.content_type
        self._array = array
        self._model = model
        self._id = new_id("resp")
        self._parts: list[dict[str, Any]] = []
        self._separator = b"["
        self._signature: str | None = None

    def started(self) -> bytes:
        return self.keep_alive()

    def opened(self, block: Block) -> bytes:
        block.place = len(self._parts)
        if block.kind != "call":
            self._parts.append({})
        return b""

    def grew(self, block: Block, piece: str) -> bytes:
        return b"" if block.kind == "call" else self._event(part_of(block, piece))

    def closed(self, block: Block) -> bytes:
        if block.kind != "call":
            self._parts[block.place] = part_of(block, block.text)
            if block.kind == "thought":
                self._signature = sealed(block.text)
            return b""
        call = {"id": block.call_id, "name": block.name, "args": object_of(block.text)}
        part = self._signed({"functionCall": call})
        self._parts.append(part)
        return self._event(part)

    def finished(self) -> bytes:
        last = self._signed({"text": ""})
        if "thoughtSignature" in last:
            self._parts.append(last)
        return self._event(last, last=True) + (b"]" if self._array else b"")

    def whole(self) -> bytes:
        return orjson.dumps(self._answer(self._parts or [{"text": ""}], last=True))

    def fail(self, fault: Fault) -> bytes:
        told = self._frame(orjson.dumps(error(fault, 500 if fault.again else 400)))
        return told + b"]" if self._array else told

    def keep_alive(self) -> bytes:
        # Not every program knows comments, but an empty line means nothing to any of them.
        return b"\n\n"

    def _signed(self, part: dict[str, Any]) -> dict[str, Any]:
        signature, self._signature = self._signature, None
        return part if signature is None else {**part, "thoughtSignature": signature}

    def _event(self, part: dict[str, Any], *, last: bool = False) -> bytes:
        return self._frame(orjson.dumps(self._answer([part], last=last)))

    def _frame(self, data: bytes) -> bytes:
        if not self._array:
            # Google's own reader in JavaScript takes these two for the end of a line.
            for sign, escaped in LINE_ENDS.items():
                data = data.replace(sign, escaped)
            return b"data: " + data + b"\n\n"
        separator, self._separator = self._separator, SEPARATOR
        return separator + data

    def _answer(self, parts: list[dict[str, Any]], *, last: bool) -> dict[str, Any]:
        candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": 0}
        answer: dict[str, Any] = {"candidates": [candidate], "modelVersion": self._model, "responseId": self._id}
        if last:
            candidate["finishReason"] = FINISH_REASONS.get(self.reason, "STOP")
            answer["usageMetadata"] = {
                "promptTokenCount": self.usage.prompt,
                "candidatesTokenCount": max(0, self.usage.completion - self.usage.reasoning),
                "thoughtsTokenCount": self.usage.reasoning,
                "cachedContentTokenCount": self.usage.cached,
                "totalTokenCount": self.usage.prompt + self.usage.completion,
            }
        return answer


def part_of(block: Block, written: str) -> dict[str, Any]:
    return {"text": written, "thought": True} if block.kind == "thought" else {"text": written}


def error(fault: Fault, status: int) -> dict[str, Any]:
    message = fault.message
    if fault.is_context_overflow and (sizes := fault.sizes):
        message = f"The input token count ({sizes[0]}) exceeds the maximum number of tokens allowed ({sizes[1]})."
    name = STATUSES.get(status) or ("INTERNAL" if status >= 500 else "INVALID_ARGUMENT")
    return {"error": {"code": status, "message": message, "status": name}}


def sealed(thought: str) -> str:
    return base64.b64encode(SEALED + thought.encode("utf-8", "surrogatepass")).decode()


def unsealed(signature: Any) -> str:
    if not isinstance(signature, str):
        return ""
    try:
        # Some programs write base64 with the letters that are safe in addresses.
        found = base64.b64decode(signature.replace("-", "+").replace("_", "/"), validate=True)
        return found[len(SEALED) :].decode("utf-8", "surrogatepass") if found.startswith(SEALED) else ""
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return ""
