"""Running the application: uvicorn on one port, WebSockets on the fast path, a drain on SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn

from paddock.errors import ConfigError
from paddock.server.access import is_loopback
from paddock.server.app import create_app
from paddock.server.fast import UpgradeRouter, adopt
from paddock.server.one_write import OneWriteProtocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paddock.config import ServerConfig
    from paddock.server.service import Service

logger = logging.getLogger("paddock.server")
BACKLOG = 4096
KEEP_ALIVE = 75


def serve(
    env: Any,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    workers: int = 1,
    config: ServerConfig | None = None,
    announce: Callable[[str], None] | None = None,
    **app_options: Any,
) -> None:
    """Serve an environment class, or an app made by `create_app`, until SIGTERM or Ctrl-C.

    `announce` is called once with the URL. Raises ConfigError before the port is opened if something
    does not fit: beyond loopback a token is required.
    """
    app = env if hasattr(env, "state") and hasattr(env, "router") else create_app(env, config=config, **app_options)
    service: Service = app.state.service
    require_token(host, service)
    if workers > 1:
        from paddock.server.workers import serve_workers

        serve_workers(app, host, port, workers, announce)
        return
    listening = bind(host, port)
    if announce is not None:
        announce(url_of(listening, host))
    run(app, [listening])


def run(app: Any, sockets: list[socket.socket]) -> None:
    """Serve on sockets that are bound already. Returns when the server has drained and stopped."""
    server = DrainingServer(server_config(app), app.state.service)
    calm_collector()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(server.serve(sockets=sockets))


class DrainingServer(uvicorn.Server):
    """uvicorn, but running steps finish and every environment is closed before connections are cut."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on SIGTERM and Ctrl-C, and end with exit code 0: a drained server was not killed."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.service.colleagues is not None:
            self.service.colleagues.start(self.service, partial(adopt, self.service, self.server_state))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if not self.force_exit:
            await self.service.stop()
        await super().shutdown(sockets)


def server_config(app: Any, upgrades: type | None = None) -> uvicorn.Config:
    """How uvicorn runs an application. `upgrades` is the protocol that takes WebSockets, if not our usual one."""
    config = uvicorn.Config(
        app,
        loop="none",
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=2,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
    )
    config.load()
    config.http_protocol_class = OneWriteProtocol
    config.ws_protocol_class = upgrades or type("Upgrades", (UpgradeRouter,), {"service": app.state.service})
    return config


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A listening socket. `shared` lets several processes listen on the same port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}",
            hint="choose another --port, or 0 for any free one",
        ) from error
    listening.listen(BACKLOG)
    listening.set_inheritable(True)
    return listening


def url_of(listening: socket.socket, host: str) -> str:
    port = listening.getsockname()[1]
    shown = "127.0.0.1" if host in ("0.0.0.0", "") else f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"


def require_token(host: str, service: Service) -> None:
    if not is_loopback(host) and service.config.access.token is None:
        raise ConfigError(
            f"{host} can be reached from other machines, and no token is set",
            hint="give --auth-token or PADDOCK_AUTH_TOKEN, or listen on 127.0.0.1",
        )


def calm_collector() -> None:
    """Keep the garbage collector off the thousands of objects that live as long as the server."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
