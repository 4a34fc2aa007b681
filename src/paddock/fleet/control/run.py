"""Running a plane: one port, one loop, and an end that leaves nothing behind."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from paddock.fleet.control.app import create_plane
from paddock.server.listening import StoppableServer, bind, loop_factory, quiet_config, url_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

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
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
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


class PlaneServer(StoppableServer):
    """The instances are stopped while the connections still stand."""

    def __init__(self, app: Any, ready: Callable[[], object]) -> None:
        super().__init__(quiet_config(app), ready)
        self._plane: Plane = app.state.plane

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._plane.stop()
        await super().shutdown(sockets)
