"""Running a plane: one port, one loop, and an end that leaves nothing behind."""

from __future__ import annotations

import asyncio
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import uvicorn

from paddock.fleet.control.app import create_plane
from paddock.server.one_write import OneWriteProtocol
from paddock.server.run import BACKLOG, KEEP_ALIVE, bind, url_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from starlette.applications import Starlette

    from paddock.fleet.control.plane import Plane
    from paddock.fleet.control.process import Launcher
    from paddock.fleet.control.settings import PlaneSettings
    from paddock.fleet.control.verifying import Verify

    Announce = Callable[[str, str], None]


def serve_plane(
    settings: PlaneSettings,
    announce: Announce | None = None,
    *,
    verify: Verify | None = None,
    launcher: Launcher | None = None,
    extend: Callable[[Starlette], object] | None = None,
) -> None:
    """Host until SIGTERM or Ctrl-C, then stop every instance. `announce(url, api_key)` is called once.

    `extend` is given the application before it serves. Raises ConfigError when the port or the state folder is taken.
    """
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(run_plane(settings, announce, verify=verify, launcher=launcher, extend=extend))


async def run_plane(
    settings: PlaneSettings,
    announce: Announce | None = None,
    *,
    verify: Verify | None = None,
    launcher: Launcher | None = None,
    extend: Callable[[Starlette], object] | None = None,
) -> None:
    """The same in a loop that runs already. Cancelling it stops the plane as well."""
    app = create_plane(settings, verify=verify, launcher=launcher)
    if extend is not None:
        extend(app)
    plane: Plane = app.state.plane
    plane.open()
    try:
        listening = bind(settings.host, settings.port)
        listening.set_inheritable(False)
        server = PlaneServer(app, lambda: announce and announce(url_of(listening, settings.host), plane.api_key))
        await server.serve(sockets=[listening])
    finally:
        await plane.stop()


class PlaneServer(uvicorn.Server):
    """uvicorn, but the instances are stopped while the connections still stand."""

    def __init__(self, app: Any, ready: Callable[[], object]) -> None:
        config = uvicorn.Config(
            app,
            loop="none",
            http=OneWriteProtocol,
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
        super().__init__(config)
        self._plane: Plane = app.state.plane
        self._ready = ready

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on SIGTERM and Ctrl-C, and end with exit code 0: a plane that was stopped has not failed."""
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
        await self._plane.stop()
        await super().shutdown(sockets)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
