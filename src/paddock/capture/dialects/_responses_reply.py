"""Replies of the Responses API, as documents and as events, with reasoning in `encrypted_content`. No IO."""

from __future__ import annotations

import base64
import binascii
import time
from typing import TYPE_CHECKING, Any

import orjson

from paddock.capture.dialects.block_writer import BlockWriter, ReplyBlock, new_id
from paddock.protocol.sse import write_event

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.capture.dialects.base import DialectRequest
    from paddock.capture.errors import ErrorReply

ECHOED = (
    "instructions",
    "max_output_tokens",
    "metadata",
    "previous_response_id",
    "reasoning",
    "temperature",
    "top_p",
)
SEAL_PREFIX = "paddock."
"""Before reasoning in `encrypted_content`: programs that drop the text itself send that field back."""


class ResponseWriter(BlockWriter):
    """Calls of plain functions are streamed; other tool calls are written when they are complete."""

    def __init__(
        self, request: DialectRequest, model: str, store: Callable[[DialectRequest, dict[str, Any]], None]
    ) -> None:
        super().__init__()
        self._request = request
        self._model = model
        self._store = store
        self._id = new_id("resp")
        self._created = int(time.time())
        self._output: list[dict[str, Any]] = []
        self._sequence_number = 0

    def start_reply(self) -> bytes:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def open_block(self, block: ReplyBlock) -> bytes:
        if block.kind == "reasoning":
            return self._add(block, "rs", {"type": "reasoning", "summary": [], "content": []})
        if block.kind == "tool_call":
            if block.name in self._request.special_tools:
                return b""
            call = {"type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": ""}
            return self._add(block, "fc", call)
        part = output_text("") if block.kind == "text" else {"type": "refusal", "refusal": ""}
        added = self._add(block, "msg", {"type": "message", "role": "assistant", "content": []})
        return added + self._event("response.content_part.added", **self._at(block), content_index=0, part=part)

    def extend_block(self, block: ReplyBlock, piece: str) -> bytes:
        if block.kind == "tool_call":
            if block.name in self._request.special_tools:
                return b""
            return self._event("response.function_call_arguments.delta", **self._at(block), delta=piece)
        more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        return self._event(f"{EVENTS[block.kind]}.delta", **self._at(block), content_index=0, delta=piece, **more)

    def close_block(self, block: ReplyBlock) -> bytes:
        if block.kind == "tool_call":
            return self._close_call(block)
        if block.kind == "reasoning":
            part: dict[str, Any] = {"type": "reasoning_text", "text": block.text}
            events = self._event("response.reasoning_text.done", **self._at(block), content_index=0, text=block.text)
            return events + self._done(block, content=[part], encrypted_content=seal(block.text))
        if block.kind == "text":
            part = output_text(block.text)
            more: dict[str, Any] = {"text": block.text, "logprobs": []}
        else:
            part = {"type": "refusal", "refusal": block.text}
            more = {"refusal": block.text}
        events = self._event(f"{EVENTS[block.kind]}.done", **self._at(block), content_index=0, **more)
        events += self._event("response.content_part.done", **self._at(block), content_index=0, part=part)
        return events + self._done(block, content=[part])

    def _close_call(self, block: ReplyBlock) -> bytes:
        special = self._request.special_tools.get(block.name)
        if special is None:
            more = {"arguments": block.text, "name": block.name}
            events = self._event("response.function_call_arguments.done", **self._at(block), **more)
            return events + self._done(block, arguments=block.text)
        item = special.item(block.call_id, block.text)
        if item is None:
            # Incomplete for a call of this kind: as a function call the program refuses it with a message.
            item = {"type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": block.text}
        if item["type"] == "custom_tool_call":
            events = self._add(block, "ctc", {**item, "input": ""})
            events += self._event("response.custom_tool_call_input.delta", **self._at(block), delta=item["input"])
            events += self._event("response.custom_tool_call_input.done", **self._at(block), input=item["input"])
        elif item["type"] == "function_call":
            events = self._add(block, "fc", {**item, "arguments": ""})
            events += self._event("response.function_call_arguments.delta", **self._at(block), delta=block.text)
            more = {"arguments": block.text, "name": item["name"]}
            events += self._event("response.function_call_arguments.done", **self._at(block), **more)
        else:
            events = self._add(block, "call", item)
        return events + self._done(block, **item)

    def finish_reply(self) -> bytes:
        response = self._finished_response()
        self._store(self._request, response)
        return self._event(f"response.{response['status']}", response=response)

    def build_document(self) -> bytes:
        return orjson.dumps(self._finished_response())

    def write_error(self, error: ErrorReply) -> bytes:
        # Programs retry unless they know the code.
        code = (
            "server_error" if error.invites_retry else error.code if error.is_context_overflow else "invalid_prompt"
        )
        response = {**self._response("failed"), "error": {"code": code, "message": error.message}}
        return self.start() + self._event("response.failed", response=response)

    def writes_error_in_stream(self, error: ErrorReply) -> bool:
        return error.is_context_overflow and self._request.is_stream

    def write_keep_alive(self) -> bytes:
        return self.start() or self._event("keepalive")

    # -- pieces -------------------------------------------------------------------------------------

    def _add(self, block: ReplyBlock, prefix: str, item: dict[str, Any]) -> bytes:
        block.index, block.id = len(self._output), new_id(prefix)
        item = {"id": block.id, **item, "status": "in_progress"}
        self._output.append(item)
        return self._event("response.output_item.added", output_index=block.index, item=item)

    def _done(self, block: ReplyBlock, **changes: Any) -> bytes:
        item = {**self._output[block.index], **changes, "status": "completed"}
        self._output[block.index] = item
        return self._event("response.output_item.done", output_index=block.index, item=item)

    def _at(self, block: ReplyBlock) -> dict[str, Any]:
        return {"item_id": block.id, "output_index": block.index}

    def _event(self, kind: str, **data: Any) -> bytes:
        data_json = orjson.dumps({"type": kind, "sequence_number": self._sequence_number, **data})
        self._sequence_number += 1
        return write_event(data_json, kind)

    def _finished_response(self) -> dict[str, Any]:
        reason = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(self.reason)
        # A program that set no limit would retry forever if the proxy's own limit were reported to it.
        if reason is None or (reason == "max_output_tokens" and self._request.body.get("max_output_tokens") is None):
            return {**self._response("completed"), "completed_at": int(time.time())}
        return {**self._response("incomplete"), "incomplete_details": {"reason": reason}}

    def _response(self, status: str) -> dict[str, Any]:
        body = self._request.body
        used = None
        if status in ("completed", "incomplete"):
            used = {
                "input_tokens": self.usage.prompt,
                "input_tokens_details": {"cached_tokens": self.usage.cached, "cache_write_tokens": 0},
                "output_tokens": self.usage.completion,
                "output_tokens_details": {"reasoning_tokens": self.usage.reasoning},
                "total_tokens": self.usage.prompt + self.usage.completion,
            }
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": list(self._output),
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "text": body.get("text") or {"format": {"type": "text"}},
            "truncation": body.get("truncation") or "disabled",
            "store": body.get("store") is not False,
            "usage": used,
            **{name: body.get(name) for name in ECHOED},
        }


EVENTS = {"reasoning": "response.reasoning_text", "text": "response.output_text", "refusal": "response.refusal"}


def output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def seal(reasoning: str) -> str:
    return SEAL_PREFIX + base64.b64encode(reasoning.encode("utf-8", "surrogatepass")).decode()


def unseal(sealed: str) -> str:
    if not sealed.startswith(SEAL_PREFIX):
        return ""
    try:
        return base64.b64decode(sealed[len(SEAL_PREFIX) :], validate=True).decode("utf-8", "surrogatepass")
    except (binascii.Error, UnicodeDecodeError):
        return ""
