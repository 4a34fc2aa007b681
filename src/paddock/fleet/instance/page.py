"""The page at `/`: what a person, or an agent with a screen, sees of the environment.

Its forms are calls of tools. With a key set, the page wants the bearer token, or the cookie that its own address
with the page's token hands out: that is how the browser of the `computer` tool comes in.
"""

from __future__ import annotations

import hmac
import html
import secrets
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from paddock.errors import PaddockError
from paddock.protocol.episode import CallTool
from paddock.server.access import has_token
from paddock.server.http import read_body

if TYPE_CHECKING:
    from paddock.config import Access
    from paddock.fleet.instance.hosted import HostedEnvironment

COOKIE = "paddock_page"
MOST_FORM = 1024 * 1024


class Page:
    """The ASGI application at `/`."""

    def __init__(self, hosted: HostedEnvironment, access: Access) -> None:
        self._hosted = hosted
        self._access = access
        self._token = secrets.token_urlsafe(16)

    @property
    def address(self) -> str:
        """The path that lets a browser in."""
        return f"/?page={self._token}"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope)
        answer = await self._answer(request, receive)
        await answer(scope, receive, send)

    async def _answer(self, request: Request, receive: Any) -> Response:
        if request.method not in ("GET", "POST"):
            return HTMLResponse("method not allowed", 405, {"allow": "GET, POST"})
        if _same(request.query_params.get("page"), self._token):
            entered = RedirectResponse("/", 303)
            entered.set_cookie(COOKIE, self._token, httponly=True, samesite="strict")
            return entered
        if not self._may_enter(request):
            return HTMLResponse("this page wants the key of the instance", 401, {"www-authenticate": "Bearer"})
        try:
            if request.method == "POST":
                return await self._post(await read_body(receive, MOST_FORM))
            return HTMLResponse(await self._shown())
        except PaddockError as error:
            return HTMLResponse(f"<p>{html.escape(error.message)}</p><p><a href='/'>back</a></p>", 400)

    def _may_enter(self, request: Request) -> bool:
        if self._access.token is None or has_token(self._access, request.headers.get):
            return True
        return _same(request.cookies.get(COOKIE), self._token)

    async def _post(self, body: bytes) -> Response:
        fields = dict(parse_qsl(body.decode(errors="replace"), keep_blank_values=True))
        call = CallTool(fields.pop("tool", ""), fields)
        async with self._hosted.turn:
            await self._hosted.service.dispatch.ask(self._hosted.session, call)
        return RedirectResponse("/", 303)

    async def _shown(self) -> str:
        if self._hosted.has_page:
            return await self._hosted.page()
        name = html.escape(self._hosted.blueprint.name)
        return f"<!doctype html><title>{name}</title><h1>{name}</h1><p>This environment has no page.</p>"


def _same(given: str | None, expected: str) -> bool:
    return given is not None and hmac.compare_digest(given.encode(), expected.encode())
