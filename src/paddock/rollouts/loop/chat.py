"""One chat completion over HTTP, streamed, put together. Knows neither tools nor who answers.

The endpoint is the rollout's own `Capture`: it retries, keeps every token, and tells when the budget is spent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import aiohttp
import orjson

from paddock.errors import ModelError
from paddock.rollouts.capture.answer import Answer
from paddock.rollouts.capture.refusals import CONTEXT_CODE, read_error
from paddock.rollouts.capture.sse import DONE, EventReader

if TYPE_CHECKING:
    from types import TracebackType

MODEL = "policy"
"""The capture puts the endpoint's own name in its place."""
TRIES = 2
"""A stream that broke off in the middle is asked for once more; everything else was retried by the capture."""


class ContextFull(ModelError):
    """The conversation is longer than the model's context."""


@dataclass(frozen=True, slots=True)
class Said:
    """What the model answered."""

    message: dict[str, Any]
    finish_reason: str | None

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        return list(self.message.get("tool_calls") or ())


class Chat:
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

    async def ask(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], max_tokens: int) -> Said:
        """The answer to a conversation. Raises ContextFull, or ModelError when there is none."""
        body: dict[str, Any] = {"model": MODEL, "messages": messages, "stream": True, "max_tokens": max_tokens}
        if tools:
            body["tools"] = tools
        payload = orjson.dumps(body)
        for last in (*(False for _ in range(TRIES - 1)), True):
            try:
                return await self._ask(payload)
            except _BrokenOff:
                if last:
                    raise
        raise AssertionError("the last try returns or raises")

    async def _ask(self, payload: bytes) -> Said:
        assert self._session is not None, "use `async with Chat(...)`"
        answer, reader = Answer(strip=False), EventReader()
        try:
            async with self._session.post(self._url, data=payload) as response:
                if response.status != 200:
                    raise refused(await response.read())
                async for piece in response.content.iter_any():
                    for data in reader.feed(piece):
                        if data != DONE:
                            take(answer, data)
        except aiohttp.ClientError as error:
            raise _BrokenOff(f"the answer broke off: {type(error).__name__}") from error
        if answer.finish_reason is None:
            raise _BrokenOff("the answer ended in its middle")
        return Said(answer.message, answer.finish_reason)


class _BrokenOff(ModelError):
    """Some of an answer came, and then no more."""


def take(answer: Answer, data: bytes) -> None:
    try:
        chunk = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise _BrokenOff(f"the stream holds something that is not JSON: {error}") from error
    if chunk.get("error"):
        failure = refused(data)
        raise failure if isinstance(failure, ContextFull) else _BrokenOff(failure.message)
    answer.take(chunk)


def refused(body: bytes) -> ModelError:
    told = read_error(body)
    kind = ContextFull if told["code"] == CONTEXT_CODE else ModelError
    return kind(told["message"])
