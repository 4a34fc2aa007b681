"""A real server in a thread, for tests that talk to one."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import uvicorn
import uvicorn.server

from environments import Watched
from paddock import create_app
from paddock.config import Access, Limits, ServerConfig
from paddock.server.listening import bind, loop_factory
from paddock.server.run import DrainingServer, server_config
from wire import Http, RawSocket, Socket, open_socket

LIMITS = {"max_sessions": 4, "drain_grace": 1.0}


class Hurried:
    """asyncio as uvicorn sees it here: its pauses of a tenth of a second are short ones."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.005))


uvicorn.server.asyncio = Hurried()  # type: ignore[assignment]


class Running:
    """A server in a thread of its own."""

    def __init__(self, make: Any, kind: str, mode: str, access: Access, app_options: Any, limits: Any) -> None:
        allowed = Limits(**{**LIMITS, **limits})
        config = ServerConfig(limits=allowed, access=access, mode=mode)  # type: ignore[arg-type]
        self.app = create_app(make, config=config, **app_options)
        self.service = self.app.state.service
        self.listening = bind("127.0.0.1", 0)
        self.port: int = self.listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.clients = ExitStack()
        if kind == "fast":
            self.server: uvicorn.Server = DrainingServer(server_config(self.app), self.service)
        else:
            asgi = uvicorn.Config(
                self.app,
                ws="websockets-sansio",
                ws_max_size=allowed.message_bytes,
                lifespan="on",
                log_config=None,
            )
            self.server = uvicorn.Server(asgi)
        self.factory = loop_factory() if kind == "fast" else None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        wait_until(lambda: self.server.started or not self.thread.is_alive())

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self.factory) as runner:
            runner.run(self.server.serve(sockets=[self.listening]))

    # -- clients, closed with the server --------------------------------------------------------------

    def http(self, timeout: float = 20) -> Http:
        client = Http(self.port, timeout)
        self.clients.callback(client.close)
        return client

    def socket(self, path: str = "/ws", **headers: str) -> Socket:
        return self.clients.enter_context(open_socket(self.port, path, **headers))

    def raw(self, path: str = "/ws", headers: str = "") -> RawSocket:
        client = RawSocket(self.port, path, headers)
        self.clients.callback(client.close)
        return client

    def health(self) -> Any:
        client = Http(self.port, 5)
        try:
            return client("GET", "/health").json
        finally:
            client.close()

    # -- the end --------------------------------------------------------------------------------------

    def begin_to_stop(self) -> None:
        """What SIGTERM does."""
        self.server.should_exit = True

    def stop(self) -> None:
        self.clients.close()
        self.begin_to_stop()
        self.thread.join(10)
        self.listening.close()
        assert not self.thread.is_alive()


def wait_until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


Serve = Callable[..., Running]


def servers(kind: str, lives: list[Watched]) -> Iterator[Serve]:
    running: list[Running] = []

    def serve(
        make: Any,
        *,
        through: str = kind,
        mode: str = "simulation",
        access: Access | None = None,
        app: Any = None,
        **limits: Any,
    ) -> Running:
        running.append(Running(make, through, mode, access or Access(), app or {}, limits))
        return running[-1]

    yield serve
    try:
        for server in running:
            server.stop()
    finally:
        for life in lives:
            life.release.set()
        for server in running:
            server.server.force_exit = True
            server.thread.join(5)
    wait_until(lambda: all(life.closes for life in lives))
    assert [life.closes for life in lives] == [1] * len(lives)
