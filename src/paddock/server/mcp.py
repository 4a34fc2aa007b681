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
from paddock.protocol.codec import encode
from paddock.protocol.jsonrpc import Call, RpcError
from paddock.server.http import read_body
from paddock.server.rpc import Left, respond
from paddock.sessions.session import Door, Session

if TYPE_CHECKING:
    from paddock.server.service import Service

SESSION_HEADER = b"mcp-session-id"
JSON = (b"content-type", b"application/json")
KEEP_ALIVE_EVERY = 15.0
SESSION_GONE = -32001


class HttpCaller:
    """A POST: its header or its parameters name the session."""

    def __init__(self, service: Service, token: str | None, receive: Any) -> None:
        self.service = service
        self.token = token
        self.opened: Session | None = None
        self.speaks_mcp = token is not None
        self._receive = receive

    @property
    def left(self) -> Left:
        return self._wait_for_disconnect

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def owns(self, token: str) -> bool:
        return False

    def known_session(self, params: dict[str, Any]) -> Session | None:
        named = params.get("session_id") or self.token
        if not named:
            return self.opened
        session = self.service.manager.find(str(named))
        session.dropped_at = None
        return session

    def session(self, params: dict[str, Any]) -> AbstractAsyncContextManager[Session]:
        self.speaks_mcp = self.speaks_mcp or mcp.is_stateless(params)
        session = self.known_session(params)
        return nullcontext(session) if session is not None else self.service.manager.borrow()

    async def initialize(self) -> None:
        self.opened = await self.service.manager.open(Door.MCP)

    async def create(self) -> str:
        return (await self.service.manager.open(Door.CREATED)).token


class McpEndpoint:
    """The ASGI application at `/mcp`."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.limit = service.config.limits.message_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        token = next((value.decode("latin-1") for name, value in scope["headers"] if name == SESSION_HEADER), None)
        if scope["method"] == "POST":
            await self._post(token, scope, receive, send)
        elif token is None or scope["method"] not in ("GET", "DELETE"):
            await _reply(send, 405, {"detail": "Method Not Allowed"}, [(b"allow", b"POST, GET, DELETE")])
        elif scope["method"] == "DELETE":
            await self._delete(token, send)
        else:
            await self._stream(token, receive, send)

    async def _post(self, token: str | None, scope: Any, receive: Any, send: Any) -> None:
        try:
            body = await read_body(receive, self.limit)
        except ClientDisconnect:
            return
        except PaddockError as error:
            await _reply(send, error.http_status, jsonrpc.failure(error))
            return
        try:
            calls = jsonrpc.parse(body)
        except RpcError as error:
            await _reply(send, 200, jsonrpc.failure(error))
            return
        colleagues = self.service.colleagues
        if colleagues is not None and isinstance(calls, Call):
            worker = colleagues.owner(str(calls.params.get("session_id") or ""))
            if worker is not None:
                await colleagues.forward(worker, scope, body, send)
                return
        caller = HttpCaller(self.service, token, receive)
        if token is not None:
            try:
                self.service.manager.find(token)
            except SessionNotFound as error:
                await _reply(send, 404, _session_gone(error, calls))
                return
        response = await self._respond(caller, calls)
        if not response:
            await _reply(send, 202, None)
            return
        headers = [(SESSION_HEADER, caller.opened.token.encode())] if caller.opened is not None else []
        await _reply(send, _status(response), response, headers)

    async def _respond(self, caller: HttpCaller, calls: list[Call | RpcError] | Call) -> Any:
        if isinstance(calls, Call):
            return await respond(self.service, caller, calls)
        answers = []
        for call in calls:
            one = jsonrpc.failure(call) if isinstance(call, RpcError) else await respond(self.service, caller, call)
            if one is not None:
                answers.append(one)
        return answers

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

    def send(self, frame: bytes) -> None:
        """Answers go back in the POST that asked."""

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


def _status(response: Any) -> int:
    """Always 200, but for the revision that wants another status for a version we do not speak."""
    error = response.get("error") if isinstance(response, dict) else None
    return 400 if error and error["code"] == mcp.UNSUPPORTED_VERSION else 200


def _session_gone(error: SessionNotFound, calls: Any) -> dict[str, Any]:
    known = calls.id if isinstance(calls, Call) else None
    return jsonrpc.failure(RpcError(SESSION_GONE, error.message), known)


async def _reply(send: Any, status: int, document: Any, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    try:
        body = b"" if document is None else encode(document)
    except PaddockError as error:
        body = encode(jsonrpc.failure(error, document.get("id") if isinstance(document, dict) else None))
    length = (b"content-length", str(len(body)).encode())
    kind = [JSON] if document is not None else []
    await send({"type": "http.response.start", "status": status, "headers": [*kind, length, *(headers or [])]})
    await send({"type": "http.response.body", "body": body})
