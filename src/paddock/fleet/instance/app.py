"""All that an instance serves, on one origin: MCP, the management paths, and the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.config import Access
from paddock.errors import Forbidden
from paddock.fleet.instance.manager import PLACE, Manager
from paddock.fleet.instance.mcp import KeptAnswers, McpEndpoint
from paddock.fleet.instance.page import Page
from paddock.fleet.instance.screen import Screen
from paddock.server.access import check_browser
from paddock.server.http import JSONBytes

if TYPE_CHECKING:
    from paddock.fleet.instance.hosted import HostedEnvironment
    from paddock.fleet.instance.order import Order


class InstanceApp:
    """The ASGI application. It also owns the screen, if the image has one."""

    def __init__(self, order: Order, hosted: HostedEnvironment) -> None:
        self.access = Access(token=order.api_key, hosts=frozenset((order.host,)))
        self.screen = Screen(order.folder) if order.has_screen else None
        answers = KeptAnswers()
        self.page = Page(hosted, self.access)
        self.manager = Manager(order, hosted, self.screen)
        self._places = {
            "/": self.page,
            "/mcp": McpEndpoint(hosted, self.access, answers),
            "/api/v1/mcp": McpEndpoint(hosted, self.access, answers, self.screen),
        }

    def serves_at(self, origin: str) -> None:
        if self.screen is not None:
            self.screen.url = origin + self.page.address

    async def close(self) -> None:
        if self.screen is not None:
            await self.screen.close()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        place: Any = self._places.get(scope["path"].rstrip("/") or "/")
        if place is None:
            place = self.manager if PLACE.fullmatch(scope["path"]) else not_found
        try:
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            check_browser(self.access, headers.get)
        except Forbidden as error:
            place = JSONBytes({"detail": error.message}, error.http_status)
        await place(scope, receive, send)


async def not_found(scope: Any, receive: Any, send: Any) -> None:
    await JSONBytes({"detail": f"nothing is served at {scope['path']}"}, 404)(scope, receive, send)
