"""The door as a server: WebSockets are tied to their host or sent there, HTTP requests are passed on.

Runs as a process of its own (`python -m paddock.scale.router`) below a supervisor, which binds the ports, so that
they outlive it. Settings and news come in as lines of JSON on stdin, reports go out on stdout.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp
import orjson
from pydantic import BaseModel, Field, ValidationError
from starlette.requests import ClientDisconnect
from yarl import URL

import paddock
from paddock.config import Access
from paddock.errors import HostLost, InvalidMessage, PaddockError
from paddock.protocol import jsonrpc, messages
from paddock.protocol.codec import encode
from paddock.protocol.jsonrpc import Call, RpcError
from paddock.scale.door import CONNECT_TIMEOUT, Door, DoorConfig, lost
from paddock.scale.roster import Host, key_in
from paddock.scale.splice import ClientSide, accept_key, closing, frame
from paddock.server.access import check_access, check_browser, has_token
from paddock.server.answers import CLOSE_CODES, NORMAL
from paddock.server.app import OPEN_PATHS, PAGE
from paddock.server.hello import LEASE_HEADER, Hello
from paddock.server.http import (
    SESSION_COOKIE,
    SESSION_HEADER,
    JSONBytes,
    disconnected,
    error_response,
    read_body,
    unless_left,
)
from paddock.server.listening import StoppableServer, loop_factory, quiet_config

if TYPE_CHECKING:
    from paddock.scale.heartbeat import Address

REPORT_EVERY = 0.25
STREAM_HEADERS = frozenset(("content-length", "connection", "transfer-encoding", LEASE_HEADER))
HOP_HEADERS = STREAM_HEADERS | {"host", "origin", "authorization"}
OPENS_A_SESSION = frozenset(("initialize", "openenv/session/create"))
HOST_IS_LOST = 1011
PLACES = "/places"
MOST_PLACES = 1000


# -- WebSockets ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Handshake:
    """A request for an upgrade, as it came."""

    target: str
    headers: dict[str, str]

    @classmethod
    def read(cls, data: bytes) -> Handshake:
        first, *lines = data.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
        named = (line.partition(":") for line in lines)
        return cls(first.split(" ")[1], {name.strip().lower(): value.strip() for name, _, value in named})

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def hello(self) -> Hello:
        return Hello.read(self.path, self.target.partition("?")[2], self.headers.get)

    def for_host(self, host: Host, added: dict[str, str]) -> bytes:
        """The same request as the door makes it to a host."""
        kept = {name: value for name, value in self.headers.items() if name not in HOP_HEADERS}
        fields = {"host": urlsplit(host.url).netloc, "connection": "Upgrade", **kept, **added}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"GET {self.target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1")


class Upgrade(ClientSide):
    """A WebSocket at the door, in the form uvicorn expects."""

    door: Door

    def __init__(self, config: Any, server_state: Any, app_state: dict[str, Any]) -> None:
        super().__init__()
        self._shaken = False
        self._accepted = False
        self._opening: asyncio.Task[None] | None = None
        self._queue_frames = False
        self._place = 0

    def data_received(self, data: bytes) -> None:
        if self._shaken:
            super().data_received(data)
            return
        self._shaken = True
        handshake = Handshake.read(data)
        try:
            check_access(self.door.config.access, handshake.headers.get)
        except PaddockError as error:
            self._answer(error.http_status, {"content-type": "text/plain; charset=utf-8"}, error.message.encode())
            return
        self._opening = asyncio.get_running_loop().create_task(self._open(handshake))

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self.door.sockets.get(self.key, set()).discard(self)
        if self._opening is not None:
            self._opening.cancel()

    async def _open(self, handshake: Handshake) -> None:
        try:
            await self._find_host(handshake)
        except PaddockError as error:
            self._accept(handshake)
            self._refuse(error)
        except (OSError, TimeoutError) as error:
            self._accept(handshake)
            self._refuse(HostLost(f"the host did not answer: {error}", hint="connect again"))

    async def _find_host(self, handshake: Handshake) -> None:
        door, hello = self.door, handshake.hello
        named = hello.session_id or (hello.resume if hello.resume != "new" else None) or hello.lease
        if named is not None and (handshake.path == "/ws" or key_in(named)):
            await self._go(handshake, await door.keeper(named))
        elif handshake.path != "/ws" or hello.vector:
            await self._go(handshake, await door.anybody())
        else:
            self._queue_frames = hello.resume is not None
            host, lease = await door.place(hello.queue_timeout, partial(self._queued, handshake))
            await self._go(handshake, host, lease)

    async def _go(self, handshake: Handshake, host: Host, lease: str | None = None) -> None:
        """Bring the client to its host, in the way that is still open."""
        if self._accepted and self._queue_frames:
            redirects = self.door.config.mode == "redirect"
            word = {"type": "moved", "data": {"url": host.url if redirects else None, "lease": lease}}
            self.say_goodbye(frame(encode(word)), closing(NORMAL, "go on where you were told"))
        elif self.door.config.mode == "redirect" and not self._accepted:
            query = handshake.target.partition("?")[2]
            parts = [part for part in (query, f"lease={lease}" if lease else "") if part]
            where = f"ws{host.url.removeprefix('http')}{handshake.path}{'?' if parts else ''}{'&'.join(parts)}"
            self._answer(307, {"location": where})
        else:
            await self._tie(handshake, host, lease)

    async def _tie(self, handshake: Handshake, host: Host, lease: str | None) -> None:
        self.key = host.key
        # Who can return does so, and hears then what became of the session.
        self.last_words = None if handshake.hello.resume else self._why_it_ends
        self.door.sockets.setdefault(host.key, set()).add(self)
        address = urlsplit(host.url)
        assert address.hostname is not None
        assert address.port is not None
        added = {**self.door.hosts_headers(), **({LEASE_HEADER: lease} if lease else {})}
        try:
            await self.tie(
                (address.hostname, address.port), handshake.for_host(host, added),
                keep_answer=not self._accepted, timeout=CONNECT_TIMEOUT,
            )  # fmt: skip
        except BaseException:
            self.door.sockets[host.key].discard(self)
            raise

    async def _why_it_ends(self) -> bytes:
        """The host's death is known within moments of its sockets' end."""
        if not await self.door.is_lost(self.key):
            return b""
        error = lost(self.key)
        return frame(messages.write_error(error)) + closing(HOST_IS_LOST, error.message)

    # -- saying something oneself -----------------------------------------------------------------

    def _queued(self, handshake: Handshake, place: int) -> None:
        """There is no slot yet: the handshake is answered here, since clients do not wait for that for long."""
        self._accept(handshake)
        if self._queue_frames and place != self._place:
            self._place = place
            self.transport.write(frame(messages.write_queued(place)))

    def _accept(self, handshake: Handshake) -> None:
        if self._accepted:
            return
        self._accepted = True
        key = accept_key(handshake.headers.get("sec-websocket-key", ""))
        upgrade = {"upgrade": "websocket", "connection": "Upgrade", "sec-websocket-accept": key}
        self._answer(101, {**upgrade, "paddock-version": paddock.__version__})

    def _refuse(self, error: PaddockError) -> None:
        self.say_goodbye(frame(messages.write_error(error)), closing(CLOSE_CODES.get(error.code, NORMAL), error.code))

    def _answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        known = {**headers, "content-length": str(len(body)), "connection": "close"} if status != 101 else headers
        lines = "".join(f"{name}: {value}\r\n" for name, value in known.items())
        self.transport.write(f"HTTP/1.1 {status} {status}\r\n{lines}\r\n".encode("latin-1") + body)
        if status != 101:
            self.transport.close()


# -- HTTP ---------------------------------------------------------------------------------------------


class PlacesWanted(BaseModel):
    """What a client asks that opens many sessions over few connections."""

    sessions: int = Field(ge=1)
    queue_timeout: float | None = Field(default=None, ge=0)

    @classmethod
    def read(cls, body: bytes) -> PlacesWanted:
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)
            raise InvalidMessage("Invalid request", errors=found) from None


class DoorApp:
    """The ASGI application: the questions about the whole cluster are answered here, all others by a host."""

    def __init__(self, door: Door) -> None:
        self.door = door

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        path, access = scope["path"], self.door.config.access
        try:
            check = check_browser if path in OPEN_PATHS or path.startswith(PAGE) else check_access
            check(access, headers.get)
            answer = await self._own(scope["method"], path, headers)
            if answer is None:
                body = await read_body(receive, self.door.config.message_bytes)
                if (path, scope["method"]) == (PLACES, "POST"):
                    await (await self._places(body, receive))(scope, receive, send)
                    return
                await self._pass_on(scope, headers, body, receive, send)
            else:
                await answer(scope, receive, send)
        except ClientDisconnect:
            return
        except PaddockError as error:
            answer = rpc_failure(error, None) if path == "/mcp" else error_response(error)
            await answer(scope, receive, send)

    async def _live(self, receive: Any, send: Any) -> None:
        while True:
            event = (await receive())["type"]
            if event == "lifespan.startup":
                await self.door.start()
            else:
                await self.door.stop()
            await send({"type": f"{event}.complete"})
            if event == "lifespan.shutdown":
                return

    async def _own(self, method: str, path: str, headers: dict[str, str]) -> JSONBytes | None:
        if method != "GET" or path not in ("/health", "/metrics", "/sessions"):
            return None
        if path == "/metrics":
            text = (await self.door.metrics()).encode()
            return JSONBytes(text, headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"})
        if path == "/sessions":
            return JSONBytes(await self.door.sessions())
        health = await self.door.health()
        access = self.door.config.access
        known = access.token is None or has_token(access, headers.get)
        return JSONBytes(
            health if known else {"status": health["status"]}, 200 if health["status"] == "healthy" else 503
        )

    async def _places(self, body: bytes, receive: Any) -> JSONBytes:
        """Slots for several sessions at once, by host; the client opens them there with the leases."""
        wanted = PlacesWanted.read(body)
        most = min(wanted.sessions, MOST_PLACES)
        placed = await unless_left(partial(disconnected, receive), self.door.place_some(most, wanted.queue_timeout))
        return JSONBytes({"places": [{"host": host.key, "leases": leases} for host, leases in placed]})

    async def _pass_on(self, scope: Any, headers: dict[str, str], body: bytes, receive: Any, send: Any) -> None:
        door = self.door
        token = headers.get("mcp-session-id") or headers.get(SESSION_HEADER) or cookie(headers.get("cookie"))
        call = read_call(body) if scope["path"] == "/mcp" and scope["method"] == "POST" else None
        if call is not None and key_in(str(call.params.get("session_id") or "")):
            token = str(call.params["session_id"])
        lease = None
        # A session that is unknown, or of another cluster's life, is for some host to refuse in the route's own way.
        if token is not None and key_in(token):
            try:
                host = await door.keeper(token)
            except HostLost as error:
                if scope["path"] != "/reset":
                    answer = rpc_failure(error, call) if scope["path"] == "/mcp" else error_response(error)
                    await answer(scope, receive, send)
                    return
                host, lease = await unless_left(partial(disconnected, receive), door.place())
        elif (scope["path"], scope["method"]) in (("/reset", "POST"), ("/web/reset", "POST")) or opens(call):
            host, lease = await unless_left(partial(disconnected, receive), door.place())
        else:
            host = await door.anybody()
        await self._exchange(host, lease, scope, headers, body, receive, send)

    async def _exchange(
        self, host: Host, lease: str | None, scope: Any, headers: dict[str, str], body: bytes, receive: Any, send: Any
    ) -> None:
        dropped = HOP_HEADERS
        added: dict[str, str] = {}
        if scope["path"].startswith(PAGE) and self.door.config.access.token is not None:
            # The page looks at token, cookie and origin itself, so it gets them as they came.
            dropped = STREAM_HEADERS
        else:
            added = self.door.hosts_headers()
        kept = {name: value for name, value in headers.items() if name not in dropped}
        added = {**added, **({LEASE_HEADER: lease} if lease else {})}
        query = scope["query_string"].decode("latin-1")
        url = f"{host.url}{scope['raw_path'].decode('latin-1')}{'?' if query else ''}{query}"
        asking = asyncio.ensure_future(self._relay(scope["method"], url, {**kept, **added}, body, send))
        leaving = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({asking, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                return
            await asking
        except (aiohttp.ClientError, OSError) as error:
            raise HostLost(
                f"the host {host.key} did not answer, the episode may be lost: {error}",
                hint="reset() begins a new one",
            ) from error
        finally:
            asking.cancel()
            leaving.cancel()

    async def _relay(self, method: str, url: str, headers: dict[str, str], body: bytes, send: Any) -> None:

        exact = URL(url, encoded=True)
        async with self.door.http.request(
            method, exact, headers=headers, data=body or None, allow_redirects=False
        ) as answer:
            kept = [
                (name.lower(), value)
                for name, value in answer.raw_headers
                if name.lower() not in (b"connection", b"transfer-encoding")
            ]
            await send({"type": "http.response.start", "status": answer.status, "headers": kept})
            async for piece in answer.content.iter_any():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


def read_call(body: bytes) -> Call | None:
    try:
        call = jsonrpc.parse(body)
    except RpcError:
        return None
    return call if isinstance(call, Call) else None


def opens(call: Call | None) -> bool:
    return call is not None and call.method in OPENS_A_SESSION


def rpc_failure(error: PaddockError, call: Call | None) -> JSONBytes:
    status = error.http_status if isinstance(error, HostLost) or error.http_status in (401, 403) else 200
    return JSONBytes(jsonrpc.failure(error, call.id if call else None), 404 if status == 410 else status)


def cookie(header: str | None) -> str | None:
    for part in (header or "").split(";"):
        name, _, value = part.strip().partition("=")
        if name == SESSION_COOKIE:
            return value
    return None


# -- the process --------------------------------------------------------------------------------------


async def run_door(settings: dict[str, Any]) -> None:
    """Be a door on ports that are bound already, until SIGTERM, or until the supervisor is gone."""
    control = socket.socket(fileno=settings["control"])
    config = DoorConfig(
        access=Access(settings["token"], frozenset(settings["allowed_hosts"]), frozenset(settings["origins"])),
        others=others_than(control, settings.get("doors", [])),
        **settings["door"],
    )
    door = Door(config)
    upgrades = type("Upgrades", (Upgrade,), {"door": door})
    server = StoppableServer(quiet_config(DoorApp(door), upgrades=upgrades))
    calls = await asyncio.start_server(door.switchboard.answer, sock=control)
    tasks = [asyncio.create_task(hear(door, server)), asyncio.create_task(report(door))]
    try:
        await server.serve([socket.socket(fileno=settings["listen"])])
    finally:
        calls.close()
        for task in tasks:
            task.cancel()


def others_than(control: socket.socket, doors: list[list[Any]]) -> tuple[Address, ...]:
    own = control.getsockname()[1]
    return tuple((str(host), int(port)) for host, port in doors if port != own)


async def hear(door: Door, server: StoppableServer) -> None:
    """News from the supervisor: what was asked of the cluster, which hosts take nobody any more."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        news = orjson.loads(line)
        door.asked = news["asked"]
        door.roster.retire(frozenset(news["retired"]))
        door.slots.admit()
    server.should_exit = True


async def report(door: Door) -> None:
    while True:
        with suppress(BlockingIOError):
            os.write(sys.stdout.fileno(), orjson.dumps(door.report()) + b"\n")
        await asyncio.sleep(REPORT_EVERY)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=0) as unbuffered:
        settings = orjson.loads(unbuffered.readline())
    os.set_blocking(sys.stdout.fileno(), False)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run_door(settings))


if __name__ == "__main__":
    main()
