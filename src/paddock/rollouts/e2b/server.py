"""The server behind `paddock e2b up`."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import web

from paddock.errors import PaddockError, RequestError, SandboxError
from paddock.rollouts.e2b.api import Api, problem
from paddock.rollouts.e2b.connect import ConnectError
from paddock.rollouts.e2b.envd import Envd
from paddock.rollouts.e2b.lifecycle import Guests
from paddock.rollouts.e2b.ports import Door
from paddock.rollouts.ledger import recover
from paddock.rollouts.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

logger = logging.getLogger("paddock.e2b")

MOST_IN_MEMORY = 64 << 20
DAEMON = ("/health", "/files", "/process.Process/", "/filesystem.Filesystem/")
BROKEN = "the request could not be carried out"


@dataclass(frozen=True, slots=True)
class FrontSettings:
    host: str = "127.0.0.1"
    port: int = 3717
    backend: str = "bwrap"
    consent: bool = False
    max_sandboxes: int = 20
    api_key: str | None = None
    """None: one is made up."""
    store: Path | None = None
    """Whose ledger knows the sandboxes. None: the usual one."""


@dataclass(frozen=True, slots=True)
class Address:
    """What a client has to know."""

    url: str
    api_key: str

    @property
    def variables(self) -> dict[str, str]:
        return {"E2B_API_URL": self.url, "E2B_SANDBOX_URL": self.url, "E2B_API_KEY": self.api_key}


class Front:
    """Both APIs at one address. Use it as an async context manager."""

    def __init__(self, settings: FrontSettings) -> None:
        self.settings = settings
        self.api_key = settings.api_key or f"e2b_{secrets.token_hex(20)}"
        self._store: Store | None = None
        self.guests: Guests
        self.address: Address

    async def __aenter__(self) -> Front:
        settings = self.settings
        store = self._store = Store.open(settings.store)
        recovered = await store.run(recover, store)
        if recovered.sandboxes:
            logger.info("%d sandboxes of a front that was killed have been ended", len(recovered.sandboxes))
        self.guests = Guests(store, backend=settings.backend, consent=settings.consent, most=settings.max_sandboxes)
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(
            lambda: Door(self.guests, self._new_connection), settings.host, settings.port, backlog=256
        )
        host, port = self._listening.sockets[0].getsockname()[:2]
        shown = f"[{host}]" if ":" in host else "127.0.0.1" if host == "0.0.0.0" else host
        self.address = Address(f"http://{shown}:{port}", self.api_key)
        api = Api(self.guests, key=self.api_key, domain=f"localhost:{port}")
        app = web.Application(client_max_size=MOST_IN_MEMORY, middlewares=[guarded(api)])
        app.add_routes(api.routes())
        app.add_routes(Envd(self.guests).routes())
        self._app = web.AppRunner(app, access_log=None, handler_cancellation=True, keepalive_timeout=75)
        await self._app.setup()
        return self

    def _new_connection(self) -> asyncio.Protocol:
        assert self._app.server is not None
        return self._app.server()

    async def __aexit__(self, *_: object) -> None:
        self._listening.close()
        try:
            await self.guests.close()
        finally:
            await self._app.cleanup()
            if self._store is not None:
                self._store.close()


def guarded(api: Api) -> Any:
    """The key before everything of the control API, and every error in the words of E2B's API."""

    @web.middleware
    async def guard(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        if not request.path.startswith(DAEMON) and not api.opens(request):
            return problem(401, "the API key is wrong or missing")
        try:
            found: web.StreamResponse = await handler(request)
            return found
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
            return problem(500, BROKEN)

    return guard


def serve_front(settings: FrontSettings, announce: Callable[[Address], None]) -> None:
    """Serve until SIGINT or SIGTERM; then every sandbox is ended."""

    async def run() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        async with Front(settings) as front:
            announce(front.address)
            await stop.wait()

    with suppress(KeyboardInterrupt):
        asyncio.run(run())
