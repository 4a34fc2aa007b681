"""All that an instance serves, on one origin: MCP, the management paths, and the page.

Invariant: access is decided here, before a request is routed and before its body is read. No endpoint looks at keys,
so that none can forget to. The management paths want the runner token and are not there for others; everything else
wants the key, whatever the method and whether or not there is such a path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.config import Access
from paddock.errors import Forbidden
from paddock.fleet.instance.manager import PLACE, Manager
from paddock.fleet.instance.mcp import KeptAnswers, McpEndpoint
from paddock.fleet.instance.page import Page
from paddock.fleet.instance.screen import Screen
from paddock.server.access import check_browser, has_token, lookup
from paddock.server.http import JSONBytes

if TYPE_CHECKING:
    from paddock.fleet.instance.hosted import HostedEnvironment
    from paddock.fleet.instance.order import Order

NO_KEY = "send 'Authorization: Bearer KEY' with the key that the instance was made with"


class InstanceApp:
    """The ASGI application. It also owns the screen, if the image has one."""

    def __init__(self, order: Order, hosted: HostedEnvironment) -> None:
        self.access = Access(token=order.api_key, hosts=frozenset((order.host,)))
        self.screen = Screen(order.folder) if order.has_screen else None
        answers = KeptAnswers()
        self.page = Page(hosted)
        self.manager = Manager(order, hosted, self.screen)
        self._places = {
            "/": self.page,
            "/mcp": McpEndpoint(hosted, answers),
            "/api/v1/mcp": McpEndpoint(hosted, answers, self.screen),
        }

    def serves_at(self, origin: str) -> None:
        if self.screen is not None:
            self.screen.url = origin + self.page.address

    async def close(self) -> None:
        if self.screen is not None:
            await self.screen.close()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"].rstrip("/") or "/"
        is_managing = PLACE.fullmatch(scope["path"]) is not None
        answer: Any = self._refusal(scope, path, is_managing)
        if answer is None:
            answer = self.manager if is_managing else self._places.get(path, not_found)
        await answer(scope, receive, send)

    def _refusal(self, scope: Any, path: str, is_managing: bool) -> JSONBytes | None:
        """The answer to a request that may not come further; None if it may."""
        header = lookup(scope["headers"])
        try:
            check_browser(self.access, header)
        except Forbidden as error:
            return JSONBytes({"detail": error.message}, error.http_status)
        if is_managing:
            return None if self.manager.admits(header) else JSONBytes({"detail": "Not Found"}, 404)
        if self.access.token is None or has_token(self.access, header) or (path == "/" and self.page.admits(scope)):
            return None
        return JSONBytes({"detail": NO_KEY}, 401, {"www-authenticate": "Bearer"})


async def not_found(scope: Any, receive: Any, send: Any) -> None:
    await JSONBytes({"detail": f"nothing is served at {scope['path']}"}, 404)(scope, receive, send)
