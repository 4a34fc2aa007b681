"""The server that one rollout's agent talks to: routes, the agent's key, budgets, and the rollout's calls.

One call is the exchange's business; what a call was for, the roles'; keeping it, the ledger's.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets as randomness
import time
from collections import deque
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from paddock.errors import ModelError
from paddock.rollouts.blame import CallSummary, endpoint_failure
from paddock.rollouts.capture import budget
from paddock.rollouts.capture.callers import UNIDENTIFIED, AgentProgram
from paddock.rollouts.capture.counting import count_tokens
from paddock.rollouts.capture.dialects import Interpreter
from paddock.rollouts.capture.dialects.base import JSON, plain_answer
from paddock.rollouts.capture.exchange import Exchange
from paddock.rollouts.capture.ledger import Ledger, fingerprint
from paddock.rollouts.capture.refusals import BadRequest, Fault
from paddock.rollouts.capture.reply import HttpReply
from paddock.rollouts.capture.roles import SESSION_HEADERS, Roles, session_of
from paddock.rollouts.capture.shaping import constraint
from paddock.rollouts.masking import Mask
from paddock.rollouts.sandbox.callers import Holders
from paddock.rollouts.trace import Caller, Role

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Mapping

    from paddock.rollouts.capture.dialects.base import Asked, Dialect, Place, Writer
    from paddock.rollouts.capture.exchange import CallTimes
    from paddock.rollouts.capture.settings import CaptureSettings
    from paddock.rollouts.capture.upstream import Upstream
    from paddock.rollouts.models.endpoint import Endpoint
    from paddock.rollouts.sandbox.callers import CallerFinder
    from paddock.rollouts.trace import Call

    Classify = Callable[[dict[str, Any], Mapping[str, str]], Role | None]

LARGEST_BODY = 64 * 1024 * 1024
LOG_LINES = 500
IDLE_AGENT_SECONDS = 3600.0
"""An agent's tool may run for long, and the agent expects its connection to be there afterwards."""
STOP_SECONDS = 5.0
SHUTDOWN_SECONDS = 0.1
IDENTIFY_SECONDS = 5.0
"""For the search for the process that made a call. Takes about a millisecond on a machine with time to spare."""
SERVED = "/v1/chat/completions, /v1/responses, /v1/messages or /v1beta/models/NAME:generateContent"
KEY_HEADERS = ("x-api-key", "x-goog-api-key")
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
        callers: CallerFinder | None = None,
        callers_unknown: str = "nobody can tell which process called",
    ) -> None:
        self.endpoint = endpoint
        self.settings = settings
        self.secret = "paddock-" + randomness.token_urlsafe(24)
        """The key that the agent must show, in the way of its dialect."""
        self.exhausted: str | None = None
        """`calls`, `tokens` or `time` once the agent was told to stop."""
        self._upstream = upstream
        self._classify = classify
        self._interpreter = Interpreter()
        self._roles = Roles()
        self._callers = callers
        self._callers_unknown = callers_unknown
        """Why no caller is known, where there is no finder."""
        self._program = AgentProgram()
        self._identified: list[tuple[asyncio.Transport, Holders]] = []
        self._mask = Mask.of_endpoint(endpoint, (self.secret, *secrets))
        self._log: deque[str] = deque(maxlen=LOG_LINES)
        self._ledger = Ledger(on_call, self._mask, self._note)
        self._granted: dict[str, int] = {}
        """The most tokens that each call may sample."""
        self._times: dict[str, CallTimes] = {}
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

    @property
    def last_failure(self) -> str | None:
        """How the endpoint failed the agent's most recent call; None once a later one went well."""
        return endpoint_failure(self.summaries())

    def summaries(self) -> list[CallSummary]:
        """What decides whether the endpoint is to blame, in the order the calls began.

        Titles decide nothing, and neither do calls of other programs than the agent's: a tool may call what it likes,
        and hang up."""
        return [self._summary(call) for call in self.calls if decides_blame(call)]

    def _summary(self, call: Call) -> CallSummary:
        times = asdict(self._times[call.id])
        error = None if call.error is None else self._mask.text(call.error)
        return CallSummary(**times, error=error, unanswered=call.aborted)

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
        dialect, place = self._interpreter.find(request.path.rstrip("/"), request.headers, request.query)
        if self._stopping:
            return refusal(dialect, Fault(503, "the rollout is over", "server_error"))
        if not self._knows(request):
            return refusal(dialect, Fault(401, "wrong or missing API key", code="invalid_api_key"))
        if place is None:
            message = f"{request.method} {request.path} is not served here; use POST {SERVED}"
            return refusal(dialect, Fault(404, message, code="not_found"))
        if request.method != place.method:
            return refusal(dialect, Fault(405, f"{request.path} takes {place.method} only"))
        if place.action == "look":
            found = dialect.look(place, self.endpoint.name)
            if found is None:
                return refusal(dialect, Fault(404, f"{request.path} is not there", code="not_found"))
            return web.Response(body=found, content_type=JSON)
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            return await self._answer(request, dialect, place)
        finally:
            self._running.discard(task)

    async def _answer(self, request: web.BaseRequest, dialect: Dialect, place: Place) -> web.StreamResponse:
        try:
            asked = dialect.read(await request.read(), place)
        except BadRequest as error:
            self._note(f"bad request: {error}")
            return refusal(dialect, Fault(error.status, str(error), code=error.code, param=error.param))
        except web.HTTPRequestEntityTooLarge:
            return refusal(dialect, Fault(413, f"the body is larger than {LARGEST_BODY} bytes"))
        except OSError:
            raise asyncio.CancelledError from None
        for note in asked.notes:
            self._note(f"{dialect.name}: {note}")
        if place.action == "count":
            tokens = await count_tokens(asked.chat, self.endpoint, self._upstream)
            return web.Response(body=dialect.counted(tokens), content_type=JSON)
        if self.settings.transparent and (forced := constraint(asked.chat)) is not None:
            message = f"{forced} forces what the model may say, and such a call cannot be trained on; leave it out"
            self._note(f"refused: {forced}")
            return refusal(dialect, Fault(400, message, code="constrained_decoding"))
        role = self._role(asked.chat, request.headers)
        writer = dialect.writer(asked, self.endpoint.name, usage=not self.settings.transparent)
        if (spent := self._spent(role)) is not None:
            return stop_message(writer, SPENT[spent], self.endpoint.name, stream=asked.stream)
        return await self._exchange(request, dialect, asked, writer, role)

    async def _exchange(
        self, request: web.BaseRequest, dialect: Dialect, asked: Asked, writer: Writer, role: Role
    ) -> web.StreamResponse:
        try:
            recorded = self._mask.value(asked.body) if self._mask.is_in(orjson.dumps(asked.body)) else asked.body
        except TypeError:
            return refusal(dialect, Fault(400, "the body is nested too deeply"))
        room = budget.room(self.settings.budget, self.calls, self._granted)
        mark = fingerprint(asked.chat["messages"])
        call = self._ledger.begin(role, session_of(request.headers), recorded, mark, dialect.name)
        self._granted[call.id] = room
        identified = self._identify(request, call)
        keep_alive = self.settings.keep_alive if asked.stream else None
        reply = HttpReply(request, writer, keep_alive, self._note, identified)
        exchange = Exchange(
            call=call,
            body=asked.chat,
            writer=writer,
            refuse=dialect.error,
            endpoint=self.endpoint,
            upstream=self._upstream,
            settings=self.settings,
            reply=reply,
            mask=self._mask,
            headers={name: request.headers[name] for name in SESSION_HEADERS if name in request.headers},
            room=room,
            limit=asyncio.get_running_loop().time() + self._seconds_for_a_call(),
        )
        self._times[call.id] = exchange.times
        try:
            await exchange.run()
        finally:
            exchange.times.ended = time.monotonic()
            reply.close()
            if identified is not None:
                await asyncio.shield(identified)
            self._conclude(exchange)
            await self._ledger.finish(call)
        if reply.response is None:
            raise asyncio.CancelledError
        return reply.response

    def _identify(self, request: web.BaseRequest, call: Call) -> asyncio.Future[None] | None:
        """Label the call by the processes that hold its connection now, while the caller waits for its answer.

        What is returned is done when the label is there; None if it is there already."""
        finder, connection = self._callers, request.transport
        if finder is None:
            call.caller_reason = self._callers_unknown
            return None
        first = all(each.first_token is None for each in self.calls)
        known = next((holders for other, holders in self._identified if other is connection), None)
        ends: list[Any] = [connection and connection.get_extra_info(name) for name in ("peername", "sockname")]
        if known is None and None not in ends:
            known = finder.find_known(ends[0][:2], ends[1][:2])
            if known is None:
                return asyncio.ensure_future(self._search(finder, connection, ends, call, first))
        self._label(call, known or Holders(), first)
        return None

    async def _search(self, finder: CallerFinder, connection: Any, ends: list[Any], call: Call, first: bool) -> None:
        holders = Holders()
        try:
            async with asyncio.timeout(IDENTIFY_SECONDS):
                holders = await asyncio.to_thread(finder.find, ends[0][:2], ends[1][:2])
        except (OSError, TimeoutError) as error:
            self._note(f"{call.id}: its caller could not be identified: {type(error).__name__}: {error}")
        # Where nobody else can come to hold it, a connection is searched for once.
        if holders.lineages and holders.is_private:
            self._identified = [each for each in self._identified if not each[0].is_closing()]
            self._identified.append((connection, holders))
        self._label(call, holders, first)

    def _label(self, call: Call, holders: Holders, first: bool) -> None:
        for changed in self._program.add(call, holders.lineages, first=first):
            self._ledger.rewrite(changed)
        if call.caller is Caller.FOREIGN:
            self._note(f"{call.id} was not made by the agent's program: {call.caller_reason}")

    def _conclude(self, exchange: Exchange) -> None:
        if exchange.call.aborted and self._seconds_left() == 0.0:
            self.exhausted = self.exhausted or "time"

    # -- judgements ---------------------------------------------------------------------------------

    def _knows(self, request: web.BaseRequest) -> bool:
        shown = [request.headers.get("Authorization", "").removeprefix("Bearer ")]
        shown += [request.headers.get(name, "") for name in KEY_HEADERS]
        shown.append(request.query.get("key", ""))
        own = self.secret.encode()
        return any(hmac.compare_digest(each.encode("utf-8", "surrogateescape"), own) for each in shown if each)

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

    def _seconds_left(self) -> float | None:
        return None if self.settings.deadline is None else max(0.0, self.settings.deadline - time.monotonic())

    def _seconds_for_a_call(self) -> float:
        left = self._seconds_left()
        return self.settings.call_timeout if left is None else min(self.settings.call_timeout, left)

    def _note(self, line: str) -> None:
        self._log.append(f"{time.strftime('%H:%M:%S')} {self._mask.text(line)}")


def decides_blame(call: Call) -> bool:
    """A call whose process could not be identified may be the agent's, so it counts."""
    is_foreign = call.caller is Caller.FOREIGN and call.caller_reason != UNIDENTIFIED
    return call.role is not Role.TITLE and not is_foreign


def make_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=LARGEST_BODY)


def refusal(dialect: Dialect, fault: Fault) -> web.Response:
    return web.Response(body=dialect.error(fault), status=fault.status, content_type=JSON)


def stop_message(writer: Writer, text: str, model: str, *, stream: bool) -> web.Response:
    """A plain answer of our own that ends the agent's loop."""
    answer = plain_answer(text, model)
    if stream:
        return web.Response(body=writer.replay(answer), content_type=writer.content_type)
    return web.Response(body=writer.document(answer), content_type=JSON)
