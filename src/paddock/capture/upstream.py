"""HTTP client of the model endpoints, shared by all rollouts. Keeps the engine and the compatibility of each
endpoint.

One call of `post` is one attempt; the exchange decides on retries. Every failure of an attempt is raised as
`UpstreamFailure`. Knows nothing about agents and records.
"""

from __future__ import annotations

import asyncio
import io
import logging
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Self

import aiohttp
import orjson

from paddock.capture.engines import DETECTION_PATHS, UNKNOWN, detect_by_owner, detect_by_paths, find_engine
from paddock.capture.errors import UpstreamFailure, read_error
from paddock.capture.upstream_request import Compatibility
from paddock.errors import ModelError
from paddock.protocol.sse import MEDIA_TYPE
from paddock.retry import Backoff, parse_retry_after

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from types import TracebackType

    from paddock.capture.engines import InferenceEngine
    from paddock.capture.settings import CaptureSettings
    from paddock.models.endpoint import Endpoint

log = logging.getLogger("paddock.capture")

CONNECT_SECONDS = 10.0
DETECTION_SECONDS = 2.0
"""For each of the requests that detect the engine."""
SIDE_REQUEST_SECONDS = 30.0
DRAIN_SECONDS = 0.5
IDLE_CONNECTION_SECONDS = 4.0
"""Less than the 5 s after which common servers close an idle connection."""
RETRIED_STATUS = frozenset((408, 409, 429))
CONNECTION_ERRORS = (aiohttp.ClientError, OSError, TimeoutError)
LONGEST_ERROR_BYTES = 64 * 1024
LONGEST_RETRY_AFTER_SECONDS = 3600.0
LARGE_BODY_BYTES = 1024 * 1024
DETECTION_PAUSE_SECONDS = 30.0
"""After a failed detection, until the next one."""


class UpstreamResponse:
    """A response with status 200, before its body is read."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers
        self.is_stream = response.content_type == MEDIA_TYPE

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Raises UpstreamFailure if it breaks off."""
        content = self._response.content
        while True:
            try:
                piece = await content.readany()
            except CONNECTION_ERRORS as error:
                raise connection_failure(error) from error
            if not piece:
                return
            yield piece

    async def document(self) -> dict[str, Any]:
        """The whole body as JSON. Raises UpstreamFailure."""
        try:
            raw = await self._response.read()
            document = orjson.loads(raw)
        except CONNECTION_ERRORS as error:
            raise connection_failure(error) from error
        except orjson.JSONDecodeError as error:
            raise UpstreamFailure(f"the endpoint's answer is not JSON: {error}", status=self.status) from error
        if not isinstance(document, dict):
            raise UpstreamFailure("the endpoint's answer is not a JSON object", status=self.status)
        return document

    async def drain(self) -> None:
        """Read the rest, so that the connection can be used again; give up soon if it does not end."""
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                await self._response.content.read()
        except CONNECTION_ERRORS:
            self._response.close()


class Upstream:
    """Use it as `async with`, once per event loop."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._engines: dict[tuple[str, str], InferenceEngine] = {}
        self._next_detection: dict[tuple[str, str], float] = {}
        self._detection_locks: dict[tuple[str, str], asyncio.Lock] = {}
        self._compatibility: dict[tuple[str, str], Compatibility] = {}

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            headers={"User-Agent": "paddock", "Content-Type": "application/json"},
            read_bufsize=1024 * 1024,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # -- one attempt --------------------------------------------------------------------------------

    @asynccontextmanager
    async def post(
        self,
        endpoint: Endpoint,
        path: str,
        payload: bytes,
        *,
        headers: Mapping[str, str],
        idle: float,
        root: bool = False,
    ) -> AsyncIterator[UpstreamResponse]:
        """Post to the endpoint (or to its server's root). Leaving early closes the connection at once.

        Raises UpstreamFailure for every status but 200.
        """
        url = (server_root(endpoint) if root else endpoint.url.rstrip("/")) + path
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=idle)
        # aiohttp warns about large bytes; it writes a file in pieces.
        data = payload if len(payload) < LARGE_BODY_BYTES else io.BytesIO(payload)
        try:
            response = await self._client.post(
                url, data=data, headers=request_headers(endpoint, headers), timeout=timeout, allow_redirects=False
            )
        except CONNECTION_ERRORS as error:
            raise connection_failure(error) from error
        try:
            if response.status != 200:
                raise await read_failure(response)
            yield UpstreamResponse(response)
        finally:
            # Closes an unread response; a finished one has returned its connection to the pool.
            response.close()

    async def post_to_root(self, endpoint: Endpoint, path: str, document: dict[str, Any]) -> dict[str, Any]:
        """A side request to the server's root. Raises UpstreamFailure."""
        payload = orjson.dumps(document)
        async with self.post(endpoint, path, payload, headers={}, idle=SIDE_REQUEST_SECONDS, root=True) as response:
            return await response.document()

    async def get(self, endpoint: Endpoint, path: str, *, root: bool = False) -> Any:
        """The JSON document at a path; None if there is none. Raises UpstreamFailure without a connection."""
        url = (server_root(endpoint) if root else endpoint.url.rstrip("/")) + path
        timeout = aiohttp.ClientTimeout(total=DETECTION_SECONDS)
        try:
            async with self._client.get(
                url, headers=request_headers(endpoint, {}), timeout=timeout, allow_redirects=False
            ) as response:
                return orjson.loads(await response.read()) if response.status == 200 else None
        except orjson.JSONDecodeError:
            return None
        except CONNECTION_ERRORS as error:
            raise connection_failure(error) from error

    # -- properties of an endpoint ------------------------------------------------------------------

    async def detect_engine(self, endpoint: Endpoint) -> InferenceEngine:
        """The inference engine of the endpoint, detected once, without a completion."""
        if endpoint.engine is not None:
            return find_engine(endpoint.engine)
        key = (endpoint.url, endpoint.name)
        if key in self._engines:
            return self._engines[key]
        async with self._detection_locks.setdefault(key, asyncio.Lock()):
            if key not in self._engines and time.monotonic() >= self._next_detection.get(key, 0.0):
                engine = await self._detect(endpoint)
                if engine is not None:
                    self._engines[key] = engine
                else:
                    self._next_detection[key] = time.monotonic() + DETECTION_PAUSE_SECONDS
        return self._engines.get(key, UNKNOWN)

    async def _detect(self, endpoint: Endpoint) -> InferenceEngine | None:
        """None if the server did not answer: it may still be starting."""
        try:
            models = await self.get(endpoint, "/models")
        except UpstreamFailure as failure:
            log.debug("no list of models from %s: %s", endpoint.display_name, failure.message)
            models = None
        if (engine := detect_by_owner(models)) is not None:
            return engine
        documents = await asyncio.gather(*(self._get_or_none(endpoint, path) for path in DETECTION_PATHS))
        if models is None and not any(documents):
            return None
        return detect_by_paths(dict(zip(DETECTION_PATHS, documents, strict=True))) or UNKNOWN

    async def _get_or_none(self, endpoint: Endpoint, path: str) -> Any:
        try:
            return await self.get(endpoint, path, root=True)
        except UpstreamFailure as failure:
            log.debug("no answer to %s from %s: %s", path, endpoint.display_name, failure.message)
            return None

    def compatibility(self, endpoint: Endpoint) -> Compatibility:
        return self._compatibility.get((endpoint.url, endpoint.name)) or Compatibility()

    def set_compatibility(self, endpoint: Endpoint, compatibility: Compatibility) -> None:
        self._compatibility[endpoint.url, endpoint.name] = compatibility

    @property
    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise ModelError(
                "the way to the model endpoints is closed", hint="use `async with Upstream() as upstream`"
            )
        return self._session


def retry_pause(settings: CaptureSettings, failures: int, failure: UpstreamFailure) -> float:
    """Seconds to wait after that many failed attempts."""
    if failure.retry_after is not None:
        return min(failure.retry_after, settings.longest_retry_after)
    return Backoff(settings.first_pause, settings.longest_pause).pause(failures - 1)


def request_headers(endpoint: Endpoint, headers: Mapping[str, str]) -> dict[str, str]:
    authorization = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
    return {**headers, **endpoint.headers, **authorization}


def server_root(endpoint: Endpoint) -> str:
    return endpoint.url.rstrip("/").removesuffix("/v1")


def connection_failure(error: BaseException) -> UpstreamFailure:
    if isinstance(error, TimeoutError):
        return UpstreamFailure(f"the endpoint sent nothing in time ({type(error).__name__})")
    return UpstreamFailure(f"the connection to the endpoint broke: {type(error).__name__}: {error}")


async def read_failure(response: aiohttp.ClientResponse) -> UpstreamFailure:
    """The failure that a response with another status than 200 describes."""
    raw = b""
    try:
        while len(raw) < LONGEST_ERROR_BYTES and (piece := await response.content.readany()):
            raw += piece
    except CONNECTION_ERRORS as failure:
        log.debug("the error response broke off: %s", type(failure).__name__)
    error = read_error(raw[:LONGEST_ERROR_BYTES])
    status = response.status
    return UpstreamFailure(
        error["message"],
        status=status,
        retryable=status in RETRIED_STATUS or status >= 500 or status < 300,
        retry_after=parse_retry_after(
            response.headers.get("Retry-After"), longest_seconds=LONGEST_RETRY_AFTER_SECONDS
        ),
        kind=error["type"] if isinstance(error["type"], str) else None,
        code=error["code"] if isinstance(error["code"], str | int) else None,
        param=error["param"] if isinstance(error["param"], str) else None,
    )
