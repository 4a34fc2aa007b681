"""An inference engine that a trainer answers: prompts arrive over HTTP as token ids, and wait for who samples them.

For trainers that sample themselves and ask an environment for the next prompt. In the shape of vLLM, for token mode.
It listens on the loopback. Each rollout has an address of its own.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from aiohttp import web

from paddock.models.endpoint import Endpoint

if TYPE_CHECKING:
    from collections.abc import Sequence

SHUTDOWN_SECONDS = 1.0
LARGEST_REQUEST = 1 << 28
"""Bytes. A prompt of 100,000 ids is more than aiohttp's default of 1 MiB in some vocabularies."""


@dataclass(frozen=True, slots=True)
class PromptCall:
    """A model call that waits for its tokens."""

    prompt: list[int]
    stop_ids: list[int]
    max_tokens: int | None
    answer: asyncio.Future[tuple[list[int], str]]

    def reply(self, ids: Sequence[int], finish_reason: str) -> None:
        if not self.answer.done():
            self.answer.set_result((list(ids), finish_reason))


@dataclass(slots=True)
class PromptQueue:
    """The model calls of one rollout, in the order in which they arrive."""

    endpoint: Endpoint
    calls: asyncio.Queue[PromptCall] = field(default_factory=asyncio.Queue)


class PolicyServer:
    """Use it as `async with`. `add` gives the endpoint of a rollout and the calls that arrive there."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._queues: dict[str, PromptQueue] = {}
        app = web.Application(client_max_size=LARGEST_REQUEST)
        app.router.add_post("/{key}/v1/completions", self._complete)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return self

    async def __aexit__(self, *problem: Any) -> None:
        await self._runner.cleanup()

    def add(self) -> PromptQueue:
        key = secrets.token_urlsafe(16)
        url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/{key}/v1"
        queue = self._queues[key] = PromptQueue(Endpoint(url, self._model, label=self._model, engine="vllm"))
        return queue

    def remove(self, queue: PromptQueue) -> None:
        self._queues = {key: each for key, each in self._queues.items() if each is not queue}

    async def _complete(self, request: web.Request) -> web.Response:
        queue = self._queues.get(request.match_info["key"])
        if queue is None:
            return web.json_response({"error": {"message": "the rollout has ended"}}, status=404)
        body = await request.json()
        prompt: list[int] = body["prompt"]
        call = PromptCall(prompt, body.get("stop_token_ids") or [], body.get("max_tokens"), asyncio.Future())
        queue.calls.put_nowait(call)
        ids, finish_reason = await call.answer
        choice = {"index": 0, "token_ids": ids, "prompt_token_ids": prompt, "finish_reason": finish_reason}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        document = {"object": "text_completion", "model": self._model, "choices": [choice], "usage": usage}
        if not body.get("stream"):
            return web.json_response(document)
        text = f"data: {json.dumps(document)}\n\ndata: [DONE]\n\n"
        return web.Response(text=text, content_type="text/event-stream")
