"""The way to the model endpoints: one HTTP client for all rollouts, and what it has learned about each endpoint.

One call of `post` is one attempt; whether to try again is the exchange's to decide. Every way in which an
attempt can fail comes out as `Failure`. Knows nothing about agents and records.
"""

from __future__ import annotations

import asyncio
import io
import logging
import random
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Self

import aiohttp
import orjson

from paddock.errors import ModelError
from paddock.rollouts.capture.engines import TELLTALE_PATHS, UNKNOWN, by_name, by_owner, by_telltales
from paddock.rollouts.capture.refusals import CONTEXT_CODE, read_error
from paddock.rollouts.capture.shaping import Lessons

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from types import TracebackType

    from paddock.rollouts.blame import Blamed
    from paddock.rollouts.capture.engines.base import Engine
    from paddock.rollouts.capture.settings import CaptureSettings
    from paddock.rollouts.models.endpoint import Endpoint

log = logging.getLogger("paddock.rollouts.capture")

CONNECT_SECONDS = 10.0
GLANCE_SECONDS = 2.0
"""For each of the cheap questions that tell the engine."""
SIDE_QUESTION_SECONDS = 30.0
DRAIN_SECONDS = 0.5
KEEP_CONNECTION_SECONDS = 4.0
"""Less than the 5 s after which common servers hang up on an idle connection."""
RETRIED_STATUS = frozenset((408, 409, 429))
BROKEN = (aiohttp.ClientError, OSError, TimeoutError)
LONGEST_ERROR = 64 * 1024
LARGE = 1024 * 1024
UNANSWERED_SECONDS = 30.0
"""How long an endpoint that told nothing about its engine is left in peace."""


class Failure(Exception):
    """An attempt failed. `kind`, `code` and `param` are what the endpoint said, if it said anything."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        retryable: bool = True,
        retry_after: float | None = None,
        kind: str | None = None,
        code: str | int | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.retryable = retryable
        self.retry_after = retry_after
        self.kind = kind
        self.code = code
        self.param = param

    @property
    def is_endpoints_fault(self) -> bool:
        """Not what was asked is to blame, but whoever was asked: no answer, no access, no model, too busy, broken."""
        status = self.status
        return status is None or status < 400 or status in (401, 403, 404, 408, 429) or status >= 500

    @property
    def is_context_overflow(self) -> bool:
        return self.code == CONTEXT_CODE

    @property
    def blamed(self) -> Blamed:
        if self.is_context_overflow:
            return "context"
        return "endpoint" if self.is_endpoints_fault else "request"


class Answered:
    """An endpoint that has begun to answer with success."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers
        self.streams = response.content_type == "text/event-stream"

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises Failure if it breaks off."""
        content = self._response.content
        while True:
            try:
                piece = await content.readany()
            except BROKEN as error:
                raise broken(error) from error
            if not piece:
                return
            yield piece

    async def document(self) -> dict[str, Any]:
        """The whole body as JSON. Raises Failure."""
        try:
            raw = await self._response.read()
            found = orjson.loads(raw)
        except BROKEN as error:
            raise broken(error) from error
        except orjson.JSONDecodeError as error:
            raise Failure(f"the endpoint's answer is not JSON: {error}", status=self.status) from error
        if not isinstance(found, dict):
            raise Failure("the endpoint's answer is not a JSON object", status=self.status)
        return found

    async def drain(self) -> None:
        """Read what is left, so that the connection can be used again; give up soon if it does not end."""
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                await self._response.content.read()
        except BROKEN:
            self._response.close()


class Upstream:
    """Use it as `async with`, once per event loop."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._engines: dict[tuple[str, str], Engine] = {}
        self._silent_until: dict[tuple[str, str], float] = {}
        self._finding: dict[tuple[str, str], asyncio.Lock] = {}
        self._lessons: dict[tuple[str, str], Lessons] = {}

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_CONNECTION_SECONDS),
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
    ) -> AsyncIterator[Answered]:
        """Post to the endpoint (or to its server's root). Leaving early closes the connection at once.

        Raises Failure for everything that is not a success.
        """
        url = (server_root(endpoint) if root else endpoint.url.rstrip("/")) + path
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=idle)
        # aiohttp warns about large bytes, and writes a file in pieces instead.
        data = payload if len(payload) < LARGE else io.BytesIO(payload)
        try:
            response = await self._client.post(
                url, data=data, headers=credentials(endpoint, headers), timeout=timeout, allow_redirects=False
            )
        except BROKEN as error:
            raise broken(error) from error
        try:
            if response.status != 200:
                raise await refusal(response)
            yield Answered(response)
        finally:
            # Closes what was not read to its end; a finished response has already given its connection back.
            response.close()

    async def ask(self, endpoint: Endpoint, path: str, document: dict[str, Any]) -> dict[str, Any]:
        """A question to the server's root beside the calls. Raises Failure."""
        payload = orjson.dumps(document)
        async with self.post(endpoint, path, payload, headers={}, idle=SIDE_QUESTION_SECONDS, root=True) as answered:
            return await answered.document()

    async def get(self, endpoint: Endpoint, path: str, *, root: bool = False) -> Any:
        """A cheap question, or None if there is no answer of use. Raises Failure if nobody is there."""
        url = (server_root(endpoint) if root else endpoint.url.rstrip("/")) + path
        timeout = aiohttp.ClientTimeout(total=GLANCE_SECONDS)
        try:
            async with self._client.get(
                url, headers=credentials(endpoint, {}), timeout=timeout, allow_redirects=False
            ) as response:
                return orjson.loads(await response.read()) if response.status == 200 else None
        except orjson.JSONDecodeError:
            return None
        except BROKEN as error:
            raise broken(error) from error

    # -- what is known of an endpoint ---------------------------------------------------------------

    async def engine(self, endpoint: Endpoint) -> Engine:
        """Which engine answers there, found without a completion and remembered."""
        if endpoint.engine is not None:
            return by_name(endpoint.engine)
        key = (endpoint.url, endpoint.name)
        if key in self._engines:
            return self._engines[key]
        async with self._finding.setdefault(key, asyncio.Lock()):
            if key not in self._engines and time.monotonic() >= self._silent_until.get(key, 0.0):
                found = await self._find_engine(endpoint)
                if found is not None:
                    self._engines[key] = found
                else:
                    self._silent_until[key] = time.monotonic() + UNANSWERED_SECONDS
        return self._engines.get(key, UNKNOWN)

    async def _find_engine(self, endpoint: Endpoint) -> Engine | None:
        """None if nobody answered: the server may still be starting."""
        try:
            models = await self.get(endpoint, "/models")
        except Failure as failure:
            log.debug("no list of models from %s: %s", endpoint.shown, failure.message)
            models = None
        if (found := by_owner(models)) is not None:
            return found
        answers = dict(
            zip(
                TELLTALE_PATHS,
                await asyncio.gather(*(self._glance(endpoint, p) for p in TELLTALE_PATHS)),
                strict=True,
            )
        )
        if models is None and not any(answers.values()):
            return None
        return by_telltales(answers) or UNKNOWN

    async def _glance(self, endpoint: Endpoint, path: str) -> Any:
        try:
            return await self.get(endpoint, path, root=True)
        except Failure as failure:
            log.debug("no answer to %s from %s: %s", path, endpoint.shown, failure.message)
            return None

    def lessons(self, endpoint: Endpoint) -> Lessons:
        return self._lessons.get((endpoint.url, endpoint.name)) or Lessons()

    def learn(self, endpoint: Endpoint, lessons: Lessons) -> None:
        self._lessons[endpoint.url, endpoint.name] = lessons

    @property
    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise ModelError(
                "the way to the model endpoints is closed", hint="use `async with Upstream() as upstream`"
            )
        return self._session


def pause(settings: CaptureSettings, failed: int, failure: Failure) -> float:
    """Seconds to wait after the `failed`th failed attempt."""
    if failure.retry_after is not None:
        return min(failure.retry_after, settings.longest_retry_after)
    longest = min(settings.first_pause * 2.0 ** (failed - 1), settings.longest_pause)
    return longest * random.uniform(0.5, 1.0)


def credentials(endpoint: Endpoint, headers: Mapping[str, str]) -> dict[str, str]:
    own = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
    return {**headers, **endpoint.headers, **own}


def server_root(endpoint: Endpoint) -> str:
    return endpoint.url.rstrip("/").removesuffix("/v1")


def broken(error: BaseException) -> Failure:
    """A failure of the connection itself."""
    if isinstance(error, TimeoutError):
        return Failure(f"the endpoint sent nothing in time ({type(error).__name__})")
    return Failure(f"the connection to the endpoint broke: {type(error).__name__}: {error}")


async def refusal(response: aiohttp.ClientResponse) -> Failure:
    """What a status other than 200 means."""
    raw = b""
    try:
        while len(raw) < LONGEST_ERROR and (piece := await response.content.readany()):
            raw += piece
    except BROKEN as error:
        log.debug("the refusal broke off: %s", type(error).__name__)
    told = read_error(raw[:LONGEST_ERROR])
    status = response.status
    return Failure(
        told["message"],
        status=status,
        retryable=status in RETRIED_STATUS or status >= 500 or status < 300,
        retry_after=retry_after(response.headers.get("Retry-After")),
        kind=told["type"] if isinstance(told["type"], str) else None,
        code=told["code"] if isinstance(told["code"], str | int) else None,
        param=told["param"] if isinstance(told["param"], str) else None,
    )


def retry_after(value: str | None) -> float | None:
    """Seconds; a date is not worth the clocks it needs."""
    try:
        seconds = float(value or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None
