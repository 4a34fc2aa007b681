"""What E2B's daemon answers for a guest: its files and its two services. The token of the guest opens it."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from paddock.errors import SandboxError
from paddock.rollouts.e2b import files, filesystem, process
from paddock.rollouts.e2b.arrival import whole_body
from paddock.rollouts.e2b.connect import (
    STREAM,
    UNARY,
    ConnectError,
    Envelopes,
    envelope,
    last_envelope,
    parse,
    timeout_of,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from paddock.rollouts.e2b.guest import Guest
    from paddock.rollouts.e2b.lifecycle import Guests

SERVICES: dict[str, Any] = {"filesystem.Filesystem": filesystem, "process.Process": process}
KEEPALIVE = "Keepalive-Ping-Interval"
SPACE = 507
GONE = "The sandbox was not found"


class Envd:
    def __init__(self, guests: Guests) -> None:
        self._guests = guests

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self.health),
            web.get("/files", self.files),
            web.post("/files", self.files),
            web.post("/{service:process.Process|filesystem.Filesystem}/{method}", self.call),
        ]

    def guest(self, request: web.Request) -> Guest:
        """Whose request it is. Raises HTTPBadGateway, as E2B's edge does, if that sandbox is gone."""
        guest_id = request.headers.get("E2b-Sandbox-Id") or guest_of_host(request.host)
        guest = self._guests.find(guest_id)
        if guest is None:
            told = {"sandboxId": guest_id or "", "message": GONE, "code": 502}
            raise web.HTTPBadGateway(text=orjson.dumps(told).decode(), content_type="application/json")
        return guest

    def opens(self, request: web.Request, guest: Guest) -> bool:
        return hmac.compare_digest(
            request.headers.get("X-Access-Token", "").encode(errors="replace"), guest.token.encode()
        )

    async def health(self, request: web.Request) -> web.Response:
        self.guest(request)
        return web.Response(status=204)

    async def files(self, request: web.Request) -> web.StreamResponse:
        guest = self._signer(request) or self.guest(request)
        if not self.opens(request, guest) and not files.signature_opens(request, guest):
            return web.json_response({"code": 401, "message": "the access token is not this sandbox's"}, status=401)
        act = files.upload if request.method == "POST" else files.download
        try:
            return await act(request, guest)
        except ConnectError as error:
            status = SPACE if error.code == "out_of_space" else error.status
            return web.json_response({"code": status, "message": error.message}, status=status)
        except SandboxError as error:
            return self.broken(guest, error)

    def _signer(self, request: web.Request) -> Guest | None:
        """A signed address names no sandbox when all of them have one address; its signature does."""
        if "E2b-Sandbox-Id" in request.headers or "signature" not in request.query:
            return None
        return next((guest for guest in self._guests.all() if files.signature_opens(request, guest)), None)

    def broken(self, guest: Guest, error: SandboxError) -> web.Response:
        if guest.alive:
            return web.json_response({"code": 500, "message": error.message}, status=500)
        return web.json_response({"sandboxId": guest.id, "message": GONE, "code": 502}, status=502)

    # -- services -------------------------------------------------------------------------------------

    async def call(self, request: web.Request) -> web.StreamResponse:
        guest = self.guest(request)
        service, method = SERVICES[request.match_info["service"]], request.match_info["method"]
        try:
            if not self.opens(request, guest):
                raise ConnectError("unauthenticated", "the access token is not this sandbox's")
            refuse_other_users(request.headers.get("Authorization", ""))
            timeout = timeout_of(request.headers.get("Connect-Timeout-Ms"))
            if method in service.UNARY:
                return await self.unary(request, guest, service.UNARY[method])
            if method in service.STREAMS:
                return await self.stream(request, guest, service.STREAMS[method], timeout)
            if method in getattr(service, "FED", {}):
                return await self.fed(request, guest, service.FED[method], timeout)
            raise ConnectError("unimplemented", f"{method} is not known here")
        except ConnectError as error:
            return web.json_response(error.to_json(), status=error.status)
        except SandboxError as error:
            return self.broken(guest, error)

    async def unary(self, request: web.Request, guest: Guest, act: Any) -> web.Response:
        require(request, UNARY)
        return web.json_response(await act(guest, parse(await whole_body(request))))

    async def stream(self, request: web.Request, guest: Guest, act: Any, timeout: float | None) -> web.StreamResponse:
        """Errors from before the stream began are its end, too: the protocol has no other place for them."""
        require(request, STREAM)
        response = web.StreamResponse(headers={"Content-Type": STREAM})
        response.enable_chunked_encoding()
        error: ConnectError | None = None
        try:
            asked = Envelopes().add(await whole_body(request))
            async with asyncio.timeout(timeout):
                messages = await act(guest, asked[0] if asked else {}, timeout)
                await response.prepare(request)
                async with aclosing(messages):
                    async for message in kept_alive(messages, interval_of(request)):
                        await response.write(envelope(message))
        except TimeoutError:
            error = ConnectError("deadline_exceeded", f"the deadline of {timeout:g} s is over")
        except ConnectError as caught:
            error = caught
        except SandboxError as caught:
            error = ConnectError("unavailable", caught.message)
        if not guest.alive:
            error = ConnectError("unavailable", GONE)
        if not response.prepared:
            await response.prepare(request)
        with suppress(ConnectionError):
            await response.write(last_envelope(error))
            await response.write_eof()
        return response

    async def fed(self, request: web.Request, guest: Guest, act: Any, timeout: float | None) -> web.Response:
        require(request, STREAM)
        error: ConnectError | None = None
        answer = b""
        try:
            async with asyncio.timeout(timeout):
                answer = envelope(await act(guest, messages_of(request)))
        except TimeoutError:
            error = ConnectError("deadline_exceeded", f"the deadline of {timeout:g} s is over")
        except ConnectError as caught:
            error = caught
        return web.Response(body=answer + last_envelope(error), content_type=STREAM)


async def messages_of(request: web.Request) -> AsyncIterator[dict[str, Any]]:
    envelopes = Envelopes()
    async for data in request.content.iter_any():
        for message in envelopes.add(data):
            yield message


async def kept_alive(
    messages: AsyncIterator[dict[str, Any]], interval: float | None
) -> AsyncIterator[dict[str, Any]]:
    """The messages, and one that says nothing whenever there was none for so long."""
    following: asyncio.Future[dict[str, Any]] = asyncio.ensure_future(anext(messages))
    process = None
    try:
        while True:
            done, _ = await asyncio.wait([following], timeout=interval)
            if not done:
                yield {"event": {"keepalive": {}}} if process else {"keepalive": {}}
                continue
            try:
                message = following.result()
            except StopAsyncIteration:
                return
            process = "event" in message
            following = asyncio.ensure_future(anext(messages))
            yield message
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def interval_of(request: web.Request) -> float | None:
    text = request.headers.get(KEEPALIVE, "")
    return float(text) if text.isdigit() and int(text) > 0 else None


def require(request: web.Request, form: str) -> None:
    if request.content_type != form:
        raise ConnectError("unimplemented", f"{request.content_type} is not spoken here, only {form}")


def refuse_other_users(header: str) -> None:
    kind, _, value = header.partition(" ")
    if kind.lower() != "basic":
        return
    try:
        user = base64.b64decode(value).decode().partition(":")[0]
    except (binascii.Error, UnicodeDecodeError):
        raise ConnectError("unauthenticated", "the Authorization header cannot be read") from None
    files.refuse_others(user)


def guest_of_host(host: str) -> str | None:
    """`49983-ID.domain` names a guest."""
    port, _, rest = host.partition(".")[0].partition("-")
    return rest if port.isdigit() and rest else None
