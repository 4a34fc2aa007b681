"""A model server on the loopback that plays a script. It samples nothing and needs no weights."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import orjson
from aiohttp import web

from paddock.testing.replay.answer import answer
from paddock.testing.replay.faults import Faults, ScriptedHangUp, hang_up, never_answer, tokens_before_the_end
from paddock.testing.replay.script import Script
from paddock.testing.replay.template import prompt_ids, prompt_text
from paddock.testing.replay.tokens import encode, encode_with_markers
from paddock.testing.replay.wire import Wire

if TYPE_CHECKING:
    from pathlib import Path

    from paddock.testing.replay.answer import Piece
    from paddock.testing.replay.format import Fault

BODY_BYTES = 64 * 1024 * 1024
EVENTS_PER_WRITE = 16
SESSION_HEADERS = ("x-session-id", "x-session-affinity")
OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp", "openai": "openai", "text": "replay"}


@dataclass(slots=True)
class Served:
    """One request as it was answered."""

    request: dict[str, Any]
    headers: dict[str, str] = field(repr=False)
    session: str = ""
    turn: int | None = None
    prompt_ids: list[int] = field(default_factory=list, repr=False)
    sampled_ids: list[int] = field(default_factory=list, repr=False)
    """Those that were sent."""
    logprobs: list[float] = field(default_factory=list, repr=False)
    status: int | None = None
    """None while there is no whole answer."""
    fault: Fault | None = None
    aborted: bool = False
    """The client hung up before the end."""

    def sent(self, pieces: list[Piece]) -> None:
        self.sampled_ids += [piece.token for piece in pieces]
        self.logprobs += [piece.logprob for piece in pieces]


class ReplayServer:
    """Serves a script while it is entered. `url` is the base that `/chat/completions` is added to."""

    def __init__(self, script: Script | dict[str, Any] | str | Path, *, api_key: str | None = None) -> None:
        if isinstance(script, dict):
            script = Script.parse(script)
        self.script = script if isinstance(script, Script) else Script.load(script)
        self.log: list[Served] = []
        self._api_key = api_key
        self._faults = Faults(self.script.faults)
        self._runner: web.AppRunner | None = None
        self._port = 0

    @property
    def url(self) -> str:
        if not self._port:
            raise RuntimeError("the replay server is not running; enter it with `async with`")
        return f"http://127.0.0.1:{self._port}/v1"

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=BODY_BYTES)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/health", self._health)
        if self.script.engine == "vllm":
            app.router.add_post("/tokenize", self._count)
        if self.script.engine == "llamacpp":
            app.router.add_get("/props", self._props)
            app.router.add_post("/apply-template", self._apply_template)
            app.router.add_post("/tokenize", self._tokenize)
        # A handler ends when its client hangs up, so the log can tell.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        self._runner = runner
        try:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
        except BaseException:
            await self._close()
            raise
        self._port = runner.addresses[0][1]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._close()

    async def _close(self) -> None:
        runner, self._runner, self._port = self._runner, None, 0
        if runner is not None:
            await runner.cleanup()

    # -- what is asked beside completions ---------------------------------------------------------

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        if refusal := self._refuse_stranger(request):
            return refusal
        script = self.script
        model: dict[str, Any] = {"id": script.model, "object": "model", "owned_by": OWNERS[script.engine]}
        if script.max_context is not None and script.engine in ("vllm", "sglang"):
            model["max_model_len"] = script.max_context
        return web.json_response({"object": "list", "data": [model]})

    async def _props(self, _: web.Request) -> web.Response:
        settings = {"n_ctx": self.script.max_context or 8192}
        return web.json_response({"default_generation_settings": settings, "model_alias": self.script.model})

    async def _count(self, request: web.Request) -> web.Response:
        if refusal := self._refuse_stranger(request):
            return refusal
        body = _read(await request.read())
        if body is None:
            return _error(400, "the body holds no messages", "invalid_request_error")
        tokens = prompt_ids(body["messages"], body.get("tools"))
        most = self.script.max_context or 8192
        return web.json_response({"count": len(tokens), "max_model_len": most, "tokens": tokens})

    async def _apply_template(self, request: web.Request) -> web.Response:
        body = await request.json(loads=orjson.loads)
        return web.json_response({"prompt": prompt_text(body["messages"], body.get("tools"))})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json(loads=orjson.loads)
        marked = body.get("parse_special", True)
        tokens = encode_with_markers(body["content"]) if marked else list(encode(body["content"]))
        return web.json_response({"tokens": tokens})

    # -- completions ------------------------------------------------------------------------------

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        if refusal := self._refuse_stranger(request):
            return refusal
        body = _read(await request.read())
        if body is None:
            return _error(400, "the body is no chat completion request", "invalid_request_error")
        served = Served(body, dict(request.headers), _session(request))
        self.log.append(served)
        try:
            response = await self._answer(request, served)
        except ScriptedHangUp:
            raise
        except (asyncio.CancelledError, ConnectionError):
            served.aborted = True
            raise
        served.status = response.status
        return response

    async def _answer(self, request: web.Request, served: Served) -> web.StreamResponse:
        script, body = self.script, served.request
        if unknown := sorted(script.rejects & body.keys()):
            return _error(400, f"Unknown parameter: '{unknown[0]}'.", "invalid_request_error", "unknown_parameter")
        if script.engine == "sglang" and body.get("stream") and body.get("return_token_ids"):
            return _error(400, "return_token_ids is not supported with stream=true", "BadRequestError")
        chosen = answer(script, body)
        if chosen is None:
            known = [task.when for task in script.tasks]
            return _error(400, f"no task of the script is for this; it has {known}", "invalid_request_error")
        served.turn, served.prompt_ids = chosen.turn, chosen.prompt_ids
        if script.max_context is not None and len(chosen.prompt_ids) > script.max_context:
            return self._too_long(len(chosen.prompt_ids), script.max_context)
        fault = served.fault = self._faults.next(chosen, served.session)
        if fault is not None:
            if fault.hang is not None:
                await asyncio.sleep(fault.hang)
            if fault.status is not None:
                headers = {} if fault.retry_after is None else {"Retry-After": f"{fault.retry_after:g}"}
                return _error(fault.status, fault.message, "scripted_fault", fault.code, headers)
            if fault.close:
                hang_up(request)
        wire = Wire(script, body, chosen)
        if body.get("stream"):
            return await self._stream(request, served, wire, fault)
        return await self._unary(request, served, wire, fault)

    async def _unary(
        self, request: web.Request, served: Served, wire: Wire, fault: Fault | None
    ) -> web.StreamResponse:
        if fault is not None:
            tokens = len(wire.answer.pieces)
            await asyncio.sleep((fault.delay or 0.0) + (fault.per_token_delay or 0.0) * tokens)
            if fault.stall_after is not None:
                await never_answer()
            if fault.error_chunk is not None:
                return _error(500, fault.error_chunk, "server_error")
        payload = orjson.dumps(wire.unary())
        if fault is not None and fault.malformed:
            payload = payload[: len(payload) // 2]
        if fault is not None and fault.cut_after is not None:
            response = web.StreamResponse(headers={"Content-Type": "application/json"})
            response.content_length = len(payload)
            await response.prepare(request)
            await response.write(payload[: len(payload) // 2])
            hang_up(request)
        served.sent(wire.answer.pieces)
        return web.Response(body=payload, content_type="application/json")

    async def _stream(
        self, request: web.Request, served: Served, wire: Wire, fault: Fault | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        if fault is not None and fault.delay is not None:
            await asyncio.sleep(fault.delay)
        waiting = [_event(wire.opening())]
        pause = fault.per_token_delay if fault is not None else None
        most = tokens_before_the_end(fault)
        for pieces, event in wire.chunks():
            if most is not None and len(served.sampled_ids) >= most:
                break
            waiting.append(_event(event))
            served.sent(list(pieces))
            if pause is not None or len(waiting) >= EVENTS_PER_WRITE:
                await response.write(b"".join(waiting))
                waiting.clear()
            if pause is not None:
                await asyncio.sleep(pause * len(pieces))
        if fault is not None and fault.malformed:
            waiting.append(b'data: {"choices": [{"delta": {"content": "brok\n\n')
        elif fault is not None and fault.stall_after is not None:
            await response.write(b"".join(waiting))
            await never_answer()
        elif fault is not None and fault.error_chunk is not None:
            waiting.append(_event({"error": {"message": fault.error_chunk, "type": "server_error", "code": 500}}))
        elif most is None:
            waiting += [_event(event) for event in wire.closing()]
            waiting.append(b"data: [DONE]\n\n")
        await response.write(b"".join(waiting))
        return response

    def _too_long(self, tokens: int, most: int) -> web.Response:
        if self.script.engine == "llamacpp":
            message = f"request ({tokens} tokens) exceeds the available context size ({most} tokens)"
            return _error(400, message, "exceed_context_size_error", n_prompt_tokens=tokens, n_ctx=most)
        message = f"This model's maximum context length is {most} tokens, but the request has {tokens} tokens."
        return _error(400, message, "invalid_request_error", "context_length_exceeded")

    def _refuse_stranger(self, request: web.Request) -> web.Response | None:
        if self._api_key is None or request.headers.get("Authorization") == f"Bearer {self._api_key}":
            return None
        return _error(401, "Incorrect API key provided", "invalid_request_error", "invalid_api_key")


def _read(raw: bytes) -> dict[str, Any] | None:
    with suppress(orjson.JSONDecodeError):
        body = orjson.loads(raw)
        messages = body.get("messages") if isinstance(body, dict) else None
        if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
            return dict(body)
    return None


def _session(request: web.Request) -> str:
    return next((request.headers[name] for name in SESSION_HEADERS if name in request.headers), "")


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def _error(
    status: int,
    message: str,
    kind: str,
    code: str | None = None,
    headers: dict[str, str] | None = None,
    **more: int,
) -> web.Response:
    error = {"message": message, "type": kind, "param": None, "code": code if code is not None else status, **more}
    return web.json_response({"error": error}, status=status, headers=headers)
