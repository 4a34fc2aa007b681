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
from paddock.protocol.jsonrpc import RpcCall, RpcError
from paddock.protocol.sse import KEEP_ALIVE, MEDIA_TYPE
from paddock.server.access import lookup
from paddock.server.http import (
    cancel_on_disconnect,
    read_body,
    request_number,
    requested_queue_timeout,
    wait_for_disconnect,
)
from paddock.server.keepalive import PLAIN_RESPONSE
from paddock.server.rpc import DisconnectWait, encode_response, respond, respond_to_batch
from paddock.sessions.session import Origin, Session

if TYPE_CHECKING:
    from paddock.server.access import Header
    from paddock.server.service import Service
    from paddock.sessions.work import Work

VERSION_HEADER = "mcp-protocol-version"
JSON = (b"content-type", b"application/json")
KEEP_ALIVE_SECONDS = 15.0
SESSION_GONE = -32001


class HttpCaller:
    """The client of a POST. A header or the parameters of the call name the session."""

    def __init__(
        self, service: Service, token: str | None, receive: Any = None, header: Header | None = None
    ) -> None:
        self.service = service
        self.token = token
        self.opened: Session | None = None
        self.speaks_mcp = token is not None
        self.is_disconnected = False
        """Whether the client was seen to disconnect."""
        self._receive = receive
        self._header = header
        self._sessions: list[Session] = []

    @property
    def disconnect_wait(self) -> DisconnectWait | None:
        return None if self._receive is None else self._record_disconnect

    async def _record_disconnect(self) -> None:
        await wait_for_disconnect(self._receive)
        self.is_disconnected = True

    def owns(self, token: str) -> bool:
        return False

    def find_session(self, params: dict[str, Any]) -> Session | None:
        token = params.get("session_id") or self.token
        if not token:
            return self.opened
        session = self.service.manager.find(str(token))
        session.record_activity()
        return session

    def session(self, params: dict[str, Any]) -> AbstractAsyncContextManager[Session]:
        session = self.find_session(params)
        return nullcontext(session) if session is not None else self.service.manager.borrow()

    async def initialize(self) -> None:
        self.opened = await self._open(Origin.MCP)

    async def create_session(self) -> str:
        return (await self._open(Origin.CREATED)).token

    async def _open(self, origin: Origin) -> Session:
        """A new session. Raises ClientDisconnect if the client disconnects before."""
        wait = None if self._header is None else requested_queue_timeout(self._header)
        opening = self.service.manager.open(origin, wait=wait)
        wait_for = self.disconnect_wait
        session = await (opening if wait_for is None else cancel_on_disconnect(wait_for, opening))
        self._sessions.append(session)
        return session

    def close_sessions(self) -> None:
        """The client has disconnected and does not know the sessions that its calls opened."""
        for session in self._sessions:
            session.close("its client left")


class McpEndpoint:
    """The ASGI application at `/mcp`."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.limit = service.config.limits.message_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        header = lookup(scope["headers"])
        token = header(mcp.SESSION_HEADER)
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
        siblings = self.service.siblings
        if siblings is not None:
            worker = siblings.owner(_named_session(calls))
            if worker is not None:
                await siblings.forward(worker, scope, body, receive, send)
                return
        token = header(mcp.SESSION_HEADER)
        scope[PLAIN_RESPONSE] = opens_session(calls)
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
            response = jsonrpc.failure(error, calls.id if isinstance(calls, RpcCall) else None)
        except ClientDisconnect:
            return
        finally:
            if caller.is_disconnected:
                caller.close_sessions()
        if not response:
            await _reply(send, 202, None)
            return
        headers = [(mcp.SESSION_HEADER.encode(), caller.opened.token.encode())] if caller.opened is not None else []
        await _reply(send, _status(response, calls), response, headers)

    async def _respond_once(
        self, session: Session | None, caller: HttpCaller, calls: list[RpcCall | RpcError] | RpcCall, header: Header
    ) -> Any:
        """Like `_respond`. Numbered calls in a session are executed at most once, and run on without a client."""
        number = None if session is None else request_number(header)
        if session is None or number is None:
            return await self._respond(caller, calls)
        detached_caller = HttpCaller(self.service, caller.token)
        return await session.http_requests.answer(
            number, lambda: self.service.spawn(self._respond(detached_caller, calls))
        )

    async def _respond(self, caller: HttpCaller, calls: list[RpcCall | RpcError] | RpcCall) -> Any:
        if isinstance(calls, RpcCall):
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
        """Nothing is pushed over the stream. It shows that the client lives, and it ends with the session."""
        try:
            session = self.service.manager.find(token)
        except SessionNotFound as error:
            await _reply(send, 404, _session_gone(error, None))
            return
        if session.attachment is not None:
            await _reply(send, 409, {"detail": "a stream is open for this session already"})
            return
        await EventStream(session).hold(receive, send)


class EventStream:
    """The open GET of an MCP client: attached to its session for as long as it lasts."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._ended = asyncio.Event()

    def is_blocked(self, work: Work) -> bool:
        """Never: answers go back in the POST that asked."""
        return False

    def send(self, frame: bytes) -> None:
        """Nothing is sent here."""

    def on_session_closed(self, error: PaddockError) -> None:
        self._ended.set()

    def on_replaced(self) -> None:
        self._ended.set()

    async def hold(self, receive: Any, send: Any) -> None:
        headers = [(b"content-type", MEDIA_TYPE.encode()), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self.session.attach(self)
        listener = asyncio.create_task(self._listen(receive))
        try:
            while not self._ended.is_set():
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
                with suppress(TimeoutError):
                    async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                        await self._ended.wait()
        finally:
            listener.cancel()
            self.session.detach(self, dropped=True)
        await send({"type": "http.response.body", "body": b""})

    async def _listen(self, receive: Any) -> None:
        await wait_for_disconnect(receive)
        self._ended.set()


def _status(response: Any, calls: Any = None) -> int:
    """Always 200, except for the stateless revision of MCP, which has statuses for malformed requests."""
    error = response.get("error") if isinstance(response, dict) else None
    if error is None:
        return 200
    if error["code"] == jsonrpc.METHOD_NOT_FOUND:
        return 404 if isinstance(calls, RpcCall) and mcp.is_stateless(calls.params) else 200
    return 400 if error["code"] in (mcp.UNSUPPORTED_VERSION, mcp.HEADER_MISMATCH) else 200


def speaks_known_version(header: Header) -> bool:
    """Whether a request names no revision of MCP in its header, or one that we speak."""
    return header(VERSION_HEADER) in (None, *mcp.VERSIONS)


def _check_headers(header: Header, calls: list[RpcCall | RpcError] | RpcCall) -> None:
    """A stateless request repeats its method and name in headers, for proxies. Raises RpcError if they differ."""
    if not isinstance(calls, RpcCall) or not mcp.is_stateless(calls.params):
        return
    expected = {
        VERSION_HEADER: mcp.stateless_version(calls.params),
        "mcp-method": calls.method,
        "mcp-name": calls.params.get("name"),
    }
    for name, value in expected.items():
        text = header(name)
        if text is not None and mcp.header_value(text) != value:
            message = f"the header {name} says {text!r}, the request {value!r}"
            raise RpcError(mcp.HEADER_MISMATCH, message, id=calls.id)


def _named_session(calls: list[RpcCall | RpcError] | RpcCall) -> str:
    """The first `session_id` in the parameters of the calls; empty if there is none."""
    listed = calls if isinstance(calls, list) else [calls]
    tokens = (call.params.get("session_id") for call in listed if isinstance(call, RpcCall))
    return str(next(filter(None, tokens), ""))


async def refuse(error: PaddockError, scope: Any, body: bytes, send: Any) -> None:
    """Answer a request that did not reach its session.

    A lost session is a 404 if a header named it, and a JSON-RPC error if the parameters did.
    """
    try:
        calls: Any = jsonrpc.parse(body) if body else None
    except RpcError:
        calls = None
    if not isinstance(error, SessionNotFound):
        request_id = calls.id if isinstance(calls, RpcCall) else None
        await _reply(send, error.http_status, jsonrpc.failure(error, request_id))
    elif lookup(scope["headers"])(mcp.SESSION_HEADER) is not None:
        await _reply(send, 404, _session_gone(error, calls))
    else:
        await _reply(send, 200, jsonrpc.failure(error, calls.id if isinstance(calls, RpcCall) else None))


def _session_gone(error: SessionNotFound, calls: Any) -> dict[str, Any]:
    request_id = calls.id if isinstance(calls, RpcCall) else None
    return jsonrpc.failure(RpcError(SESSION_GONE, error.message, jsonrpc.details_of(error)), request_id)


def opens_session(calls: list[RpcCall | RpcError] | RpcCall) -> bool:
    """Whether the response will carry a new session in its header."""
    listed = calls if isinstance(calls, list) else [calls]
    return any(isinstance(call, RpcCall) and call.method == "initialize" for call in listed)


async def _reply(send: Any, status: int, document: Any, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    body = b"" if document is None else encode_response(document)
    length = (b"content-length", str(len(body)).encode())
    kind = [JSON] if document is not None else []
    await send({"type": "http.response.start", "status": status, "headers": [*kind, length, *(headers or [])]})
    await send({"type": "http.response.body", "body": body})
