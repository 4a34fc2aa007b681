"""An MCP client over streamable HTTP, as small as tool use allows.

An endpoint is initialized once and remembered; its connection is kept. Answers may be JSON or a stream of events,
and a stream that breaks is taken up again where the server allows it. Servers of the revision without `initialize`
are spoken to in theirs. Knows no retry: each method sends its request once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import weakref
from typing import Any

import aiohttp

from paddock.fleet.errors import AnswerLost, FleetError, PlaneError, ProtocolError, RpcFailure
from paddock.fleet.http import Reply, checked, connections, decoded, encoded, failure, send, shown
from paddock.fleet.sse import EventReader
from paddock.protocol.jsonrpc import METHOD_NOT_FOUND
from paddock.protocol.mcp import SESSION_VERSIONS, STATELESS_VERSION, UNSUPPORTED_VERSION, client_answer
from paddock.protocol.redact import redact

logger = logging.getLogger(__name__)

OFFERED = SESSION_VERSIONS[1]
"""The revision asked for: old enough that every server in use knows it."""
CLIENT = {"name": "paddock-fleet", "version": "1"}
IDEMPOTENCY = "paddock/idempotency"
IDEMPOTENCY_KEY = "paddock/idempotency-key"
PING_SECONDS = 5.0
STREAM = "text/event-stream"


class McpEndpoint:
    """One MCP server at one address."""

    def __init__(self, url: str, api_key: str) -> None:
        self.url = url
        self.repeats_safely = False
        """Whether the server runs a call once however often it comes under the same idempotency key."""
        self._key = api_key
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self._version: str | None = None
        self._stateless = False
        # Loops come and go (`asyncio.run` per call); what was agreed with the server stays.
        self._locks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()

    async def list_tools(self) -> list[dict[str, Any]]:
        """All tools, in MCP form, whatever number of pages they come in."""
        tools: list[dict[str, Any]] = []
        cursor: str | None = None
        seen: set[str] = set()
        while True:
            page = await self._request("tools/list", {} if cursor is None else {"cursor": cursor})
            found = page.get("tools")
            if not isinstance(found, list):
                raise ProtocolError(f"{self.url}: tools/list answered without tools")
            tools.extend(tool for tool in found if isinstance(tool, dict) and isinstance(tool.get("name"), str))
            cursor = page.get("nextCursor")
            if not isinstance(cursor, str) or not cursor or cursor in seen:
                return tools
            seen.add(cursor)

    async def call_tool(self, name: str, arguments: dict[str, Any], key: str | None = None) -> dict[str, Any]:
        """The result of one call, sent once. `key` names the call for servers that repeat safely."""
        params: dict[str, Any] = {"name": name, "arguments": arguments}
        await self.ready()
        if key is not None and self.repeats_safely:
            params["_meta"] = {IDEMPOTENCY_KEY: key}
        return await self._request("tools/call", params)

    async def close(self) -> None:
        """End the server's session, if it keeps one. Failure is of no consequence: sessions end by themselves."""
        session, self._session, self._version = self._session, None, None
        if session is not None:
            try:
                await send("DELETE", self.url, timeout=PING_SECONDS, headers=self._headers("", session=session))
            except FleetError as error:
                logger.debug("ending the session at %s: %s", self.url, error)

    # -- the conversation -----------------------------------------------------------------------------

    async def ready(self) -> None:
        """Agree with the server on how to speak, once."""
        if self._version is not None:
            return
        lock = self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock())
        async with lock:
            if self._version is None:
                await self._initialize()

    async def _initialize(self) -> None:
        params = {"protocolVersion": OFFERED, "capabilities": {}, "clientInfo": CLIENT}
        try:
            result, headers = await self._post("initialize", params)
        except (RpcFailure, PlaneError) as error:
            if _rpc_number(error) not in (METHOD_NOT_FOUND, UNSUPPORTED_VERSION):
                raise
            self._stateless, self._version = True, STATELESS_VERSION
            return
        self._session = headers.get("Mcp-Session-Id")
        self.repeats_safely = _repeats_safely(result)
        version = str(result.get("protocolVersion") or OFFERED)
        note = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        sent = self._headers("notifications/initialized", version=version)
        await send("POST", self.url, timeout=PING_SECONDS, document=note, headers=sent)
        self._version = version

    async def _request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        await self.ready()
        named = self._session
        try:
            return (await self._post(method, params))[0]
        except PlaneError as error:
            # A server that no longer knows the session refused the request: begin a new one, and ask there.
            if named is None or error.status != 404:
                raise
        if self._session == named:
            self._session, self._version = None, None
        await self.ready()
        return (await self._post(method, params))[0]

    async def _post(self, method: str, params: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        number = next(self._numbers)
        if self._stateless:
            params = {**params, "_meta": {**params.get("_meta", {}), **_introduction()}}
        document = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        body, headers = encoded(document, self._headers(method, str(params.get("name", ""))))
        session = await connections()
        try:
            async with session.post(self.url, data=body, headers=headers, allow_redirects=False) as response:
                if response.content_type == STREAM and response.status < 300:
                    return await self._from_stream(response, number), response.headers
                reply = Reply(response.status, response.headers, await response.read())
        except (aiohttp.ClientError, OSError) as error:
            raise failure(error, "POST", self.url) from error
        return _result(_ours(checked(reply, "POST", self.url).json(), number), self.url), reply.headers

    def _headers(
        self, method: str, tool: str = "", *, session: str | None = None, version: str | None = None
    ) -> dict[str, str]:
        headers = {"Accept": f"application/json, {STREAM}"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        if (named := session or self._session) is not None:
            headers["Mcp-Session-Id"] = named
        if (spoken := version or self._version) is not None:
            headers["MCP-Protocol-Version"] = spoken
        if self._stateless:
            headers["Mcp-Method"] = method
            if tool:
                headers["Mcp-Name"] = tool
        return headers

    # -- streams --------------------------------------------------------------------------------------

    async def _from_stream(self, response: aiohttp.ClientResponse, number: int) -> dict[str, Any]:
        reader = EventReader()
        found = await self._search(response, reader, number)
        while found is None:
            # Where events carry ids the server keeps the answer: asking for the rest runs nothing twice.
            if reader.last_id is None:
                raise AnswerLost(f"POST {self.url}: the stream ended before the answer")
            headers = self._headers("") | {"Accept": STREAM, "Last-Event-ID": reader.last_id}
            known = reader.last_id
            session = await connections()
            try:
                async with session.get(self.url, headers=headers, allow_redirects=False) as again:
                    if again.status >= 300 or again.content_type != STREAM:
                        raise AnswerLost(f"POST {self.url}: the stream ended and cannot be taken up again")
                    found = await self._search(again, reader, number)
            except (aiohttp.ClientError, OSError) as error:
                raise AnswerLost(f"POST {self.url}: the stream broke off ({type(error).__name__})") from error
            if found is None and reader.last_id == known:
                raise AnswerLost(f"POST {self.url}: the stream ended before the answer")
        return found

    async def _search(
        self, response: aiohttp.ClientResponse, reader: EventReader, number: int
    ) -> dict[str, Any] | None:
        """The answer to request `number`, or None if the stream ends or breaks without it."""
        try:
            async for piece in response.content.iter_any():
                for event in reader.feed(piece):
                    document = decoded(event.data)
                    if isinstance(document, dict) and "method" in document and "id" in document:
                        await self._answer(document)
                    elif (ours := _ours(document, number)) is not None:
                        return _result(ours, self.url)
        except (aiohttp.ClientError, OSError) as error:
            if reader.last_id is None:
                raise failure(error, "POST", self.url) from error
        return None

    async def _answer(self, request: dict[str, Any]) -> None:
        """In the middle of a stream."""
        reply = client_answer(request)
        try:
            await send("POST", self.url, timeout=PING_SECONDS, document=reply, headers=self._headers(""))
        except FleetError as error:
            logger.debug("answering %s of %s: %s", request["method"], self.url, error)


def _ours(document: Any, number: int) -> dict[str, Any] | None:
    """The response to request `number`, alone or in a batch."""
    members = document if isinstance(document, list) else [document]
    for member in members:
        if isinstance(member, dict) and "method" not in member and member.get("id") in (number, str(number)):
            return member
    return None


def _result(response: dict[str, Any] | None, url: str) -> dict[str, Any]:
    if response is None:
        raise ProtocolError(f"{url} answered, but not to the request")
    error = response.get("error")
    if isinstance(error, dict):
        number = error.get("code")
        said = redact(shown(error.get("message", "")))
        raise RpcFailure(said or "JSON-RPC error", number if isinstance(number, int) else 0, error.get("data"))
    result = response.get("result")
    if not isinstance(result, dict):
        raise ProtocolError(f"{url} answered without a result")
    return result


def _rpc_number(error: FleetError) -> Any:
    """The JSON-RPC code of an error; some servers put it under an HTTP status."""
    if isinstance(error, RpcFailure):
        return error.number
    detail = error.detail if isinstance(error, PlaneError) else None
    inner = detail.get("error") if isinstance(detail, dict) else None
    return inner.get("code") if isinstance(inner, dict) else None


def _repeats_safely(result: dict[str, Any]) -> bool:
    capabilities, meta = result.get("capabilities"), result.get("_meta")
    experimental = capabilities.get("experimental") if isinstance(capabilities, dict) else None
    stated = isinstance(experimental, dict) and IDEMPOTENCY in experimental
    return stated or (isinstance(meta, dict) and bool(meta.get(IDEMPOTENCY)))


def _introduction() -> dict[str, Any]:
    prefix = "io.modelcontextprotocol/"
    return {
        f"{prefix}protocolVersion": STATELESS_VERSION,
        f"{prefix}clientInfo": CLIENT,
        f"{prefix}clientCapabilities": {},
    }
