"""The wire formats of the engines that a replay can imitate: what each returns about a sampled answer.

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

from paddock.models.replay.tokenizer import MARKER_TEXT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paddock.models.replay.answer import ReplayAnswer, SampledToken
    from paddock.models.replay.script import Script


@dataclass(frozen=True)
class EngineFormat:
    """How one request is answered."""

    script: Script
    body: dict[str, Any]
    answer: ReplayAnswer

    def unary(self) -> dict[str, Any]:
        answer, engine = self.answer, self.script.engine
        choice: dict[str, Any] = {
            "index": 0,
            "message": answer.message,
            "finish_reason": answer.finish_reason,
            "logprobs": self._logprobs(0, len(answer.tokens)),
        }
        reply = self._frame("chat.completion") | {"choices": [choice], "usage": self._usage()}
        if self._has_ids:
            choice["token_ids"] = [token.id for token in answer.tokens]
            (reply if engine == "vllm" else choice)["prompt_token_ids"] = answer.prompt_ids
        if engine == "sglang":
            reply["metadata"] = {"weight_version": self.script.weight_version or "default"}
        return reply

    def opening(self) -> dict[str, Any]:
        """The first event of a stream, before any token."""
        event = self._event({"role": "assistant", "content": ""})
        if self._has_ids:
            event["prompt_token_ids"] = self.answer.prompt_ids
        return event

    def chunks(self) -> Iterator[tuple[Sequence[SampledToken], dict[str, Any]]]:
        """The events of a stream with tokens, and which tokens each of them tells."""
        tokens, size = self.answer.tokens, self.script.tokens_per_chunk
        for start in range(0, len(tokens), size):
            group = tokens[start : start + size]
            event = self._event(_merge_deltas(group), self._logprobs(start, start + size, streamed=True))
            if self._has_ids:
                event["choices"][0]["token_ids"] = [token.id for token in group]
            if start + size >= len(tokens) and not self._separate_finish:
                event["choices"][0]["finish_reason"] = self.answer.finish_reason
            yield group, event

    def closing(self) -> Iterator[dict[str, Any]]:
        """The events of a stream after its last token."""
        if self._separate_finish or not self.answer.tokens:
            event = self._event({})
            event["choices"][0]["finish_reason"] = self.answer.finish_reason
            yield event
        if (self.body.get("stream_options") or {}).get("include_usage"):
            yield self._frame("chat.completion.chunk") | {"choices": [], "usage": self._usage()}

    @property
    def _has_ids(self) -> bool:
        return self.script.engine in ("vllm", "sglang") and self.body.get("return_token_ids") is True

    @property
    def _separate_finish(self) -> bool:
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
        prompt, completion = len(self.answer.prompt_ids), len(self.answer.tokens)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _logprobs(self, start: int, stop: int, *, streamed: bool = False) -> dict[str, Any] | None:
        wanted = self.body.get("logprobs") is True and self.script.engine != "text"
        top = self.body.get("top_logprobs") or 0
        if not wanted or (self.script.engine == "llamacpp" and not top):
            return None
        entries = []
        for token, data in zip(self.answer.tokens[start:stop], self._token_bytes[start:stop], strict=True):
            if data is None or (streamed and self.script.engine == "llamacpp" and token.delta is None):
                continue
            entry = {"token": data.decode("utf-8", "replace"), "logprob": token.logprob, "bytes": list(data)}
            if self.script.engine == "llamacpp":
                entry["id"] = token.id
            entries.append(entry | {"top_logprobs": [entry] if top else []})
        return {"content": entries} if entries else None

    @cached_property
    def _token_bytes(self) -> list[bytes | None]:
        """The bytes of each token in the logprobs; None for a token that is left out."""
        if self.script.engine != "llamacpp":
            return [token.data for token in self.answer.tokens]
        data: list[bytes | None] = []
        pending = b""
        for token in self.answer.tokens:
            pending += b"" if token.id in MARKER_TEXT else token.data
            try:
                pending.decode()
            except UnicodeDecodeError:
                data.append(None)
            else:
                data.append(pending)
                pending = b""
        return data


def _merge_deltas(tokens: Sequence[SampledToken]) -> dict[str, Any]:
    """The deltas of several tokens as one."""
    merged: dict[str, Any] = {}
    for token in tokens:
        for key, value in (token.delta or {}).items():
            merged[key] = merged[key] + value if key in merged else value
    return merged
