"""The gateway as a server: WebSockets are relayed or redirected to their host, HTTP requests are forwarded.

It runs as a child process (`python -m paddock.scale.gateway_server`) of the cluster service, which binds the ports,
so that they outlive it. Settings and updates come in as lines of JSON on stdin, reports go out on stdout.
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
from websockets.utils import accept_key
from yarl import URL

import paddock
from paddock.config import Access
from paddock.errors import HostLost, InvalidMessage, PaddockError
from paddock.protocol import jsonrpc, mcp, messages
from paddock.protocol.codec import encode
from paddock.protocol.jsonrpc import RpcCall, RpcError
from paddock.scale.gateway import CONNECT_SECONDS, Gateway, GatewayConfig, host_lost
from paddock.scale.host_registry import Host, host_key_of
from paddock.scale.websocket_relay import ClientSocket, close_frame, text_frame
from paddock.server.access import check_access, check_browser, has_token
from paddock.server.answers import CLOSE_CODES, NORMAL
from paddock.server.app import OPEN_PATHS, PAGE
from paddock.server.handshake import LEASE_HEADER, SESSION_HEADER, ClientHandshake
from paddock.server.http import (
    JSONBytes,
    cancel_on_disconnect,
    error_response,
    read_body,
    wait_for_disconnect,
)
from paddock.server.listening import StoppableServer, loop_factory, uvicorn_config
from paddock.server.workers import session_cookie

if TYPE_CHECKING:
    from paddock.scale.host_connection import Address

REPORT_SECONDS = 0.25
STREAM_HEADERS = frozenset(("content-length", "connection", "transfer-encoding", LEASE_HEADER))
HOP_HEADERS = STREAM_HEADERS | {"host", "origin", "authorization"}
SESSION_OPENING_METHODS = frozenset(("initialize", "openenv/session/create"))
HOST_LOST_CLOSE_CODE = 1011
PLACES = "/places"
MAX_PLACES = 1000


# -- WebSockets ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Handshake:
    """A WebSocket handshake, as the client sent it."""

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
    def hello(self) -> ClientHandshake:
        return ClientHandshake.read(self.path, self.target.partition("?")[2], self.headers.get)

    def for_host(self, host: Host, added: dict[str, str]) -> bytes:
        """The same handshake, from the gateway to a host."""
        forwarded = {name: value for name, value in self.headers.items() if name not in HOP_HEADERS}
        fields = {"host": urlsplit(host.url).netloc, "connection": "Upgrade", **forwarded, **added}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"GET {self.target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1")


class ClientUpgrade(ClientSocket):
    """A WebSocket of a client, as a protocol class for uvicorn."""

    gateway: Gateway

    def __init__(self, config: Any, server_state: Any, app_state: dict[str, Any]) -> None:
        super().__init__()
        self._handshake_read = False
        self._accepted = False
        self._setup: asyncio.Task[None] | None = None
        self._queue_frames = False
        self._place = 0

    def data_received(self, data: bytes) -> None:
        if self._handshake_read:
            super().data_received(data)
            return
        self._handshake_read = True
        handshake = Handshake.read(data)
        try:
            check_access(self.gateway.config.access, handshake.headers.get)
        except PaddockError as error:
            self._answer(error.http_status, {"content-type": "text/plain; charset=utf-8"}, error.message.encode())
            return
        self._setup = asyncio.get_running_loop().create_task(self._open(handshake))

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self.gateway.sockets.get(self.key, set()).discard(self)
        if self._setup is not None:
            self._setup.cancel()

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
        gateway, hello = self.gateway, handshake.hello
        named = hello.session_id or (hello.resume if hello.resume != "new" else None) or hello.lease
        if named is not None and (handshake.path == "/ws" or host_key_of(named)):
            await self._send_to_host(handshake, await gateway.host_of_session(named))
        elif handshake.path != "/ws" or hello.vector:
            await self._send_to_host(handshake, await gateway.least_loaded_host())
        else:
            self._queue_frames = hello.resume is not None
            host, lease = await gateway.reserve_slot(hello.queue_timeout, partial(self._queued, handshake))
            await self._send_to_host(handshake, host, lease)

    async def _send_to_host(self, handshake: Handshake, host: Host, lease: str | None = None) -> None:
        """Redirect or relay the client to its host, depending on what it has been answered already."""
        if self._accepted and self._queue_frames:
            redirects = self.gateway.config.mode == "redirect"
            message = {"type": "moved", "data": {"url": host.url if redirects else None, "lease": lease}}
            self.send_and_close(text_frame(encode(message)), close_frame(NORMAL, "continue at the given host"))
        elif self.gateway.config.mode == "redirect" and not self._accepted:
            query = handshake.target.partition("?")[2]
            parts = [part for part in (query, f"lease={lease}" if lease else "") if part]
            where = f"ws{host.url.removeprefix('http')}{handshake.path}{'?' if parts else ''}{'&'.join(parts)}"
            self._answer(307, {"location": where})
        else:
            await self._relay_to_host(handshake, host, lease)

    async def _relay_to_host(self, handshake: Handshake, host: Host, lease: str | None) -> None:
        self.key = host.key
        # A client that can resume reconnects, and learns then what became of its session.
        self.closing_frames = None if handshake.hello.resume else self._closing_frames
        self.gateway.sockets.setdefault(host.key, set()).add(self)
        address = urlsplit(host.url)
        assert address.hostname is not None
        assert address.port is not None
        added = {**self.gateway.host_headers(), **({LEASE_HEADER: lease} if lease else {})}
        try:
            await self.connect_host(
                (address.hostname, address.port), handshake.for_host(host, added),
                keep_answer=not self._accepted, timeout=CONNECT_SECONDS,
            )  # fmt: skip
        except BaseException:
            self.gateway.sockets[host.key].discard(self)
            raise

    async def _closing_frames(self) -> bytes:
        """An error and a close frame if the host has died, which shows shortly after its first socket closes."""
        if not await self.gateway.is_lost(self.key):
            return b""
        error = host_lost(self.key)
        return text_frame(messages.write_error(error)) + close_frame(HOST_LOST_CLOSE_CODE, error.message)

    # -- answers of the gateway itself -----------------------------------------------------------------

    def _queued(self, handshake: Handshake, place: int) -> None:
        """No slot is free yet. The gateway answers the handshake itself, because clients time out on that soon."""
        self._accept(handshake)
        if self._queue_frames and place != self._place:
            self._place = place
            self.transport.write(text_frame(messages.write_queued(place)))

    def _accept(self, handshake: Handshake) -> None:
        if self._accepted:
            return
        self._accepted = True
        key = accept_key(handshake.headers.get("sec-websocket-key", ""))
        upgrade = {"upgrade": "websocket", "connection": "Upgrade", "sec-websocket-accept": key}
        self._answer(101, {**upgrade, "paddock-version": paddock.__version__})

    def _refuse(self, error: PaddockError) -> None:
        close = close_frame(CLOSE_CODES.get(error.code, NORMAL), error.code)
        self.send_and_close(text_frame(messages.write_error(error)), close)

    def _answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        fields = {**headers, "content-length": str(len(body)), "connection": "close"} if status != 101 else headers
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self.transport.write(f"HTTP/1.1 {status} {status}\r\n{lines}\r\n".encode("latin-1") + body)
        if status != 101:
            self.transport.close()


# -- HTTP ---------------------------------------------------------------------------------------------


class PlacesRequest(BaseModel):
    """The body of `POST /places`, from a client that opens many sessions over few connections."""

    sessions: int = Field(ge=1)
    queue_timeout: float | None = Field(default=None, ge=0)

    @classmethod
    def read(cls, body: bytes) -> PlacesRequest:
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            problems = error.errors(include_url=False, include_context=False, include_input=False)
            raise InvalidMessage("Invalid request", errors=problems) from None


class GatewayApp:
    """The ASGI application. It answers requests about the whole cluster, and forwards all others to a host."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._run_lifespan(receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        path, access = scope["path"], self.gateway.config.access
        try:
            check = check_browser if path in OPEN_PATHS or path.startswith(PAGE) else check_access
            check(access, headers.get)
            answer = await self._answer_for_cluster(scope["method"], path, headers)
            if answer is None:
                body = await read_body(receive, self.gateway.config.message_bytes)
                if (path, scope["method"]) == (PLACES, "POST"):
                    await (await self._reserve_places(body, receive))(scope, receive, send)
                    return
                await self._forward(scope, headers, body, receive, send)
            else:
                await answer(scope, receive, send)
        except ClientDisconnect:
            return
        except PaddockError as error:
            answer = rpc_failure(error, None) if path == "/mcp" else error_response(error)
            await answer(scope, receive, send)

    async def _run_lifespan(self, receive: Any, send: Any) -> None:
        while True:
            event = (await receive())["type"]
            if event == "lifespan.startup":
                await self.gateway.start()
            else:
                await self.gateway.stop()
            await send({"type": f"{event}.complete"})
            if event == "lifespan.shutdown":
                return

    async def _answer_for_cluster(self, method: str, path: str, headers: dict[str, str]) -> JSONBytes | None:
        if method != "GET" or path not in ("/health", "/metrics", "/sessions"):
            return None
        if path == "/metrics":
            text = (await self.gateway.metrics()).encode()
            return JSONBytes(text, headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"})
        if path == "/sessions":
            return JSONBytes(await self.gateway.sessions())
        health = await self.gateway.health()
        access = self.gateway.config.access
        is_trusted = access.token is None or has_token(access, headers.get)
        return JSONBytes(
            health if is_trusted else {"status": health["status"]}, 200 if health["status"] == "healthy" else 503
        )

    async def _reserve_places(self, body: bytes, receive: Any) -> JSONBytes:
        """Leases for several sessions at once, by host. The client opens the sessions there."""
        request = PlacesRequest.read(body)
        reserving = self.gateway.reserve_slots(min(request.sessions, MAX_PLACES), request.queue_timeout)
        placed = await cancel_on_disconnect(partial(wait_for_disconnect, receive), reserving)
        return JSONBytes({"places": [{"host": host.key, "leases": leases} for host, leases in placed]})

    async def _forward(self, scope: Any, headers: dict[str, str], body: bytes, receive: Any, send: Any) -> None:
        gateway = self.gateway
        token = (
            headers.get(mcp.SESSION_HEADER) or headers.get(SESSION_HEADER) or session_cookie(headers.get("cookie"))
        )
        call = read_call(body) if scope["path"] == "/mcp" and scope["method"] == "POST" else None
        if call is not None and host_key_of(str(call.params.get("session_id") or "")):
            token = str(call.params["session_id"])
        lease = None
        # Any host can refuse an unknown session, in the form that the route needs.
        if token is not None and host_key_of(token):
            try:
                host = await gateway.host_of_session(token)
            except HostLost as error:
                if scope["path"] != "/reset":
                    answer = rpc_failure(error, call) if scope["path"] == "/mcp" else error_response(error)
                    await answer(scope, receive, send)
                    return
                host, lease = await cancel_on_disconnect(
                    partial(wait_for_disconnect, receive), gateway.reserve_slot()
                )
        elif (scope["path"], scope["method"]) in (("/reset", "POST"), ("/web/reset", "POST")) or opens_session(call):
            host, lease = await cancel_on_disconnect(partial(wait_for_disconnect, receive), gateway.reserve_slot())
        else:
            host = await gateway.least_loaded_host()
        await self._exchange(host, lease, scope, headers, body, receive, send)

    async def _exchange(
        self, host: Host, lease: str | None, scope: Any, headers: dict[str, str], body: bytes, receive: Any, send: Any
    ) -> None:
        dropped = HOP_HEADERS
        added: dict[str, str] = {}
        if scope["path"].startswith(PAGE) and self.gateway.config.access.token is not None:
            # The page checks token, cookie and origin itself, so it gets them unchanged.
            dropped = STREAM_HEADERS
        else:
            added = self.gateway.host_headers()
        forwarded = {name: value for name, value in headers.items() if name not in dropped}
        added = {**added, **({LEASE_HEADER: lease} if lease else {})}
        query = scope["query_string"].decode("latin-1")
        url = f"{host.url}{scope['raw_path'].decode('latin-1')}{'?' if query else ''}{query}"
        asking = asyncio.ensure_future(self._relay(scope["method"], url, {**forwarded, **added}, body, send))
        leaving = asyncio.ensure_future(wait_for_disconnect(receive))
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
        async with self.gateway.http.request(
            method, exact, headers=headers, data=body or None, allow_redirects=False
        ) as answer:
            response_headers = [
                (name.lower(), value)
                for name, value in answer.raw_headers
                if name.lower() not in (b"connection", b"transfer-encoding")
            ]
            await send({"type": "http.response.start", "status": answer.status, "headers": response_headers})
            async for piece in answer.content.iter_any():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


def read_call(body: bytes) -> RpcCall | None:
    try:
        call = jsonrpc.parse(body)
    except RpcError:
        return None
    return call if isinstance(call, RpcCall) else None


def opens_session(call: RpcCall | None) -> bool:
    return call is not None and call.method in SESSION_OPENING_METHODS


def rpc_failure(error: PaddockError, call: RpcCall | None) -> JSONBytes:
    status = error.http_status if isinstance(error, HostLost) or error.http_status in (401, 403) else 200
    return JSONBytes(jsonrpc.failure(error, call.id if call else None), 404 if status == 410 else status)


# -- the process --------------------------------------------------------------------------------------


async def run_gateway(settings: dict[str, Any]) -> None:
    """Serve on ports that are bound already, until SIGTERM, or until the cluster service is gone."""
    control = socket.socket(fileno=settings["control"])
    config = GatewayConfig(
        access=Access(settings["token"], frozenset(settings["allowed_hosts"]), frozenset(settings["origins"])),
        peers=other_gateways(control, settings.get("gateways", [])),
        **settings["gateway"],
    )
    gateway = Gateway(config)
    upgrades = type("Upgrades", (ClientUpgrade,), {"gateway": gateway})
    server = StoppableServer(uvicorn_config(GatewayApp(gateway), upgrades=upgrades))
    calls = await asyncio.start_server(gateway.listener.serve, sock=control)
    tasks = [asyncio.create_task(read_updates(gateway, server)), asyncio.create_task(write_reports(gateway))]
    try:
        await server.serve([socket.socket(fileno=settings["listen"])])
    finally:
        calls.close()
        for task in tasks:
            task.cancel()


def other_gateways(control: socket.socket, gateways: list[list[Any]]) -> tuple[Address, ...]:
    own = control.getsockname()[1]
    return tuple((str(host), int(port)) for host, port in gateways if port != own)


async def read_updates(gateway: Gateway, server: StoppableServer) -> None:
    """Apply updates of the cluster service: what the autoscaler requested, and which hosts are retired."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        update = orjson.loads(line)
        gateway.autoscaler_status = update["autoscaler"]
        gateway.registry.retire(frozenset(update["retired"]))
        gateway.slots.admit()
    server.should_exit = True


async def write_reports(gateway: Gateway) -> None:
    while True:
        with suppress(BlockingIOError):
            os.write(sys.stdout.fileno(), orjson.dumps(gateway.report()) + b"\n")
        await asyncio.sleep(REPORT_SECONDS)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=0) as unbuffered:
        settings = orjson.loads(unbuffered.readline())
    os.set_blocking(sys.stdout.fileno(), False)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run_gateway(settings))


if __name__ == "__main__":
    main()
