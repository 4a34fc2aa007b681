"""A model server on the loopback that plays a script, with injected faults. It samples nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Self

import orjson
from aiohttp import web

from paddock.models.replay.answer import answer
from paddock.models.replay.engine_format import EngineFormat
from paddock.models.replay.script import Script
from paddock.models.replay.tokenizer import encode, encode_with_markers, prompt_ids, prompt_text
from paddock.protocol.sse import DONE, MEDIA_TYPE, write_event

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paddock.models.replay.answer import ReplayAnswer, SampledToken
    from paddock.models.replay.script import ScriptedFault

BODY_BYTES = 64 * 1024 * 1024
EVENTS_PER_WRITE = 16
WHEN_CHARACTERS = 30
"""How much of the `when` of a task an error shows."""
SESSION_HEADERS = ("x-session-id", "x-session-affinity")
OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp", "openai": "openai", "text": "replay"}


@dataclass(slots=True)
class ServedRequest:
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
    fault: ScriptedFault | None = None
    aborted: bool = False
    """The client hung up before the end."""

    def record_sent(self, tokens: list[SampledToken]) -> None:
        self.sampled_ids += [token.id for token in tokens]
        self.logprobs += [token.logprob for token in tokens]


class ReplayServer:
    """Serves a script while it is entered. `url` is the base that `/chat/completions` is added to."""

    def __init__(self, script: Script | dict[str, Any] | str | Path, *, api_key: str | None = None) -> None:
        if isinstance(script, dict):
            script = Script.parse(script)
        self.script = script if isinstance(script, Script) else Script.load(script)
        self.log: list[ServedRequest] = []
        self._api_key = api_key
        self._faults = FaultCounter(self.script.faults)
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

    # -- side requests ----------------------------------------------------------------------------

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        if refusal := self._check_key(request):
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
        if refusal := self._check_key(request):
            return refusal
        body = _read_body(await request.read())
        if body is None:
            return _error(400, "the body holds no messages", "invalid_request_error")
        tokens = prompt_ids(body["messages"], body.get("tools"))
        limit = self.script.max_context or 8192
        return web.json_response({"count": len(tokens), "max_model_len": limit, "tokens": tokens})

    async def _apply_template(self, request: web.Request) -> web.Response:
        body = await request.json(loads=orjson.loads)
        return web.json_response({"prompt": prompt_text(body["messages"], body.get("tools"))})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json(loads=orjson.loads)
        with_markers = body.get("parse_special", True)
        tokens = encode_with_markers(body["content"]) if with_markers else list(encode(body["content"]))
        return web.json_response({"tokens": tokens})

    # -- completions ------------------------------------------------------------------------------

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        if refusal := self._check_key(request):
            return refusal
        body = _read_body(await request.read())
        if body is None:
            return _error(400, "the body is no chat completion request", "invalid_request_error")
        served = ServedRequest(body, dict(request.headers), _session(request))
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

    async def _answer(self, request: web.Request, served: ServedRequest) -> web.StreamResponse:
        script, body = self.script, served.request
        if unknown := sorted(script.rejects & body.keys()):
            return _error(400, f"Unknown parameter: '{unknown[0]}'.", "invalid_request_error", "unknown_parameter")
        if script.engine == "sglang" and body.get("stream") and body.get("return_token_ids"):
            return _error(400, "return_token_ids is not supported with stream=true", "BadRequestError")
        reply = answer(script, body)
        if reply is None:
            return _error(400, _describe_missing_task(script), "invalid_request_error")
        served.turn, served.prompt_ids = reply.turn, reply.prompt_ids
        if script.max_context is not None and len(reply.prompt_ids) > script.max_context:
            return self._context_error(len(reply.prompt_ids), script.max_context)
        fault = served.fault = self._faults.next_fault(reply, served.session)
        if fault is not None:
            if fault.hang is not None:
                await asyncio.sleep(fault.hang)
            if fault.status is not None:
                headers = {} if fault.retry_after is None else {"Retry-After": f"{fault.retry_after:g}"}
                return _error(fault.status, fault.message, "scripted_fault", fault.code, headers)
            if fault.close:
                hang_up(request)
        formatted = EngineFormat(script, body, reply)
        if body.get("stream"):
            return await self._stream(request, served, formatted, fault)
        return await self._unary(request, served, formatted, fault)

    async def _unary(
        self, request: web.Request, served: ServedRequest, formatted: EngineFormat, fault: ScriptedFault | None
    ) -> web.StreamResponse:
        if fault is not None:
            tokens = len(formatted.answer.tokens)
            await asyncio.sleep((fault.delay or 0.0) + (fault.per_token_delay or 0.0) * tokens)
            if fault.stall_after is not None:
                await never_answer()
            if fault.error_chunk is not None:
                return _error(500, fault.error_chunk, "server_error")
        payload = orjson.dumps(formatted.unary())
        if fault is not None and fault.malformed:
            payload = payload[: len(payload) // 2]
        if fault is not None and fault.cut_after is not None:
            response = web.StreamResponse(headers={"Content-Type": "application/json"})
            response.content_length = len(payload)
            await response.prepare(request)
            await response.write(payload[: len(payload) // 2])
            hang_up(request)
        served.record_sent(formatted.answer.tokens)
        return web.Response(body=payload, content_type="application/json")

    async def _stream(
        self, request: web.Request, served: ServedRequest, formatted: EngineFormat, fault: ScriptedFault | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": MEDIA_TYPE, "Cache-Control": "no-cache"})
        await response.prepare(request)
        if fault is not None and fault.delay is not None:
            await asyncio.sleep(fault.delay)
        pending = [_event(formatted.opening())]
        pause = fault.per_token_delay if fault is not None else None
        limit = tokens_before_break(fault)
        for tokens, event in formatted.chunks():
            if limit is not None and len(served.sampled_ids) >= limit:
                break
            pending.append(_event(event))
            served.record_sent(list(tokens))
            if pause is not None or len(pending) >= EVENTS_PER_WRITE:
                await response.write(b"".join(pending))
                pending.clear()
            if pause is not None:
                await asyncio.sleep(pause * len(tokens))
        if fault is not None and fault.malformed:
            pending.append(b'data: {"choices": [{"delta": {"content": "brok\n\n')
        elif fault is not None and fault.stall_after is not None:
            await response.write(b"".join(pending))
            await never_answer()
        elif fault is not None and fault.error_chunk is not None:
            pending.append(_event({"error": {"message": fault.error_chunk, "type": "server_error", "code": 500}}))
        elif limit is None:
            pending += [_event(event) for event in formatted.closing()]
            pending.append(write_event(DONE))
        await response.write(b"".join(pending))
        return response

    def _context_error(self, tokens: int, limit: int) -> web.Response:
        if self.script.engine == "llamacpp":
            message = f"request ({tokens} tokens) exceeds the available context size ({limit} tokens)"
            return _error(400, message, "exceed_context_size_error", n_prompt_tokens=tokens, n_ctx=limit)
        message = f"This model's maximum context length is {limit} tokens, but the request has {tokens} tokens."
        return _error(400, message, "invalid_request_error", "context_length_exceeded")

    def _check_key(self, request: web.Request) -> web.Response | None:
        if self._api_key is None or request.headers.get("Authorization") == f"Bearer {self._api_key}":
            return None
        return _error(401, "Incorrect API key provided", "invalid_request_error", "invalid_api_key")


def _read_body(raw: bytes) -> dict[str, Any] | None:
    with suppress(orjson.JSONDecodeError):
        body = orjson.loads(raw)
        messages = body.get("messages") if isinstance(body, dict) else None
        if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
            return dict(body)
    return None


def _session(request: web.Request) -> str:
    return next((request.headers[name] for name in SESSION_HEADERS if name in request.headers), "")


def _event(data: dict[str, Any]) -> bytes:
    return write_event(orjson.dumps(data))


def _describe_missing_task(script: Script) -> str:
    """Why no task of a script fits. `--model demo` is a script too, with the shipped tasks."""
    starts = ", ".join(repr(task.when[:WHEN_CHARACTERS]) for task in script.tasks)
    return (
        f"the script has no answers for this instruction. Its tasks are for instructions with: {starts}. "
        "--model demo knows the shipped tasks only: for another task, write a script (--model replay:FILE)"
    )


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


# -- faults ----------------------------------------------------------------------------------------------


class ScriptedHangUp(ConnectionResetError):
    """The script closed the socket, not the client."""


class FaultCounter:
    """The faults of a script, and how often each was played in each conversation."""

    def __init__(self, faults: Sequence[ScriptedFault]) -> None:
        self._faults = faults
        self._played: Counter[tuple[str, str, int]] = Counter()

    def next_fault(self, answer: ReplayAnswer, session: str) -> ScriptedFault | None:
        """The first fault that applies to this answer; it is counted. Side calls have none."""
        if answer.turn is None:
            return None
        for number, fault in enumerate(self._faults):
            if fault.when not in answer.task or fault.turn not in (None, answer.turn):
                continue
            key = (answer.task, session, number)
            if fault.limit is None or self._played[key] < fault.limit:
                self._played[key] += 1
                return fault
        return None


def tokens_before_break(fault: ScriptedFault | None) -> int | None:
    """After how many tokens a stream breaks off; None if it does not."""
    if fault is None:
        return None
    if fault.stall_after is not None:
        return fault.stall_after
    if fault.cut_after is None and fault.malformed:
        return 0
    return 1 if fault.cut_after is None and fault.error_chunk is not None else fault.cut_after


async def never_answer() -> NoReturn:
    """Until the client hangs up, which cancels the handler, or the server is closed."""
    while True:
        await asyncio.sleep(3600)


def hang_up(request: web.Request) -> NoReturn:
    """Close the socket without the rest of an answer."""
    if request.transport is not None:
        request.transport.abort()
    raise ScriptedHangUp("scripted fault")
