"""How many tokens a request has, asked of the engine's own tokenizer, or estimated where it has none."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson

from paddock.rollouts.capture.upstream import Failure

if TYPE_CHECKING:
    from paddock.rollouts.capture.upstream import Upstream
    from paddock.rollouts.models.endpoint import Endpoint

SECONDS = 10.0
CHARACTERS_PER_TOKEN = 4
TOKENS_PER_MESSAGE = 4
TOKENS_PER_PICTURE = 800


async def count_tokens(chat: dict[str, Any], endpoint: Endpoint, upstream: Upstream) -> int:
    """The tokens of the prompt that this request would make. Never fails."""
    engine = await upstream.engine(endpoint)
    if engine.count is None:
        return estimate(chat)

    async def ask(path: str, document: dict[str, Any]) -> dict[str, Any]:
        return await upstream.ask(endpoint, path, document)

    try:
        async with asyncio.timeout(SECONDS):
            return await engine.count(ask, {**chat, "model": endpoint.name})
    except (Failure, TimeoutError, KeyError, TypeError, ValueError):
        return estimate(chat)


def estimate(chat: dict[str, Any]) -> int:
    """A rough number, rather too high than too low."""
    pictures, letters = 0, len(orjson.dumps(chat.get("tools") or []))
    messages: list[dict[str, Any]] = chat["messages"]
    for message in messages:
        content = message.get("content")
        letters += len(orjson.dumps([message.get("tool_calls"), message.get("reasoning_content")]))
        for part in content if isinstance(content, list) else [{"text": content}]:
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                letters += len(part["text"])
            elif part != {"text": None}:
                pictures += 1
    return letters // CHARACTERS_PER_TOKEN + TOKENS_PER_MESSAGE * len(messages) + TOKENS_PER_PICTURE * pictures
