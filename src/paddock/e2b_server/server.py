"""The server behind `paddock e2b up`: HTTP for both APIs, and any port of a sandbox at `PORT-ID.domain`."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import signal
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import orjson
from aiohttp import web

from paddock.e2b_server.connect_protocol import ConnectError
from paddock.e2b_server.control_api import ControlApi, problem
from paddock.e2b_server.envd_api import EnvdApi
from paddock.e2b_server.registry import SandboxRegistry
from paddock.errors import PaddockError, RequestError, SandboxError
from paddock.rollouts.sandboxes import recover
from paddock.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

logger = logging.getLogger("paddock.e2b")

MOST_BODY_BYTES = 64 << 20
ENVD_PATHS = ("/health", "/files", "/process.Process/", "/filesystem.Filesystem/")
FAILED = "the request could not be carried out"
ENVD_PORT = 49983
MAX_HEAD_BYTES = 65536
HEAD_SECONDS = 20.0
"""From the connection to the end of the headers of its first request."""
DIAL_SECONDS = 10.0
HOST = re.compile(rb"\r\nhost:[ \t]*(\d{1,5})-([a-z0-9-]+)\.", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class E2bServerSettings:
    host: str = "127.0.0.1"
    port: int = 3717
    backend: str = "bwrap"
    consent: bool = False
    max_sandboxes: int = 20
    api_key: str | None = None
    """None: a random one is generated."""
    store: Path | None = None
    """The store that records the sandboxes. None: the default one."""


@dataclass(frozen=True, slots=True)
class E2bServerAddress:
    """What a client needs to connect."""

    url: str
    api_key: str

    @property
    def variables(self) -> dict[str, str]:
        return {"E2B_API_URL": self.url, "E2B_SANDBOX_URL": self.url, "E2B_API_KEY": self.api_key}


class E2bServer:
    """Both APIs at one address. Use it as an async context manager."""

    def __init__(self, settings: E2bServerSettings) -> None:
        self.settings = settings
        self.api_key = settings.api_key or f"e2b_{secrets.token_hex(20)}"
        self._store: Store | None = None
        self.registry: SandboxRegistry
        self.address: E2bServerAddress

    async def __aenter__(self) -> E2bServer:
        settings = self.settings
        store = self._store = Store.open(settings.store)
        recovered = await store.run(recover, store)
        if recovered.sandboxes:
            logger.info("%d sandboxes of a server that was killed have been ended", len(recovered.sandboxes))
        self.registry = SandboxRegistry(
            store, backend=settings.backend, consent=settings.consent, most=settings.max_sandboxes
        )
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(
            lambda: PortRouter(self.registry, self._new_connection), settings.host, settings.port, backlog=256
        )
        host, port = self._listening.sockets[0].getsockname()[:2]
        host_text = f"[{host}]" if ":" in host else "127.0.0.1" if host == "0.0.0.0" else host
        self.address = E2bServerAddress(f"http://{host_text}:{port}", self.api_key)
        api = ControlApi(self.registry, key=self.api_key, domain=f"localhost:{port}")
        app = web.Application(client_max_size=MOST_BODY_BYTES, middlewares=[guard_requests(api)])
        app.add_routes(api.routes())
        app.add_routes(EnvdApi(self.registry).routes())
        self._app = web.AppRunner(app, access_log=None, handler_cancellation=True, keepalive_timeout=75)
        await self._app.setup()
        return self

    def _new_connection(self) -> asyncio.Protocol:
        assert self._app.server is not None
        return self._app.server()

    async def __aexit__(self, *_: object) -> None:
        self._listening.close()
        try:
            await self.registry.close()
        finally:
            await self._app.cleanup()
            if self._store is not None:
                self._store.close()


def guard_requests(api: ControlApi) -> Any:
    """Middleware: the control API needs the key, and every error has the form of E2B's API."""

    @web.middleware
    async def guard(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        if not request.path.startswith(ENVD_PATHS) and not api.is_authorized(request):
            return problem(401, "the API key is wrong or missing")
        try:
            response: web.StreamResponse = await handler(request)
            return response
        except web.HTTPException as error:
            if error.body is not None and error.content_type == "application/json":
                raise
            return problem(error.status, f"{request.method} {request.path}: {error.reason}")
        except (RequestError, KeyError, ValueError, TypeError) as error:
            return problem(400, str(error))
        except ConnectError as error:
            return problem(error.status, error.message)
        except (PaddockError, SandboxError) as error:
            return problem(500, error.message)
        except Exception:
            logger.exception("%s %s", request.method, request.path)
            return problem(500, FAILED)

    return guard


def serve_e2b(settings: E2bServerSettings, announce: Callable[[E2bServerAddress], None]) -> None:
    """Serve until SIGINT or SIGTERM; then every sandbox is ended."""

    async def run() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        async with E2bServer(settings) as server:
            announce(server.address)
            await stop.wait()

    with suppress(KeyboardInterrupt):
        asyncio.run(run())


# -- ports of sandboxes -------------------------------------------------------------------------------


class PortRouter(asyncio.Protocol):
    """One connection until its Host header is read: then it goes to the HTTP server, or to a port of a sandbox.

    What goes to a sandbox is not parsed any further, so WebSockets and everything else that begins as HTTP works.
    """

    def __init__(self, registry: SandboxRegistry, front: Callable[[], asyncio.Protocol]) -> None:
        self._registry, self._make_http_protocol = registry, front
        self._head = bytearray()
        self._transport: asyncio.Transport | None = None
        self._timeout: asyncio.TimerHandle | None = None
        self._routing: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._timeout = asyncio.get_running_loop().call_later(HEAD_SECONDS, self._close_timed_out)

    def connection_lost(self, error: Exception | None) -> None:
        if self._timeout is not None:
            self._timeout.cancel()

    def data_received(self, data: bytes) -> None:
        transport = self._transport
        if transport is None or self._routing is not None:
            self._head += data
            return
        self._head += data
        if b"\r\n\r\n" not in self._head and len(self._head) < MAX_HEAD_BYTES:
            return
        if self._timeout is not None:
            self._timeout.cancel()
        match = HOST.search(self._head.partition(b"\r\n\r\n")[0])
        if match is None or int(match[1]) == ENVD_PORT:
            protocol = self._make_http_protocol()
            transport.set_protocol(protocol)
            protocol.connection_made(transport)
            protocol.data_received(bytes(self._head))
        else:
            transport.pause_reading()
            self._routing = asyncio.ensure_future(self._route(transport, match[2].decode().lower(), int(match[1])))

    def _close_timed_out(self) -> None:
        assert self._transport is not None
        peer = self._transport.get_extra_info("peername")
        logger.warning("a connection of %s was closed: the headers of its request did not arrive in time", peer)
        self._transport.close()

    async def _route(self, transport: asyncio.Transport, sandbox_id: str, port: int) -> None:
        served = self._registry.find(sandbox_id)
        if served is None:
            refuse(transport, {"sandboxId": sandbox_id, "message": "The sandbox was not found", "code": 502})
            return
        try:
            inside = await served.sandbox.dial(port, timeout=DIAL_SECONDS)
        except (OSError, SandboxError):
            message = "The sandbox is running but port is not open"
            refuse(transport, {"sandboxId": sandbox_id, "message": message, "port": port, "code": 502})
            return
        loop = asyncio.get_running_loop()
        inner, _ = await loop.create_connection(lambda: RelayProtocol(transport), sock=inside)
        inner.write(bytes(self._head))
        transport.set_protocol(RelayProtocol(inner))
        transport.resume_reading()


class RelayProtocol(asyncio.Protocol):
    """Passes what one connection receives on to another one."""

    def __init__(self, other: asyncio.Transport) -> None:
        self._other = other

    def data_received(self, data: bytes) -> None:
        self._other.write(data)

    def eof_received(self) -> bool:
        if self._other.can_write_eof() and not self._other.is_closing():
            self._other.write_eof()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self._other.close()

    def pause_writing(self) -> None:
        """Backpressure: this side is full, so the other one is not read."""
        if not self._other.is_closing():
            self._other.pause_reading()

    def resume_writing(self) -> None:
        if not self._other.is_closing():
            self._other.resume_reading()


def refuse(transport: asyncio.Transport, details: dict[str, object]) -> None:
    body = orjson.dumps(details)
    head = f"HTTP/1.1 502 Bad Gateway\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    transport.write(f"{head}Connection: close\r\n\r\n".encode() + body)
    transport.close()
