"""Client for the HTTP API of a container runtime: Docker's, which Podman implements too.

The runtime is reached at `DOCKER_HOST` (`unix://…`, `tcp://…`, or `https://…` with `DOCKER_TLS_VERIFY`), or at
Docker's default socket.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import aiohttp
import orjson

from paddock.config import DOCKER_CERT_PATH, DOCKER_HOST, DOCKER_TLS_VERIFY
from paddock.errors import SandboxError
from paddock.sandbox.transports import AsyncioChannel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

DEFAULT_ADDRESS = "unix:///var/run/docker.sock"
NEWEST_VERSION, OLDEST_VERSION = (1, 47), (1, 41)
"""Versions of the API that this client implements."""
RESPONSE_SECONDS = 60.0
PING_SECONDS = 5.0
TAR = "application/x-tar"
FRAME = struct.Struct(">BxxxI")
STDOUT, STDERR = 1, 2
STDERR_BYTES = 4096
START_HINT = "start Docker or Podman, or set DOCKER_HOST"


class ContainerApiError(SandboxError):
    """The container runtime refused. `status` is its HTTP status."""

    def __init__(self, message: str, /, *, status: int = 0, hint: str | None = None, **data: Any) -> None:
        super().__init__(message, hint=hint, status=status, **data)
        self.status = status


@dataclass(frozen=True, slots=True)
class ContainerApiAddress:
    """Where the container runtime listens."""

    path: str | None
    """Path of its Unix socket, if it has one."""
    host: str = "localhost"
    port: int = 2375
    context: ssl.SSLContext | None = None

    @property
    def is_local(self) -> bool:
        """Whether it runs on this machine, so that it can mount folders of it."""
        return self.path is not None

    @property
    def base(self) -> str:
        return f"{'https' if self.context else 'http'}://{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"unix://{self.path}" if self.path else self.base


def find_address(text: str | None = None) -> ContainerApiAddress:
    """From `DOCKER_HOST`. Raises SandboxError for one that cannot be used."""
    address = text or DOCKER_HOST.read() or DEFAULT_ADDRESS
    parts = urlsplit(address)
    if parts.scheme == "unix":
        return ContainerApiAddress(parts.path)
    if parts.scheme not in ("tcp", "http", "https") or not parts.hostname:
        hint = "give unix:///path or tcp://host:port; for ssh, forward the socket yourself"
        raise SandboxError(f"a container runtime at {address} cannot be reached", hint=hint)
    secure = parts.scheme == "https" or bool(DOCKER_TLS_VERIFY.read())
    context = client_context() if secure else None
    return ContainerApiAddress(None, parts.hostname, parts.port or (2376 if secure else 2375), context)


def client_context() -> ssl.SSLContext:
    folder = DOCKER_CERT_PATH.read() or Path.home() / ".docker"
    try:
        context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        context.load_cert_chain(str(folder / "cert.pem"), str(folder / "key.pem"))
    except OSError as error:
        hint = "put ca.pem, cert.pem and key.pem into DOCKER_CERT_PATH"
        raise SandboxError(f"the certificates in {folder} cannot be used: {error}", hint=hint) from error
    return context


class ContainerApi:
    """One container runtime. Use it as an async context manager."""

    def __init__(self, address: ContainerApiAddress | None = None) -> None:
        self.address = address or find_address()
        self.version = ""
        """The API version that both sides implement."""
        self.name = ""
        self.builder = ""
        """`2` if the runtime offers BuildKit."""
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ContainerApi:
        address = self.address
        connector: aiohttp.BaseConnector = (
            aiohttp.UnixConnector(path=address.path)
            if address.path
            else aiohttp.TCPConnector(ssl=address.context or True)
        )
        self._session = aiohttp.ClientSession(connector=connector)
        try:
            await self._negotiate_version()
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

    async def _negotiate_version(self) -> None:
        """Choose a version of the API that both sides implement."""
        async with self._request("GET", "/_ping", timeout=PING_SECONDS) as response:
            if response.status != 200:
                raise ContainerApiError(
                    f"{self.address} is not a container runtime", status=response.status, hint=START_HINT
                )
            runtime_version = parse_version(response.headers.get("Api-Version", ""))
            self.name = response.headers.get("Server", "")
            self.builder = response.headers.get("Builder-Version", "")
        if runtime_version is None or runtime_version < OLDEST_VERSION:
            supported = ".".join(map(str, runtime_version)) if runtime_version else "no known version"
            hint = f"API {'.'.join(map(str, OLDEST_VERSION))} is needed"
            raise ContainerApiError(f"the container runtime at {self.address} implements API {supported}", hint=hint)
        self.version = ".".join(map(str, min(runtime_version, NEWEST_VERSION)))

    # -- requests -------------------------------------------------------------------------------------

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        data: bytes | IO[bytes] | None = None,
        accepted: tuple[int, ...] = (),
        timeout: float | None = RESPONSE_SECONDS,
    ) -> Any:
        """The response as JSON, or None. Raises ContainerApiError if the status is above 399 and not `accepted`."""
        sent = orjson.dumps(body) if body is not None else data
        kind = "application/json" if body is not None else TAR
        headers = {"Content-Type": kind} if sent is not None else {}
        async with self._request(
            method, f"/v{self.version}{path}", params=query, data=sent, headers=headers, timeout=timeout
        ) as response:
            content = await response.read()
            if response.status >= 400 and response.status not in accepted:
                raise ContainerApiError(
                    f"the container runtime refuses: {error_message(content)}", status=response.status
                )
            return orjson.loads(content) if response.content_type == "application/json" and content else None

    async def lines(
        self,
        path: str,
        query: Mapping[str, str],
        *,
        data: bytes | IO[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[dict[str, Any]]:
        """A response that is a stream of JSON objects. Raises ContainerApiError if one of them reports an error.

        `data` is an archive to send."""
        sent = {**(headers or {}), **({} if data is None else {"Content-Type": TAR})}
        async with self._request(
            "POST", f"/v{self.version}{path}", params=query, data=data, headers=sent, timeout=None
        ) as response:
            if response.status >= 400:
                reason = error_message(await response.read())
                raise ContainerApiError(f"the container runtime refuses: {reason}", status=response.status)
            async for line in whole_lines(response.content):
                progress: dict[str, Any] = orjson.loads(line)
                if progress.get("error"):
                    raise ContainerApiError(f"the container runtime reports: {progress['error']}")
                yield progress

    def _request(self, method: str, path: str, *, timeout: float | None, **options: Any) -> PendingResponse:
        if self._session is None:
            raise SandboxError("the connection to the container runtime is closed")
        limits = aiohttp.ClientTimeout(total=timeout)
        return PendingResponse(
            self.address, self._session.request(method, f"{self.address.base}{path}", timeout=limits, **options)
        )

    async def attach(self, container: str) -> AttachedChannel:
        """The input and output of a container, from before it starts."""
        address = self.address
        query = "stream=1&stdin=1&stdout=1&stderr=1"
        request = (
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
            writer.write(request.encode())
            head = await reader.readuntil(b"\r\n\r\n")
            status = int(head.split(b" ", 2)[1])
            if status not in (101, 200):
                raise ContainerApiError("the container runtime does not attach to the container", status=status)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, IndexError) as error:
            writer.close()
            raise ContainerApiError("the container runtime does not answer to attach as documented") from error
        except BaseException:
            writer.close()
            raise
        return AttachedChannel(reader, writer)

    # -- images, containers, volumes ---------------------------------------------------------------------

    async def inspect_image(self, image: str) -> dict[str, Any] | None:
        """What the runtime says about an image that it has; None if it does not have it."""
        document = await self.call("GET", f"/images/{quote(image, safe='/:@')}/json", accepted=(404,))
        return document if document is not None and "Id" in document else None

    async def pull_image(self, image: str, login: str = "") -> None:
        """Let the runtime pull an image. `login` is a value for X-Registry-Auth."""
        path, _, digest = image.partition("@")
        name, colon, tag = path.rpartition(":")
        if not colon or "/" in tag:
            name, tag = path, "latest"
        headers = {"X-Registry-Auth": login} if login else {}
        async for _ in self.lines("/images/create", {"fromImage": name, "tag": digest or tag}, headers=headers):
            pass

    async def load_image(self, archive: Path) -> None:
        """Give the runtime an archive of `docker save`, or an OCI layout."""
        with archive.open("rb") as file:
            async for _ in self.lines("/images/load", {"quiet": "1"}, data=file):
                pass

    def build_image(self, context: bytes, query: Mapping[str, str]) -> AsyncIterator[dict[str, Any]]:
        """The messages of a build, whose context is a tar archive with a Dockerfile."""
        return self.lines("/build", query, data=context)

    async def create_container(self, body: dict[str, Any]) -> CreatedContainer:
        container: dict[str, Any] = await self.call("POST", "/containers/create", body=body)
        return CreatedContainer(str(container["Id"]), tuple(map(str, container.get("Warnings") or ())))

    async def create(self, body: dict[str, Any]) -> str:
        return (await self.create_container(body)).id

    async def writable_bytes(self, container: str) -> int | None:
        """How much a container has written to its root; None if the runtime does not say."""
        document = await self.call("GET", f"/containers/{container}/json", query={"size": "1"})
        size = (document or {}).get("SizeRw")
        return size if isinstance(size, int) else None

    async def start(self, container: str) -> None:
        await self.call("POST", f"/containers/{container}/start")

    async def remove(self, container: str) -> None:
        """Kill and remove a container; one that is gone, or being removed, is no error."""
        query = {"force": "1", "v": "1"}
        await self.call("DELETE", f"/containers/{container}", query=query, accepted=(404, 409))

    async def find_containers(self, label: str) -> list[str]:
        query = {"all": "1", "filters": json.dumps({"label": [label]})}
        return [str(container["Id"]) for container in await self.call("GET", "/containers/json", query=query) or []]

    async def create_volume(self, name: str, labels: dict[str, str]) -> None:
        await self.call("POST", "/volumes/create", body={"Name": name, "Labels": labels})

    async def find_volumes(self, label: str) -> list[str]:
        answer = await self.call("GET", "/volumes", query={"filters": json.dumps({"label": [label]})}) or {}
        return [str(volume["Name"]) for volume in answer.get("Volumes") or []]

    async def remove_volume(self, name: str) -> None:
        await self.call("DELETE", f"/volumes/{quote(name)}", query={"force": "1"}, accepted=(404, 409))

    async def put_archive(self, container: str, path: str, archive: bytes | IO[bytes]) -> None:
        """Unpack a tar archive of ours into a container that has not been started."""
        query = {"path": path, "noOverwriteDirNonDir": "1"}
        await self.call("PUT", f"/containers/{container}/archive", query=query, data=archive, timeout=None)


@dataclass(frozen=True, slots=True)
class CreatedContainer:
    id: str
    warnings: tuple[str, ...]
    """Such as limits that the runtime cannot enforce."""


class PendingResponse:
    """A request in flight. Its connection errors are raised as ContainerApiError."""

    def __init__(self, address: ContainerApiAddress, request: Any) -> None:
        self._address, self._request = address, request

    async def __aenter__(self) -> aiohttp.ClientResponse:
        try:
            response: aiohttp.ClientResponse = await self._request.__aenter__()
        except (aiohttp.ClientError, OSError) as error:
            raise unreachable(self._address, error) from error
        return response

    async def __aexit__(self, *error: Any) -> None:
        await self._request.__aexit__(*error)


class AttachedChannel(AsyncioChannel):
    """The standard streams of a container. Both outputs arrive on one connection, in frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(reader, writer)
        self.stderr = bytearray()
        """The last bytes that it wrote to its standard error."""

    async def receive(self) -> bytes:
        while True:
            try:
                kind, length = FRAME.unpack(await self._reader.readexactly(FRAME.size))
                data = await self._reader.readexactly(length)
            except (asyncio.IncompleteReadError, ConnectionError):
                return b""
            if kind == STDERR:
                self.stderr += data
                del self.stderr[:-STDERR_BYTES]
            elif kind == STDOUT and data:
                return data
            elif kind not in (0, STDOUT):
                raise SandboxError("the container runtime sends an unknown kind of frame")


async def whole_lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The lines of a response, however long: a message of a build can be longer than a line that aiohttp reads."""
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.strip():
                yield line
    if rest.strip():
        yield rest


def parse_version(text: str) -> tuple[int, int] | None:
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def error_message(content: bytes) -> str:
    try:
        return str(orjson.loads(content)["message"])
    except (ValueError, KeyError, TypeError):
        return content.decode("utf-8", "replace").strip()[:500] or "no reason given"


def unreachable(address: ContainerApiAddress, error: Exception) -> ContainerApiError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
    return ContainerApiError(
        f"no container runtime answers at {address}: {reason}", hint=START_HINT, fails_for_all=True
    )
