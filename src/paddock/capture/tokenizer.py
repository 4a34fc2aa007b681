"""Requests to the tokenizer of the inference engine: the token ids of a prompt, and their number.

Engines that return no prompt ids with a completion are asked for them beside the call. Where an engine has no
tokenizer endpoint, the count is estimated.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson

from paddock.capture.errors import UpstreamFailure

if TYPE_CHECKING:
    from paddock.capture.engines import FetchPromptIds, Post
    from paddock.capture.upstream import Upstream
    from paddock.models.endpoint import Endpoint

TOKENIZER_SECONDS = 10.0
UNUSABLE = (UpstreamFailure, TimeoutError, KeyError, TypeError, ValueError)
"""What a tokenizer that does not answer as expected raises."""
CHARACTERS_PER_TOKEN = 4
TOKENS_PER_MESSAGE = 4
TOKENS_PER_IMAGE = 800


async def count_tokens(chat: dict[str, Any], endpoint: Endpoint, upstream: Upstream) -> int:
    """The tokens of the prompt of this request. Never fails."""
    engine = await upstream.detect_engine(endpoint)
    if engine.count_tokens is None:
        return estimate_tokens(chat)
    try:
        async with asyncio.timeout(TOKENIZER_SECONDS):
            return await engine.count_tokens(post_to(endpoint, upstream), {**chat, "model": endpoint.name})
    except UNUSABLE:
        return estimate_tokens(chat)


def estimate_tokens(chat: dict[str, Any]) -> int:
    """A rough number, rather too high than too low."""
    images, characters = 0, len(orjson.dumps(chat.get("tools") or []))
    messages: list[dict[str, Any]] = chat["messages"]
    for message in messages:
        content = message.get("content")
        characters += len(orjson.dumps([message.get("tool_calls"), message.get("reasoning_content")]))
        for part in content if isinstance(content, list) else [{"text": content}]:
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                characters += len(part["text"])
            elif part != {"text": None}:
                images += 1
    return characters // CHARACTERS_PER_TOKEN + TOKENS_PER_MESSAGE * len(messages) + TOKENS_PER_IMAGE * images


class PromptIds:
    """The ids of a call's prompt, requested beside the call."""

    def __init__(self, endpoint: Endpoint, upstream: Upstream) -> None:
        self._endpoint = endpoint
        self._upstream = upstream
        self._task: asyncio.Task[list[int]] | None = None

    def request(self, fetch: FetchPromptIds, body: dict[str, Any]) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._fetch(fetch, body))

    def cancel(self) -> None:
        """Forget the request: the next attempt may have another prompt."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def wait(self, expected_count: Any) -> list[int]:
        """The ids; empty if there are none, or not as many as the engine counted."""
        ids = [] if self._task is None else await self._task
        return ids if len(ids) == expected_count else []

    async def _fetch(self, fetch: FetchPromptIds, body: dict[str, Any]) -> list[int]:
        try:
            async with asyncio.timeout(TOKENIZER_SECONDS):
                return await fetch(post_to(self._endpoint, self._upstream), body)
        except UNUSABLE:
            return []


def post_to(endpoint: Endpoint, upstream: Upstream) -> Post:
    async def post(path: str, document: dict[str, Any]) -> dict[str, Any]:
        return await upstream.post_to_root(endpoint, path, document)

    return post
