"""Plain HTTP: a small keep-alive connection on h11, and episodes over `/reset`, `/step` and `/state`."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any
from urllib.parse import urlsplit

import h11
import orjson

from paddock.client.policy import Timeouts
from paddock.errors import ConnectFailed, DeadlineExceeded, InvalidMessage, PaddockError, ServerError, Unauthorized, from_wire
from paddock.protocol.codec import encode

CHUNK = 65536


class HttpConnection:
    """One connection, one request at a time. A connection the server has closed is opened again."""

    def __init__(self, url: str, headers: dict[str, str] | None = None) -> None:
        self._parts = urlsplit(url)
        self._headers = headers or {}
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._protocol = h11.Connection(h11.CLIENT)
        self._lock = asyncio.Lock()

    async def request(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers (names in lower case) and body. Raises OSError if there is no server."""
        async with self._lock:
            fresh = self._streams is None
            try:
                return await self._exchange(method, path, body, headers or {})
            except (OSError, h11.RemoteProtocolError):
                # A kept connection may have been closed while idle; a fresh one that fails has failed.
                await self._drop()
                if fresh or method != "GET":
                    raise
                return await self._exchange(method, path, body, headers or {})
            except BaseException:
                await self._drop()
                raise

    async def close(self) -> None:
        await self._drop()

    async def _exchange(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        reader, writer = await self._connected()
        fields = {"host": self._parts.netloc, "content-length": str(len(body)), **self._headers, **headers}
        if body:
            fields.setdefault("content-type", "application/json")
        request = h11.Request(method=method, target=f"{self._parts.path.rstrip('/')}{path}", headers=list(fields.items()))
        for event in (request, h11.Data(data=body), h11.EndOfMessage()):
            writer.write(self._protocol.send(event) or b"")
        await writer.drain()
        status, received, parts = 0, {}, []
        while True:
            answer = self._protocol.next_event()
            if answer is h11.NEED_DATA:
                self._protocol.receive_data(await reader.read(CHUNK))
            elif isinstance(answer, h11.Response):
                status = answer.status_code
                received = {name.decode(): value.decode("latin-1") for name, value in answer.headers}
            elif isinstance(answer, h11.Data):
                parts.append(bytes(answer.data))
            elif isinstance(answer, h11.EndOfMessage):
                break
            elif isinstance(answer, h11.ConnectionClosed):
                raise ConnectionResetError("the server closed the connection")
        if self._protocol.our_state is h11.MUST_CLOSE:
            await self._drop()
        else:
            self._protocol.start_next_cycle()
        return status, received, b"".join(parts)

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None:
            secure = self._parts.scheme == "https"
            port = self._parts.port or (443 if secure else 80)
            context = ssl.create_default_context() if secure else None
            self._streams = await asyncio.open_connection(self._parts.hostname, port, ssl=context)
            self._protocol = h11.Connection(h11.CLIENT)
        return self._streams

    async def _drop(self) -> None:
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].close()


async def get_json(url: str, headers: dict[str, str], timeout: float | None) -> Any:
    """The JSON behind one GET. Raises ConnectFailed, Unauthorized or ServerError."""
    parts = urlsplit(url)
    connection = HttpConnection(f"{parts.scheme}://{parts.netloc}", headers)
    try:
        async with asyncio.timeout(timeout):
            status, _, body = await connection.request("GET", parts.path or "/")
    except TimeoutError:
        raise ConnectFailed(f"{url} did not answer within {timeout} s", hint="is the server up?") from None
    except (OSError, h11.RemoteProtocolError) as error:
        raise ConnectFailed(f"cannot reach {url}: {error}", hint="is the server up, and the port right?") from error
    finally:
        await connection.close()
    if status >= 400:
        raise error_of(status, body)
    return orjson.loads(body)


def error_of(status: int, body: bytes) -> PaddockError:
    """The error behind an HTTP answer, whoever's server sent it."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return ServerError(f"HTTP {status}: {body[:200].decode(errors='replace')}", status=status)
    detail = document.get("detail") if isinstance(document, dict) else document
    if isinstance(document, dict) and "code" in document:
        return from_wire({**document, "message": detail, "detail": None})
    if status == 401:
        return Unauthorized(str(detail))
    if status == 422:
        return InvalidMessage("Invalid request", errors=detail)
    return ServerError(f"HTTP {status}: {detail}", status=status)


class HttpTransport:
    """An episode over plain HTTP. The server's `Session-Id` keeps it together."""

    foreign = False

    def __init__(self, url: str, *, headers: dict[str, str] | None = None, timeouts: Timeouts | None = None) -> None:
        self.base = url.rstrip("/")
        self.timeouts = timeouts or Timeouts()
        self._headers = headers or {}
        self._connection = HttpConnection(self.base, self._headers)
        self._session: str | None = None

    async def open(self) -> None:
        """There is nothing to open: the first request connects."""

    async def request(self, message: dict[str, Any], timeout: float | None) -> dict[str, Any]:
        kind = message["type"]
        if kind == "mcp":
            return {"type": "mcp", "data": await self._exchange("POST", "/mcp", self._in_session(message["data"]), timeout)}
        if kind == "state":
            return {"type": "state", "data": await self._exchange("GET", "/state", None, timeout)}
        body = message.get("data", {}) if kind == "reset" else {"action": message["data"]}
        if kind == "step" and timeout is not None:
            body["timeout_s"] = timeout
        return {"type": "observation", "data": await self._exchange("POST", f"/{kind}", body, timeout)}

    async def fetch(self, path: str) -> Any:
        return await get_json(self.base + path, self._headers, self.timeouts.connect)

    async def close(self) -> None:
        await self._connection.close()

    def _in_session(self, call: dict[str, Any]) -> dict[str, Any]:
        """A tool call acts in the episode that `/reset` began, if there is one."""
        if self._session is None:
            return call
        return {**call, "params": {**call.get("params", {}), "session_id": self._session}}

    async def _exchange(self, method: str, path: str, body: Any, timeout: float | None) -> Any:
        headers = {"session-id": self._session} if self._session else {}
        try:
            async with asyncio.timeout(timeout):
                content = b"" if body is None else encode(body)
                status, received, answer = await self._connection.request(method, path, content, headers)
        except TimeoutError:
            raise DeadlineExceeded(f"no answer to {path} within {timeout} s") from None
        except (OSError, h11.RemoteProtocolError) as error:
            raise ConnectFailed(f"cannot reach {self.base}: {error}", hint="is the server up?") from error
        if status >= 400:
            raise error_of(status, answer)
        self._session = received.get("session-id", self._session)
        return orjson.loads(answer)
