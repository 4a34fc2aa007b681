"""MCP over streamable HTTP: a request is a POST, and its answer is JSON or a stream of events.

A stream that breaks is resumed with `Last-Event-ID` where the server gave its events ids. Knows no tool.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import aiohttp

from paddock.client.mcp.client import (
    McpAnswerLost,
    McpError,
    McpProtocolError,
    McpSessionLost,
    McpStatusError,
    McpUnreachable,
    McpUnsendable,
)
from paddock.http_pool import http_pool
from paddock.protocol.codec import decode_any, encode_any
from paddock.protocol.mcp import STATELESS_VERSION, client_answer
from paddock.protocol.redact import redact
from paddock.protocol.sse import MEDIA_TYPE, EventReader

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

NOTIFY_SECONDS = 5.0
SHOWN_CHARACTERS = 300
BROKEN = (aiohttp.ClientError, OSError, asyncio.IncompleteReadError)


class McpHttpTransport:
    """The server at `url`. Connections belong to the running loop."""

    def __init__(self, url: str, token: str = "") -> None:
        self.name = self.url = url
        self.version: str | None = None
        self.session: str | None = None
        self._token = token

    async def open(self) -> None:
        """Connections are made as they are needed."""

    async def request(self, message: dict[str, Any]) -> dict[str, Any]:
        number, method = message["id"], message["method"]
        document, headers = await self._post(message)
        if method == "initialize":
            self.session = headers.get("Mcp-Session-Id")
        response = _response_to(number, document)
        if response is None:
            raise McpProtocolError(f"{self.url} answered, but not to the request")
        return response

    async def notify(self, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(NOTIFY_SECONDS):
                await self._post(message)
        except TimeoutError as error:
            raise McpAnswerLost(f"POST {self.url} took longer than {NOTIFY_SECONDS:g} s") from error

    async def close(self) -> None:
        """End the server's session, if it keeps one. A failure has no consequence: sessions end by themselves."""
        session, self.session = self.session, None
        if session is None:
            return
        headers = self._headers({}) | {"Mcp-Session-Id": session}
        try:
            pool = await http_pool()
            async with (
                asyncio.timeout(NOTIFY_SECONDS),
                pool.delete(self.url, headers=headers, allow_redirects=False) as response,
            ):
                await response.read()
        except (*BROKEN, TimeoutError) as error:
            logger.debug("ending the session at %s: %s", self.url, error)

    async def _post(self, message: dict[str, Any]) -> tuple[Any, Mapping[str, str]]:
        """The JSON document that answers, and the headers; the document of a notification is None."""
        try:
            body = encode_any(message)
        except ValueError as error:
            raise McpUnsendable(f"this cannot be written as JSON: {error}") from error
        headers, session = self._headers(message), self.session
        pool = await http_pool()
        try:
            async with pool.post(self.url, data=body, headers=headers, allow_redirects=False) as response:
                if response.content_type == MEDIA_TYPE and response.status < 300 and "id" in message:
                    return await self._read_stream(response, message["id"]), response.headers
                status, received, answer = response.status, response.headers, await response.read()
        except BROKEN as error:
            raise self._broken(error) from error
        if status >= 300:
            raise self._refused(status, received, answer, session)
        if "method" not in message or "id" not in message:
            return None, received
        return self._decode(answer), received

    def _headers(self, message: dict[str, Any]) -> dict[str, str]:
        headers = {"Accept": f"application/json, {MEDIA_TYPE}", "Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        if self.session is not None:
            headers["Mcp-Session-Id"] = self.session
        if self.version is not None:
            headers["MCP-Protocol-Version"] = self.version
        if self.version == STATELESS_VERSION and "method" in message:
            headers["Mcp-Method"] = message["method"]
            if name := message.get("params", {}).get("name"):
                headers["Mcp-Name"] = str(name)
        return headers

    # -- streams --------------------------------------------------------------------------------------

    async def _read_stream(self, response: aiohttp.ClientResponse, number: int) -> dict[str, Any]:
        """The response to request `number`. Where events have ids the server keeps the answer, so the rest of a
        broken stream can be requested without running anything twice."""
        reader = EventReader()
        answer = await self._find_response(response, reader, number)
        while answer is None:
            if reader.last_id is None:
                raise McpAnswerLost(f"POST {self.url}: the stream ended before the answer")
            resumed_at = reader.last_id
            headers = self._headers({}) | {"Accept": MEDIA_TYPE, "Last-Event-ID": resumed_at}
            pool = await http_pool()
            try:
                async with pool.get(self.url, headers=headers, allow_redirects=False) as resumed:
                    if resumed.status >= 300 or resumed.content_type != MEDIA_TYPE:
                        raise McpAnswerLost(f"POST {self.url}: the stream ended and cannot be resumed")
                    answer = await self._find_response(resumed, reader, number)
            except BROKEN as error:
                raise McpAnswerLost(f"POST {self.url}: the stream broke ({type(error).__name__})") from error
            if answer is None and reader.last_id == resumed_at:
                raise McpAnswerLost(f"POST {self.url}: the stream ended before the answer")
        return answer

    async def _find_response(
        self, response: aiohttp.ClientResponse, reader: EventReader, number: int
    ) -> dict[str, Any] | None:
        """None if the stream ends or breaks without it."""
        try:
            async for piece in response.content.iter_any():
                for event in reader.feed(piece):
                    document = self._decode(event.data)
                    if isinstance(document, dict) and "method" in document and "id" in document:
                        await self._answer(document)
                    elif (answer := _response_to(number, document)) is not None:
                        return answer
        except BROKEN as error:
            if reader.last_id is None:
                raise self._broken(error) from error
        return None

    async def _answer(self, request: dict[str, Any]) -> None:
        """Answer a request that the server sent in the middle of a stream."""
        try:
            await self.notify(client_answer(request))
        except McpError as error:
            logger.debug("answering %s of %s: %s", request["method"], self.url, error)

    # -- errors ---------------------------------------------------------------------------------------

    def _decode(self, text: bytes) -> Any:
        try:
            return decode_any(text)
        except ValueError as error:
            raise McpProtocolError(f"{self.url} answered with something that is not JSON: {_short(text)}") from error

    def _broken(self, error: BaseException) -> McpError:
        """Whether the request left us decides."""
        reason = f"POST {self.url}: {type(error).__name__}"
        not_sent = (
            aiohttp.ClientConnectorError,
            aiohttp.ConnectionTimeoutError,
            aiohttp.InvalidURL,
            aiohttp.NonHttpUrlClientError,
        )
        if isinstance(error, not_sent):
            return McpUnreachable(f"{reason}, so there is no connection")
        return McpAnswerLost(f"{reason} before the answer was complete")

    def _refused(self, status: int, headers: Mapping[str, str], body: bytes, session: str | None) -> McpStatusError:
        message = f"POST {self.url} answered {status}: {_short(body)}"
        if status == 404 and session is not None:
            lost = McpSessionLost(message, status, headers, body)
            lost.session = session
            return lost
        return McpStatusError(message, status, headers, body)


def _response_to(number: int, document: Any) -> dict[str, Any] | None:
    """The response to request `number`, alone or in a batch."""
    for member in document if isinstance(document, list) else [document]:
        if isinstance(member, dict) and "method" not in member and member.get("id") in (number, str(number)):
            return member
    return None


def _short(body: bytes) -> str:
    text = redact(body.decode(errors="replace"))
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
