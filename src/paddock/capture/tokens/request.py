"""One model call in token mode: the request with token ids, and the engine's responses as chat completions.

The exchange sends the request and passes the chat completions on, as on the ordinary path. Knows no HTTP.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from paddock.capture.completion import GIVEN_UP
from paddock.capture.engines import TokenRequest
from paddock.capture.errors import UpstreamFailure
from paddock.capture.tokens.rendering import LATE_NAMES, plain_text
from paddock.capture.tokens.streaming import ReplyStream
from paddock.capture.upstream_request import MAX_TOKENS_FIELDS, Compatibility, UpstreamRequest, sampling_fields

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.capture.engines import InferenceEngine, SampledPiece, TokenApi
    from paddock.capture.settings import CaptureSettings
    from paddock.capture.tokens.rendering import ParsedReply, Rendering

MODE_CODE = "token_mode"


class TokenModeRefusal(UpstreamFailure):
    """The agent's request cannot be served exactly; the message says why, and the agent sees it."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message, status=status, retryable=False, kind="invalid_request_error", code=MODE_CODE)


@dataclass(slots=True)
class TokenCall:
    """Made by `TokenConversations.prepare`. `start_attempt` begins the answer anew."""

    engine: InferenceEngine
    rendering: Rendering
    model: str
    prompt: list[int]
    tools: list[dict[str, Any]] | None
    stop_strings: list[str]
    seed: int | None
    on_answer: Callable[[list[int], dict[str, Any], list[dict[str, str]]], None]
    """Gets the sampled ids, the message as the agent gets it, and the tool calls that could not be parsed."""
    _stream: ReplyStream = field(init=False)
    _api: TokenApi = field(init=False)
    _finish_reason: str | None = None
    _stop_string: str | None = None
    _has_started: bool = False

    def __post_init__(self) -> None:
        self.start_attempt()

    def start_attempt(self) -> None:
        # A stop string may end the text anywhere, so nothing is shown before the end.
        rendering = self.rendering
        holds_text = bool(self.stop_strings) or rendering.tokenizer.is_remote or rendering.family in LATE_NAMES
        self._stream = ReplyStream(self.rendering, self.prompt, self.tools, holds_text=holds_text)
        self._finish_reason = self._stop_string = None
        self._has_started = False

    def build(
        self, chat: dict[str, Any], settings: CaptureSettings, compatibility: Compatibility, max_tokens: int
    ) -> UpstreamRequest:
        """The request for the engine."""
        api = self.engine.token_api
        assert api is not None
        if compatibility.uses_other_token_api and api.other is not None:
            api = api.other
        self._api = api
        sampling = sampling_fields(settings, self.engine)
        if (temperature := chat.get("temperature")) is not None:
            sampling.setdefault("temperature", temperature)
        limits = [chat[name] for name in MAX_TOKENS_FIELDS if _is_count(chat.get(name))]
        is_stream = bool(chat.get("stream")) and api.can_stream
        request = TokenRequest(
            model=self.model,
            prompt=self.prompt,
            max_tokens=min([max_tokens, *limits]),
            sampling=sampling,
            top_logprobs=max(settings.top_logprobs, self.engine.min_top_logprobs),
            stop_ids=self.rendering.stop_ids,
            stop_strings=self.stop_strings,
            seed=self.seed,
            is_stream=is_stream,
        )
        return UpstreamRequest(
            api.write(request),
            is_stream,
            path=api.path,
            at_root=api.at_root,
            has_other_token_api=api.other is not None,
        )

    # -- responses ------------------------------------------------------------------------------------

    async def read_event(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        """An event of the engine's stream, as chunks of a chat completion. Raises UpstreamFailure."""
        piece = self._read(event)
        chunks = [] if self._has_started else [self._chunk({"role": "assistant", "content": ""})]
        self._has_started = True
        reasoning = text = ""
        if piece.ids and self._stream.feed(piece.ids):
            reasoning, text = await self.rendering.run(self._stream.parse)
        delta = {name: part for name, part in (("reasoning_content", reasoning), ("content", text)) if part}
        tokens = await self.rendering.run(self._token_fields, piece)
        if delta or tokens:
            chunks.append({**self._chunk(delta, **tokens), **version_field(piece)})
        if piece.finish_reason is not None:
            self._finish_reason, self._stop_string = piece.finish_reason, piece.stop_string
            chunks += await self._last_chunks()
        if piece.usage is not None and self._finish_reason is not None:
            chunks.append({**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage(piece)})
        return chunks

    async def read_document(self, document: dict[str, Any]) -> dict[str, Any]:
        """A whole response as a chat completion. Raises UpstreamFailure."""
        piece = self._read(document)
        self._stream.feed(piece.ids)
        self._finish_reason, self._stop_string = piece.finish_reason or "stop", piece.stop_string
        parsed = await self.rendering.run(self._parse)
        tokens = await self.rendering.run(self._token_fields, piece)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content or None}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.tool_calls:
            message["tool_calls"] = parsed.tool_calls
        self.on_answer(self._stream.ids, message, parsed.malformed)
        choice = {"index": 0, "message": message, "finish_reason": self._reason(parsed), **tokens}
        return {
            **self._head("chat.completion"),
            "choices": [choice],
            "usage": self._usage(piece),
            **version_field(piece),
        }

    def _read(self, document: dict[str, Any]) -> SampledPiece:
        try:
            piece = self._api.read(document, len(self._stream.ids))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise UpstreamFailure(f"the endpoint's answer has an unexpected form: {error}") from error
        if piece.prompt_ids is not None and piece.prompt_ids != self.prompt:
            raise UpstreamFailure("the endpoint used other prompt ids than it was sent", retryable=False)
        counted = (piece.usage or {}).get("prompt_tokens")
        if _is_count(counted) and counted != len(self.prompt):
            message = f"the endpoint counted {counted} prompt tokens, and was sent {len(self.prompt)}"
            raise UpstreamFailure(f"{message}: it must not truncate prompts", retryable=False)
        if piece.finish_reason in GIVEN_UP:
            raise UpstreamFailure("the endpoint cut the answer off")
        if piece.finish_reason is not None and not piece.ids and not self._stream.ids:
            raise UpstreamFailure(f"the endpoint returned no token ids; {self.engine.upgrade_hint}", retryable=False)
        return piece

    async def _last_chunks(self) -> list[dict[str, Any]]:
        parsed = await self.rendering.run(self._parse)
        reasoning, text = self._stream.finish(parsed)
        chunks = []
        if reasoning:
            chunks.append(self._chunk({"reasoning_content": reasoning}))
        if text:
            chunks.append(self._chunk({"content": text}))
        for index, call in enumerate(parsed.tool_calls):
            chunks.append(self._chunk({"tool_calls": [{**call, "index": index}]}))
        reasoning, text = self._stream.visible
        message: dict[str, Any] = {"role": "assistant", "content": text or None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if parsed.tool_calls:
            message["tool_calls"] = parsed.tool_calls
        self.on_answer(self._stream.ids, message, parsed.malformed)
        return [*chunks, self._chunk({}, finish_reason=self._reason(parsed))]

    def _parse(self) -> ParsedReply:
        parsed = self.rendering.parse(self._stream.ids, self.prompt, self.tools)
        if self._stop_string is None:
            return parsed
        return replace(parsed, content=parsed.content.partition(self._stop_string)[0].strip())

    def _reason(self, parsed: ParsedReply) -> str:
        reason = self._finish_reason or "stop"
        return "tool_calls" if parsed.tool_calls and reason == "stop" else reason

    def _token_fields(self, piece: SampledPiece) -> dict[str, Any]:
        if not piece.ids:
            return {}
        entries: list[dict[str, Any]] = []
        for index, text in enumerate(self.rendering.texts(piece.ids)[: len(piece.logprobs)]):
            tops = piece.tops[index] if index < len(piece.tops) else []
            others = [{"token": self._text(token), "logprob": value} for token, value in tops]
            entries.append({"token": text, "logprob": piece.logprobs[index], "top_logprobs": others})
        return {"token_ids": piece.ids, "logprobs": {"content": entries}}

    def _text(self, token: Any) -> str:
        return self.rendering.texts([token])[0] if isinstance(token, int) else str(token)

    def _usage(self, piece: SampledPiece) -> dict[str, Any]:
        reported = {name: value for name, value in (piece.usage or {}).items() if value is not None}
        usage = {"completion_tokens": len(self._stream.ids), **reported, "prompt_tokens": len(self.prompt)}
        return {**usage, "total_tokens": usage["prompt_tokens"] + usage["completion_tokens"]}

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None, **fields: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, **fields}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": "chatcmpl-tokens", "object": kind, "created": int(time.time()), "model": self.model}


def check_request(chat: dict[str, Any], engine: InferenceEngine) -> list[str]:
    """The stop strings of a request. Raises TokenModeRefusal for what cannot be sampled exactly."""
    if engine.token_api is None:
        raise TokenModeRefusal(f"token mode needs vLLM, SGLang or llama.cpp; this endpoint is {engine.name}")
    if chat.get("n") not in (None, 1):
        raise TokenModeRefusal("n must be 1 in token mode: one conversation is one sample")
    stop = chat.get("stop") or []
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list) or not all(isinstance(each, str) and each for each in strings):
        raise TokenModeRefusal("stop must be a string or a list of strings")
    if strings and not engine.token_api.takes_stop_strings:
        raise TokenModeRefusal(f"{engine.name} returns incomplete tokens after a stop string; leave stop out")
    return strings


def find_images(messages: list[dict[str, Any]]) -> int | None:
    """The index of the first message with a part that is no text."""
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list) and any(isinstance(part, dict) and not is_text(part) for part in content):
            return index
    return None


def is_text(part: dict[str, Any]) -> bool:
    return part.get("type") in (None, "text", "refusal") and plain_text([part]) is not None


def version_field(piece: SampledPiece) -> dict[str, str]:
    return {} if piece.weight_version is None else {"weight_version": piece.weight_version}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
