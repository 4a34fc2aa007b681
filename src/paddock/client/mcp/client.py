"""An MCP client: agree on a protocol revision, list tools, call them.

Also speaks the protocol revision without `initialize`. If the server has lost our session, a new one is opened.
Knows no transport and no retry: each call is sent once.

McpError
├── McpUnreachable       no connection was made, or the program did not start: the request did not run
├── McpAnswerLost        the connection broke, or the program ended: the request may have run
├── McpStatusError       an HTTP status of 300 or more
│   └── McpSessionLost   the server does not know our session any more, and refused the request
├── McpProtocolError     an answer that is not MCP
├── McpUnsendable        a request that cannot be written as JSON
└── McpRpcError          a JSON-RPC error
"""

from __future__ import annotations

import asyncio
import itertools
import weakref
from typing import TYPE_CHECKING, Any, Protocol, Self

from paddock.errors import EnvironmentFailure
from paddock.protocol.codec import decode_any
from paddock.protocol.jsonrpc import METHOD_NOT_FOUND
from paddock.protocol.mcp import SESSION_VERSIONS, STATELESS_VERSION, UNSUPPORTED_VERSION
from paddock.protocol.redact import redact

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

OFFERED_VERSION = SESSION_VERSIONS[1]
"""An older revision, which every server in use supports."""
CLIENT_INFO = {"name": "paddock", "version": "1"}
IDEMPOTENCY = "paddock/idempotency"
"""A capability in the answer to `initialize`: calls with the same idempotency key run once."""
IDEMPOTENCY_KEY = "paddock/idempotency-key"
META = "io.modelcontextprotocol/"


class McpTransport(Protocol):
    """Carries JSON-RPC messages to one server. All methods but `close` raise McpError."""

    name: str
    """An address or a program; once the server has introduced itself, its own name."""
    version: str | None
    """The revision that was agreed on; set by the client."""
    session: str | None
    """What the server calls our session, if it keeps one."""

    async def open(self) -> None: ...
    async def request(self, message: dict[str, Any]) -> dict[str, Any]:
        """The JSON-RPC response to `message`."""
        ...

    async def notify(self, message: dict[str, Any]) -> None: ...
    async def close(self) -> None: ...


class McpClient:
    """One MCP server. It is opened by the first call, or by `open`."""

    def __init__(self, transport: McpTransport, *, open_seconds: float | None = None) -> None:
        self.repeats_safely = False
        """Whether the server runs a call once, however often it comes under the same idempotency key."""
        self._transport = transport
        self._open_seconds = open_seconds
        self._is_open = False
        self._numbers = itertools.count(1)
        # Loops come and go (`asyncio.run` per call); what was agreed with the server stays.
        self._locks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def server_name(self) -> str:
        return self._transport.name

    async def open(self) -> None:
        """Agree with the server on a revision, once. Raises McpError."""
        if not self._is_open:
            async with self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
                await self._open()

    async def _open(self) -> None:
        if self._is_open:
            return
        self._transport.version = None
        await self._transport.open()
        try:
            async with asyncio.timeout(self._open_seconds):
                await self._initialize()
        except TimeoutError:
            raise McpUnreachable(
                f"the MCP server {self.server_name} did not answer initialize within {self._open_seconds:g} s",
                hint="does it speak MCP?",
            ) from None
        self._is_open = True

    async def list_tools(self) -> list[dict[str, Any]]:
        """All tools, in MCP form, whatever number of pages they come in."""
        tools: list[dict[str, Any]] = []
        cursor: str | None = None
        seen: set[str] = set()
        while True:
            page = await self._request("tools/list", {} if cursor is None else {"cursor": cursor})
            listed = page.get("tools")
            if not isinstance(listed, list):
                raise McpProtocolError(f"{self.server_name}: tools/list answered without tools")
            tools.extend(tool for tool in listed if isinstance(tool, dict) and isinstance(tool.get("name"), str))
            cursor = page.get("nextCursor")
            if not isinstance(cursor, str) or not cursor or cursor in seen:
                return tools
            seen.add(cursor)

    async def call_tool(
        self, name: str, arguments: dict[str, Any], idempotency_key: str | None = None
    ) -> dict[str, Any]:
        """The result of one call. The key is sent to servers that repeat safely."""
        params: dict[str, Any] = {"name": name, "arguments": arguments}
        await self.open()
        if idempotency_key is not None and self.repeats_safely:
            params["_meta"] = {IDEMPOTENCY_KEY: idempotency_key}
        return await self._request("tools/call", params)

    async def close(self) -> None:
        """End the server's session and the transport. The next call opens them anew."""
        self._is_open = False
        await self._transport.close()

    async def _initialize(self) -> None:
        params = {"protocolVersion": OFFERED_VERSION, "capabilities": {}, "clientInfo": CLIENT_INFO}
        try:
            result = await self._send("initialize", params)
        except (McpRpcError, McpStatusError) as error:
            number = error.number if isinstance(error, McpRpcError) else error.rpc_number
            if number not in (METHOD_NOT_FOUND, UNSUPPORTED_VERSION):
                raise
            self._transport.version = STATELESS_VERSION
            return
        self.repeats_safely = _repeats_safely(result)
        server = result.get("serverInfo")
        self._transport.name = str((isinstance(server, dict) and server.get("name")) or self._transport.name)
        self._transport.version = str(result.get("protocolVersion") or OFFERED_VERSION)
        await self._transport.notify({"jsonrpc": "2.0", "method": "notifications/initialized"})

    async def _request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        await self.open()
        try:
            return await self._send(method, params)
        except McpSessionLost as lost:
            # Calls that run at the same time lose the same session: only the first begins a new one.
            if self._transport.session == lost.session:
                self._transport.session, self._is_open = None, False
        await self.open()
        return await self._send(method, params)

    async def _send(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        if self._transport.version == STATELESS_VERSION:
            params = {**params, "_meta": {**params.get("_meta", {}), **_introduction()}}
        number = next(self._numbers)
        message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        response = await self._transport.request(message)
        error = response.get("error")
        if isinstance(error, dict):
            code = error.get("code")
            reason = redact(str(error.get("message") or "JSON-RPC error"))
            raise McpRpcError(reason, code if isinstance(code, int) else 0, error.get("data"))
        result = response.get("result")
        if not isinstance(result, dict):
            raise McpProtocolError(f"{self.server_name} answered {method} without a result")
        return result


def _repeats_safely(result: dict[str, Any]) -> bool:
    capabilities, meta = result.get("capabilities"), result.get("_meta")
    experimental = capabilities.get("experimental") if isinstance(capabilities, dict) else None
    is_declared = isinstance(experimental, dict) and IDEMPOTENCY in experimental
    return is_declared or (isinstance(meta, dict) and bool(meta.get(IDEMPOTENCY)))


def _introduction() -> dict[str, Any]:
    """In the revision without `initialize`, every request says who sends it."""
    return {
        f"{META}protocolVersion": STATELESS_VERSION,
        f"{META}clientInfo": CLIENT_INFO,
        f"{META}clientCapabilities": {},
    }


# -- errors ----------------------------------------------------------------------------------------


class McpError(EnvironmentFailure):
    """The root. An EnvironmentFailure, because an MCP server can be served as an environment."""


class McpUnreachable(McpError):
    pass


class McpAnswerLost(McpError):
    pass


class McpStatusError(McpError):
    def __init__(self, message: str, status: int, headers: Mapping[str, str], body: bytes) -> None:
        super().__init__(message, status=status)
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def rpc_number(self) -> Any:
        """The JSON-RPC code in the body: some servers send their errors under an HTTP status."""
        try:
            document = decode_any(self.body)
        except ValueError:
            return None
        error = document.get("error") if isinstance(document, dict) else None
        return error.get("code") if isinstance(error, dict) else None


class McpSessionLost(McpStatusError):
    session: str | None = None
    """The session that is gone."""


class McpProtocolError(McpError):
    pass


class McpUnsendable(McpError):
    pass


class McpRpcError(McpError):
    """The server answered with a JSON-RPC error."""

    def __init__(self, message: str, number: int, details: Any = None) -> None:
        super().__init__(message, rpc_code=number)
        self.number = number
        self.details = details
