"""MCP over HTTP: POST carries calls, GET holds a stream open, DELETE ends a session.

A session is named by the `Mcp-Session-Id` header (MCP clients, after `initialize`), or by
`session_id` in the parameters (OpenEnv clients, after `openenv/session/create`). A call that names
none gets an environment of its own for that one call.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect

from paddock.errors import PaddockError, SessionNotFound
from paddock.protocol import jsonrpc, mcp
from paddock.protocol.jsonrpc import Call, RpcError
from paddock.server.access import lookup
from paddock.server.http import disconnected, read_body, time_to_wait, unless_left
from paddock.server.patience import WHOLE
from paddock.server.rpc import Left, respond, respond_to_batch, written
from paddock.sessions.numbered import request_number
from paddock.sessions.session import Door, Session

if TYPE_CHECKING:
    from paddock.server.access import Header
    from paddock.server.service import Service
    from paddock.sessions.work import Work

SESSION_HEADER = "mcp-session-id"
VERSION_HEADER = "mcp-protocol-version"
JSON = (b"content-type", b"application/json")
KEEP_ALIVE_EVERY = 15.0
SESSION_GONE = -32001


class HttpCaller:
    """A POST: its header or its parameters name the session."""

    def __init__(
        self, service: Service, token: str | None, receive: Any = None, header: Header | None = None
    ) -> None:
        self.service = service
        self.token = token
        self.opened: Session | None = None
        self.speaks_mcp = token is not None
        self.is_gone = False
        """Whether it was seen to hang up."""
        self._receive = receive
        self._header = header
        self._made: list[Session] = []

    @property
    def left(self) -> Left | None:
        return None if self._receive is None else self._wait_for_disconnect

    async def _wait_for_disconnect(self) -> None:
        await disconnected(self._receive)
        self.is_gone = True

    def owns(self, token: str) -> bool:
        return False

    def known_session(self, params: dict[str, Any]) -> Session | None:
        named = params.get("session_id") or self.token
        if not named:
            return self.opened
        session = self.service.manager.find(str(named))
        session.heard_of()
        return session

    def session(self, params: dict[str, Any]) -> AbstractAsyncContextManager[Session]:
        session = self.known_session(params)
        return nullcontext(session) if session is not None else self.service.manager.borrow()

    async def initialize(self) -> None:
        self.opened = await self._open(Door.MCP)

    async def create(self) -> str:
        return (await self._open(Door.CREATED)).token

    async def _open(self, door: Door) -> Session:
        """A session for a caller that waits for it. Raises ClientDisconnect if it does not."""
        wait = None if self._header is None else time_to_wait(self._header)
        opening = self.service.manager.open(door, wait=wait)
        session = await (opening if self.left is None else unless_left(self.left, opening))
        self._made.append(session)
        return session

    def leave(self) -> None:
        """Nobody will hear of the sessions that were made here."""
        for session in self._made:
            session.close("its client left")


class McpEndpoint:
    """The ASGI application at `/mcp`."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.limit = service.config.limits.message_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        header = lookup(scope["headers"])
        token = header(SESSION_HEADER)
        if not speaks_known_version(header):
            await _reply(send, 400, jsonrpc.failure(mcp.unsupported(header(VERSION_HEADER))))
        elif scope["method"] == "POST":
            await self._post(header, scope, receive, send)
        elif token is None or scope["method"] not in ("GET", "DELETE"):
            await _reply(send, 405, {"detail": "Method Not Allowed"}, [(b"allow", b"POST, GET, DELETE")])
        elif scope["method"] == "DELETE":
            await self._delete(token, send)
        else:
            await self._stream(token, receive, send)

    async def _post(self, header: Header, scope: Any, receive: Any, send: Any) -> None:
        try:
            body = await read_body(receive, self.limit)
        except ClientDisconnect:
            return
        except PaddockError as error:
            await _reply(send, error.http_status, jsonrpc.failure(error))
            return
        try:
            calls = jsonrpc.parse(body)
            _check_headers(header, calls)
        except RpcError as error:
            await _reply(send, _status(jsonrpc.failure(error)), jsonrpc.failure(error))
            return
        colleagues = self.service.colleagues
        if colleagues is not None:
            worker = colleagues.owner(_named_session(calls))
            if worker is not None:
                await colleagues.forward(worker, scope, body, receive, send)
                return
        token = header(SESSION_HEADER)
        scope[WHOLE] = opens_session(calls)
        caller = HttpCaller(self.service, token, receive, header)
        session = None
        if token is not None:
            try:
                session = self.service.manager.find(token)
            except SessionNotFound as error:
                await _reply(send, 404, _session_gone(error, calls))
                return
        try:
            response = await self._respond_once(session, caller, calls, header)
        except PaddockError as error:
            response = jsonrpc.failure(error, calls.id if isinstance(calls, Call) else None)
        except ClientDisconnect:
            return
        finally:
            if caller.is_gone:
                caller.leave()
        if not response:
            await _reply(send, 202, None)
            return
        headers = [(SESSION_HEADER.encode(), caller.opened.token.encode())] if caller.opened is not None else []
        await _reply(send, _status(response, calls), response, headers)

    async def _respond_once(
        self, session: Session | None, caller: HttpCaller, calls: list[Call | RpcError] | Call, header: Header
    ) -> Any:
        """Like `_respond`; numbered calls in a session are carried out at most once, and go on without a client."""
        number = None if session is None else request_number(header)
        if session is None or number is None:
            return await self._respond(caller, calls)
        lasting = HttpCaller(self.service, caller.token)
        return await session.answer_once(number, lambda: self.service.spawn(self._respond(lasting, calls)))

    async def _respond(self, caller: HttpCaller, calls: list[Call | RpcError] | Call) -> Any:
        if isinstance(calls, Call):
            return await respond(self.service, caller, calls)
        return await respond_to_batch(self.service, caller, calls)

    async def _delete(self, token: str, send: Any) -> None:
        try:
            self.service.manager.find(token).close("its client left")
        except SessionNotFound as error:
            await _reply(send, 404, _session_gone(error, None))
            return
        await _reply(send, 204, None)

    async def _stream(self, token: str, receive: Any, send: Any) -> None:
        """Nothing is pushed over it: it tells us that the client lives, and tells it when the session ends."""
        try:
            session = self.service.manager.find(token)
        except SessionNotFound as error:
            await _reply(send, 404, _session_gone(error, None))
            return
        if session.attachment is not None:
            await _reply(send, 409, {"detail": "a stream is open for this session already"})
            return
        await Stream(session).hold(receive, send)


class Stream:
    """The open GET of an MCP client: attached to its session for as long as it lasts."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._over = asyncio.Event()

    def holds_back(self, work: Work) -> bool:
        """Never: answers go back in the POST that asked."""
        return False

    def send(self, frame: bytes) -> None:
        """Nothing is sent here."""

    def session_closed(self, error: PaddockError) -> None:
        self._over.set()

    def replaced(self) -> None:
        self._over.set()

    async def hold(self, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self.session.attach(self)
        listener = asyncio.create_task(self._listen(receive))
        try:
            while not self._over.is_set():
                await send({"type": "http.response.body", "body": b": here\n\n", "more_body": True})
                with suppress(TimeoutError):
                    async with asyncio.timeout(KEEP_ALIVE_EVERY):
                        await self._over.wait()
        finally:
            listener.cancel()
            self.session.detach(self, dropped=True)
        await send({"type": "http.response.body", "body": b""})

    async def _listen(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._over.set()


def _status(response: Any, calls: Any = None) -> int:
    """Always 200, but for the stateless revision, which has statuses for what is wrong with a request itself."""
    error = response.get("error") if isinstance(response, dict) else None
    if error is None:
        return 200
    if error["code"] == jsonrpc.METHOD_NOT_FOUND:
        return 404 if isinstance(calls, Call) and mcp.is_stateless(calls.params) else 200
    return 400 if error["code"] in (mcp.UNSUPPORTED_VERSION, mcp.HEADER_MISMATCH) else 200


def speaks_known_version(header: Header) -> bool:
    """Whether a request names no revision of MCP in its header, or one that we speak."""
    return header(VERSION_HEADER) in (None, *mcp.VERSIONS)


def _check_headers(header: Header, calls: list[Call | RpcError] | Call) -> None:
    """A stateless request repeats in its headers what it is, for whoever stands in between. Both must agree."""
    if not isinstance(calls, Call) or not mcp.is_stateless(calls.params):
        return
    expected = {
        VERSION_HEADER: mcp.stateless_version(calls.params),
        "mcp-method": calls.method,
        "mcp-name": calls.params.get("name"),
    }
    for name, value in expected.items():
        told = header(name)
        if told is not None and mcp.header_value(told) != value:
            message = f"the header {name} says {told!r}, the request {value!r}"
            raise RpcError(mcp.HEADER_MISMATCH, message, id=calls.id)


def _named_session(calls: list[Call | RpcError] | Call) -> str:
    """The session that the first call names which names one in its parameters."""
    listed = calls if isinstance(calls, list) else [calls]
    named = (call.params.get("session_id") for call in listed if isinstance(call, Call))
    return str(next(filter(None, named), ""))


async def refuse(error: PaddockError, scope: Any, body: bytes, send: Any) -> None:
    """Answer a request that did not reach its session. One whose session is lost hears it in the way of whoever named
    it: by header, or in its parameters."""
    try:
        calls: Any = jsonrpc.parse(body) if body else None
    except RpcError:
        calls = None
    if not isinstance(error, SessionNotFound):
        known = calls.id if isinstance(calls, Call) else None
        await _reply(send, error.http_status, jsonrpc.failure(error, known))
    elif lookup(scope["headers"])(SESSION_HEADER) is not None:
        await _reply(send, 404, _session_gone(error, calls))
    else:
        await _reply(send, 200, jsonrpc.failure(error, calls.id if isinstance(calls, Call) else None))


def _session_gone(error: SessionNotFound, calls: Any) -> dict[str, Any]:
    known = calls.id if isinstance(calls, Call) else None
    return jsonrpc.failure(RpcError(SESSION_GONE, error.message, jsonrpc.details_of(error)), known)


def opens_session(calls: list[Call | RpcError] | Call) -> bool:
    """Whether a header of the answer will name a new session."""
    listed = calls if isinstance(calls, list) else [calls]
    return any(isinstance(call, Call) and call.method == "initialize" for call in listed)


async def _reply(send: Any, status: int, document: Any, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    body = b"" if document is None else written(document)
    length = (b"content-length", str(len(body)).encode())
    kind = [JSON] if document is not None else []
    await send({"type": "http.response.start", "status": status, "headers": [*kind, length, *(headers or [])]})
    await send({"type": "http.response.body", "body": body})
