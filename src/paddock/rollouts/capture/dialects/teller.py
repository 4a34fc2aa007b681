"""An answer told block by block: thoughts, text, refusals and calls, from the chunks of a chat completion. No IO.

Whole answers go the same way, so that a stream and a document cannot differ.
"""

from __future__ import annotations

import json
import secrets
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from paddock.rollouts.capture.dialects.base import Writer, chunks_of

if TYPE_CHECKING:
    from collections.abc import Iterator

Kind = Literal["thought", "text", "refusal", "call"]


@dataclass(slots=True)
class Block:
    """A part of an answer while it grows."""

    kind: Kind
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    is_open: bool = True
    place: int = 0
    """For the dialect's own numbering."""
    label: str = ""
    """For the dialect's own name of it."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Usage:
    prompt: int = 0
    completion: int = 0
    cached: int = 0
    reasoning: int = 0

    @classmethod
    def read(cls, told: Any) -> Usage:
        if not isinstance(told, dict):
            return cls()
        prompt, completion = told.get("prompt_tokens_details"), told.get("completion_tokens_details")
        return cls(
            _count(told, "prompt_tokens"),
            _count(told, "completion_tokens"),
            _count(prompt, "cached_tokens"),
            _count(completion, "reasoning_tokens"),
        )


class Teller(Writer):
    """A dialect says how a block is `opened`, `grew` and was `closed`, and what stands around all of them."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.finish_reason: str | None = None
        self.stop_sequence: str | None = None
        self.usage = Usage()
        self._begun = False
        self._calls: dict[int, Block] = {}
        self._nameless: dict[int, list[str]] = {}

    # -- what a dialect says ------------------------------------------------------------------------

    @abstractmethod
    def started(self) -> bytes: ...

    @abstractmethod
    def opened(self, block: Block) -> bytes: ...

    @abstractmethod
    def grew(self, block: Block, piece: str) -> bytes: ...

    @abstractmethod
    def closed(self, block: Block) -> bytes: ...

    @abstractmethod
    def finished(self) -> bytes: ...

    @abstractmethod
    def whole(self) -> bytes:
        """The document of a finished answer."""

    # -- what comes ---------------------------------------------------------------------------------

    def document(self, document: dict[str, Any]) -> bytes:
        for chunk in chunks_of(document):
            self.chunk(b"", chunk, changed=True)
        self.end()
        return self.whole()

    def chunk(self, raw: bytes, chunk: dict[str, Any], *, changed: bool) -> bytes:
        out = [self.begin()]
        if chunk.get("usage"):
            self.usage = Usage.read(chunk["usage"])
        for choice in chunk.get("choices") or ():
            if choice.get("index", 0) != 0:
                continue
            out += self._read(choice.get("delta") or {})
            if reason := choice.get("finish_reason"):
                self.finish_reason = reason
                stop = choice.get("stop_reason")
                self.stop_sequence = stop if isinstance(stop, str) else None
        return b"".join(out)

    def begin(self) -> bytes:
        """The opening of the stream, once."""
        if self._begun:
            return b""
        self._begun = True
        return self.started()

    def end(self) -> bytes:
        late = [self._open_call(index, "call", {}) for index in sorted(self._nameless)]
        return b"".join((self.begin(), *late, *self._close_all(), self.finished()))

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    @property
    def reason(self) -> str:
        """Why the answer ended; engines disagree on what an answer with calls ends with."""
        told = self.finish_reason or "stop"
        return "tool_calls" if told in ("stop", "function_call") and self.has_calls else told

    # -- blocks -------------------------------------------------------------------------------------

    def _read(self, delta: dict[str, Any]) -> Iterator[bytes]:
        if thought := delta.get("reasoning_content") or delta.get("reasoning"):
            yield from self._grow("thought", written(thought))
        if said := delta.get("content"):
            yield from self._grow("text", written(said))
        if refusal := delta.get("refusal"):
            yield from self._grow("refusal", written(refusal))
        for position, piece in enumerate(delta.get("tool_calls") or ()):
            index = piece.get("index")
            yield self._call(position if index is None else index, piece)

    def _grow(self, kind: Kind, piece: str) -> Iterator[bytes]:
        if not piece:
            return
        last = self.blocks[-1] if self.blocks else None
        if last is None or last.kind != kind or not last.is_open:
            yield from self._close_ready()
            last = Block(kind)
            self.blocks.append(last)
            yield self.opened(last)
        last.pieces.append(piece)
        yield self.grew(last, piece)

    def _call(self, index: int, piece: dict[str, Any]) -> bytes:
        function = piece.get("function") or {}
        out = []
        if index not in self._calls:
            if not function.get("name"):
                # A call is told by its name first; what comes before that waits for it.
                self._nameless.setdefault(index, []).append(arguments_in(function))
                return b""
            out.append(self._open_call(index, str(function["name"]), piece))
        block = self._calls[index]
        if arguments := arguments_in(function):
            block.pieces.append(arguments)
            out.append(self.grew(block, arguments))
        return b"".join(out)

    def _open_call(self, index: int, name: str, piece: dict[str, Any]) -> bytes:
        out = [*self._close_ready()]
        block = Block("call", call_id=str(piece.get("id") or new_id("call")), name=name)
        self._calls[index] = block
        self.blocks.append(block)
        out.append(self.opened(block))
        for waiting in self._nameless.pop(index, ()):
            block.pieces.append(waiting)
            out.append(self.grew(block, waiting))
        return b"".join(out)

    def _close_ready(self) -> Iterator[bytes]:
        """Close what nothing can be added to: all but calls whose arguments are not yet whole."""
        for block in self.blocks:
            if block.is_open and (block.kind != "call" or is_whole(block.text)):
                block.is_open = False
                yield self.closed(block)

    def _close_all(self) -> Iterator[bytes]:
        for block in self.blocks:
            if block.is_open:
                block.is_open = False
                yield self.closed(block)


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def is_whole(arguments: str) -> bool:
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return False
    return True


def written(value: Any) -> str:
    """Text, also from content in parts."""
    if isinstance(value, list):
        return "".join(str(part.get("text", "")) for part in value if isinstance(part, dict))
    return str(value)


def arguments_in(function: dict[str, Any]) -> str:
    arguments = function.get("arguments")
    if arguments is None:
        return ""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _count(told: Any, name: str) -> int:
    found = told.get(name) if isinstance(told, dict) else None
    return found if isinstance(found, int) else 0
