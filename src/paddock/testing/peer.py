"""A server under examination: raw frames and raw requests, each answer seen as it came.

Knows the wire's envelopes and nothing of what they mean; a client would hide the very things to look at.
Uses one slot of the server at a time, and gives it back.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import h11
import orjson
from picows import WSMsgType

from paddock.client.transports.address import server_url
from paddock.client.transports.link import Link, connect
from paddock.errors import ConnectFailed
from paddock.net import HttpConnection
from paddock.protocol.codec import encode
from paddock.testing.checks import Skipped, Wrong
from paddock.testing.examples import NoExample, example

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

CONNECT_TIMEOUT = 10.0
SEAT_PATIENCE = 10.0
SEAT_PAUSE = 0.1

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer. `document` is its JSON, or None if it is none."""

    status: int
    headers: dict[str, str]
    document: Any
    text: str

    @property
    def short(self) -> str:
        return f"HTTP {self.status} {self.text[:200]}".strip()


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The server hung up."""

    code: int
    reason: str


class Wire:
    """One WebSocket. Waiting for a frame raises Wrong when the server hangs up or stays silent."""

    link: Link

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._frames: asyncio.Queue[bytes | Goodbye] = asyncio.Queue()

    async def open(self, url: str, headers: dict[str, str]) -> None:
        self.link = await connect(url, headers, self._frames.put_nowait, self._lost, CONNECT_TIMEOUT)

    def send(self, message: Any) -> None:
        """Text goes as it is, bytes as a binary frame, and anything else as JSON."""
        if isinstance(message, bytes):
            self.link.transport.send(WSMsgType.BINARY, message)
        else:
            self.link.send(message.encode() if isinstance(message, str) else encode(message))

    async def receive(self) -> dict[str, Any]:
        frame = await self._next()
        if isinstance(frame, Goodbye):
            raise Wrong(f"the server hung up ({frame.code} {frame.reason})".replace(" )", ")"))
        try:
            document = orjson.loads(frame)
        except orjson.JSONDecodeError:
            raise Wrong(f"a frame that is no JSON came back: {frame[:100]!r}") from None
        if not isinstance(document, dict):
            raise Wrong(f"a frame that is no object came back: {frame[:100]!r}")
        return document

    async def ask(self, message: Any) -> dict[str, Any]:
        self.send(message)
        return await self.receive()

    async def goodbye(self) -> Goodbye:
        """Wait until the server hangs up, passing by what it says before."""
        while True:
            frame = await self._next()
            if isinstance(frame, Goodbye):
                return frame

    async def close(self) -> None:
        self.link.close()
        await self.link.wait_lost()

    async def _next(self) -> bytes | Goodbye:
        return await answered(self._frames.get(), self._timeout)

    def _lost(self, link: Link) -> None:
        self._frames.put_nowait(Goodbye(link.code, link.reason))


class Peer:
    """A server, by its URL."""

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 30.0) -> None:
        """Raises ConfigError for what cannot be the URL of a server."""
        self.url = server_url(url)
        self.timeout = timeout
        self.is_paddock = False
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._schema: dict[str, Any] | None = None
        self._tools: list[dict[str, Any]] | None = None
        self._routes: set[str] | None = None

    async def greet(self) -> None:
        """Find out whether an environment server is there, and whether it is Paddock. Raises ConnectFailed."""
        try:
            health = await self.get("/health")
        except Wrong:
            hint = "is it up, and a server of environments? --timeout gives it longer"
            raise ConnectFailed(f"{self.url} did not answer within {self.timeout:g} s", hint=hint) from None
        wire = Wire(self.timeout)
        try:
            await wire.open(self._socket_url("/ws"), self._headers)
        except ConnectFailed as error:
            if error.data.get("status") == 401:
                raise
            if not isinstance(health.document, dict) and not await self.schema():
                hint = "give the URL that paddock serve prints, or of another server that speaks as OpenEnv's do"
                message = f"{self.url}: this is no environment server, /health answers HTTP {health.status}"
                raise ConnectFailed(message, hint=hint) from error
            return
        self.is_paddock = "Paddock-Version" in wire.link.headers
        await wire.close()

    # -- HTTP -------------------------------------------------------------------------------------

    async def get(self, path: str, headers: dict[str, str] | None = None) -> Reply:
        return await self.request("GET", path, headers=headers)

    async def post(self, path: str, document: Any, headers: dict[str, str] | None = None) -> Reply:
        """`document` is sent as JSON; bytes go as they are."""
        return await self.request("POST", path, document, headers)

    async def request(
        self, method: str, path: str, document: Any = None, headers: dict[str, str] | None = None
    ) -> Reply:
        """One request on a connection of its own. Raises ConnectFailed if nobody listens."""
        body = document if isinstance(document, bytes) else b"" if document is None else encode(document)
        connection = HttpConnection(self.url, self._headers)
        try:
            exchange = connection.request(method, path, body, headers)
            status, received, content = await answered(exchange, self.timeout)
        except (OSError, h11.RemoteProtocolError) as error:
            hint = "is the server up, and the port right?"
            raise ConnectFailed(f"cannot reach {self.url}: {error}", hint=hint) from error
        finally:
            await connection.close()
        try:
            read = orjson.loads(content)
        except orjson.JSONDecodeError:
            read = None
        return Reply(status, received, read, content.decode(errors="replace"))

    async def rpc(self, method: str, /, **params: Any) -> dict[str, Any]:
        """The answer to a JSON-RPC call over POST `/mcp`."""
        return await self.rpc_document({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})

    async def rpc_document(self, document: Any) -> dict[str, Any]:
        reply = await self.post("/mcp", document)
        if not isinstance(reply.document, dict) or reply.document.get("jsonrpc") != "2.0":
            raise Wrong(f"no JSON-RPC answer came back: {reply.short}")
        return reply.document

    # -- WebSocket --------------------------------------------------------------------------------

    @asynccontextmanager
    async def socket(self, path: str = "/ws", headers: dict[str, str] | None = None) -> AsyncIterator[Wire]:
        """A socket, closed at the end."""
        wire = Wire(self.timeout)
        await wire.open(self._socket_url(path), {**self._headers, **(headers or {})})
        try:
            yield wire
        finally:
            await wire.close()

    @asynccontextmanager
    async def session(self, headers: dict[str, str] | None = None) -> AsyncIterator[Wire]:
        """A socket with a session. While the server is full, perhaps with our last one, it is tried again."""
        deadline = asyncio.get_running_loop().time() + SEAT_PATIENCE
        while True:
            async with self.socket(headers=headers) as wire:
                first = await wire.ask({"type": "state"})
                if not is_error(first, "CAPACITY_REACHED"):
                    yield wire
                    return
            if asyncio.get_running_loop().time() > deadline:
                raise Skipped(f"the server is full: {first['data'].get('message')}")
            await asyncio.sleep(SEAT_PAUSE)

    def _socket_url(self, path: str) -> str:
        scheme, host, base, _, _ = urlsplit(self.url)
        path, _, query = path.partition("?")
        return urlunsplit(("wss" if scheme == "https" else "ws", host, base + path, query, ""))

    # -- what the server says about itself --------------------------------------------------------

    async def schema(self) -> dict[str, Any]:
        """The action schema it publishes."""
        if self._schema is None:
            document = (await self.get("/schema")).document
            action = document.get("action") if isinstance(document, dict) else None
            self._schema = action if isinstance(action, dict) else {}
        return self._schema

    async def has_route(self, path: str) -> bool:
        if self._routes is None:
            document = (await self.get("/openapi.json")).document
            self._routes = set(document.get("paths", ())) if isinstance(document, dict) else set()
        return path in self._routes

    async def tools(self) -> list[dict[str, Any]]:
        """The tools it offers. Raises Skipped if it has none to offer."""
        if self._tools is None:
            result = (await self.rpc("tools/list")).get("result")
            listed = result.get("tools") if isinstance(result, dict) else None
            self._tools = listed if isinstance(listed, list) else []
        if not self._tools:
            raise Skipped("its environment has no tools")
        return self._tools

    async def action(self) -> dict[str, Any]:
        """An action to try. Raises Skipped if none can be made up."""
        schema = await self.schema()
        try:
            if "tool_name" not in schema.get("properties", {}):
                made: dict[str, Any] = example(schema)
                return made
            name, arguments = await self.tool_call()
        except NoExample as error:
            raise Skipped(f"no example action can be made from the schema: {error}") from None
        return {"type": "call_tool", "tool_name": name, "arguments": arguments}

    async def tool_call(self) -> tuple[str, dict[str, Any]]:
        """Name and arguments of a call to try. Raises Skipped."""
        problems = []
        for tool in await self.tools():
            try:
                return tool["name"], example(tool.get("inputSchema") or {"type": "object"})
            except NoExample as error:
                problems.append(f"{tool['name']}: {error}")
        raise Skipped(f"no example call can be made: {'; '.join(problems)}")


async def answered(waiting: Awaitable[ResultT], timeout: float) -> ResultT:
    """The answer, or Wrong if there is none in time."""
    try:
        async with asyncio.timeout(timeout):
            return await waiting
    except TimeoutError:
        raise Wrong(f"no answer within {timeout:g} s") from None


def is_error(frame: dict[str, Any], code: str) -> bool:
    data = frame.get("data")
    return frame.get("type") == "error" and isinstance(data, dict) and data.get("code") == code
