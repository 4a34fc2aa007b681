"""Running the page alone: one port, and an end that does not wait for those who still listen."""

from __future__ import annotations

import asyncio
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn

from paddock.server.run import BACKLOG, KEEP_ALIVE, _loop_factory, bind, url_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from starlette.applications import Starlette


def serve_page(app: Starlette, host: str, port: int, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises ConfigError when the port is taken."""
    listening = bind(host, port)
    server = PageServer(app, lambda: announce(url_of(listening, host)))
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(server.serve(sockets=[listening]))


class PageServer(uvicorn.Server):
    def __init__(self, app: Starlette, ready: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
            loop="none",
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=2,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
        )
        super().__init__(config)
        self._page = app.state.page
        self._ready = ready

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on SIGTERM and Ctrl-C, and end with exit code 0: that is how one leaves."""
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
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._page.stop()
        await super().shutdown(sockets)
        self._page.close()
