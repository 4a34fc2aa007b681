"""MCP of an instance: streamable HTTP with JSON answers and without sessions.

Every call acts on the one environment, whoever sends it, with `initialize` or without. Who may come here is decided
before (`paddock.fleet.instance.app`).

A call may carry `_meta["paddock/idempotency-key"]`: one that comes again under the same key gets the answer of the
first, and nothing is done twice.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect

from paddock.errors import PaddockError
from paddock.protocol import jsonrpc, mcp
from paddock.protocol.jsonrpc import INVALID_PARAMS, INVALID_REQUEST, METHOD_NOT_FOUND, Call, RpcError
from paddock.server import rpc
from paddock.server.http import JSONBytes, read_body

if TYPE_CHECKING:
    from paddock.fleet.instance.hosted import HostedEnvironment
    from paddock.fleet.instance.screen import Screen
    from paddock.sessions.session import Session

IDEMPOTENCY = "paddock/idempotency"
IDEMPOTENCY_KEY = "paddock/idempotency-key"
KEPT_SECONDS = 600.0
MOST_KEPT = 4096
LONGEST_KEY = 512
MOST_BODY = 16 * 1024 * 1024
HANDSHAKE = frozenset(("initialize", "ping"))


class InstanceCaller:
    """Every call means the one session of the instance."""

    left = None
    speaks_mcp = True
    is_gone = False

    def __init__(self, hosted: HostedEnvironment) -> None:
        self._hosted = hosted

    def owns(self, token: str) -> bool:
        return False

    def session(self, params: dict[str, Any]) -> AbstractAsyncContextManager[Session]:
        return nullcontext(self._hosted.session)

    def known_session(self, params: dict[str, Any]) -> Session:
        return self._hosted.session

    async def initialize(self) -> None:
        """There is nothing to open."""

    async def create(self) -> str:
        return self._hosted.session.id


class McpEndpoint:
    """The ASGI application of one MCP path. `screen` adds the `computer` tool."""

    def __init__(self, hosted: HostedEnvironment, answers: KeptAnswers, screen: Screen | None = None) -> None:
        self._hosted = hosted
        self._answers = answers
        self._screen = screen
        self._caller = InstanceCaller(hosted)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        answer = await self._answer(scope, receive)
        await answer(scope, receive, send)

    async def _answer(self, scope: Any, receive: Any) -> JSONBytes:
        if scope["method"] != "POST":
            return JSONBytes({"detail": "Method Not Allowed"}, 405, {"allow": "POST"})
        try:
            calls = jsonrpc.parse(await read_body(receive, MOST_BODY))
        except RpcError as error:
            return JSONBytes(jsonrpc.failure(error))
        except PaddockError as error:
            return JSONBytes(jsonrpc.failure(error), error.http_status)
        except ClientDisconnect:
            return JSONBytes({"detail": "the request broke off"}, 400)
        if isinstance(calls, Call):
            response = await self.respond(calls)
            return JSONBytes(b"", 202) if response is None else _written(response)
        answers = [
            jsonrpc.failure(call) if isinstance(call, RpcError) else await self.respond(call) for call in calls
        ]
        told = [answer for answer in answers if answer is not None]
        return _written(told) if told else JSONBytes(b"", 202)

    async def respond(self, call: Call) -> dict[str, Any] | None:
        """The response to one call; None for a notification. Never raises a PaddockError."""
        if call.is_notification or call.method.startswith("notifications/"):
            return None
        try:
            if call.method == "tools/call":
                return await self._call_tool(call)
            if call.method == "tools/list":
                return self._with_screen(await self._pass_on(call))
            if call.method in HANDSHAKE:
                return _introduced(await self._pass_on(call))
            if call.method == "server/discover":
                # Nothing is kept between requests, so the revision without `initialize` is offered to everybody.
                return jsonrpc.result(mcp.discovery(rpc.server_info(self._hosted.service), {}), call.id)
        except PaddockError as error:
            return jsonrpc.failure(error, call.id)
        return jsonrpc.failure(RpcError(METHOD_NOT_FOUND, f"Method not found: {call.method}"), call.id)

    async def _pass_on(self, call: Call) -> dict[str, Any]:
        response = await rpc.respond(self._hosted.service, self._caller, call)
        assert response is not None
        return response

    async def _call_tool(self, call: Call) -> dict[str, Any]:
        name, arguments = call.params.get("name"), call.params.get("arguments")
        if not isinstance(name, str) or not name or not isinstance(arguments, (dict, type(None))):
            raise RpcError(INVALID_PARAMS, "Invalid params: name is a string, arguments an object")
        meta = call.params.get("_meta")
        key = meta.get(IDEMPOTENCY_KEY) if isinstance(meta, dict) else None
        if key is None:
            return await self._carry_out(call)
        if not isinstance(key, str) or not 0 < len(key) <= LONGEST_KEY:
            raise RpcError(INVALID_PARAMS, f"{IDEMPOTENCY_KEY} is a string of at most {LONGEST_KEY} characters")
        response = await self._answers.once(key, (name, arguments or {}), lambda: self._carry_out(call))
        return {**response, "id": call.id}

    async def _carry_out(self, call: Call) -> dict[str, Any]:
        if self._screen is not None and call.params["name"] == self._screen.tool.name:
            return jsonrpc.result(await self._screen.call(call.params.get("arguments") or {}), call.id)
        async with self._hosted.turn:
            response = await self._pass_on(call)
        error = response.get("error")
        if error is not None and error["code"] == INVALID_PARAMS:
            # An unknown tool or a wrong argument is the agent's mistake: it is meant to read about it.
            return jsonrpc.result(mcp.tool_failure(error["message"]), call.id)
        return response

    def _with_screen(self, response: dict[str, Any]) -> dict[str, Any]:
        if self._screen is None or "result" not in response:
            return response
        result = response["result"]
        return {**response, "result": {**result, "tools": [*result["tools"], mcp.tool_listing(self._screen.tool)]}}


def _introduced(response: dict[str, Any]) -> dict[str, Any]:
    """Let clients know that they may repeat a call."""
    capabilities = response.get("result", {}).get("capabilities")
    if capabilities is not None:
        capabilities["experimental"] = {IDEMPOTENCY: {}}
    return response


def _written(response: Any) -> JSONBytes:
    error = response.get("error") if isinstance(response, dict) else None
    status = 400 if error and error["code"] == mcp.UNSUPPORTED_VERSION else 200
    try:
        return JSONBytes(response, status)
    except PaddockError as failed:
        return JSONBytes(jsonrpc.failure(failed, response.get("id") if isinstance(response, dict) else None))


@dataclass(slots=True)
class _Kept:
    request: Any
    answer: asyncio.Task[dict[str, Any]]
    began: float


class KeptAnswers:
    """The answers of calls that came under a key."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    async def once(self, key: str, request: Any, carry_out: Any) -> dict[str, Any]:
        """The answer of the call that first came under `key`; it goes on when its caller leaves.

        Raises RpcError if the key was used for something else.
        """
        known = self._kept.get(key)
        if known is None:
            self._make_room()
            known = self._kept[key] = _Kept(request, asyncio.ensure_future(carry_out()), time.monotonic())
        elif known.request != request:
            raise RpcError(INVALID_PARAMS, f"the {IDEMPOTENCY_KEY} was used for another call: send a new one")
        response = await asyncio.shield(known.answer)
        if response.get("error", {}).get("code") == INVALID_REQUEST:
            # It was refused before anything was done, so it may be tried again.
            self._kept.pop(key, None)
        return response

    def _make_room(self) -> None:
        """Forget the oldest, once they are old enough or too many."""
        now = time.monotonic()
        for key, kept in list(self._kept.items()):
            if now - kept.began < KEPT_SECONDS and len(self._kept) < MOST_KEPT:
                return
            del self._kept[key]
