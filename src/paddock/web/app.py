"""The page as an ASGI application: its files, its API, and a gate in front of the API.

It stands at `/web/` of whatever app it is put into. What it offers depends on what there is: a store, a server,
a plane.
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
from starlette.routing import Mount, Route

import paddock
from paddock.errors import PaddockError, Unauthorized
from paddock.server.access import check_access, check_browser, page_cookie
from paddock.server.app import INSIDE_HEADER
from paddock.server.http import read_body
from paddock.web.answers import HEADERS, NotHere, PageError, answer, answering, failure, refusal
from paddock.web.files import INDEX, Assets
from paddock.web.streams import stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request

    from paddock.config import Access
    from paddock.fleet.control.plane import Plane
    from paddock.server.service import Service
    from paddock.web.live import Watch
    from paddock.web.rollouts import Rollouts
    from paddock.web.shelf import Shelf

WEB = "/web"
LONGEST_BODY = 64 * 1024
COOKIE_SECONDS = 30 * 86_400
GUARDED = ("/api/", "/metadata", "/state", "/reset", "/step", "/schema")
OPEN = "/api/access"


@dataclass(frozen=True, slots=True)
class Parts:
    """What there is to show."""

    shelf: Shelf | None = None
    service: Service | None = None
    plane: Plane | None = None


class Page:
    """The ASGI application below `/web`."""

    def __init__(self, parts: Parts, access: Access, drains: Callable[[], bool] = lambda: False) -> None:
        self.parts = parts
        self.access = access
        self.assets = Assets()
        self._stopped = False
        self._drains = drains
        self.watch: Watch | None = None
        self.rollouts: Rollouts | None = None
        if parts.shelf is not None:
            from paddock.web.live import Watch
            from paddock.web.rollouts import Rollouts

            self.watch = Watch(parts.shelf, self.is_stopping)
            self.rollouts = Rollouts(parts.shelf, self.watch, self.assets, self.said)
        self._app = Starlette(
            routes=self._routes(),
            exception_handlers={HTTPException: _http_error, Exception: _server_error},
        )
        self._app.router.redirect_slashes = False

    def is_stopping(self) -> bool:
        return self._stopped or self._drains()

    def stop(self) -> None:
        """End all streams, so that a server that shuts down need not wait for them."""
        self._stopped = True
        if self.watch is not None:
            self.watch.wake()

    def close(self) -> None:
        self.stop()
        if self.parts.shelf is not None:
            self.parts.shelf.close()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *extra]}
            await send(message)

        refused = self._refused(scope)
        await (self._app if refused is None else refused)(scope, receive, guarded)

    def _refused(self, scope: Any) -> Response | None:
        """The answer to a request that may not come in."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        guarded = path.startswith(GUARDED) and path != OPEN
        try:
            (check_access if guarded else check_browser)(self.access, headers.get)
        except Unauthorized as error:
            error.hint = "open the address that was printed when the page was started; it has the token"
            return refusal(error)
        except PaddockError as error:
            return refusal(error)
        return None

    def _routes(self) -> list[Any]:
        found: list[Any] = [
            Route("/", self.index, methods=["GET"]),
            Route("/api/about", answering(self.about), methods=["GET"]),
            Route(OPEN, answering(self.enter), methods=["POST"]),
            Route("/api/server", answering(self.server), methods=["GET"]),
            Route("/api/server/live", answering(self.server_live), methods=["GET"]),
            Route("/api/fleet", answering(self.fleet), methods=["GET"]),
            Route("/api/fleet/live", answering(self.fleet_live), methods=["GET"]),
        ]
        if self.rollouts is not None:
            found += self.rollouts.routes()
        if self.parts.service is not None:
            from paddock.web.play import Play

            found += Play(self.parts.service).routes()
        return [
            *found,
            Route("/api/{path:path}", answering(self.nothing)),
            Route("/{path:path}", answering(self.file), methods=["GET"]),
        ]

    # -- files and entry --------------------------------------------------------------------------

    async def index(self, request: Request) -> Response:
        """The page itself. A token in the address becomes a cookie, and is taken out of the address."""
        given = request.query_params.get("token")
        if given is None:
            return self.assets.answer(request, INDEX)
        response: Response = RedirectResponse(request.scope.get("root_path", "") + "/", 303)
        if self._is_token(given):
            self._set_cookie(response)
        return response

    async def enter(self, request: Request) -> Response:
        """The same for a page that has the token otherwise: `{"token": …}`."""
        raw = await read_body(request.receive, LONGEST_BODY)
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError:
            body = None
        given = body.get("token") if isinstance(body, dict) else None
        if not isinstance(given, str):
            raise PageError("no token was sent", hint='send {"token": "…"}')
        if not self._is_token(given):
            raise Unauthorized("this is not the token of this page", hint="copy the address that was printed")
        response = answer(request, {"ok": True})
        self._set_cookie(response)
        return response

    def _is_token(self, given: str) -> bool:
        token = self.access.token
        return token is not None and hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())

    def _set_cookie(self, response: Response) -> None:
        assert self.access.token is not None
        name, value = page_cookie(self.access.token)
        response.set_cookie(name, value, max_age=COOKIE_SECONDS, path="/", httponly=True, samesite="strict")

    async def file(self, request: Request) -> Response:
        return self.assets.answer(request, request.path_params["path"])

    async def nothing(self, request: Request) -> Response:
        parts = "a store" if self.parts.shelf is None else None
        hint = f"this page was started without {parts}" if parts else "docs/page.md lists what there is"
        raise NotHere(f"there is no {request.method} {request.url.path[:200]}", hint=hint)

    async def shared(self, rollout_id: str) -> tuple[str, bytes]:
        """The whole id of a rollout, and its page as a file that needs no server."""
        if self.rollouts is None:
            raise NotHere("this page has no store", hint="start it over one")
        return await self.rollouts.shared(rollout_id)

    # -- about ------------------------------------------------------------------------------------

    async def about(self, request: Request) -> Response:
        return answer(request, self.said())

    def said(self) -> dict[str, Any]:
        """What this page offers."""
        shelf, service = self.parts.shelf, self.parts.service
        return {
            "version": paddock.__version__,
            "parts": {
                "rollouts": shelf is not None and shelf.exists,
                "play": service is not None,
                "server": service is not None,
                "fleet": self.parts.plane is not None,
            },
            "environment": None if service is None else service.blueprint.name,
            "can_abort": shelf is not None and shelf.can_write,
            "store": None if shelf is None else str(shelf.folder),
            "now": time.time(),
        }

    async def server(self, request: Request) -> Response:
        from paddock.web import watched

        return answer(request, await watched.server(self._service(), alone=INSIDE_HEADER in request.headers))

    async def server_live(self, request: Request) -> Response:
        from paddock.web import watched

        return stream(watched.server_events(self._service(), self.is_stopping))

    async def fleet(self, request: Request) -> Response:
        from paddock.web import watched

        return answer(request, await watched.fleet(self._plane()))

    async def fleet_live(self, request: Request) -> Response:
        from paddock.web import watched

        return stream(watched.fleet_events(self._plane(), self.is_stopping))

    def _service(self) -> Service:
        if self.parts.service is None:
            raise NotHere("this page has no server", hint="paddock serve TARGET --web starts one with it")
        return self.parts.service

    def _plane(self) -> Plane:
        if self.parts.plane is None:
            raise NotHere("this page has no plane", hint="paddock fleet up --web starts one with it")
        return self.parts.plane


def create_view_app(shelf: Shelf, access: Access) -> Starlette:
    """The page over a store, alone in an application. `app.state.page` is the page."""
    page = Page(Parts(shelf), access)
    app = Starlette(routes=routes(page))
    app.state.page = page
    return app


def routes(page: Page) -> list[Any]:
    """What an application needs to have the page at `/web/`, and to lead there from `/`."""
    return [
        Route("/", _lead_there, methods=["GET"]),
        Route(WEB, _lead_there, methods=["GET"]),
        Mount(WEB, page),
    ]


async def _lead_there(request: Request) -> Response:
    query = f"?{request.url.query}" if request.url.query else ""
    return RedirectResponse(f"{WEB}/{query}", 307, HEADERS)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return failure(error.status_code, str(error.detail))


async def _server_error(request: Request, error: Exception) -> Response:
    return failure(500, f"the page failed: {type(error).__name__}", "the log of the server says more")
