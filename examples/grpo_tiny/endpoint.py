"""The policy behind an OpenAI-compatible address, in the shape of vLLM: token ids and logprobs with every answer.

`/v1/completions` takes prompts as token ids (token mode), `/v1/chat/completions` takes messages. Requests that wait
at the same moment are sampled together. Each answer tells the version of the weights.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import words
from aiohttp import web
from policy import CONTEXT, Sampled

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    Sampler = Callable[[list[list[int]], list[int]], tuple[list[Sampled], int]]
    """Prompts and the most tokens for each, to answers and the version of the weights that gave them."""

NAME = "tiny"
GATHER_SECONDS = 0.004
"""How long the first of several requests waits for others."""


@dataclass(frozen=True, slots=True)
class Waiting:
    prompt: list[int]
    limit: int
    answer: asyncio.Future[tuple[Sampled, int]]


class Server:
    """Answers with what a policy samples. `sampled` counts the tokens."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampled = 0
        self._sampler = sampler
        self._queue: asyncio.Queue[Waiting] = asyncio.Queue()

    async def work(self) -> None:
        """Sample for whoever waits, until cancelled."""
        while True:
            batch = [await self._queue.get()]
            await asyncio.sleep(GATHER_SECONDS)
            while not self._queue.empty():
                batch.append(self._queue.get_nowait())
            prompts, limits = [each.prompt for each in batch], [each.limit for each in batch]
            answers, version = await asyncio.to_thread(self._sampler, prompts, limits)
            for each, answer in zip(batch, answers, strict=True):
                self.sampled += len(answer.ids)
                if not each.answer.done():
                    each.answer.set_result((answer, version))

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": NAME, "object": "model", "owned_by": "vllm"}]})

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        prompt = words.prompt_ids(body["messages"])
        answer = await self._sample(body, prompt)
        if isinstance(answer, web.Response):
            return answer
        sampled, headers = answer
        reply = Reply(body, prompt, sampled)
        if body.get("stream"):
            return web.Response(text=reply.stream(), content_type="text/event-stream", headers=headers)
        return web.json_response(reply.document(), headers=headers)

    async def complete_ids(self, request: web.Request) -> web.Response:
        body = await request.json()
        prompt: list[int] = body["prompt"]
        answer = await self._sample(body, prompt)
        if isinstance(answer, web.Response):
            return answer
        sampled, headers = answer
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(sampled.ids)}
        choice = {
            "index": 0,
            "text": words.decode(sampled.ids),
            "token_ids": sampled.ids,
            "prompt_token_ids": prompt,
            "logprobs": {"token_logprobs": sampled.logprobs},
            "finish_reason": sampled.finish_reason,
        }
        document = {"id": "cmpl", "object": "text_completion", "model": NAME, "choices": [choice], "usage": usage}
        if body.get("stream"):
            text = f"data: {json.dumps(document)}\n\ndata: [DONE]\n\n"
            return web.Response(text=text, content_type="text/event-stream", headers=headers)
        return web.json_response(document, headers=headers)

    async def _sample(self, body: dict[str, Any], prompt: list[int]) -> tuple[Sampled, dict[str, str]] | web.Response:
        room = CONTEXT - len(prompt)
        if room < 1:
            error = {"message": "longer than the maximum context length", "code": "context_length_exceeded"}
            return web.json_response({"error": error}, status=400)
        waiting = Waiting(prompt, min(room, int(body.get("max_tokens") or room)), asyncio.Future())
        self._queue.put_nowait(waiting)
        sampled, version = await waiting.answer
        return sampled, {"X-Weight-Version": str(version)}


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer in the words of the API."""

    body: dict[str, Any]
    prompt: list[int]
    sampled: Sampled

    def document(self) -> dict[str, Any]:
        choice = {"message": self._message(), **self._choice()}
        return {**self._frame("chat.completion"), "choices": [choice], "prompt_token_ids": self.prompt}

    def stream(self) -> str:
        frame = self._frame("chat.completion.chunk")
        usage = frame.pop("usage")
        opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        events = [
            {**frame, "choices": [opening], "prompt_token_ids": self.prompt},
            {**frame, "choices": [{"delta": self._message(), **self._choice()}]},
            {**frame, "choices": [], "usage": usage},
        ]
        return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"

    def _message(self) -> dict[str, Any]:
        return words.read(words.decode(self.sampled.ids), self.body.get("tools") or [])

    def _choice(self) -> dict[str, Any]:
        entries = [
            {"token": words.NAMES[token], "logprob": logprob, "top_logprobs": []}
            for token, logprob in zip(self.sampled.ids, self.sampled.logprobs, strict=True)
        ]
        calls = self.sampled.finish_reason == "stop" and "tool_calls" in self._message()
        return {
            "index": 0,
            "token_ids": self.sampled.ids,
            "logprobs": {"content": entries},
            "finish_reason": "tool_calls" if calls else self.sampled.finish_reason,
        }

    def _frame(self, kind: str) -> dict[str, Any]:
        prompt, completion = len(self.prompt), len(self.sampled.ids)
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return {"id": "chatcmpl", "object": kind, "created": int(time.time()), "model": NAME, "usage": usage}


@asynccontextmanager
async def served(sampler: Sampler) -> AsyncIterator[tuple[Server, str]]:
    """The server and its address, for as long as it is entered."""
    server = Server(sampler)
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/chat/completions", server.complete)
    app.router.add_post("/v1/completions", server.complete_ids)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    working = asyncio.create_task(server.work())
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield server, f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        working.cancel()
        await runner.cleanup()
