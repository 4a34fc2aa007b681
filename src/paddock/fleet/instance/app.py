"""All that an instance serves on its origin: MCP, the management API, and the page.

Invariant: access is decided here, before a request is routed and before its body is read. No endpoint checks keys, so
none can forget to. The management API requires the runner token and answers 404 without it; every other path requires
the key, for every method, and whether the path exists or not.

The page at `/` also admits requests with the page's own token. `/?page=TOKEN` sets it as a cookie: this is how the
browser of the `computer` tool gets access.
"""

from __future__ import annotations

import hmac
import html
import secrets
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from paddock.config import Access
from paddock.errors import Forbidden, PaddockError
from paddock.fleet.instance.computer import Computer
from paddock.fleet.instance.management import MANAGEMENT_PATH, ManagementApi
from paddock.fleet.instance.mcp import IdempotentCalls, InstanceMcp
from paddock.protocol.episode import CallTool
from paddock.server.access import check_browser, has_token, lookup
from paddock.server.http import JSONBytes, read_body

if TYPE_CHECKING:
    from paddock.fleet.instance.environment import InstanceEnvironment, InstanceSpec

NO_KEY = "send 'Authorization: Bearer KEY' with the key that the instance was made with"
PAGE_COOKIE = "paddock_page"
MAX_FORM_BYTES = 1024 * 1024


class InstanceApp:
    """The ASGI application. It also owns the browser of the `computer` tool, if the image has one."""

    def __init__(self, spec: InstanceSpec, environment: InstanceEnvironment) -> None:
        self.access = Access(token=spec.api_key, hosts=frozenset((spec.host,)))
        self.computer = Computer(spec.folder) if spec.has_screen else None
        self.page = InstancePage(environment)
        self.management = ManagementApi(spec, environment, self.computer)
        calls = IdempotentCalls()
        self._endpoints = {
            "/": self.page,
            "/mcp": InstanceMcp(environment, calls),
            "/api/v1/mcp": InstanceMcp(environment, calls, self.computer),
        }

    def set_origin(self, origin: str) -> None:
        """Set the origin of this instance, which the browser of the `computer` tool opens."""
        if self.computer is not None:
            self.computer.url = origin + self.page.login_path

    async def close(self) -> None:
        if self.computer is not None:
            await self.computer.close()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"].rstrip("/") or "/"
        is_management = MANAGEMENT_PATH.fullmatch(scope["path"]) is not None
        application: Any = self._refuse(scope, path, is_management)
        if application is None:
            application = self.management if is_management else self._endpoints.get(path, not_found)
        await application(scope, receive, send)

    def _refuse(self, scope: Any, path: str, is_management: bool) -> JSONBytes | None:
        """The error response for a request without access; None if it has access."""
        header = lookup(scope["headers"])
        try:
            check_browser(self.access, header)
        except Forbidden as error:
            return JSONBytes({"detail": error.message}, error.http_status)
        if is_management:
            return None if self.management.admits(header) else JSONBytes({"detail": "Not Found"}, 404)
        if self.access.token is None or has_token(self.access, header) or (path == "/" and self.page.admits(scope)):
            return None
        return JSONBytes({"detail": NO_KEY}, 401, {"www-authenticate": "Bearer"})


async def not_found(scope: Any, receive: Any, send: Any) -> None:
    await JSONBytes({"detail": f"nothing is served at {scope['path']}"}, 404)(scope, receive, send)


class InstancePage:
    """The ASGI application at `/`: the environment's page. Its forms are tool calls."""

    def __init__(self, environment: InstanceEnvironment) -> None:
        self._environment = environment
        self._token = secrets.token_urlsafe(16)

    @property
    def login_path(self) -> str:
        """The path that sets the cookie."""
        return f"/?page={self._token}"

    def admits(self, scope: Any) -> bool:
        """Whether the request carries the page's own token."""
        request = Request(scope)
        tokens = (request.query_params.get("page"), request.cookies.get(PAGE_COOKIE))
        return any(_is_same(token, self._token) for token in tokens)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        response = await self._respond(Request(scope), receive)
        await response(scope, receive, send)

    async def _respond(self, request: Request, receive: Any) -> Response:
        if request.method not in ("GET", "POST"):
            return HTMLResponse("method not allowed", 405, {"allow": "GET, POST"})
        if _is_same(request.query_params.get("page"), self._token):
            redirect = RedirectResponse("/", 303)
            redirect.set_cookie(PAGE_COOKIE, self._token, httponly=True, samesite="strict")
            return redirect
        try:
            if request.method == "POST":
                return await self._call_tool(await read_body(receive, MAX_FORM_BYTES))
            return HTMLResponse(await self._render())
        except PaddockError as error:
            return HTMLResponse(f"<p>{html.escape(error.message)}</p><p><a href='/'>back</a></p>", 400)

    async def _call_tool(self, body: bytes) -> Response:
        fields = dict(parse_qsl(body.decode(errors="replace"), keep_blank_values=True))
        call = CallTool(fields.pop("tool", ""), fields)
        async with self._environment.lock:
            await self._environment.service.dispatch.execute(self._environment.session, call)
        return RedirectResponse("/", 303)

    async def _render(self) -> str:
        if self._environment.has_page:
            return await self._environment.render_page()
        name = html.escape(self._environment.spec.name)
        return f"<!doctype html><title>{name}</title><h1>{name}</h1><p>This environment has no page.</p>"


def _is_same(token: str | None, expected: str) -> bool:
    return token is not None and hmac.compare_digest(token.encode(), expected.encode())
