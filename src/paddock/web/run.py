"""Running the page alone: one port, and an end that does not wait for those who still listen."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from paddock.server.listening import StoppableServer, bind, loop_factory, quiet_config, url_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from starlette.applications import Starlette


def serve_page(app: Starlette, host: str, port: int, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises ConfigError when the port is taken."""
    listening = bind(host, port)
    server = PageServer(app, lambda: announce(url_of(listening, host)))
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(server.serve(sockets=[listening]))


class PageServer(StoppableServer):
    def __init__(self, app: Starlette, ready: Callable[[], None]) -> None:
        super().__init__(quiet_config(app, lifespan=False), ready)
        self._page = app.state.page

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._page.stop()
        await super().shutdown(sockets)
        self._page.close()
