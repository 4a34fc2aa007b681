"""What all our servers share: a socket, a loop, uvicorn told to be quiet, and an end that is no failure."""

from __future__ import annotations

import signal
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import uvicorn

from paddock.errors import ConfigError
from paddock.server.connection_limits import ConnectionWatch, LimitedProtocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator

    from paddock.server.one_write import OneWriteProtocol

BACKLOG = 4096
KEEP_ALIVE = 75


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


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def quiet_config(
    app: Any,
    *,
    lifespan: bool = True,
    requests: type[OneWriteProtocol] = LimitedProtocol,
    upgrades: type | None = None,
) -> uvicorn.Config:
    """How uvicorn runs an application of ours. `upgrades` is the protocol that takes WebSockets, if any does."""
    config = uvicorn.Config(
        app,
        loop="none",
        http="httptools",
        ws="none",
        lifespan="on" if lifespan else "off",
        log_config=None,
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=2,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
    )
    config.load()
    config.http_protocol_class = requests
    if upgrades is not None:
        config.ws_protocol_class = upgrades
    return config


class StoppableServer(uvicorn.Server):
    """uvicorn, but to be stopped is a good end, and `ready` is called once it listens."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], object] | None = None) -> None:
        super().__init__(config)
        self._ready = ready
        self._watch = ConnectionWatch(self.server_state.connections)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on SIGTERM and Ctrl-C, and end with exit code 0."""
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
        self._watch.listen_on(sockets)
        if self.started and self._ready is not None:
            self._ready()

    async def on_tick(self, counter: int) -> bool:
        self._watch.look()
        return await super().on_tick(counter)
