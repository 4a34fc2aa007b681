"""A server under test: raw frames and raw requests, with every answer as it came.

Knows the envelopes of the wire and not what they mean: a client would hide what the checks look at. Uses one slot of
the server at a time, and frees it.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import h11
import orjson
from picows import WSMsgType

from paddock.client.requests import server_url
from paddock.client.transports.socket import WebSocketConnection, open_socket
from paddock.errors import ConnectFailed
from paddock.net import HttpConnection
from paddock.protocol.codec import encode
from paddock.testing.checks import Doubtful, Skipped, Wrong, shorten
from paddock.testing.schema_examples import NoExample, counterexamples, example

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

CONNECT_SECONDS = 10.0
SLOT_SECONDS = 10.0
SLOT_PAUSE_SECONDS = 0.1

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """An HTTP answer. `document` is its JSON, or None if it is none."""

    status: int
    headers: dict[str, str]
    document: Any
    text: str

    @property
    def short(self) -> str:
        return f"HTTP {self.status} {self.text[:200]}".strip()


@dataclass(frozen=True, slots=True)
class SocketClosed:
    """The server hung up."""

    code: int
    reason: str


class RawSocket:
    """One WebSocket. Waiting for a frame raises Wrong when the server hangs up or stays silent."""

    socket: WebSocketConnection

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._frames: asyncio.Queue[bytes | SocketClosed] = asyncio.Queue()

    async def open(self, url: str, headers: dict[str, str]) -> None:
        self.socket = await open_socket(url, headers, self._frames.put_nowait, self._lost, CONNECT_SECONDS)

    def send(self, message: Any) -> None:
        """Text goes as it is, bytes as a binary frame, and anything else as JSON."""
        if isinstance(message, bytes):
            self.socket.transport.send(WSMsgType.BINARY, message)
        else:
            self.socket.send(message.encode() if isinstance(message, str) else encode(message))

    async def receive(self) -> dict[str, Any]:
        frame = await self._next()
        if isinstance(frame, SocketClosed):
            raise Wrong(f"the server hung up ({frame.code} {frame.reason})".replace(" )", ")"))
        try:
            document = orjson.loads(frame)
        except orjson.JSONDecodeError:
            raise Wrong(f"a frame that is no JSON came back: {frame[:100]!r}") from None
        if not isinstance(document, dict):
            raise Wrong(f"a frame that is no object came back: {frame[:100]!r}")
        return document

    async def request(self, message: Any) -> dict[str, Any]:
        self.send(message)
        return await self.receive()

    async def wait_closed(self) -> SocketClosed:
        """Wait until the server hangs up, passing by what it says before."""
        while True:
            frame = await self._next()
            if isinstance(frame, SocketClosed):
                return frame

    async def close(self) -> None:
        self.socket.close()
        await self.socket.wait_lost()

    async def _next(self) -> bytes | SocketClosed:
        return await within_timeout(self._frames.get(), self._timeout)

    def _lost(self, socket: WebSocketConnection) -> None:
        self._frames.put_nowait(SocketClosed(socket.code, socket.reason))


class ServerSubject:
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
        socket = RawSocket(self.timeout)
        try:
            await socket.open(self._socket_url("/ws"), self._headers)
        except ConnectFailed as error:
            if error.data.get("status") == 401:
                raise
            if not isinstance(health.document, dict) and not await self.schema():
                hint = "give the URL that paddock serve prints, or of another server that speaks as OpenEnv's do"
                message = f"{self.url}: this is no environment server, /health answers HTTP {health.status}"
                raise ConnectFailed(message, hint=hint) from error
            return
        self.is_paddock = "Paddock-Version" in socket.socket.headers
        await socket.close()

    # -- HTTP -------------------------------------------------------------------------------------

    async def get(self, path: str, headers: dict[str, str] | None = None) -> HttpResponse:
        return await self.request("GET", path, headers=headers)

    async def post(self, path: str, document: Any, headers: dict[str, str] | None = None) -> HttpResponse:
        """`document` is sent as JSON; bytes go as they are."""
        return await self.request("POST", path, document, headers)

    async def request(
        self, method: str, path: str, document: Any = None, headers: dict[str, str] | None = None
    ) -> HttpResponse:
        """One request on a connection of its own. Raises ConnectFailed if nobody listens."""
        body = document if isinstance(document, bytes) else b"" if document is None else encode(document)
        connection = HttpConnection(self.url, self._headers)
        try:
            exchange = connection.request(method, path, body, headers)
            status, received, content = await within_timeout(exchange, self.timeout)
        except (OSError, h11.RemoteProtocolError) as error:
            hint = "is the server up, and the port right?"
            raise ConnectFailed(f"cannot reach {self.url}: {error}", hint=hint) from error
        finally:
            await connection.close()
        try:
            read = orjson.loads(content)
        except orjson.JSONDecodeError:
            read = None
        return HttpResponse(status, received, read, content.decode(errors="replace"))

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
    async def socket(self, path: str = "/ws", headers: dict[str, str] | None = None) -> AsyncIterator[RawSocket]:
        """A socket, closed at the end."""
        socket = RawSocket(self.timeout)
        await socket.open(self._socket_url(path), {**self._headers, **(headers or {})})
        try:
            yield socket
        finally:
            await socket.close()

    @asynccontextmanager
    async def session(self, headers: dict[str, str] | None = None) -> AsyncIterator[RawSocket]:
        """A socket with a session. While the server is full, perhaps with our last one, it is tried again."""
        deadline = asyncio.get_running_loop().time() + SLOT_SECONDS
        while True:
            async with self.socket(headers=headers) as socket:
                first = await socket.request({"type": "state"})
                if not is_error(first, "CAPACITY_REACHED"):
                    yield socket
                    return
            if asyncio.get_running_loop().time() > deadline:
                raise Skipped(f"the server is full: {first['data'].get('message')}")
            await asyncio.sleep(SLOT_PAUSE_SECONDS)

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
                action: dict[str, Any] = example(schema)
                return action
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


async def within_timeout(waiting: Awaitable[ResultT], timeout: float) -> ResultT:
    """The answer, or Wrong if there is none in time."""
    try:
        async with asyncio.timeout(timeout):
            return await waiting
    except TimeoutError:
        raise Wrong(f"no answer within {timeout:g} s") from None


def is_error(frame: dict[str, Any], code: str) -> bool:
    data = frame.get("data")
    return frame.get("type") == "error" and isinstance(data, dict) and data.get("code") == code


# -- what the checks share -------------------------------------------------------------------------


def field(reply: HttpResponse, name: str) -> Any:
    return reply.document.get(name) if isinstance(reply.document, dict) else None


def short(document: Any) -> str:
    return shorten(str(document), 160)


def code_of(answer: dict[str, Any]) -> Any:
    error = answer.get("error")
    return error.get("code") if isinstance(error, dict) else None


def require_code(answer: dict[str, Any], code: int, what: str) -> None:
    if code_of(answer) != code:
        raise Wrong(f"{what} is answered with {short(answer)}")


def require_error(frame: dict[str, Any], code: str | None, what: str) -> None:
    if frame.get("type") != "error" or (code is not None and not is_error(frame, code)):
        raise Wrong(f"{what} is answered with {short(frame)}")


def require_observation(frame: dict[str, Any]) -> None:
    if frame.get("type") != "observation" or not isinstance(frame.get("data"), dict):
        raise Wrong(f"no observation came back, but {short(frame)}")
    require_fields(frame["data"], "the observation")


def require_body(reply: HttpResponse, what: str) -> None:
    if reply.status != 200 or not isinstance(reply.document, dict):
        raise Wrong(f"{what} answers {reply.short}")
    if "metadata" not in reply.document:
        raise Wrong(f"{what} answers without metadata")
    require_fields(reply.document, what)


def require_fields(data: dict[str, Any], what: str) -> None:
    missing = {"observation", "reward", "done"} - data.keys()
    if missing:
        raise Wrong(f"{what} has no {' and no '.join(sorted(missing))}")
    if not isinstance(data["observation"], dict) or not isinstance(data["done"], bool):
        raise Wrong(f"{what} is {short(data)}")
    if data["reward"] is not None and not isinstance(data["reward"], Real):
        raise Wrong(f"{what} has the reward {data['reward']!r}")


async def require_refusals(subject: ServerSubject, code: str | None, frames: list[Any]) -> None:
    """Each frame must be refused with `code`, the connection kept, and the state left as it was."""
    async with subject.session() as socket:
        await socket.request({"type": "reset"})
        before = await read_state(socket)
        for frame in frames:
            require_error(await socket.request(frame), code, shorten(str(frame), 60) or "an empty frame")
            if await read_state(socket) != before:
                raise Wrong(f"{shorten(str(frame), 60)} was refused, but changed the state")


async def require_simulation(subject: ServerSubject) -> None:
    if not await subject.has_route("/step"):
        raise Skipped("the server offers no episodes over HTTP (production mode)")


async def read_state(socket: RawSocket) -> dict[str, Any]:
    frame = await socket.request({"type": "state"})
    if frame.get("type") != "state" or not isinstance(frame.get("data"), dict):
        raise Wrong(f"state is answered with {short(frame)}")
    state: dict[str, Any] = frame["data"]
    return state


async def take_step(subject: ServerSubject, socket: RawSocket, *, reset: bool = True) -> None:
    """Carry out the example action. Raises Doubtful if the environment, not the server, refuses it."""
    action = await subject.action()
    if reset:
        await socket.request({"type": "reset"})
    frame = await socket.request({"type": "step", "data": action})
    if is_error(frame, "EXECUTION_ERROR"):
        hint = "the environment fails on an action that its schema allows: `paddock check` its class"
        raise Doubtful(f"the example action {short(action)} failed: {frame['data'].get('message')}", hint)
    require_observation(frame)


async def bad_actions(subject: ServerSubject) -> list[tuple[str, dict[str, Any]]]:
    try:
        bad = list(counterexamples(await subject.schema()))
    except NoExample as error:
        raise Skipped(f"no example action can be made from the schema: {error}") from None
    if not bad:
        raise Skipped("the schema allows every action")
    return bad


async def call_a_tool(subject: ServerSubject) -> tuple[str, dict[str, Any]]:
    name, arguments = await subject.tool_call()
    answer = await subject.rpc("tools/call", name=name, arguments=arguments)
    result = answer.get("result")
    if not isinstance(result, dict):
        message = (answer.get("error") or {}).get("message")
        raise Doubtful(f"{name} failed on the example call: {message or short(answer)}")
    return name, result


@asynccontextmanager
async def http_episode(subject: ServerSubject) -> AsyncIterator[tuple[HttpResponse, dict[str, str]]]:
    """The answer to `/reset` and the headers to go on with; the session, if there is one, is closed."""
    reset = await subject.post("/reset", {})
    session = reset.headers.get("session-id")
    try:
        yield reset, {"Session-Id": session} if session else {}
    finally:
        if session:
            await subject.rpc("openenv/session/close", session_id=session)
