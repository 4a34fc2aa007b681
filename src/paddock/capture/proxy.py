"""The HTTP proxy between one rollout's agent and the model endpoint.

A request takes this path: route and key (here) → `dialects/` (request as a chat completion) → `roles` and `budget` →
`exchange` (one call: `upstream_request`, `upstream`, `completion`, retries) → `reply` (response in the agent's
dialect) → `recorder` (the call is linked and stored).
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections import deque
from functools import partial
from secrets import token_urlsafe
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from paddock.capture.budget import STOP_MESSAGES, BudgetMeter
from paddock.capture.call_summary import CallSummary, endpoint_failure
from paddock.capture.callers import NO_FINDER, UNIDENTIFIED, CallerLabels
from paddock.capture.dialects import DIALECTS, DialectRouter
from paddock.capture.dialects.base import JSON, text_completion
from paddock.capture.errors import BadRequest, ErrorReply
from paddock.capture.exchange import Exchange
from paddock.capture.gate import CallGate
from paddock.capture.masking import Mask
from paddock.capture.paused_time import PausedTime
from paddock.capture.recorded.answer import RecordedExchange
from paddock.capture.recorder import CallRecorder, fingerprint_messages
from paddock.capture.reply import HttpReply
from paddock.capture.roles import SESSION_HEADERS, Roles, session_of
from paddock.capture.tokenizer import count_tokens
from paddock.capture.tokens.conversations import TokenConversations
from paddock.capture.tokens.opening import RenderingSource
from paddock.capture.trace import Caller, Role
from paddock.capture.upstream_request import find_constraint
from paddock.errors import ModelError

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Mapping

    from paddock.capture.call_summary import CallTimes
    from paddock.capture.dialects.base import Dialect, DialectRequest, ReplyWriter, Route
    from paddock.capture.recorded.replay import Replay
    from paddock.capture.settings import CaptureSettings
    from paddock.capture.trace import Call
    from paddock.capture.upstream import Upstream
    from paddock.models.endpoint import Endpoint
    from paddock.sandbox.socket_owners import SocketOwnerFinder

    Classify = Callable[[dict[str, Any], Mapping[str, str]], Role | None]

LARGEST_BODY_BYTES = 64 * 1024 * 1024
LOG_LINES = 500
DIVERGED_MESSAGE = "This conversation differs from the recorded one. Stopping here."
"""The text that ends the agent's loop."""
IDLE_AGENT_SECONDS = 3600.0
"""A tool of the agent may run for long, and the agent expects its connection to be open afterwards."""
STOP_SECONDS = 5.0
SHUTDOWN_SECONDS = 0.1
SERVED_PATHS = ", ".join(dialect.path for dialect in DIALECTS.values())
KEY_HEADERS = tuple(dialect.key_header for dialect in DIALECTS.values() if dialect.key_header is not None)


class Capture:
    """Serves the agent from `serve` to `stop`, and records every call.

    `begin_step` makes it ready for another program of the agent, whose calls go on the same account."""

    def __init__(
        self,
        endpoint: Endpoint,
        upstream: Upstream,
        settings: CaptureSettings,
        *,
        on_call: Callable[[Call], Awaitable[None]],
        classify: Classify | None = None,
        secrets: tuple[str, ...] = (),
        caller_finder: SocketOwnerFinder | None = None,
        no_finder_reason: str = NO_FINDER,
        replay: Replay | None = None,
        gate: CallGate | None = None,
        paused: PausedTime | None = None,
        on_begin: Callable[[Call], asyncio.Future[None]] | None = None,
    ) -> None:
        """`replay` answers the calls that it has a recorded answer for. `gate` can hold back calls, and `paused`
        collects the time for which they waited. `on_begin` is told of each call that begins: the agent gets nothing
        of the answer before its future is done, which never fails."""
        self.endpoint = endpoint
        self.settings = settings
        self.secret = "paddock-" + token_urlsafe(24)
        """The API key of the agent."""
        self.divergence: str | None = None
        """Why the recorded calls cannot be replayed further."""
        self.paused = paused or PausedTime()
        self._gate = gate or CallGate()
        self._replay = replay
        self._on_begin = on_begin
        self._upstream = upstream
        self._classify = classify
        self._router = DialectRouter()
        self._roles = Roles()
        self._mask = Mask.of_endpoint(endpoint, (self.secret, *secrets))
        self._log: deque[str] = deque(maxlen=LOG_LINES)
        self._recorder = CallRecorder(on_call, self._mask, self._add_log_line)
        self._budget = BudgetMeter(settings, self._recorder.calls, self.paused)
        self._callers = self._make_callers(caller_finder, no_finder_reason)
        self._tokens = self._make_conversations()
        self._first_call = 0
        """The index of the first call of this step."""
        self._times: dict[str, CallTimes] = {}
        self._running: set[asyncio.Task[Any]] = set()
        self._runner: web.ServerRunner | None = None
        self._stopping = False

    @property
    def calls(self) -> list[Call]:
        """All calls so far, in the order they began."""
        return self._recorder.calls

    @property
    def step_calls(self) -> list[Call]:
        """The calls of the current step."""
        return self.calls[self._first_call :]

    @property
    def exhausted(self) -> str | None:
        """`calls`, `tokens` or `time` once a limit of the budget has stopped the agent."""
        return self._budget.exhausted

    @property
    def storage_error(self) -> str | None:
        """Why a call could not be stored; None if all were."""
        return self._recorder.storage_error

    @property
    def last_failure(self) -> str | None:
        """How the endpoint failed the agent's most recent call; None once a later one succeeded."""
        return endpoint_failure(self.summaries())

    def summaries(self) -> list[CallSummary]:
        """What decides whether the endpoint is to blame in the current step, in the order the calls began.
        Their times are those of `PausedTime.working_time`.

        Titles do not count, and neither do calls of other programs than the agent's: a tool may call what it likes,
        and disconnect."""
        return [self._summarize(call) for call in self.step_calls if decides_blame(call)]

    def _summarize(self, call: Call) -> CallSummary:
        times, clock = self._times[call.id], self.paused.working_time
        return CallSummary(
            began=clock(times.began),
            attempt_began=None if times.attempt_began is None else clock(times.attempt_began),
            last_byte=None if times.last_byte is None else clock(times.last_byte),
            ended=None if times.ended is None else clock(times.ended),
            streamed=times.streamed,
            fault=times.fault,
            error=None if call.error is None else self._mask.text(call.error),
            unanswered=call.aborted,
        )

    def log_tail(self, count: int = 4096) -> str:
        """The last `count` characters of the log."""
        return "\n".join(self._log)[-count:]

    def _add_log_line(self, line: str) -> None:
        self._log.append(f"{time.strftime('%H:%M:%S')} {self._mask.text(line)}")

    # -- start and stop ------------------------------------------------------------------------------

    async def serve(self, sock: socket.socket) -> None:
        """Serve on a listening socket. It is closed by `stop`."""
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

    def begin_step(
        self, name: str, caller_finder: SocketOwnerFinder | None = None, no_finder_reason: str = NO_FINDER
    ) -> None:
        """Prepare for the next step of the task. Call it before `serve`, and between `stop` and the next `serve`.

        The agent's program of a step is another process, and its conversation begins anew."""
        self._stopping = False
        self._first_call = len(self.calls)
        self._recorder.step = name
        self._roles = Roles()
        self._callers = self._make_callers(caller_finder, no_finder_reason)

    def _make_callers(self, finder: SocketOwnerFinder | None, no_finder_reason: str) -> CallerLabels:
        return CallerLabels(finder, no_finder_reason, log=self._add_log_line, on_change=self._recorder.rewrite)

    def _make_conversations(self) -> TokenConversations | None:
        """The conversations as token ids, in token mode."""
        if self.settings.tokens is None:
            return None
        thinking = self.settings.thinking
        source = RenderingSource(self.settings.tokens, self.endpoint, self._upstream, thinking=thinking)
        return TokenConversations(source, self._add_log_line)

    async def stop(self) -> None:
        """Refuse new requests, cancel running calls, and return when every call was stored."""
        self._stopping = True
        running = self._running - {asyncio.current_task()}
        for task in running:
            task.cancel()
        try:
            if running:
                await asyncio.wait(running, timeout=STOP_SECONDS)
            await self._recorder.settle()
        finally:
            runner, self._runner = self._runner, None
            if runner is not None:
                await runner.cleanup()

    # -- requests -----------------------------------------------------------------------------------

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        dialect, route = self._router.find(request.path.rstrip("/"), request.headers, request.query)
        if self._stopping:
            return error_response(dialect, ErrorReply(503, "the rollout is over", "server_error"))
        if not self._has_key(request):
            return error_response(dialect, ErrorReply(401, "wrong or missing API key", code="invalid_api_key"))
        if route is None:
            message = f"{request.method} {request.path} is not served here; POST to one of {SERVED_PATHS}"
            return error_response(dialect, ErrorReply(404, message, code="not_found"))
        if request.method != route.method:
            return error_response(dialect, ErrorReply(405, f"{request.path} takes {route.method} only"))
        if route.action == "lookup":
            body = dialect.lookup_body(route, self.endpoint.name)
            if body is None:
                return error_response(dialect, ErrorReply(404, f"{request.path} is not there", code="not_found"))
            return web.Response(body=body, content_type=JSON)
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            return await self._handle_call(request, dialect, route)
        finally:
            self._running.discard(task)

    async def _handle_call(self, request: web.BaseRequest, dialect: Dialect, route: Route) -> web.StreamResponse:
        try:
            parsed = dialect.parse(await request.read(), route)
        except BadRequest as error:
            self._add_log_line(f"bad request: {error}")
            return error_response(dialect, ErrorReply(error.status, str(error), code=error.code, param=error.param))
        except web.HTTPRequestEntityTooLarge:
            return error_response(dialect, ErrorReply(413, f"the body is larger than {LARGEST_BODY_BYTES} bytes"))
        except OSError:
            raise asyncio.CancelledError from None
        for note in parsed.notes:
            self._add_log_line(f"{dialect.name}: {note}")
        if route.action == "count_tokens":
            return await self._count_tokens(dialect, parsed)
        if self.settings.transparent and (constraint := find_constraint(parsed.chat)) is not None:
            message = f"{constraint} constrains decoding, and such a call cannot be trained on; leave it out"
            self._add_log_line(f"refused: {constraint}")
            return error_response(dialect, ErrorReply(400, message, code="constrained_decoding"))
        role = self._find_role(parsed.chat, request.headers)
        writer = dialect.make_writer(parsed, self.endpoint.name, include_usage=not self.settings.transparent)
        if (limit := self._budget.check(role)) is not None:
            if role is not Role.TITLE:
                self._add_log_line(f"budget of {limit} reached")
            return stop_response(writer, STOP_MESSAGES[limit], self.endpoint.name, is_stream=parsed.is_stream)
        return await self._run_exchange(request, dialect, parsed, writer, role)

    async def _count_tokens(self, dialect: Dialect, parsed: DialectRequest) -> web.StreamResponse:
        """The endpoint may be away during a pause, so the count waits for its end."""
        if self._gate.is_paused:
            try:
                with self.paused.hold(time.monotonic()):
                    async with asyncio.timeout(self.settings.unary_pause_timeout):
                        await self._gate.wait_open()
            except TimeoutError:
                return error_response(dialect, ErrorReply(503, "the model is paused", "server_error"))
        tokens = await count_tokens(parsed.chat, self.endpoint, self._upstream)
        return web.Response(body=dialect.token_count_body(tokens), content_type=JSON)

    async def _run_exchange(
        self, request: web.BaseRequest, dialect: Dialect, parsed: DialectRequest, writer: ReplyWriter, role: Role
    ) -> web.StreamResponse:
        try:
            has_secret = self._mask.is_in(orjson.dumps(parsed.body))
        except TypeError:
            return error_response(dialect, ErrorReply(400, "the body is nested too deeply"))
        recorded = None
        tool_results: dict[str, str] = {}
        if self._replay is not None:
            match = self._replay.match(f"c{len(self.calls)}", self._mask.value(parsed.chat["messages"]))
            if match.divergence is not None:
                self._add_log_line(match.divergence)
                self.divergence = self._mask.text(match.divergence)
                return stop_response(writer, DIVERGED_MESSAGE, self.endpoint.name, is_stream=parsed.is_stream)
            recorded = match.recorded
            parsed.chat["messages"], tool_results = self._replay.rewrite(parsed.chat["messages"])
        before_output = all(each.first_token is None for each in self.step_calls)
        max_tokens = self._budget.grant_tokens()
        call = self._recorder.start(
            role,
            session_of(request.headers),
            self._mask.value(parsed.body) if has_secret else parsed.body,
            fingerprint_messages(parsed.chat["messages"]),
            dialect.name,
        )
        call.tool_results = tool_results
        self._budget.record_grant(call, max_tokens)
        ready = self._announce(call, self._callers.label(call, request.transport, before_output=before_output))
        keep_alive = self.settings.keep_alive if parsed.is_stream else None
        reply = HttpReply(request, writer, keep_alive, self._add_log_line, ready)
        if recorded is not None:
            assert self._replay is not None
            restore = None if self._tokens is None else partial(self._tokens.restore, chat=parsed.chat)
            exchange: Exchange | RecordedExchange = RecordedExchange(
                call,
                recorded,
                self._replay,
                writer,
                reply,
                dialect.error_body,
                is_stream=parsed.is_stream,
                on_answer=restore,
            )
            return await self._finish_exchange(exchange, reply, ready)
        exchange = Exchange(
            call=call,
            chat=parsed.chat,
            writer=writer,
            error_body=dialect.error_body,
            endpoint=self.endpoint,
            upstream=self._upstream,
            settings=self.settings,
            reply=reply,
            mask=self._mask,
            headers={name: request.headers[name] for name in SESSION_HEADERS if name in request.headers},
            max_tokens=max_tokens,
            ends_at=asyncio.get_running_loop().time() + self._budget.seconds_for_call(),
            gate=self._gate,
            paused=self.paused,
            tokens=self._tokens,
        )
        return await self._finish_exchange(exchange, reply, ready)

    def _announce(self, call: Call, labelled: asyncio.Future[None] | None) -> asyncio.Future[None] | None:
        """Done when the caller is labelled, and whoever was told of the call lets it go on."""
        if self._on_begin is None:
            return labelled
        begun = self._on_begin(call)
        return begun if labelled is None else asyncio.ensure_future(_wait_both(labelled, begun))

    async def _finish_exchange(
        self, exchange: Exchange | RecordedExchange, reply: HttpReply, ready: asyncio.Future[None] | None
    ) -> web.StreamResponse:
        call = exchange.call
        self._times[call.id] = exchange.times
        try:
            await exchange.run()
        finally:
            exchange.times.ended = time.monotonic()
            reply.close()
            if ready is not None:
                await asyncio.shield(ready)
            if call.aborted:
                self._budget.record_abort()
            await self._recorder.finish(call)
        if reply.response is None:
            raise asyncio.CancelledError
        return reply.response

    def _has_key(self, request: web.BaseRequest) -> bool:
        keys = [request.headers.get("Authorization", "").removeprefix("Bearer ")]
        keys += [request.headers.get(name, "") for name in KEY_HEADERS]
        keys.append(request.query.get("key", ""))
        own = self.secret.encode()
        return any(hmac.compare_digest(key.encode("utf-8", "surrogateescape"), own) for key in keys if key)

    def _find_role(self, chat: dict[str, Any], headers: Mapping[str, str]) -> Role:
        role = self._roles.classify(chat, headers)
        if self._classify is None:
            return role
        try:
            return self._classify(chat, headers) or role
        except Exception as error:
            self._add_log_line(f"the agent's own classifier failed: {type(error).__name__}: {error}")
            return role


async def _wait_both(first: asyncio.Future[None], second: asyncio.Future[None]) -> None:
    await first
    await second


def decides_blame(call: Call) -> bool:
    """Whether a call says something about the endpoint. One whose process could not be identified does: it may be the
    agent's."""
    is_foreign = call.caller is Caller.FOREIGN and call.caller_reason != UNIDENTIFIED
    return call.role is not Role.TITLE and not is_foreign


def make_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
    """An aiohttp request without an application. Its body may be as large as a model call."""
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=LARGEST_BODY_BYTES)


def error_response(dialect: Dialect, error: ErrorReply) -> web.Response:
    """An error as the agent's API writes it."""
    return web.Response(body=dialect.error_body(error), status=error.status, content_type=JSON)


def stop_response(writer: ReplyWriter, text: str, model: str, *, is_stream: bool) -> web.Response:
    """A plain text that ends the agent's loop."""
    completion = text_completion(text, model)
    if is_stream:
        return web.Response(body=writer.write_as_stream(completion), content_type=writer.content_type)
    return web.Response(body=writer.write_document(completion), content_type=JSON)
