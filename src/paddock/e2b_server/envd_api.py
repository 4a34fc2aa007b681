"""The HTTP API of E2B's daemon (envd) for one sandbox: its files and its two services, with the sandbox' token."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from paddock.e2b_server import file_transfer
from paddock.e2b_server.connect_protocol import (
    STREAM,
    UNARY,
    ConnectError,
    Envelopes,
    envelope,
    last_envelope,
    parse,
    timeout_of,
)
from paddock.e2b_server.file_transfer import read_body
from paddock.e2b_server.services import SERVICES
from paddock.errors import SandboxError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from paddock.e2b_server.registry import SandboxRegistry
    from paddock.e2b_server.served_sandbox import ServedSandbox

KEEPALIVE_HEADER = "Keepalive-Ping-Interval"
INSUFFICIENT_STORAGE = 507
NOT_FOUND = "The sandbox was not found"


class EnvdApi:
    def __init__(self, registry: SandboxRegistry) -> None:
        self._registry = registry

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self.health),
            web.get("/files", self.files),
            web.post("/files", self.files),
            web.post("/{service:process.Process|filesystem.Filesystem}/{method}", self.call),
        ]

    def served(self, request: web.Request) -> ServedSandbox:
        """Whose request it is. Raises HTTPBadGateway, as E2B's edge does, if that sandbox is gone."""
        sandbox_id = request.headers.get("E2b-Sandbox-Id") or sandbox_id_of_host(request.host)
        served = self._registry.find(sandbox_id)
        if served is None:
            details = {"sandboxId": sandbox_id or "", "message": NOT_FOUND, "code": 502}
            raise web.HTTPBadGateway(text=orjson.dumps(details).decode(), content_type="application/json")
        return served

    def is_authorized(self, request: web.Request, served: ServedSandbox) -> bool:
        return hmac.compare_digest(
            request.headers.get("X-Access-Token", "").encode(errors="replace"), served.token.encode()
        )

    async def health(self, request: web.Request) -> web.Response:
        self.served(request)
        return web.Response(status=204)

    async def files(self, request: web.Request) -> web.StreamResponse:
        served = self._signer(request) or self.served(request)
        if not self.is_authorized(request, served) and not file_transfer.is_signed(request, served):
            return web.json_response({"code": 401, "message": "the access token is not this sandbox's"}, status=401)
        act = file_transfer.upload if request.method == "POST" else file_transfer.download
        try:
            return await act(request, served)
        except ConnectError as error:
            status = INSUFFICIENT_STORAGE if error.code == "out_of_space" else error.status
            return web.json_response({"code": status, "message": error.message}, status=status)
        except SandboxError as error:
            return self.failure(served, error)

    def _signer(self, request: web.Request) -> ServedSandbox | None:
        """The sandbox whose token signed the URL: a URL names no sandbox where all of them have one address."""
        if "E2b-Sandbox-Id" in request.headers or "signature" not in request.query:
            return None
        return next((served for served in self._registry.all() if file_transfer.is_signed(request, served)), None)

    def failure(self, served: ServedSandbox, error: SandboxError) -> web.Response:
        if served.alive:
            return web.json_response({"code": 500, "message": error.message}, status=500)
        return web.json_response({"sandboxId": served.id, "message": NOT_FOUND, "code": 502}, status=502)

    # -- services -------------------------------------------------------------------------------------

    async def call(self, request: web.Request) -> web.StreamResponse:
        served = self.served(request)
        service, method = SERVICES[request.match_info["service"]], request.match_info["method"]
        try:
            if not self.is_authorized(request, served):
                raise ConnectError("unauthenticated", "the access token is not this sandbox's")
            user = user_of(request.headers.get("Authorization", ""))
            served.check_user(user)
            timeout = timeout_of(request.headers.get("Connect-Timeout-Ms"))
            if method in service.unary:
                return await self.unary(request, served, service.unary[method])
            if method in service.server_streams:
                return await self.server_stream(request, served, service.server_streams[method], timeout, user)
            if method in service.client_streams:
                return await self.client_stream(request, served, service.client_streams[method], timeout)
            raise ConnectError("unimplemented", f"{method} is not known here")
        except ConnectError as error:
            return web.json_response(error.to_json(), status=error.status)
        except SandboxError as error:
            return self.failure(served, error)

    async def unary(self, request: web.Request, served: ServedSandbox, act: Any) -> web.Response:
        require_content_type(request, UNARY)
        return web.json_response(await act(served, parse(await read_body(request))))

    async def server_stream(
        self, request: web.Request, served: ServedSandbox, act: Any, timeout: float | None, user: str
    ) -> web.StreamResponse:
        """Errors from before the stream began are reported at its end too: the protocol has no other place."""
        require_content_type(request, STREAM)
        response = web.StreamResponse(headers={"Content-Type": STREAM})
        response.enable_chunked_encoding()
        error: ConnectError | None = None
        try:
            received = Envelopes().add(await read_body(request))
            async with asyncio.timeout(timeout):
                message = {**(received[0] if received else {}), "user": user}
                messages = await act(served, message, timeout)
                await response.prepare(request)
                async with aclosing(messages):
                    async for answer in with_keepalive(messages, keepalive_interval(request)):
                        await response.write(envelope(answer))
        except TimeoutError:
            error = ConnectError("deadline_exceeded", f"the deadline of {timeout:g} s is over")
        except ConnectError as caught:
            error = caught
        except SandboxError as caught:
            error = ConnectError("unavailable", caught.message)
        if not served.alive:
            error = ConnectError("unavailable", NOT_FOUND)
        if not response.prepared:
            await response.prepare(request)
        with suppress(ConnectionError):
            await response.write(last_envelope(error))
            await response.write_eof()
        return response

    async def client_stream(
        self, request: web.Request, served: ServedSandbox, act: Any, timeout: float | None
    ) -> web.Response:
        require_content_type(request, STREAM)
        error: ConnectError | None = None
        answer = b""
        try:
            async with asyncio.timeout(timeout):
                answer = envelope(await act(served, messages_of(request)))
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


async def with_keepalive(
    messages: AsyncIterator[dict[str, Any]], interval: float | None
) -> AsyncIterator[dict[str, Any]]:
    """The messages, and an empty one whenever there was none for `interval` seconds."""
    following: asyncio.Future[dict[str, Any]] = asyncio.ensure_future(anext(messages))
    is_process = False
    try:
        while True:
            done, _ = await asyncio.wait([following], timeout=interval)
            if not done:
                yield {"event": {"keepalive": {}}} if is_process else {"keepalive": {}}
                continue
            try:
                message = following.result()
            except StopAsyncIteration:
                return
            is_process = "event" in message
            following = asyncio.ensure_future(anext(messages))
            yield message
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def keepalive_interval(request: web.Request) -> float | None:
    text = request.headers.get(KEEPALIVE_HEADER, "")
    return float(text) if text.isdigit() and int(text) > 0 else None


def require_content_type(request: web.Request, expected: str) -> None:
    if request.content_type != expected:
        raise ConnectError("unimplemented", f"{request.content_type} is not supported, only {expected}")


def user_of(header: str) -> str:
    """The user that an Authorization header names; empty for none. Raises ConnectError if it cannot be read."""
    kind, _, value = header.partition(" ")
    if kind.lower() != "basic":
        return ""
    try:
        return base64.b64decode(value).decode().partition(":")[0]
    except (binascii.Error, UnicodeDecodeError):
        raise ConnectError("unauthenticated", "the Authorization header cannot be read") from None


def sandbox_id_of_host(host: str) -> str | None:
    """`49983-ID.domain` names a sandbox."""
    port, _, rest = host.partition(".")[0].partition("-")
    return rest if port.isdigit() and rest else None
