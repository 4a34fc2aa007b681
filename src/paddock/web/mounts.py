"""Where the page is served: in a server of environments, in a plane, or alone over a store."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.responses import RedirectResponse
from starlette.routing import Mount, Route

from paddock.config import Access
from paddock.server.listening import StoppableServer, bind, loop_factory, url_of, uvicorn_config
from paddock.web.app import Page, PageSources
from paddock.web.responses import HEADERS

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from pathlib import Path

    from starlette.requests import Request
    from starlette.responses import Response

    from paddock.fleet.plane.plane import Plane
    from paddock.server.service import Service
    from paddock.web.read_store import ReadStore

WEB = "/web"
ROLLOUT_PACKAGES = ("zstandard", "aiohttp")
"""What rollouts need and a server does not."""


def page_in_server(app: Starlette, folder: Path | None = None) -> Page:
    """Add the page to an application of `create_app`. `folder` is the store whose rollouts it shows."""
    service: Service = app.state.service
    page = Page(PageSources(find_store(folder), service=service), service.config.access, lambda: service.stopping)
    app.router.routes.extend(routes(page))
    service.has_page = True
    return page


def page_in_plane(app: Starlette, folder: Path | None = None) -> Page:
    """The same for an application of `create_plane`; its key opens the page."""
    plane: Plane = app.state.plane
    page = Page(PageSources(find_store(folder), plane=plane), Access(token=plane.api_key), lambda: plane.is_stopping)
    app.router.routes.extend(routes(page))
    return page


def find_store(folder: Path | None) -> ReadStore | None:
    """The store to show; None where the packages that rollouts need are not installed.

    Raises StoreError if one was named and is broken.
    """
    try:
        from paddock.web.read_store import ReadStore
    except ModuleNotFoundError as error:
        if error.name not in ROLLOUT_PACKAGES:
            raise
        return None
    store = ReadStore(folder)
    if folder is not None:
        store.check()
    return store


def create_view_app(store: ReadStore, access: Access) -> Starlette:
    """The page over a store, alone in an application. `app.state.page` is the page."""
    page = Page(PageSources(store), access)
    app = Starlette(routes=routes(page))
    app.state.page = page
    return app


def routes(page: Page) -> list[Any]:
    """The routes that serve the page at `/web/`, and redirect there from `/`."""
    return [
        Route("/", _redirect, methods=["GET"]),
        Route(WEB, _redirect, methods=["GET"]),
        Mount(WEB, page),
    ]


async def _redirect(request: Request) -> Response:
    query = f"?{request.url.query}" if request.url.query else ""
    return RedirectResponse(f"{WEB}/{query}", 307, HEADERS)


def serve_page(app: Starlette, host: str, port: int, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises ConfigError when the port is taken."""
    listening = bind(host, port)
    server = PageServer(app, lambda: announce(url_of(listening, host)))
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(server.serve(sockets=[listening]))


class PageServer(StoppableServer):
    def __init__(self, app: Starlette, ready: Callable[[], None]) -> None:
        super().__init__(uvicorn_config(app, lifespan=False), ready)
        self._page = app.state.page

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._page.stop()
        await super().shutdown(sockets)
        self._page.close()
