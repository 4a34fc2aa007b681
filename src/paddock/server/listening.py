"""What every uvicorn server of Paddock uses: a listening socket, the event loop, the uvicorn settings, a clean exit.

Knows nothing of environments: the fleet, the web page and the cluster's gateway run on it too.
"""

from __future__ import annotations

import signal
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import uvicorn

from paddock.errors import ConfigError
from paddock.server.http_protocol import ConnectionMonitor, LimitedProtocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator


BACKLOG = 4096
KEEP_ALIVE_SECONDS = 75


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A listening socket. `shared` lets several processes listen on the same port. Raises ConfigError."""
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
    name = "127.0.0.1" if host in ("0.0.0.0", "") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}"


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, if it is installed; None for asyncio's."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def uvicorn_config(
    app: Any,
    *,
    lifespan: bool = True,
    requests: type[LimitedProtocol] = LimitedProtocol,
    upgrades: type | None = None,
) -> uvicorn.Config:
    """uvicorn's settings for an application of ours: no access log, no server header, our HTTP protocol.

    `upgrades` is the protocol class for WebSockets.
    """
    config = uvicorn.Config(
        app,
        loop="none",
        http="httptools",
        ws="none",
        lifespan="on" if lifespan else "off",
        log_config=None,
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
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
    """uvicorn's server. It returns on SIGTERM and Ctrl-C, and calls `ready` once it listens."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], object] | None = None) -> None:
        super().__init__(config)
        self._ready = ready
        self._monitor = ConnectionMonitor(self.server_state.connections)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on SIGTERM and Ctrl-C. uvicorn would raise the signal again at the end; here the exit code is 0."""
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
        self._monitor.listen_on(sockets)
        if self.started and self._ready is not None:
            self._ready()

    async def on_tick(self, counter: int) -> bool:
        self._monitor.check()
        return await super().on_tick(counter)
