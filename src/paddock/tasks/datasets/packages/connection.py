"""Requests to a package store: its database through PostgREST, and its archives.

The public key is enough to read public packages. A Harbor API key is exchanged for a token that can read private ones
too. A request that may succeed later is repeated here, and nowhere else. Knows no tables and no packages.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlencode

from paddock.errors import TaskError
from paddock.limits import GIBIBYTE, MEBIBYTE
from paddock.loopback import is_loopback_url
from paddock.retry import Backoff
from paddock.tasks.datasets.source import without_credentials

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

T = TypeVar("T")

REQUEST_SECONDS = 60.0
"""How long the store may stay silent."""
LARGEST_ANSWER = 64 * MEBIBYTE
LARGEST_ARCHIVE = 8 * GIBIBYTE
CHUNK_BYTES = MEBIBYTE
PAGE_ROWS = 1000
BACKOFF = Backoff(first_seconds=0.5, attempts=4)
TEMPORARY_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
KEY_REFUSED = (401, 403)
SHOWN_CHARACTERS = 300


class TemporaryFailure(TaskError):
    """The same request may succeed later."""


class StoreConnection:
    """Its methods can be called by several threads, and raise TaskError."""

    def __init__(self, url: str, key: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._key = key
        self._api_key = api_key

    def rows(self, table: str, query: Mapping[str, str]) -> list[Any]:
        """Rows of a table that match a PostgREST query."""
        rows = self._ask_with_token(f"rest/v1/{table}?{urlencode(query)}")
        if not isinstance(rows, list):
            raise TaskError(f"{self._public_url} did not answer with rows", hint="check PADDOCK_PACKAGE_STORE")
        return rows

    def all_rows(self, table: str, query: Mapping[str, str]) -> Iterator[Any]:
        """As `rows`, page by page. The query needs an `order`."""
        start = 0
        while True:
            page = self.rows(table, {**query, "offset": str(start), "limit": str(PAGE_ROWS)})
            yield from page
            if len(page) < PAGE_ROWS:
                break
            start += PAGE_ROWS

    def call(self, function: str, parameters: Mapping[str, str]) -> Any:
        """What a function of the database returns."""
        return self._ask_with_token(f"rest/v1/rpc/{function}", parameters)

    def download(self, path: str, file: Path) -> None:
        """Write an archive to `file`."""
        _with_retries(partial(self._download, f"storage/v1/object/{quote(path)}", file))

    def _ask_with_token(self, path: str, body: Mapping[str, str] | None = None) -> Any:
        return _with_retries(partial(self._ask, path, self._token, body))

    @cached_property
    def _token(self) -> str:
        """Who is asking: the public key stands for everyone."""
        if self._api_key is None:
            return self._key
        if not self.url.startswith("https://") and not is_loopback_url(self.url):
            raise TaskError(
                f"HARBOR_API_KEY would be sent to {self._public_url} without TLS", hint="use https:// or unset it"
            )
        exchange = partial(self._ask, "functions/v1/api-key-exchange", self._key, {"api_key": self._api_key})
        answer = _with_retries(exchange)
        if not isinstance(answer, dict) or not isinstance(answer.get("access_token"), str):
            raise TaskError("the package store gave no token for HARBOR_API_KEY", hint="make a new key, or unset it")
        return str(answer["access_token"])

    def _ask(self, path: str, token: str, body: Mapping[str, str] | None = None) -> Any:
        with self._open(path, token, body) as response:
            text = self._read(response, LARGEST_ANSWER)
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TaskError(
                f"{self._public_url} did not answer with JSON: {error}", hint="check PADDOCK_PACKAGE_STORE"
            ) from error

    def _download(self, path: str, file: Path) -> None:
        with self._open(path, self._token) as response, file.open("wb") as output:
            size = 0
            while chunk := self._read(response, CHUNK_BYTES):
                size += len(chunk)
                if size > LARGEST_ARCHIVE:
                    raise TaskError(f"an archive has more than {LARGEST_ARCHIVE} bytes", hint="use another version")
                output.write(chunk)
            # The bytes that are missing; None where the store named no length.
            if response.length:
                raise TemporaryFailure(f"{self._public_url} ended the connection within an archive", hint="try again")

    def _open(self, path: str, token: str, body: Mapping[str, str] | None = None) -> http.client.HTTPResponse:
        request = urllib.request.Request(f"{self.url}/{path}", None if body is None else json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        # Unredirected: another host that the store leads to gets neither the key nor the token.
        request.add_unredirected_header("apikey", self._key)
        request.add_unredirected_header("Authorization", f"Bearer {token}")
        try:
            return urllib.request.urlopen(request, timeout=REQUEST_SECONDS)  # type: ignore[no-any-return]
        except urllib.error.HTTPError as error:
            raise self._refusal(error) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._broken(error) from error

    def _read(self, response: http.client.HTTPResponse, size: int) -> bytes:
        try:
            return response.read(size)
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> TemporaryFailure:
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        return TemporaryFailure(
            f"the package store {self._public_url} cannot be read: {reason}", hint="check PADDOCK_PACKAGE_STORE"
        )

    def _refusal(self, error: urllib.error.HTTPError) -> TaskError:
        with error:
            text = _message(error.read(LARGEST_ANSWER))
        message = f"the package store {self._public_url} answered {error.code}{f': {text}' if text else ''}"
        if error.code in TEMPORARY_STATUS:
            return TemporaryFailure(message, hint="try again later")
        if error.code in KEY_REFUSED:
            return TaskError(message, hint="check PADDOCK_PACKAGE_STORE_KEY, and HARBOR_API_KEY if it is set")
        return TaskError(message, hint="check PADDOCK_PACKAGE_STORE and the name of the package")

    @property
    def _public_url(self) -> str:
        return without_credentials(self.url)


def _message(answer: bytes) -> str:
    """What an answer says about its failure."""
    try:
        text = json.loads(answer)["message"]
    except (ValueError, RecursionError, LookupError, TypeError):
        text = answer.decode(errors="replace")
    return " ".join(str(text).split())[:SHOWN_CHARACTERS]


def _with_retries(work: Callable[[], T]) -> T:
    for attempt in range(BACKOFF.attempts - 1):
        try:
            return work()
        except TemporaryFailure:
            time.sleep(BACKOFF.pause(attempt))
    return work()
