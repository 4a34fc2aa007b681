"""Requests to a package store: its database through PostgREST, and its archives.

The public key is enough to read public packages. A Harbor API key is exchanged for a token that can read private ones
too. A request that may succeed later is repeated here, and nowhere else. Knows no tables and no packages.
"""

from __future__ import annotations

import http.client
import json
import threading
import urllib.error
import urllib.request
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from paddock.errors import TaskError
from paddock.limits import GIBIBYTE, MEBIBYTE
from paddock.loopback import is_loopback_url
from paddock.retry import Backoff, Deadline, parse_retry_after

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

T = TypeVar("T")

REQUEST_SECONDS = 60.0
"""How long the store may stay silent."""
LARGEST_ANSWER = 64 * MEBIBYTE
LARGEST_ARCHIVE = 8 * GIBIBYTE
CHUNK_BYTES = MEBIBYTE
PAGE_ROWS = 1000
MOST_ROWS = 200_000
ARCHIVE_SECONDS = 3600.0
BACKOFF = Backoff(first_seconds=0.5, attempts=4)
LONGEST_RETRY_AFTER = 30.0
TEMPORARY_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
UNAUTHORIZED, FORBIDDEN = 401, 403
SHOWN_CHARACTERS = 300


class TemporaryFailure(TaskError):
    """The same request may succeed later."""

    retry_after: float | None = None
    """Seconds that the store asks to wait."""


class StoreConnection:
    """Its methods can be called by several threads, and raise TaskError."""

    def __init__(self, url: str, key: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._key = key
        self._api_key = api_key
        self._token: str | None = None
        self._token_lock = threading.Lock()
        self.stopped = threading.Event()
        """Once it is set, the downloads and retries of all threads raise TaskError."""
        # urllib would send requests to this machine through a proxy too.
        proxies = [urllib.request.ProxyHandler({})] if is_loopback_url(url) else []
        self._opener = urllib.request.build_opener(_Redirects, *proxies)

    def rows(self, table: str, query: Mapping[str, str]) -> list[Any]:
        """Rows of a table that match a PostgREST query."""
        rows = self._repeat(partial(self._ask, f"rest/v1/{table}?{urlencode(query)}"))
        if not isinstance(rows, list):
            raise TaskError(f"{self.url} did not answer with rows", hint="check PADDOCK_PACKAGE_STORE")
        return rows

    def all_rows(self, table: str, query: Mapping[str, str]) -> list[Any]:
        """As `rows`, page by page: a store may send fewer than it is asked for. The query needs an `order`."""
        rows: list[Any] = []
        while page := self.rows(table, {**query, "offset": str(len(rows)), "limit": str(PAGE_ROWS)}):
            rows += page
            if len(rows) > MOST_ROWS:
                raise TaskError(f"{self.url} has more than {MOST_ROWS} rows for {table}", hint="use another version")
        return rows

    def call(self, function: str, parameters: Mapping[str, str]) -> Any:
        """What a function of the database returns."""
        return self._repeat(partial(self._ask, f"rest/v1/rpc/{function}", parameters))

    def download(self, path: str, file: Path) -> None:
        """Write an archive to `file`. Raises OSError if it cannot be written."""
        self._repeat(partial(self._download, f"storage/v1/object/{quote(path, errors='replace')}", file))

    # -- one request ------------------------------------------------------------------------------

    def _ask(self, path: str, body: Mapping[str, str] | None = None, *, token: str | None = None) -> Any:
        with self._open(path, token or self._read_token(), body) as response:
            text = self._read(response, LARGEST_ANSWER)
            if len(text) == LARGEST_ANSWER:
                raise TaskError(f"{self.url} gave an answer of over {len(text)} bytes", hint="use another version")
            if response.length:
                raise self._interrupted("an answer")
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TaskError(
                f"{self.url} did not answer with JSON: {error}", hint="check PADDOCK_PACKAGE_STORE"
            ) from error

    def _download(self, path: str, file: Path) -> None:
        deadline, size = Deadline(ARCHIVE_SECONDS), 0
        with self._open(path, self._read_token()) as response, file.open("wb") as output:
            while chunk := self._read_available(response):
                size += len(chunk)
                if size > LARGEST_ARCHIVE:
                    raise TaskError(f"its archive has more than {LARGEST_ARCHIVE} bytes", hint="use another version")
                if deadline.seconds_left < 0:
                    raise TaskError(f"its download takes more than {ARCHIVE_SECONDS:g} s", hint="try again later")
                if self.stopped.is_set():
                    raise TaskError("the download was stopped", hint="try again")
                output.write(chunk)
            # The bytes that are missing; None where the store named no length.
            if response.length:
                raise self._interrupted("an archive")

    def _read_token(self) -> str:
        """Who is asking: the public key stands for everyone."""
        if self._api_key is None:
            return self._key
        with self._token_lock:
            if self._token is None:
                self._token = self._exchange(self._api_key)
            return self._token

    def _exchange(self, api_key: str) -> str:
        if not self.url.startswith("https://") and not is_loopback_url(self.url):
            raise TaskError(
                f"HARBOR_API_KEY would be sent to {self.url} without TLS", hint="use https:// or unset it"
            )
        answer = self._ask("functions/v1/api-key-exchange", {"api_key": api_key}, token=self._key)
        if not isinstance(answer, dict) or not isinstance(answer.get("access_token"), str):
            raise TaskError("the package store gave no token for HARBOR_API_KEY", hint="make a new key, or unset it")
        return str(answer["access_token"])

    def _open(self, path: str, token: str, body: Mapping[str, str] | None = None) -> http.client.HTTPResponse:
        request = urllib.request.Request(f"{self.url}/{path}", None if body is None else json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        # Unredirected: another host that the store leads to gets neither the key nor the token.
        request.add_unredirected_header("apikey", self._key)
        request.add_unredirected_header("Authorization", f"Bearer {token}")
        try:
            return self._opener.open(request, timeout=REQUEST_SECONDS)  # type: ignore[no-any-return]
        except urllib.error.HTTPError as error:
            raise self._refusal(error, token) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._broken(error) from error

    def _read(self, response: http.client.HTTPResponse, size: int) -> bytes:
        try:
            return response.read(size)
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(error) from error

    def _read_available(self, response: http.client.HTTPResponse) -> bytes:
        """What has arrived: with a slow store, too, `stopped` has an effect at once."""
        try:
            return response.read1(CHUNK_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(error) from error

    # -- failures ---------------------------------------------------------------------------------

    def _repeat(self, work: Callable[[], T]) -> T:
        for attempt in range(BACKOFF.attempts - 1):
            try:
                return work()
            except TemporaryFailure as error:
                self.stopped.wait(BACKOFF.pause(attempt, error.retry_after))
                if self.stopped.is_set():
                    raise
        return work()

    def _interrupted(self, what: str) -> TemporaryFailure:
        return TemporaryFailure(f"{self.url} ended the connection within {what}", hint="try again")

    def _broken(self, error: Exception) -> TemporaryFailure:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or type(error).__name__
        return TemporaryFailure(
            f"the package store {self.url} cannot be read: {self._printable(str(reason))}",
            hint="check PADDOCK_PACKAGE_STORE",
        )

    def _refusal(self, error: urllib.error.HTTPError, token: str) -> TaskError:
        text = self._printable(_message(error))
        message = f"the package store {self.url} answered {error.code}{f': {text}' if text else ''}"
        key_hint = "check PADDOCK_PACKAGE_STORE_KEY, and HARBOR_API_KEY if it is set"
        if error.code in TEMPORARY_STATUS:
            failure = TemporaryFailure(message, hint="try again later")
            failure.retry_after = parse_retry_after(
                error.headers.get("Retry-After"), longest_seconds=LONGEST_RETRY_AFTER
            )
            return failure
        if error.code == UNAUTHORIZED and token == self._token:
            # It may have expired: the next attempt asks for another one.
            self._token = None
            return TemporaryFailure(message, hint=key_hint)
        if error.code in (UNAUTHORIZED, FORBIDDEN):
            return TaskError(message, hint=key_hint)
        return TaskError(message, hint="check PADDOCK_PACKAGE_STORE and the name of the package")

    def _printable(self, text: str) -> str:
        """Text of the store for a terminal: a short line, without secrets and control characters."""
        for secret in (self._key, self._api_key, self._token):
            if secret:
                text = text.replace(secret, "…")
        line = "".join(character if character.isprintable() else " " for character in text)
        return " ".join(line.split())[:SHOWN_CHARACTERS]


class _Redirects(urllib.request.HTTPRedirectHandler):
    """The key goes along to another path of the same host."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        target, source = urlsplit(newurl), urlsplit(req.full_url)
        if target.scheme not in ("http", "https"):
            raise urllib.error.HTTPError(req.full_url, code, f"redirect to {target.scheme}", headers, fp)
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and (target.scheme, target.netloc) == (source.scheme, source.netloc):
            request.unredirected_hdrs.update(req.unredirected_hdrs)
        return request


def _message(error: urllib.error.HTTPError) -> str:
    """What an answer says about its failure. Its own connection may fail too."""
    try:
        with error:
            answer = error.read(LARGEST_ANSWER)
    except (OSError, http.client.HTTPException):
        return ""
    try:
        return str(json.loads(answer)["message"])
    except (ValueError, RecursionError, LookupError, TypeError):
        return answer.decode(errors="replace")
