"""The server that one rollout's agent talks to: routes, the agent's key, budgets, and the rollout's calls.

One call is the exchange's business; what a call was for, the roles'; keeping it, the ledger's.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets as randomness
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from paddock.errors import ModelError
from paddock.rollouts.capture import budget
from paddock.rollouts.capture.dialects import chat
from paddock.rollouts.capture.exchange import Exchange
from paddock.rollouts.capture.ledger import Ledger, fingerprint
from paddock.rollouts.capture.reply import HttpReply
from paddock.rollouts.capture.roles import SESSION_HEADERS, Roles, session_of
from paddock.rollouts.capture.shaping import constraint
from paddock.rollouts.masking import Mask
from paddock.rollouts.trace import Role

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Mapping

    from paddock.rollouts.capture.settings import CaptureSettings
    from paddock.rollouts.capture.upstream import Upstream
    from paddock.rollouts.models.endpoint import Endpoint
    from paddock.rollouts.trace import Call

    Classify = Callable[[dict[str, Any], Mapping[str, str]], Role | None]

LARGEST_BODY = 64 * 1024 * 1024
LOG_LINES = 500
IDLE_AGENT_SECONDS = 3600.0
"""An agent's tool may run for long, and the agent expects its connection to be there afterwards."""
STOP_SECONDS = 5.0
SHUTDOWN_SECONDS = 0.1
COMPLETIONS = ("/v1/chat/completions", "/chat/completions")
MODELS = ("/v1/models", "/models")
SPENT = {
    "calls": "Budget reached: no model calls are left. Stopping here.",
    "tokens": "Budget reached: no tokens are left. Stopping here.",
    "time": "Budget reached: no time is left. Stopping here.",
}


class Capture:
    """Stands between the agent and the endpoint from `serve` to `stop`, and keeps every call."""

    def __init__(
        self,
        endpoint: Endpoint,
        upstream: Upstream,
        settings: CaptureSettings,
        *,
        on_call: Callable[[Call], Awaitable[None]],
        classify: Classify | None = None,
        secrets: tuple[str, ...] = (),
    ) -> None:
        self.endpoint = endpoint
        self.settings = settings
        self.secret = "paddock-" + randomness.token_urlsafe(24)
        """The key that the agent must show, as `Authorization: Bearer`."""
        self.exhausted: str | None = None
        """`calls`, `tokens` or `time` once the agent was told to stop."""
        self.last_failure: str | None = None
        """How the endpoint failed the agent's most recent call; None once a later one went well. A request
        that was refused for what it says is the agent's affair, unless none was ever accepted."""
        self._upstream = upstream
        self._classify = classify
        self._roles = Roles()
        self._mask = Mask.of_endpoint(endpoint, (self.secret, *secrets))
        self._log: deque[str] = deque(maxlen=LOG_LINES)
        self._ledger = Ledger(on_call, self._mask, self._note)
        self._granted: dict[str, int] = {}
        """The most tokens that each call may sample."""
        self._running: set[asyncio.Task[Any]] = set()
        self._runner: web.ServerRunner | None = None
        self._stopping = False

    @property
    def calls(self) -> list[Call]:
        """All so far, in the order they began."""
        return self._ledger.calls

    @property
    def lost(self) -> str | None:
        """Why a call could not be kept; None if all were."""
        return self._ledger.lost

    def log_tail(self, count: int = 4096) -> str:
        """The last `count` characters of what happened, one line each."""
        return "\n".join(self._log)[-count:]

    # -- life ---------------------------------------------------------------------------------------

    async def serve(self, sock: socket.socket) -> None:
        """Begin to answer on a listening socket. It is closed by `stop`."""
        if self._runner is not None or self._stopping:
            raise ModelError("this capture has already been started", hint="make a new Capture for each rollout")
        server = web.Server(
            self._handle,
            handler_cancellation=True,
            request_factory=make_request,
            access_log=None,
            keepalive_timeout=IDLE_AGENT_SECONDS,
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=SHUTDOWN_SECONDS)
        await self._runner.setup()
        await web.SockSite(self._runner, sock).start()

    async def stop(self) -> None:
        """Answer nobody any more, cut off what runs, and come back when every call was handed on."""
        self._stopping = True
        running = self._running - {asyncio.current_task()}
        for task in running:
            task.cancel()
        try:
            if running:
                await asyncio.wait(running, timeout=STOP_SECONDS)
            await self._ledger.settle()
        finally:
            runner, self._runner = self._runner, None
            if runner is not None:
                await runner.cleanup()

    # -- requests -----------------------------------------------------------------------------------

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if self._stopping:
            return refusal(503, "the rollout is over", "server_error")
        path = request.path.rstrip("/")
        if not self._knows(request.headers.get("Authorization", "")):
            return refusal(401, "wrong or missing API key", "invalid_request_error", "invalid_api_key")
        if path in MODELS and request.method == "GET":
            return web.Response(body=chat.models(self.endpoint.name), content_type="application/json")
        if path not in COMPLETIONS:
            message = f"{request.method} {request.path} is not served here; use POST /v1/chat/completions"
            return refusal(404, message, "invalid_request_error", "not_found")
        if request.method != "POST":
            return refusal(405, f"{path} takes POST only", "invalid_request_error")
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            return await self._complete(request)
        finally:
            self._running.discard(task)

    async def _complete(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            body = chat.read_request(await request.read())
        except chat.BadRequest as error:
            self._note(f"bad request: {error}")
            return refusal(400, str(error), "invalid_request_error")
        except web.HTTPRequestEntityTooLarge:
            return refusal(413, f"the body is larger than {LARGEST_BODY} bytes", "invalid_request_error")
        except OSError:
            raise asyncio.CancelledError from None
        if self.settings.transparent and (forced := constraint(body)) is not None:
            message = f"{forced} forces what the model may say, and such a call cannot be trained on; leave it out"
            self._note(f"refused: {forced}")
            return refusal(400, message, "invalid_request_error", "constrained_decoding")
        role = self._role(body, request.headers)
        if (spent := self._spent(role)) is not None:
            return self._stop_message(body, spent)
        return await self._exchange(request, body, role)

    async def _exchange(self, request: web.BaseRequest, body: dict[str, Any], role: Role) -> web.StreamResponse:
        try:
            recorded = self._mask.value(body) if self._mask.is_in(orjson.dumps(body)) else body
        except TypeError:
            return refusal(400, "the body is nested too deeply", "invalid_request_error")
        room = budget.room(self.settings.budget, self.calls, self._granted)
        call = self._ledger.begin(role, session_of(request.headers), recorded, fingerprint(body["messages"]))
        self._granted[call.id] = room
        reply = HttpReply(request, self.settings.keep_alive if body.get("stream") else None, self._note)
        exchange = Exchange(
            call=call,
            body=body,
            endpoint=self.endpoint,
            upstream=self._upstream,
            settings=self.settings,
            reply=reply,
            mask=self._mask,
            headers={name: request.headers[name] for name in SESSION_HEADERS if name in request.headers},
            room=room,
            limit=asyncio.get_running_loop().time() + self._seconds_for_a_call(),
        )
        try:
            await exchange.run()
        finally:
            reply.close()
            self._conclude(exchange)
            await self._ledger.finish(call)
        if reply.response is None:
            raise asyncio.CancelledError
        return reply.response

    def _conclude(self, exchange: Exchange) -> None:
        call, failure = exchange.call, exchange.failure
        if call.aborted and self._seconds_left() == 0.0:
            self.exhausted = self.exhausted or "time"
        if call.role is Role.TITLE:
            return
        if call.ok:
            self.last_failure = None
        elif failure is None or failure.is_context_overflow:
            return
        elif failure.is_endpoints_fault or not any(call.ok for call in self.calls):
            self.last_failure = self._mask.text(failure.message)

    # -- judgements ---------------------------------------------------------------------------------

    def _knows(self, authorization: str) -> bool:
        shown = authorization.removeprefix("Bearer ").encode("utf-8", "surrogateescape")
        return hmac.compare_digest(shown, self.secret.encode())

    def _role(self, body: dict[str, Any], headers: Mapping[str, str]) -> Role:
        told = self._roles.tell(body, headers)
        if self._classify is None:
            return told
        try:
            return self._classify(body, headers) or told
        except Exception as error:
            self._note(f"the agent's own classifier failed: {type(error).__name__}: {error}")
            return told

    def _spent(self, role: Role) -> budget.Exhausted | None:
        left = self._seconds_left()
        spent = budget.exhausted(self.settings.budget, self.calls, role, left, self._granted)
        # A title is no part of the agent's work: that it is refused must not end the rollout.
        if spent is not None and role is not Role.TITLE:
            self.exhausted = self.exhausted or spent
            self._note(f"budget of {spent} reached")
        return spent

    def _stop_message(self, body: dict[str, Any], spent: budget.Exhausted) -> web.Response:
        stream = bool(body.get("stream"))
        content = chat.stop_message(SPENT[spent], str(body.get("model") or self.endpoint.name), stream=stream)
        return web.Response(body=content, content_type="text/event-stream" if stream else "application/json")

    def _seconds_left(self) -> float | None:
        return None if self.settings.deadline is None else max(0.0, self.settings.deadline - time.monotonic())

    def _seconds_for_a_call(self) -> float:
        left = self._seconds_left()
        return self.settings.call_timeout if left is None else min(self.settings.call_timeout, left)

    def _note(self, line: str) -> None:
        self._log.append(f"{time.strftime('%H:%M:%S')} {self._mask.text(line)}")


def make_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=LARGEST_BODY)


def refusal(status: int, message: str, kind: str, code: str | None = None) -> web.Response:
    document = chat.error_document(message, kind, code)
    return web.Response(body=document, status=status, content_type="application/json")
