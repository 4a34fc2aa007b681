"""Answers as OpenAI's responses, whole and as events, and thoughts in sealed content. No IO."""

from __future__ import annotations

import base64
import binascii
import time
from typing import TYPE_CHECKING, Any

import orjson

from paddock.rollouts.capture.dialects.teller import Block, Teller, new_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.rollouts.capture.dialects.base import Asked
    from paddock.rollouts.capture.refusals import Fault

ECHOED = (
    "instructions",
    "max_output_tokens",
    "metadata",
    "previous_response_id",
    "reasoning",
    "temperature",
    "top_p",
)
SEALED = "paddock."
"""Before a thought in `encrypted_content`: programs send that back where they drop the text itself."""


class ResponseTeller(Teller):
    """Calls of plain functions are told as they come, all other calls when they are whole."""

    def __init__(self, asked: Asked, model: str, remember: Callable[[Asked, dict[str, Any]], None]) -> None:
        super().__init__()
        self._asked = asked
        self._model = model
        self._remember = remember
        self._id = new_id("resp")
        self._created = int(time.time())
        self._output: list[dict[str, Any]] = []
        self._number = 0

    def started(self) -> bytes:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def opened(self, block: Block) -> bytes:
        if block.kind == "thought":
            return self._add(block, "rs", {"type": "reasoning", "summary": [], "content": []})
        if block.kind == "call":
            if block.name in self._asked.tools:
                return b""
            call = {"type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": ""}
            return self._add(block, "fc", call)
        part = text_of_answer("") if block.kind == "text" else {"type": "refusal", "refusal": ""}
        added = self._add(block, "msg", {"type": "message", "role": "assistant", "content": []})
        return added + self._event("response.content_part.added", **self._at(block), content_index=0, part=part)

    def grew(self, block: Block, piece: str) -> bytes:
        if block.kind == "call":
            if block.name in self._asked.tools:
                return b""
            return self._event("response.function_call_arguments.delta", **self._at(block), delta=piece)
        more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        return self._event(f"{EVENTS[block.kind]}.delta", **self._at(block), content_index=0, delta=piece, **more)

    def closed(self, block: Block) -> bytes:
        if block.kind == "call":
            return self._close_call(block)
        if block.kind == "thought":
            part: dict[str, Any] = {"type": "reasoning_text", "text": block.text}
            told = self._event("response.reasoning_text.done", **self._at(block), content_index=0, text=block.text)
            return told + self._done(block, content=[part], encrypted_content=sealed(block.text))
        if block.kind == "text":
            part = text_of_answer(block.text)
            more: dict[str, Any] = {"text": block.text, "logprobs": []}
        else:
            part = {"type": "refusal", "refusal": block.text}
            more = {"refusal": block.text}
        told = self._event(f"{EVENTS[block.kind]}.done", **self._at(block), content_index=0, **more)
        told += self._event("response.content_part.done", **self._at(block), content_index=0, part=part)
        return told + self._done(block, content=[part])

    def _close_call(self, block: Block) -> bytes:
        special = self._asked.tools.get(block.name)
        if special is None:
            more = {"arguments": block.text, "name": block.name}
            told = self._event("response.function_call_arguments.done", **self._at(block), **more)
            return told + self._done(block, arguments=block.text)
        item = special.item(block.call_id, block.text)
        if item is None:
            # Not enough for a call of this kind: as a function it is refused by the program, in words.
            item = {"type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": block.text}
        if item["type"] == "custom_tool_call":
            told = self._add(block, "ctc", {**item, "input": ""})
            told += self._event("response.custom_tool_call_input.delta", **self._at(block), delta=item["input"])
            told += self._event("response.custom_tool_call_input.done", **self._at(block), input=item["input"])
        elif item["type"] == "function_call":
            told = self._add(block, "fc", {**item, "arguments": ""})
            told += self._event("response.function_call_arguments.delta", **self._at(block), delta=block.text)
            more = {"arguments": block.text, "name": item["name"]}
            told += self._event("response.function_call_arguments.done", **self._at(block), **more)
        else:
            told = self._add(block, "call", item)
        return told + self._done(block, **item)

    def finished(self) -> bytes:
        response = self._finished()
        self._remember(self._asked, response)
        return self._event(f"response.{response['status']}", response=response)

    def whole(self) -> bytes:
        return orjson.dumps(self._finished())

    def fail(self, fault: Fault) -> bytes:
        # Programs ask again unless they know the code.
        code = "server_error" if fault.again else fault.code if fault.is_context_overflow else "invalid_prompt"
        response = {**self._response("failed"), "error": {"code": code, "message": fault.message}}
        return self.begin() + self._event("response.failed", response=response)

    def fails_in_stream(self, fault: Fault) -> bool:
        return fault.is_context_overflow and self._asked.stream

    def keep_alive(self) -> bytes:
        return self.begin() or self._event("keepalive")

    # -- pieces -------------------------------------------------------------------------------------

    def _add(self, block: Block, prefix: str, item: dict[str, Any]) -> bytes:
        block.place, block.label = len(self._output), new_id(prefix)
        item = {"id": block.label, **item, "status": "in_progress"}
        self._output.append(item)
        return self._event("response.output_item.added", output_index=block.place, item=item)

    def _done(self, block: Block, **changes: Any) -> bytes:
        item = {**self._output[block.place], **changes, "status": "completed"}
        self._output[block.place] = item
        return self._event("response.output_item.done", output_index=block.place, item=item)

    def _at(self, block: Block) -> dict[str, Any]:
        return {"item_id": block.label, "output_index": block.place}

    def _event(self, kind: str, **data: Any) -> bytes:
        told = orjson.dumps({"type": kind, "sequence_number": self._number, **data})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + told + b"\n\n"

    def _finished(self) -> dict[str, Any]:
        reason = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(self.reason)
        # An answer that ends at a limit of ours is not cut off in the eyes of a program that set none:
        # it would ask again and again.
        if reason is None or (reason == "max_output_tokens" and self._asked.body.get("max_output_tokens") is None):
            return {**self._response("completed"), "completed_at": int(time.time())}
        return {**self._response("incomplete"), "incomplete_details": {"reason": reason}}

    def _response(self, status: str) -> dict[str, Any]:
        body = self._asked.body
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


EVENTS = {"thought": "response.reasoning_text", "text": "response.output_text", "refusal": "response.refusal"}


def text_of_answer(written: str) -> dict[str, Any]:
    return {"type": "output_text", "text": written, "annotations": [], "logprobs": []}


def sealed(thought: str) -> str:
    return SEALED + base64.b64encode(thought.encode("utf-8", "surrogatepass")).decode()


def unsealed(told: str) -> str:
    if not told.startswith(SEALED):
        return ""
    try:
        return base64.b64decode(told[len(SEALED) :], validate=True).decode("utf-8", "surrogatepass")
    except (binascii.Error, UnicodeDecodeError):
        return ""
