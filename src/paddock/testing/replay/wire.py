"""The wire formats of the engines that a replay can play: what each tells about a sampled answer.

| engine     | logprobs                             | ids of prompt and completion         |
|------------|--------------------------------------|--------------------------------------|
| `vllm`     | with `logprobs`                      | with `return_token_ids`              |
| `sglang`   | with `logprobs`                      | with `return_token_ids`, not streamed |
| `llamacpp` | with `top_logprobs` of 1 or more     | sampled ids in the logprobs          |
| `openai`   | with `logprobs`                      | none                                 |
| `text`     | none                                 | none                                 |

llama.cpp's own gaps are played too: a character of several tokens has one entry, and a stream has no
entry for a token that adds no text, the end of the answer included. Nothing here does IO.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from paddock.testing.replay.tokens import MARKER_TEXT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paddock.testing.replay.answer import Answer, Piece
    from paddock.testing.replay.script import Script


@dataclass(frozen=True)
class Wire:
    """How one request is answered."""

    script: Script
    body: dict[str, Any]
    answer: Answer

    def unary(self) -> dict[str, Any]:
        answer, engine = self.answer, self.script.engine
        choice: dict[str, Any] = {
            "index": 0,
            "message": answer.message,
            "finish_reason": answer.finish_reason,
            "logprobs": self._logprobs(0, len(answer.pieces)),
        }
        reply = self._frame("chat.completion") | {"choices": [choice], "usage": self._usage()}
        if self._with_ids:
            choice["token_ids"] = [piece.token for piece in answer.pieces]
            (reply if engine == "vllm" else choice)["prompt_token_ids"] = answer.prompt_ids
        if engine == "sglang":
            reply["metadata"] = {"weight_version": self.script.weight_version or "default"}
        return reply

    def opening(self) -> dict[str, Any]:
        """The first event of a stream, before any token."""
        event = self._event({"role": "assistant", "content": ""})
        if self._with_ids:
            event["prompt_token_ids"] = self.answer.prompt_ids
        return event

    def chunks(self) -> Iterator[tuple[Sequence[Piece], dict[str, Any]]]:
        """The events of a stream with tokens, and which tokens each of them tells."""
        pieces, size = self.answer.pieces, self.script.tokens_per_chunk
        for start in range(0, len(pieces), size):
            group = pieces[start : start + size]
            event = self._event(_merged(group), self._logprobs(start, start + size, streamed=True))
            if self._with_ids:
                event["choices"][0]["token_ids"] = [piece.token for piece in group]
            if start + size >= len(pieces) and not self._finish_apart:
                event["choices"][0]["finish_reason"] = self.answer.finish_reason
            yield group, event

    def closing(self) -> Iterator[dict[str, Any]]:
        """The events of a stream after its last token."""
        if self._finish_apart or not self.answer.pieces:
            event = self._event({})
            event["choices"][0]["finish_reason"] = self.answer.finish_reason
            yield event
        if (self.body.get("stream_options") or {}).get("include_usage"):
            yield self._frame("chat.completion.chunk") | {"choices": [], "usage": self._usage()}

    @property
    def _with_ids(self) -> bool:
        return self.script.engine in ("vllm", "sglang") and self.body.get("return_token_ids") is True

    @property
    def _finish_apart(self) -> bool:
        return self.script.engine in ("llamacpp", "openai", "text")

    def _frame(self, kind: str) -> dict[str, Any]:
        turn = "side" if self.answer.turn is None else self.answer.turn
        return {
            "id": f"chatcmpl-replay-{turn}",
            "object": kind,
            "created": int(time.time()),
            "model": self.script.model,
        }

    def _event(self, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        return self._frame("chat.completion.chunk") | {"choices": [choice]}

    def _usage(self) -> dict[str, Any]:
        prompt, completion = len(self.answer.prompt_ids), len(self.answer.pieces)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _logprobs(self, start: int, stop: int, *, streamed: bool = False) -> dict[str, Any] | None:
        wanted = self.body.get("logprobs") is True and self.script.engine != "text"
        top = self.body.get("top_logprobs") or 0
        if not wanted or (self.script.engine == "llamacpp" and not top):
            return None
        entries = []
        for piece, shown in zip(self.answer.pieces[start:stop], self._shown[start:stop], strict=True):
            if shown is None or (streamed and self.script.engine == "llamacpp" and piece.delta is None):
                continue
            entry = {"token": shown.decode("utf-8", "replace"), "logprob": piece.logprob, "bytes": list(shown)}
            if self.script.engine == "llamacpp":
                entry["id"] = piece.token
            entries.append(entry | {"top_logprobs": [entry] if top else []})
        return {"content": entries} if entries else None

    @cached_property
    def _shown(self) -> list[bytes | None]:
        """The bytes that each token is told with; None for a token that is left out."""
        if self.script.engine != "llamacpp":
            return [piece.data for piece in self.answer.pieces]
        shown: list[bytes | None] = []
        waiting = b""
        for piece in self.answer.pieces:
            waiting += b"" if piece.token in MARKER_TEXT else piece.data
            try:
                waiting.decode()
            except UnicodeDecodeError:
                shown.append(None)
            else:
                shown.append(waiting)
                waiting = b""
        return shown


def _merged(pieces: Sequence[Piece]) -> dict[str, Any]:
    """The deltas of several tokens as one."""
    merged: dict[str, Any] = {}
    for piece in pieces:
        for key, value in (piece.delta or {}).items():
            merged[key] = merged[key] + value if key in merged else value
    return merged
