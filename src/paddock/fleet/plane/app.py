"""The plane as an ASGI application and as a server: the key is checked first, then the routes."""

from __future__ import annotations

import asyncio
import hmac
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from paddock.errors import ServerDraining
from paddock.fleet.plane.environments import EnvironmentRoutes
from paddock.fleet.plane.faults import FaultLayer, FaultRoutes
from paddock.fleet.plane.http import HttpError
from paddock.fleet.plane.instances import InstanceRoutes
from paddock.fleet.plane.plane import Plane
from paddock.fleet.plane.sessions import SessionRoutes
from paddock.fleet.plane.tasks import TaskRoutes
from paddock.fleet.plane.verifiers import VerifierRoutes
from paddock.server.listening import StoppableServer, bind, loop_factory, url_of, uvicorn_config

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Callable, Mapping

    from paddock.fleet.instance.verifier.runner import RunVerifier
    from paddock.fleet.plane.processes import Launcher
    from paddock.fleet.plane.settings import PlaneSettings

    Announce = Callable[[str, str], None]

logger = logging.getLogger("paddock.fleet.plane")

OPEN_PATHS = ("/health",)
WEB_PATH = "/web"
"""The web page, where there is one, checks the key itself."""
ROUTES = (InstanceRoutes, VerifierRoutes, EnvironmentRoutes, TaskRoutes, SessionRoutes, FaultRoutes)
"""The frequent ones first: Starlette tries routes in order."""


def create_plane(
    settings: PlaneSettings, *, verify: RunVerifier | None = None, launcher: Launcher | None = None
) -> Starlette:
    """An ASGI application that hosts environments during its lifespan. `app.state.plane.api_key` is its key.

    `verify` runs verifiers and `launcher` starts instances; by default in processes of this machine.
    """
    return PlaneApplication(Plane(settings, verify, launcher))


class PlaneApplication(Starlette):
    def __init__(self, plane: Plane) -> None:
        super().__init__(
            routes=[route for routes in ROUTES for route in routes(plane).routes()],
            lifespan=_lifespan,
            exception_handlers={
                HttpError: _http_error,
                ServerDraining: _stopping,
                HTTPException: _no_route,
                ClientDisconnect: _client_left,
                Exception: _failed,
            },
        )
        self.router.redirect_slashes = False
        self.state.plane = plane
        self.add_middleware(KeyCheck, plane=plane)
        self._fault_layer = FaultLayer(super().__call__, plane.faults)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._fault_layer(scope, receive, send)


class KeyCheck:
    """Middleware: only requests with the key pass, except to the open paths."""

    def __init__(self, app: Any, plane: Plane) -> None:
        self.app = app
        self.plane = plane

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and not self._is_open(scope["path"]):
            try:
                check_key(self.plane.api_key, self.plane.settings.team_id, Request(scope).headers)
            except HttpError as error:
                await error.response()(scope, receive, send)
                return
        await self.app(scope, receive, send)

    @staticmethod
    def _is_open(path: str) -> bool:
        return path in OPEN_PATHS or path == WEB_PATH or path.startswith(f"{WEB_PATH}/")


def check_key(api_key: str, team_id: str, headers: Mapping[str, str]) -> None:
    """Raises HttpError unless the key comes as a bearer token, or as a login token with the team's id."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    login = headers.get("x-jwt-token", "")
    if _is_same(bearer.strip(), api_key) and scheme.lower() == "bearer":
        return
    if not _is_same(login, api_key):
        problem = "This key is not the plane's" if bearer or login else "No key was sent"
        raise HttpError(401, f"{problem}. Send 'Authorization: Bearer KEY' (FLEET_API_KEY).")
    team = headers.get("x-team-id")
    if not team:
        raise HttpError(401, "X-Team-ID is missing. Send it along with X-JWT-Token.")
    if team != team_id:
        raise HttpError(403, f"Team not found. This plane has one team, '{team_id}': send that as X-Team-ID.")


def _is_same(key: str, expected: str) -> bool:
    # Constant time: the duration must not depend on how much of the key is right.
    return hmac.compare_digest(key.encode("utf-8", "surrogateescape"), expected.encode())


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    plane: Plane = app.state.plane
    try:
        await plane.start()
        yield
    finally:
        await plane.stop()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HttpError)
    return error.response()


async def _stopping(request: Request, error: Exception) -> Response:
    return HttpError(503, "The plane is stopping.", retry_after=5).response()


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return HttpError(error.status_code, str(error.detail), headers=error.headers).response()


async def _client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _failed(request: Request, error: Exception) -> Response:
    """The traceback goes to the log; the client gets the type of the error only."""
    return HttpError(500, f"The plane failed ({type(error).__name__}). Its log says more.").response()


# -- serving ------------------------------------------------------------------------------------------


def serve_plane(settings: PlaneSettings, announce: Announce | None = None, **options: Any) -> None:
    """Host until SIGTERM or Ctrl-C, then stop every instance. `options` are those of `run_plane`.

    Raises ConfigError when the port or the state folder is in use.
    """
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run_plane(settings, announce, **options))


async def run_plane(
    settings: PlaneSettings,
    announce: Announce | None = None,
    *,
    verify: RunVerifier | None = None,
    launcher: Launcher | None = None,
    extend: Callable[[Starlette], object] | None = None,
) -> None:
    """The same in a running loop. Cancelling it stops the plane as well.

    `announce(url, api_key)` is called once it listens. `extend` gets the application before it serves.
    """
    app = create_plane(settings, verify=verify, launcher=launcher)
    if extend is not None:
        extend(app)
    plane: Plane = app.state.plane
    plane.open()
    try:
        listener = bind(settings.host, settings.port)
        listener.set_inheritable(False)
        server = PlaneServer(app, lambda: announce and announce(url_of(listener, settings.host), plane.api_key))
        await server.serve(sockets=[listener])
    finally:
        await plane.stop()


class PlaneServer(StoppableServer):
    """Stops the instances before it closes the connections."""

    def __init__(self, app: Any, ready: Callable[[], object]) -> None:
        super().__init__(uvicorn_config(app), ready)
        self._plane: Plane = app.state.plane

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._plane.stop()
        await super().shutdown(sockets)
