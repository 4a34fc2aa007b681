"""A model server that plays a script, in the form of a real inference engine, on a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

Step = Callable[["ScriptedModel", web.BaseRequest, dict[str, Any]], Awaitable[web.StreamResponse]]

WORDS = ["Hel", "lo", ".", ""]
PROMPT_IDS = [1, 2, 3, 4, 5]
IDS = [10, 11, 12, 2]
LOGPROBS = [-0.5, -0.25, -1.0, -0.125]
CAPTURE_FIELDS = ("token_ids", "logprob")


class ScriptedModel:
    """Plays the next step of `script` for each completion; the last step is repeated."""

    def __init__(self, *script: Step, engine: str = "vllm") -> None:
        self.script = list(script) or [ok()]
        self.engine = engine
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.disconnected = asyncio.Event()
        """A client disconnected in the middle of a step."""
        self.waiting = asyncio.Event()
        """A step has begun to wait."""
        self.url = ""

    async def __aenter__(self) -> ScriptedModel:
        server = web.Server(self._handle, handler_cancellation=True, request_factory=big_request, access_log=None)
        self._runner = web.ServerRunner(server, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.paths.append(request.path)
        if request.method == "GET":
            return self._get(request.path)
        body = json.loads(await request.read())
        if request.path == "/apply-template":
            return web.json_response({"prompt": "a b c d e" if self.engine == "llamacpp" else None})
        if request.path == "/tokenize":
            return web.json_response({"tokens": PROMPT_IDS})
        self.bodies.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        try:
            return await step(self, request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.disconnected.set()
            raise

    def _get(self, path: str) -> web.Response:
        if path == "/v1/models" and self.engine != "silent":
            return web.json_response({"data": [{"id": "real", "owned_by": self.engine}]})
        return web.json_response({"error": "no"}, status=404)


def big_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=1 << 28)


# -- answers ------------------------------------------------------------------------------------------


def entries(engine: str) -> list[dict[str, Any]]:
    made = []
    for word, token, value in zip(WORDS, IDS, LOGPROBS, strict=True):
        entry = {"token": word, "logprob": value, "top_logprobs": [{"token": "x", "logprob": -2.0}]}
        made.append({"id": token, **entry} if engine == "llamacpp" else entry)
    return made


def document(engine: str, body: dict[str, Any], message: dict[str, Any], finish: str = "stop") -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": finish}
    completion: dict[str, Any] = {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": "real",
        "choices": [choice],
    }
    completion["usage"] = {"prompt_tokens": len(PROMPT_IDS), "completion_tokens": len(IDS), "total_tokens": 9}
    if body.get("logprobs"):
        choice["logprobs"] = {"content": entries(engine)}
    if body.get("return_token_ids") and engine != "llamacpp":
        choice["token_ids"] = IDS
        (choice if engine == "sglang" else completion)["prompt_token_ids"] = PROMPT_IDS
    if engine == "sglang":
        completion["metadata"] = {"weight_version": "step-7"}
    return completion


def chunks(body: dict[str, Any], finish: str | None = "stop") -> list[dict[str, Any]]:
    """A stream in the shape of vLLM."""
    head = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "real"}
    made: list[dict[str, Any]] = [{**head, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}]
    if body.get("return_token_ids"):
        made[0]["prompt_token_ids"] = PROMPT_IDS
    for position, entry in enumerate(entries("vllm")):
        choice: dict[str, Any] = {"index": 0, "delta": {"content": entry["token"]}, "finish_reason": None}
        if position == len(IDS) - 1:
            choice["finish_reason"] = finish
        if body.get("logprobs"):
            choice["logprobs"] = {"content": [entry]}
        if body.get("return_token_ids"):
            choice["token_ids"] = [IDS[position]]
        made.append({**head, "choices": [choice]})
    if (body.get("stream_options") or {}).get("include_usage"):
        made.append({**head, "choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}})
    return made


async def stream(request: web.BaseRequest, pieces: list[dict[str, Any]], *, done: bool = True) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for piece in pieces:
        await response.write(b"data: " + json.dumps(piece).encode() + b"\n\n")
    if done:
        await response.write(b"data: [DONE]\n\n")
    return response


# -- steps --------------------------------------------------------------------------------------------


def ok(content: str = "Hello.", tool: str | None = None, finish: str = "stop", **changes: Any) -> Step:
    async def step(server: ScriptedModel, request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        if body.get("stream") and tool is None:
            return await stream(request, chunks(body, finish))
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if tool is not None:
            function = {"name": tool, "arguments": '{"command":"ls"}'}
            message["tool_calls"] = [{"id": "call_1", "type": "function", "function": function}]
        answer = document(server.engine, body, message, finish) | changes
        return web.json_response(answer)

    return step


def status(code: int, error: dict[str, Any] | str = "broken", **headers: str) -> Step:
    async def step(server: ScriptedModel, request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        body_error = error if isinstance(error, dict) else {"message": error, "type": "e", "code": code}
        return web.json_response({"error": body_error}, status=code, headers=headers)

    return step


def refusing(*names: str, message: str = "Unrecognized request argument") -> Step:
    """An endpoint that refuses these fields, and names the first in its error."""

    async def step(server: ScriptedModel, request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        for name in names:
            if name in body:
                return web.json_response({"error": {"message": f"{message}: {name}"}}, status=400)
        return await ok()(server, request, body)

    return step


def refusing_unnamed(*names: str) -> Step:
    """The same, but its error does not name the field."""

    async def step(server: ScriptedModel, request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        if any(name in body for name in names):
            return web.json_response({"detail": "extra fields not permitted"}, status=422)
        return await ok()(server, request, body)

    return step


def cut(count: int, *, abort: bool = False) -> Step:
    """A stream that stops after so many chunks."""

    async def step(server: ScriptedModel, request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        response = await stream(request, chunks(body)[:count], done=False)
        if abort and request.transport is not None:
            request.transport.abort()
        return response

    return step


def stream_of(make: Callable[[dict[str, Any]], list[dict[str, Any]]], *, done: bool = True) -> Step:
    async def step(server: ScriptedModel, request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        return await stream(request, make(body), done=done)

    return step


def hang(after: int = 0) -> Step:
    """Sends so many chunks, then nothing."""

    async def step(server: ScriptedModel, request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        if after:
            await stream(request, chunks(body)[:after], done=False)
        server.waiting.set()
        await asyncio.Event().wait()
        raise AssertionError("not reached")

    return step


def answer_after(release: asyncio.Event, then: Step | None = None) -> Step:
    """Waits for the event, then answers."""

    async def step(server: ScriptedModel, request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        server.waiting.set()
        await release.wait()
        return await (then or ok())(server, request, body)

    return step
