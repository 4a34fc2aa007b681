"""A container engine's HTTP API, as far as a sandbox needs it: Docker's, which Podman speaks too.

Reached at `DOCKER_HOST` (`unix://…`, `tcp://…`, or `https://…` with `DOCKER_TLS_VERIFY`), or at the usual socket.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import aiohttp
import orjson

from paddock.errors import SandboxError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

USUAL = "unix:///var/run/docker.sock"
NEWEST, OLDEST = (1, 47), (1, 41)
"""Versions of the API that are spoken here."""
ANSWER_TIMEOUT = 60.0
PING_TIMEOUT = 5.0
FRAME = struct.Struct(">BxxxI")
STDOUT, STDERR = 1, 2
LONGEST_HEAD = 65536
LAST_WORDS = 4096
NOT_THERE = "start Docker or Podman, or set DOCKER_HOST"


class EngineError(SandboxError):
    """The engine refused. `status` is its HTTP status."""

    def __init__(self, message: str, /, *, status: int = 0, hint: str | None = None, **data: Any) -> None:
        super().__init__(message, hint=hint, status=status, **data)
        self.status = status


@dataclass(frozen=True, slots=True)
class Address:
    """Where an engine is."""

    path: str | None
    """Of its socket, if it has one."""
    host: str = "localhost"
    port: int = 2375
    context: ssl.SSLContext | None = None

    @property
    def is_here(self) -> bool:
        """Whether its files are those of this machine, as far as can be told."""
        return self.path is not None

    @property
    def base(self) -> str:
        return f"{'https' if self.context else 'http'}://{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"unix://{self.path}" if self.path else self.base


def find_address(text: str | None = None) -> Address:
    """From `DOCKER_HOST`. Raises SandboxError for one that cannot be used."""
    given = text or os.environ.get("DOCKER_HOST") or USUAL
    parts = urlsplit(given)
    if parts.scheme == "unix":
        return Address(parts.path)
    if parts.scheme not in ("tcp", "http", "https") or not parts.hostname:
        hint = "give unix:///path or tcp://host:port; for ssh, forward the socket yourself"
        raise SandboxError(f"an engine at {given} cannot be reached", hint=hint)
    secure = parts.scheme == "https" or bool(os.environ.get("DOCKER_TLS_VERIFY"))
    context = client_context() if secure else None
    return Address(None, parts.hostname, parts.port or (2376 if secure else 2375), context)


def client_context() -> ssl.SSLContext:
    folder = Path(os.environ.get("DOCKER_CERT_PATH") or Path.home() / ".docker")
    try:
        context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        context.load_cert_chain(str(folder / "cert.pem"), str(folder / "key.pem"))
    except OSError as error:
        hint = "put ca.pem, cert.pem and key.pem into DOCKER_CERT_PATH"
        raise SandboxError(f"the certificates in {folder} cannot be used: {error}", hint=hint) from error
    return context


class Engine:
    """One engine. Use it as an async context manager."""

    def __init__(self, address: Address | None = None) -> None:
        self.address = address or find_address()
        self.version = ""
        """Of the API, as agreed upon."""
        self.name = ""
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Engine:
        address = self.address
        connector: aiohttp.BaseConnector = (
            aiohttp.UnixConnector(path=address.path)
            if address.path
            else aiohttp.TCPConnector(ssl=address.context or True)
        )
        self._session = aiohttp.ClientSession(connector=connector)
        try:
            await self._agree()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _agree(self) -> None:
        """Find a version of the API that both sides speak."""
        async with self._request("GET", "/_ping", timeout=PING_TIMEOUT) as response:
            if response.status != 200:
                raise EngineError(f"{self.address} is not a container engine", status=response.status, hint=NOT_THERE)
            theirs = version_of(response.headers.get("Api-Version", ""))
            self.name = response.headers.get("Server", "")
        if theirs is None or theirs < OLDEST:
            shown = ".".join(map(str, theirs)) if theirs else "nothing known"
            hint = f"API {'.'.join(map(str, OLDEST))} is needed"
            raise EngineError(f"the engine at {self.address} speaks {shown}", hint=hint)
        self.version = ".".join(map(str, min(theirs, NEWEST)))

    # -- requests -------------------------------------------------------------------------------------

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        data: bytes | None = None,
        fine: tuple[int, ...] = (),
        timeout: float | None = ANSWER_TIMEOUT,
    ) -> Any:
        """The answer as JSON, or None. Raises EngineError unless the status is below 400 or one of `fine`."""
        sent = orjson.dumps(body) if body is not None else data
        kind = "application/json" if body is not None else "application/x-tar"
        headers = {"Content-Type": kind} if sent is not None else {}
        async with self._request(
            method, f"/v{self.version}{path}", params=query, data=sent, headers=headers, timeout=timeout
        ) as response:
            content = await response.read()
            if response.status >= 400 and response.status not in fine:
                raise EngineError(f"the engine refuses: {message_of(content)}", status=response.status)
            return orjson.loads(content) if response.content_type == "application/json" and content else None

    async def lines(self, method: str, path: str, query: Mapping[str, str]) -> AsyncIterator[dict[str, Any]]:
        """An answer that is told bit by bit, each bit a JSON object. Raises EngineError if one tells of an error."""
        async with self._request(method, f"/v{self.version}{path}", params=query, timeout=None) as response:
            if response.status >= 400:
                told = message_of(await response.read())
                raise EngineError(f"the engine refuses: {told}", status=response.status)
            async for line in response.content:
                if line.strip():
                    found: dict[str, Any] = orjson.loads(line)
                    if found.get("error"):
                        raise EngineError(f"the engine says: {found['error']}")
                    yield found

    def _request(self, method: str, path: str, *, timeout: float | None, **options: Any) -> Answer:
        if self._session is None:
            raise SandboxError("the connection to the engine is closed")
        limits = aiohttp.ClientTimeout(total=timeout)
        return Answer(self, self._session.request(method, f"{self.address.base}{path}", timeout=limits, **options))

    async def attach(self, container: str) -> AttachedLine:
        """The input and output of a container, from before it starts."""
        address = self.address
        query = "stream=1&stdin=1&stdout=1&stderr=1"
        head = (
            f"POST /v{self.version}/containers/{quote(container)}/attach?{query} HTTP/1.1\r\n"
            f"Host: {address.host}\r\nConnection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 0\r\n\r\n"
        )
        try:
            if address.path:
                reader, writer = await asyncio.open_unix_connection(address.path)
            else:
                reader, writer = await asyncio.open_connection(address.host, address.port, ssl=address.context)
        except OSError as error:
            raise unreachable(address, error) from error
        try:
            writer.write(head.encode())
            answer = await reader.readuntil(b"\r\n\r\n")
            status = int(answer.split(b" ", 2)[1])
            if status not in (101, 200):
                raise EngineError("the engine does not attach to the container", status=status)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, IndexError) as error:
            writer.close()
            raise EngineError("the engine does not attach to the container as it should") from error
        except BaseException:
            writer.close()
            raise
        return AttachedLine(reader, writer)

    # -- what is done with it -------------------------------------------------------------------------

    async def ensure_image(self, image: str) -> None:
        """Have the image, pulling it if it is not there."""
        found = await self.call("GET", f"/images/{quote(image, safe='/:@')}/json", fine=(404,))
        if found is not None and "Id" in found:
            return
        name, colon, tag = image.rpartition(":")
        if not colon or "/" in tag:
            name, tag = image, "latest"
        async for _ in self.lines("POST", "/images/create", {"fromImage": name, "tag": tag}):
            pass

    async def create(self, body: dict[str, Any]) -> str:
        made: dict[str, Any] = await self.call("POST", "/containers/create", body=body)
        return str(made["Id"])

    async def start(self, container: str) -> None:
        await self.call("POST", f"/containers/{container}/start")

    async def remove(self, container: str) -> None:
        """Kill it and take it away; one that is gone, or about to go, is fine."""
        query = {"force": "1", "v": "1"}
        await self.call("DELETE", f"/containers/{container}", query=query, fine=(404, 409))

    async def find_marked(self, label: str) -> list[str]:
        query = {"all": "1", "filters": json.dumps({"label": [label]})}
        return [str(found["Id"]) for found in await self.call("GET", "/containers/json", query=query) or []]

    async def make_volume(self, name: str, labels: dict[str, str]) -> None:
        await self.call("POST", "/volumes/create", body={"Name": name, "Labels": labels})

    async def find_volumes(self, label: str) -> list[str]:
        found = await self.call("GET", "/volumes", query={"filters": json.dumps({"label": [label]})}) or {}
        return [str(volume["Name"]) for volume in found.get("Volumes") or []]

    async def remove_volume(self, name: str) -> None:
        await self.call("DELETE", f"/volumes/{quote(name)}", query={"force": "1"}, fine=(404, 409))

    async def put_archive(self, container: str, path: str, archive: bytes) -> None:
        """Unpack a tar archive of ours into a container that has not been started."""
        query = {"path": path, "noOverwriteDirNonDir": "1"}
        await self.call("PUT", f"/containers/{container}/archive", query=query, data=archive, timeout=None)


class Answer:
    """A request on its way; what goes wrong with it is told as an error of ours."""

    def __init__(self, engine: Engine, request: Any) -> None:
        self._engine, self._request = engine, request

    async def __aenter__(self) -> aiohttp.ClientResponse:
        try:
            response: aiohttp.ClientResponse = await self._request.__aenter__()
        except (aiohttp.ClientError, OSError) as error:
            raise unreachable(self._engine.address, error) from error
        return response

    async def __aexit__(self, *given: Any) -> None:
        await self._request.__aexit__(*given)


class AttachedLine:
    """A line over what a container reads and writes. Its two outputs come on one connection, in frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.said = bytearray()
        """The last it wrote to its standard error."""

    async def receive(self) -> bytes:
        while True:
            try:
                kind, length = FRAME.unpack(await self._reader.readexactly(FRAME.size))
                data = await self._reader.readexactly(length)
            except (asyncio.IncompleteReadError, ConnectionError):
                return b""
            if kind == STDERR:
                self.said += data
                del self.said[:-LAST_WORDS]
            elif kind == STDOUT and data:
                return data
            elif kind not in (0, STDOUT):
                raise SandboxError("the engine does not send what it should")

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def close(self) -> None:
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()


def version_of(text: str) -> tuple[int, int] | None:
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def message_of(content: bytes) -> str:
    try:
        return str(orjson.loads(content)["message"])
    except (ValueError, KeyError, TypeError):
        return content.decode("utf-8", "replace").strip()[:500] or "it says nothing"


def unreachable(address: Address, error: Exception) -> EngineError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
    return EngineError(f"no container engine answers at {address}: {reason}", hint=NOT_THERE, keeps_all_out=True)
