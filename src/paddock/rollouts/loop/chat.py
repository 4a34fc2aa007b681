"""One streamed chat completion over HTTP, assembled. Knows neither tools nor who answers.

The endpoint is the rollout's own `Capture`: it retries, keeps every token, and ends the conversation when the budget
is spent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import aiohttp
import orjson

from paddock.capture.completion import Completion
from paddock.capture.errors import CONTEXT_CODE, read_error
from paddock.errors import ModelError
from paddock.protocol.sse import DONE, EventReader

if TYPE_CHECKING:
    from types import TracebackType

MODEL = "policy"
"""The capture puts the endpoint's own name in its place."""
TRIES = 2
"""A stream that broke off is requested once more; every other failure was retried by the capture."""


class ContextFull(ModelError):
    """The conversation is longer than the model's context."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """What the model answered."""

    message: dict[str, Any]
    finish_reason: str | None

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        return list(self.message.get("tool_calls") or ())


class ChatClient:
    """The way to one endpoint. Use it as `async with`."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout, read_bufsize=1024 * 1024)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def complete(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], max_tokens: int
    ) -> ChatReply:
        """The answer to a conversation. Raises ContextFull, or ModelError when there is none."""
        body: dict[str, Any] = {"model": MODEL, "messages": messages, "stream": True, "max_tokens": max_tokens}
        if tools:
            body["tools"] = tools
        payload = orjson.dumps(body)
        for last in (*(False for _ in range(TRIES - 1)), True):
            try:
                return await self._complete_once(payload)
            except _StreamBroken:
                if last:
                    raise
        raise AssertionError("the last try returns or raises")

    async def _complete_once(self, payload: bytes) -> ChatReply:
        assert self._session is not None, "use `async with ChatClient(...)`"
        completion, reader = Completion(strip=False), EventReader()
        try:
            async with self._session.post(self._url, data=payload) as response:
                if response.status != 200:
                    raise read_failure(await response.read())
                async for piece in response.content.iter_any():
                    for event in reader.feed(piece):
                        if event.data != DONE:
                            read_chunk(completion, event.data)
        except aiohttp.ClientError as error:
            raise _StreamBroken(f"the answer broke off: {type(error).__name__}") from error
        if completion.finish_reason is None:
            raise _StreamBroken("the answer ended in its middle")
        return ChatReply(completion.message, completion.finish_reason)


class _StreamBroken(ModelError):
    """Some of an answer came, and then no more."""


def read_chunk(completion: Completion, data: bytes) -> None:
    try:
        chunk = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise _StreamBroken(f"the stream holds something that is not JSON: {error}") from error
    if chunk.get("error"):
        failure = read_failure(data)
        raise failure if isinstance(failure, ContextFull) else _StreamBroken(failure.message)
    completion.read(chunk)


def read_failure(body: bytes) -> ModelError:
    error = read_error(body)
    kind = ContextFull if error["code"] == CONTEXT_CODE else ModelError
    return kind(error["message"])
