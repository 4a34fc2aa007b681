"""The page at `/`: what a person, or an agent with a screen, sees of the environment.

Its forms are calls of tools. Beside those who have the key, it admits whoever has the page's own token: in the
address, which hands out a cookie, and then in the cookie. That is how the browser of the `computer` tool comes in.
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
from paddock.server.http import read_body

if TYPE_CHECKING:
    from paddock.fleet.instance.hosted import HostedEnvironment

COOKIE = "paddock_page"
MOST_FORM = 1024 * 1024


class Page:
    """The ASGI application at `/`."""

    def __init__(self, hosted: HostedEnvironment) -> None:
        self._hosted = hosted
        self._token = secrets.token_urlsafe(16)

    @property
    def address(self) -> str:
        """The path that lets a browser in."""
        return f"/?page={self._token}"

    def admits(self, scope: Any) -> bool:
        """Whether the request carries the page's own token."""
        request = Request(scope)
        sent = (request.query_params.get("page"), request.cookies.get(COOKIE))
        return any(_same(each, self._token) for each in sent)

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
        try:
            if request.method == "POST":
                return await self._post(await read_body(receive, MOST_FORM))
            return HTMLResponse(await self._shown())
        except PaddockError as error:
            return HTMLResponse(f"<p>{html.escape(error.message)}</p><p><a href='/'>back</a></p>", 400)

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
