"""The page in applications that others have made: a server of environments, a plane."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paddock.config import Access
from paddock.web.app import Page, Parts, routes

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.applications import Starlette

    from paddock.fleet.control.plane import Plane
    from paddock.server.service import Service
    from paddock.web.shelf import Shelf

ROLLOUTS = ("zstandard", "aiohttp")
"""Packages that rollouts need, and a server does not."""


def page_in_server(app: Starlette, folder: Path | None = None) -> Page:
    """Put the page into an application of `create_app`. `folder` is the store whose rollouts it shows."""
    service: Service = app.state.service
    page = Page(Parts(shelf_of(folder), service=service), service.config.access, lambda: service.stopping)
    app.router.routes.extend(routes(page))
    service.has_page = True
    return page


def page_in_plane(app: Starlette, folder: Path | None = None) -> Page:
    """The same for an application of `create_plane`; its key opens the page."""
    plane: Plane = app.state.plane
    page = Page(Parts(shelf_of(folder), plane=plane), Access(token=plane.api_key), lambda: plane.is_stopping)
    app.router.routes.extend(routes(page))
    return page


def shelf_of(folder: Path | None) -> Shelf | None:
    """The store to show; None where the packages that rollouts need are not installed.

    Raises StoreError if one was named and is broken.
    """
    try:
        from paddock.web.shelf import Shelf
    except ModuleNotFoundError as error:
        if error.name not in ROLLOUTS:
            raise
        return None
    shelf = Shelf(folder)
    if folder is not None:
        shelf.check()
    return shelf
