"""MCP of an instance: streamable HTTP with JSON answers and without sessions.

Every call acts on the one environment, with or without `initialize`. `paddock.fleet.instance.app` has checked access.

A call may carry `_meta["paddock/idempotency-key"]`: a repeated call with the same key gets the response of the first,
and the tool runs once.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect

from paddock.client.mcp.client import IDEMPOTENCY, IDEMPOTENCY_KEY
from paddock.errors import PaddockError
from paddock.protocol import jsonrpc, mcp
from paddock.protocol.jsonrpc import INVALID_PARAMS, INVALID_REQUEST, METHOD_NOT_FOUND, RpcCall, RpcError
from paddock.server import rpc
from paddock.server.http import JSONBytes, read_body

if TYPE_CHECKING:
    from paddock.fleet.instance.computer import Computer
    from paddock.fleet.instance.environment import InstanceEnvironment
    from paddock.sessions.session import Session

KEEP_SECONDS = 600.0
MAX_KEPT_CALLS = 4096
MAX_KEY_CHARS = 512
MAX_BODY_BYTES = 16 * 1024 * 1024
HANDSHAKE = frozenset(("initialize", "ping"))


class InstanceCaller:
    """An RPC caller whose session is always the instance's."""

    disconnect_wait = None
    speaks_mcp = True
    is_disconnected = False

    def __init__(self, environment: InstanceEnvironment) -> None:
        self._environment = environment

    def owns(self, token: str) -> bool:
        return False

    def session(self, params: dict[str, Any]) -> AbstractAsyncContextManager[Session]:
        return nullcontext(self._environment.session)

    def find_session(self, params: dict[str, Any]) -> Session:
        return self._environment.session

    async def initialize(self) -> None:
        """The session is open already."""

    async def create_session(self) -> str:
        return self._environment.session.id


class InstanceMcp:
    """The ASGI application of one MCP path. `computer` adds that tool."""

    def __init__(
        self, environment: InstanceEnvironment, calls: IdempotentCalls, computer: Computer | None = None
    ) -> None:
        self._environment = environment
        self._calls = calls
        self._computer = computer
        self._caller = InstanceCaller(environment)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        response = await self._handle(scope, receive)
        await response(scope, receive, send)

    async def _handle(self, scope: Any, receive: Any) -> JSONBytes:
        if scope["method"] != "POST":
            return JSONBytes({"detail": "Method Not Allowed"}, 405, {"allow": "POST"})
        try:
            calls = jsonrpc.parse(await read_body(receive, MAX_BODY_BYTES))
        except RpcError as error:
            return JSONBytes(jsonrpc.failure(error))
        except PaddockError as error:
            return JSONBytes(jsonrpc.failure(error), error.http_status)
        except ClientDisconnect:
            return JSONBytes({"detail": "the request body is incomplete"}, 400)
        if isinstance(calls, RpcCall):
            response = await self.respond(calls)
            return JSONBytes(b"", 202) if response is None else _encode(response)
        responses = [
            jsonrpc.failure(call) if isinstance(call, RpcError) else await self.respond(call) for call in calls
        ]
        batch = [response for response in responses if response is not None]
        return _encode(batch) if batch else JSONBytes(b"", 202)

    async def respond(self, call: RpcCall) -> dict[str, Any] | None:
        """The response to one call; None for a notification. Never raises a PaddockError."""
        if call.is_notification or call.method.startswith("notifications/"):
            return None
        try:
            if call.method == "tools/call":
                return await self._call_tool(call)
            if call.method == "tools/list":
                return self._add_computer(await self._dispatch(call))
            if call.method in HANDSHAKE:
                return _announce_idempotency(await self._dispatch(call))
            if call.method == "server/discover":
                # The endpoint is stateless, so it offers the protocol revision without `initialize` to every client.
                return jsonrpc.result(mcp.discovery(rpc.server_info(self._environment.service), {}), call.id)
        except PaddockError as error:
            return jsonrpc.failure(error, call.id)
        return jsonrpc.failure(RpcError(METHOD_NOT_FOUND, f"Method not found: {call.method}"), call.id)

    async def _dispatch(self, call: RpcCall) -> dict[str, Any]:
        response = await rpc.respond(self._environment.service, self._caller, call)
        assert response is not None
        return response

    async def _call_tool(self, call: RpcCall) -> dict[str, Any]:
        name, arguments = call.params.get("name"), call.params.get("arguments")
        if not isinstance(name, str) or not name or not isinstance(arguments, (dict, type(None))):
            raise RpcError(INVALID_PARAMS, "Invalid params: name is a string, arguments an object")
        meta = call.params.get("_meta")
        key = meta.get(IDEMPOTENCY_KEY) if isinstance(meta, dict) else None
        if key is None:
            return await self._run_tool(call)
        if not isinstance(key, str) or not 0 < len(key) <= MAX_KEY_CHARS:
            raise RpcError(INVALID_PARAMS, f"{IDEMPOTENCY_KEY} is a string of at most {MAX_KEY_CHARS} characters")
        response = await self._calls.run_once(key, (name, arguments or {}), lambda: self._run_tool(call))
        return {**response, "id": call.id}

    async def _run_tool(self, call: RpcCall) -> dict[str, Any]:
        if self._computer is not None and call.params["name"] == self._computer.tool.name:
            return jsonrpc.result(await self._computer.call(call.params.get("arguments") or {}), call.id)
        async with self._environment.lock:
            response = await self._dispatch(call)
        error = response.get("error")
        if error is not None and error["code"] == INVALID_PARAMS:
            # An unknown tool or a wrong argument is the agent's mistake: the agent gets the message as a tool result.
            return jsonrpc.result(mcp.tool_failure(error["message"]), call.id)
        return response

    def _add_computer(self, response: dict[str, Any]) -> dict[str, Any]:
        if self._computer is None or "result" not in response:
            return response
        result = response["result"]
        return {**response, "result": {**result, "tools": [*result["tools"], mcp.tool_listing(self._computer.tool)]}}


def _announce_idempotency(response: dict[str, Any]) -> dict[str, Any]:
    """Tell clients that a call with a key may be repeated."""
    capabilities = response.get("result", {}).get("capabilities")
    if capabilities is not None:
        capabilities["experimental"] = {IDEMPOTENCY: {}}
    return response


def _encode(response: Any) -> JSONBytes:
    error = response.get("error") if isinstance(response, dict) else None
    status = 400 if error and error["code"] == mcp.UNSUPPORTED_VERSION else 200
    try:
        return JSONBytes(response, status)
    except PaddockError as refusal:
        return JSONBytes(jsonrpc.failure(refusal, response.get("id") if isinstance(response, dict) else None))


@dataclass(slots=True)
class _KeptCall:
    """A call with an idempotency key: its request, and the asyncio task that gives its response."""

    request: Any
    response: asyncio.Task[dict[str, Any]]
    started_at: float


class IdempotentCalls:
    """Tool calls with an idempotency key, and their responses."""

    def __init__(self) -> None:
        self._kept: dict[str, _KeptCall] = {}

    async def run_once(self, key: str, request: Any, run: Any) -> dict[str, Any]:
        """The response of the first call with `key`; that call goes on when its caller disconnects.

        Raises RpcError if the key was used for another call.
        """
        call = self._kept.get(key)
        if call is None:
            self._evict()
            call = self._kept[key] = _KeptCall(request, asyncio.ensure_future(run()), time.monotonic())
        elif call.request != request:
            raise RpcError(INVALID_PARAMS, f"the {IDEMPOTENCY_KEY} was used for another call: send a new one")
        response = await asyncio.shield(call.response)
        if response.get("error", {}).get("code") == INVALID_REQUEST:
            # It was refused before the tool ran, so the key may be used again.
            self._kept.pop(key, None)
        return response

    def _evict(self) -> None:
        """Drop expired calls, and the oldest ones when there are too many."""
        now = time.monotonic()
        for key, call in list(self._kept.items()):
            if now - call.started_at < KEEP_SECONDS and len(self._kept) < MAX_KEPT_CALLS:
                return
            del self._kept[key]
