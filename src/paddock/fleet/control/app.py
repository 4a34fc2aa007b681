"""The plane as an ASGI application: the key in front, then the routes, the frequent ones first."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from paddock.errors import ServerDraining
from paddock.fleet.control.access import check_key
from paddock.fleet.control.answers import Refused
from paddock.fleet.control.faults import FaultLayer
from paddock.fleet.control.plane import Plane
from paddock.fleet.control.routes.environments import Environments
from paddock.fleet.control.routes.instances import Instances
from paddock.fleet.control.routes.lab import Lab
from paddock.fleet.control.routes.sessions import Sessions
from paddock.fleet.control.routes.tasks import Tasks
from paddock.fleet.control.routes.verifiers import Verifiers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from paddock.fleet.control.process import Launcher
    from paddock.fleet.control.settings import PlaneSettings
    from paddock.fleet.control.verifying import Verify

logger = logging.getLogger("paddock.fleet.control")

OPEN_PATHS = ("/health",)
PAGE = "/web"
"""The page, where there is one, looks at the key itself."""


def create_plane(
    settings: PlaneSettings, *, verify: Verify | None = None, launcher: Launcher | None = None
) -> Starlette:
    """An ASGI application that hosts environments. `app.state.plane` has its key.

    It hosts from the start to the end of its lifespan. `verify` runs verifiers; by default in child
    processes of this machine. `launcher` starts instances; by default here as well.
    """
    return PlaneApplication(Plane(settings, verify, launcher))


class PlaneApplication(Starlette):
    def __init__(self, plane: Plane) -> None:
        parts = (Instances, Verifiers, Environments, Tasks, Sessions, Lab)
        super().__init__(
            routes=[route for part in parts for route in part(plane).routes()],
            lifespan=_lifespan,
            exception_handlers={
                Refused: _refused,
                ServerDraining: _stopping,
                HTTPException: _no_route,
                ClientDisconnect: _client_left,
                Exception: _failed,
            },
        )
        self.router.redirect_slashes = False
        self.state.plane = plane
        self.add_middleware(Gate, plane=plane)
        self._layer = FaultLayer(super().__call__, plane.faults)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._layer(scope, receive, send)


class Gate:
    """Nobody without the key comes further, except to ask for the health."""

    def __init__(self, app: Any, plane: Plane) -> None:
        self.app = app
        self.plane = plane

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and not self._is_open(scope["path"]):
            try:
                check_key(self.plane.api_key, self.plane.settings.team_id, Request(scope).headers)
            except Refused as refusal:
                await refusal.response()(scope, receive, send)
                return
        await self.app(scope, receive, send)

    @staticmethod
    def _is_open(path: str) -> bool:
        return path in OPEN_PATHS or path == PAGE or path.startswith(f"{PAGE}/")


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    plane: Plane = app.state.plane
    try:
        await plane.start()
        yield
    finally:
        await plane.stop()


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return error.response()


async def _stopping(request: Request, error: Exception) -> Response:
    return Refused(503, "The plane is stopping.", retry_after=5).response()


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return Refused(error.status_code, str(error.detail), headers=error.headers).response()


async def _client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _failed(request: Request, error: Exception) -> Response:
    """The traceback goes to the log; the client learns the kind of failure and nothing else."""
    return Refused(500, f"The plane failed ({type(error).__name__}). Its log says more.").response()
