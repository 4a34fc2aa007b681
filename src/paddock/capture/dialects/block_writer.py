"""A reply writer for dialects whose replies are blocks: reasoning, text, refusals and tool calls. No IO.

It reads the chunks of a chat completion and calls the dialect for each block. A whole response is split into chunks
first, so that a stream and a document cannot differ.
"""

from __future__ import annotations

import json
import secrets
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from paddock.capture.dialects.base import ReplyWriter, split_into_chunks
from paddock.models.message_text import content_text

if TYPE_CHECKING:
    from collections.abc import Iterator

BlockKind = Literal["reasoning", "text", "refusal", "tool_call"]


@dataclass(slots=True)
class ReplyBlock:
    """A part of a reply while it grows."""

    kind: BlockKind
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    is_open: bool = True
    index: int = 0
    """The dialect's own number of it."""
    id: str = ""
    """The dialect's own id of it."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class TokenUsage:
    prompt: int = 0
    completion: int = 0
    cached: int = 0
    reasoning: int = 0

    @classmethod
    def read(cls, usage: Any) -> TokenUsage:
        if not isinstance(usage, dict):
            return cls()
        prompt, completion = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
        return cls(
            _count(usage, "prompt_tokens"),
            _count(usage, "completion_tokens"),
            _count(prompt, "cached_tokens"),
            _count(completion, "reasoning_tokens"),
        )


class BlockWriter(ReplyWriter):
    """A dialect writes the start and end of a reply, and each block as it is opened, extended and closed."""

    def __init__(self) -> None:
        self.blocks: list[ReplyBlock] = []
        self.finish_reason: str | None = None
        self.stop_sequence: str | None = None
        self.usage = TokenUsage()
        self._has_started = False
        self._calls: dict[int, ReplyBlock] = {}
        self._unnamed_calls: dict[int, list[str]] = {}

    # -- for the dialect to implement ---------------------------------------------------------------

    @abstractmethod
    def start_reply(self) -> bytes: ...

    @abstractmethod
    def open_block(self, block: ReplyBlock) -> bytes: ...

    @abstractmethod
    def extend_block(self, block: ReplyBlock, piece: str) -> bytes: ...

    @abstractmethod
    def close_block(self, block: ReplyBlock) -> bytes: ...

    @abstractmethod
    def finish_reply(self) -> bytes: ...

    @abstractmethod
    def build_document(self) -> bytes:
        """The document of a finished reply."""

    # -- for the exchange ---------------------------------------------------------------------------

    def write_document(self, document: dict[str, Any]) -> bytes:
        for chunk in split_into_chunks(document):
            self.write_chunk(b"", chunk, changed=True)
        self.write_end()
        return self.build_document()

    def write_chunk(self, raw: bytes, chunk: dict[str, Any], *, changed: bool) -> bytes:
        out = [self.start()]
        if chunk.get("usage"):
            self.usage = TokenUsage.read(chunk["usage"])
        for choice in chunk.get("choices") or ():
            if choice.get("index", 0) != 0:
                continue
            out += self._read_delta(choice.get("delta") or {})
            if reason := choice.get("finish_reason"):
                self.finish_reason = reason
                stop = choice.get("stop_reason")
                self.stop_sequence = stop if isinstance(stop, str) else None
        return b"".join(out)

    def start(self) -> bytes:
        """The start of the stream; empty if it has started."""
        if self._has_started:
            return b""
        self._has_started = True
        return self.start_reply()

    def write_end(self) -> bytes:
        unnamed = [self._open_call(index, "call", {}) for index in sorted(self._unnamed_calls)]
        return b"".join((self.start(), *unnamed, *self._close_all(), self.finish_reply()))

    @property
    def reason(self) -> str:
        """The finish reason. Engines disagree on that of a response with tool calls."""
        reason = self.finish_reason or "stop"
        return "tool_calls" if reason in ("stop", "function_call") and self._calls else reason

    # -- blocks -------------------------------------------------------------------------------------

    def _read_delta(self, delta: dict[str, Any]) -> Iterator[bytes]:
        if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
            yield from self._extend("reasoning", content_text(reasoning))
        if content := delta.get("content"):
            yield from self._extend("text", content_text(content))
        if refusal := delta.get("refusal"):
            yield from self._extend("refusal", content_text(refusal))
        for position, piece in enumerate(delta.get("tool_calls") or ()):
            index = piece.get("index")
            yield self._extend_call(position if index is None else index, piece)

    def _extend(self, kind: BlockKind, piece: str) -> Iterator[bytes]:
        if not piece:
            return
        last = self.blocks[-1] if self.blocks else None
        if last is None or last.kind != kind or not last.is_open:
            yield from self._close_ready()
            last = ReplyBlock(kind)
            self.blocks.append(last)
            yield self.open_block(last)
        last.pieces.append(piece)
        yield self.extend_block(last, piece)

    def _extend_call(self, index: int, piece: dict[str, Any]) -> bytes:
        function = piece.get("function") or {}
        out = []
        if index not in self._calls:
            if not function.get("name"):
                # Dialects write the name first, so earlier arguments wait for it.
                self._unnamed_calls.setdefault(index, []).append(arguments_of(function))
                return b""
            out.append(self._open_call(index, str(function["name"]), piece))
        block = self._calls[index]
        if arguments := arguments_of(function):
            block.pieces.append(arguments)
            out.append(self.extend_block(block, arguments))
        return b"".join(out)

    def _open_call(self, index: int, name: str, piece: dict[str, Any]) -> bytes:
        out = [*self._close_ready()]
        block = ReplyBlock("tool_call", call_id=str(piece.get("id") or new_id("call")), name=name)
        self._calls[index] = block
        self.blocks.append(block)
        out.append(self.open_block(block))
        for arguments in self._unnamed_calls.pop(index, ()):
            block.pieces.append(arguments)
            out.append(self.extend_block(block, arguments))
        return b"".join(out)

    def _close_ready(self) -> Iterator[bytes]:
        """Close all blocks but tool calls whose arguments are incomplete."""
        for block in self.blocks:
            if block.is_open and (block.kind != "tool_call" or is_json(block.text)):
                block.is_open = False
                yield self.close_block(block)

    def _close_all(self) -> Iterator[bytes]:
        for block in self.blocks:
            if block.is_open:
                block.is_open = False
                yield self.close_block(block)


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def is_json(arguments: str) -> bool:
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return False
    return True


def arguments_of(function: dict[str, Any]) -> str:
    arguments = function.get("arguments")
    if arguments is None:
        return ""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _count(usage: Any, name: str) -> int:
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if isinstance(count, int) else 0
