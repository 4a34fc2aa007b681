"""The page as an ASGI application: static files, the API, and the access check in front of the API.

`mounts` puts it below `/web/` of another application. What it offers depends on its sources: a store, a server, a
plane.
"""

from __future__ import annotations

import hmac
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

import paddock
from paddock.errors import PaddockError, Unauthorized
from paddock.server.access import check_access, check_browser, page_cookie
from paddock.server.app import INTERNAL_HEADER
from paddock.server.http import read_body
from paddock.web.responses import (
    HEADERS,
    PageError,
    PartMissing,
    error_response,
    event_stream,
    failure_response,
    handle_errors,
    json_response,
)
from paddock.web.static_files import INDEX, Assets

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request

    from paddock.config import Access
    from paddock.fleet.plane.plane import Plane
    from paddock.server.service import Service
    from paddock.web.live import ChangeWatcher
    from paddock.web.read_store import ReadStore
    from paddock.web.rollout_routes import RolloutRoutes
    from paddock.web.training_routes import TrainingRoutes

MAX_BODY_BYTES = 64 * 1024
COOKIE_SECONDS = 30 * 86_400
PROTECTED_PATHS = ("/api/", "/metadata", "/state", "/reset", "/step", "/schema")
ACCESS_PATH = "/api/access"


@dataclass(frozen=True, slots=True)
class PageSources:
    """What the page shows."""

    store: ReadStore | None = None
    service: Service | None = None
    plane: Plane | None = None


class Page:
    """The ASGI application below `/web`."""

    def __init__(self, sources: PageSources, access: Access, is_draining: Callable[[], bool] = lambda: False) -> None:
        self.sources = sources
        self.access = access
        self.assets = Assets()
        self._stopped = False
        self._is_draining = is_draining
        self.watcher: ChangeWatcher | None = None
        self.rollouts: RolloutRoutes | None = None
        self.training: TrainingRoutes | None = None
        if sources.store is not None:
            from paddock.web.live import ChangeWatcher
            from paddock.web.rollout_routes import RolloutRoutes
            from paddock.web.training_routes import TrainingRoutes

            self.watcher = ChangeWatcher(sources.store, self.is_stopping)
            self.rollouts = RolloutRoutes(sources.store, self.watcher, self.assets, self.describe)
            self.training = TrainingRoutes(sources.store)
        self._app = Starlette(
            routes=self._routes(),
            exception_handlers={HTTPException: _http_error, Exception: _server_error},
        )
        self._app.router.redirect_slashes = False

    def is_stopping(self) -> bool:
        return self._stopped or self._is_draining()

    def stop(self) -> None:
        """End all streams, so that a server that shuts down need not wait for them."""
        self._stopped = True
        if self.watcher is not None:
            self.watcher.wake()

    def close(self) -> None:
        self.stop()
        if self.sources.store is not None:
            self.sources.store.close()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *extra]}
            await send(message)

        refusal = self._check_request(scope)
        await (self._app if refusal is None else refusal)(scope, receive, send_with_headers)

    def _check_request(self, scope: Any) -> Response | None:
        """The error response for a request without access; None if it has access."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        is_protected = path.startswith(PROTECTED_PATHS) and path != ACCESS_PATH
        try:
            (check_access if is_protected else check_browser)(self.access, headers.get)
        except Unauthorized as error:
            error.hint = "open the address that was printed when the page was started; it has the token"
            return error_response(error)
        except PaddockError as error:
            return error_response(error)
        return None

    def _routes(self) -> list[Any]:
        routes: list[Any] = [
            Route("/", self.index, methods=["GET"]),
            Route("/api/about", handle_errors(self.about), methods=["GET"]),
            Route(ACCESS_PATH, handle_errors(self.log_in), methods=["POST"]),
            Route("/api/server", handle_errors(self.server), methods=["GET"]),
            Route("/api/server/live", handle_errors(self.server_live), methods=["GET"]),
            Route("/api/fleet", handle_errors(self.fleet), methods=["GET"]),
            Route("/api/fleet/live", handle_errors(self.fleet_live), methods=["GET"]),
        ]
        if self.rollouts is not None:
            routes += self.rollouts.routes()
        if self.training is not None:
            routes += self.training.routes()
        if self.sources.service is not None:
            from paddock.web.play import Play

            routes += Play(self.sources.service).routes()
        return [
            *routes,
            Route("/api/{path:path}", handle_errors(self.unknown_route)),
            Route("/{path:path}", handle_errors(self.file), methods=["GET"]),
        ]

    # -- files and entry --------------------------------------------------------------------------

    async def index(self, request: Request) -> Response:
        """The page itself. A token in the address becomes a cookie and is removed from the address."""
        token = request.query_params.get("token")
        if token is None:
            return self.assets.respond(request, INDEX)
        response: Response = RedirectResponse(request.scope.get("root_path", "") + "/", 303)
        if self._is_token(token):
            self._set_cookie(response)
        return response

    async def log_in(self, request: Request) -> Response:
        """The same for a token in the body: `{"token": …}`."""
        raw = await read_body(request.receive, MAX_BODY_BYTES)
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError:
            body = None
        token = body.get("token") if isinstance(body, dict) else None
        if not isinstance(token, str):
            raise PageError("no token was sent", hint='send {"token": "…"}')
        if not self._is_token(token):
            raise Unauthorized("this is not the token of this page", hint="copy the address that was printed")
        response = json_response(request, {"ok": True})
        self._set_cookie(response)
        return response

    def _is_token(self, candidate: str) -> bool:
        token = self.access.token
        return token is not None and hmac.compare_digest(candidate.encode("utf-8", "replace"), token.encode())

    def _set_cookie(self, response: Response) -> None:
        assert self.access.token is not None
        name, value = page_cookie(self.access.token)
        response.set_cookie(name, value, max_age=COOKIE_SECONDS, path="/", httponly=True, samesite="strict")

    async def file(self, request: Request) -> Response:
        return self.assets.respond(request, request.path_params["path"])

    async def unknown_route(self, request: Request) -> Response:
        hint = "docs/page.md lists the routes"
        if self.sources.store is None:
            hint = "this page was started without a store"
        raise PartMissing(f"there is no {request.method} {request.url.path[:200]}", hint=hint)

    async def render_share(self, rollout_id: str) -> tuple[str, bytes]:
        """The whole id of a rollout, and its page as a file that needs no server."""
        if self.rollouts is None:
            raise PartMissing("this page has no store", hint="start it over one")
        return await self.rollouts.render_share(rollout_id)

    # -- about ------------------------------------------------------------------------------------

    async def about(self, request: Request) -> Response:
        return json_response(request, self.describe())

    def describe(self) -> dict[str, Any]:
        """What this page offers."""
        store, service = self.sources.store, self.sources.service
        return {
            "version": paddock.__version__,
            "parts": {
                "rollouts": store is not None and store.exists,
                "training": self.training is not None and self.training.exists,
                "play": service is not None,
                "server": service is not None,
                "fleet": self.sources.plane is not None,
            },
            "environment": None if service is None else service.spec.name,
            "can_abort": store is not None and store.can_write,
            "store": None if store is None else str(store.folder),
            "now": time.time(),
        }

    async def server(self, request: Request) -> Response:
        from paddock.web import server_status

        return json_response(
            request, await server_status.server(self._service(), alone=INTERNAL_HEADER in request.headers)
        )

    async def server_live(self, request: Request) -> Response:
        from paddock.web import server_status

        return event_stream(server_status.server_events(self._service(), self.is_stopping))

    async def fleet(self, request: Request) -> Response:
        from paddock.web import server_status

        return json_response(request, await server_status.fleet(self._plane()))

    async def fleet_live(self, request: Request) -> Response:
        from paddock.web import server_status

        return event_stream(server_status.fleet_events(self._plane(), self.is_stopping))

    def _service(self) -> Service:
        if self.sources.service is None:
            raise PartMissing("this page has no server", hint="paddock serve TARGET --web starts one with it")
        return self.sources.service

    def _plane(self) -> Plane:
        if self.sources.plane is None:
            raise PartMissing("this page has no plane", hint="paddock fleet up --web starts one with it")
        return self.sources.plane


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return failure_response(error.status_code, str(error.detail))


async def _server_error(request: Request, error: Exception) -> Response:
    return failure_response(500, f"the page failed: {type(error).__name__}", "the log of the server says more")
