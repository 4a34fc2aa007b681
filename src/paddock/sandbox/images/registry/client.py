"""One registry server: requests with tokens, redirects to other hosts, and errors that say what to do.

Knows no images and no files. Credentials go to the registry and to the token server that it names, nowhere else, and
never into an error.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

import aiohttp

from paddock.errors import ImageError
from paddock.loopback import is_loopback_url
from paddock.retry import parse_retry_after
from paddock.sandbox.images.oci import load_json
from paddock.sandbox.images.registry.endpoints import RegistryEndpoint, may_be_plain
from paddock.sandbox.network.upstream_proxy import find_upstream_proxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from paddock.sandbox.images.registry.credentials import Login

MAX_REDIRECTS = 5
MAX_TOKEN_BYTES = 1 << 20
MAX_RETRY_AFTER_SECONDS = 60.0
CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
LOGIN_HINT = "check the name; for a private image, log in so that ~/.docker/config.json has the login"
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)


class RegistryUnavailable(ImageError):
    """The registry may answer later: no connection, a broken one, or a status that says so."""

    def __init__(self, message: str, *, retry_after: float | None = None, has_progressed: bool = False) -> None:
        super().__init__(message, hint="check the network, or set PADDOCK_IMAGE_MIRRORS")
        self.retry_after = retry_after
        self.has_progressed = has_progressed


class ImageNotFound(ImageError):
    """The registry does not have it, or does not show it to us."""


class WrongContent(ImageError):
    """The registry sent something else than was asked for."""

    def __init__(self, message: str) -> None:
        super().__init__(message, hint="the registry or a proxy on the way is broken; try again")


class RegistryClient:
    """Requests to one endpoint."""

    def __init__(self, endpoint: RegistryEndpoint, login: Login, session: aiohttp.ClientSession) -> None:
        self._endpoint, self._login, self._session = endpoint, login, session
        self._tokens: dict[str, str] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self.host = urlsplit(endpoint.url).netloc

    @asynccontextmanager
    async def get(
        self, repository: str, path: str, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer to `GET /v2/REPOSITORY/PATH`, redirects followed. Raises ImageError unless it is a success.

        An OSError of the caller's block counts as one of the connection.
        """
        url = f"{self._endpoint.url}/v2/{repository}/{path}"
        what = f"{repository} ({path})"
        try:
            response = await self._request(url, repository, dict(headers or {}))
            try:
                self._check(response, what)
                yield response
            finally:
                response.release() if response.content.is_eof() else response.close()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise RegistryUnavailable(f"{self.host} cannot be reached for {what}: {_reason(error)}") from error

    async def _request(self, url: str, repository: str, headers: dict[str, str]) -> aiohttp.ClientResponse:
        refused = self._tokens.get(repository)
        response = await self._get_following(url, _with_token(headers, refused))
        if response.status != 401:
            return response
        challenge = response.headers.get("WWW-Authenticate", "")
        response.close()
        async with self._locks.setdefault(repository, asyncio.Lock()):
            # Another request may have got a new token meanwhile.
            if self._tokens.get(repository) == refused:
                self._tokens[repository] = await self._authorize(challenge, repository)
        return await self._get_following(url, _with_token(headers, self._tokens[repository]))

    async def _get_following(self, url: str, headers: dict[str, str]) -> aiohttp.ClientResponse:
        for _ in range(MAX_REDIRECTS + 1):
            response = await self._session.get(url, headers=headers, allow_redirects=False, **_proxy_options(url))
            if response.status not in (301, 302, 303, 307, 308):
                return response
            response.close()
            target = urljoin(url, response.headers.get("Location", ""))
            self._check_redirect(url, target)
            if _origin(target) != _origin(url):
                # The other host must not get the token, and signed addresses refuse requests that have one.
                headers = {name: value for name, value in headers.items() if name != "Authorization"}
            url = target
        raise ImageError(f"{self.host} redirects more than {MAX_REDIRECTS} times", hint="use another registry")

    def _check_redirect(self, url: str, target: str) -> None:
        parts = urlsplit(target)
        if parts.scheme == "https" or (parts.scheme == "http" and may_be_plain(parts.netloc)):
            return
        raise ImageError(
            f"{self.host} redirects to {parts.netloc or 'nowhere'} without TLS",
            hint=f"set PADDOCK_IMAGE_INSECURE={parts.netloc} to allow it",
        )

    # -- tokens ---------------------------------------------------------------------------------------

    async def _authorize(self, challenge: str, repository: str) -> str:
        """The value of the Authorization header that a challenge asks for."""
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic":
            if not self._login.basic:
                raise ImageNotFound(f"{self.host} wants a login for {repository}", hint=LOGIN_HINT)
            return self._login.basic
        parameters = dict(CHALLENGE.findall(rest))
        realm = parameters.get("realm", "")
        parts = urlsplit(realm)
        if scheme.lower() != "bearer" or not (
            parts.scheme == "https" or (parts.scheme == "http" and may_be_plain(parts.netloc))
        ):
            raise ImageError(f"{self.host} asks for an unknown kind of login", hint=LOGIN_HINT)
        query = {"scope": parameters.get("scope") or f"repository:{repository}:pull"}
        if "service" in parameters:
            query["service"] = parameters["service"]
        return f"Bearer {await self._fetch_token(realm, query, repository)}"

    async def _fetch_token(self, realm: str, query: dict[str, str], repository: str) -> str:
        if self._login.identity_token:
            form = {
                "grant_type": "refresh_token",
                "client_id": "paddock",
                "refresh_token": self._login.identity_token,
            }
            request = self._session.post(
                realm, data={**query, **form}, allow_redirects=False, **_proxy_options(realm)
            )
        else:
            headers = {"Authorization": self._login.basic} if self._login.basic else {}
            request = self._session.get(
                realm, params=query, headers=headers, allow_redirects=False, **_proxy_options(realm)
            )
        async with request as response:
            if response.status in TRANSIENT:
                raise self._unavailable(response, "a token")
            if response.status != 200:
                raise ImageNotFound(
                    f"{urlsplit(realm).netloc} gives no token for {repository}: HTTP {response.status}",
                    hint=LOGIN_HINT,
                )
            if (response.content_length or 0) > MAX_TOKEN_BYTES:
                raise ImageError(f"{urlsplit(realm).netloc} gives a token that is too long", hint=LOGIN_HINT)
            document = load_json(await response.read())
        answer = document.get("token") or document.get("access_token") if isinstance(document, dict) else None
        if not isinstance(answer, str) or not answer.isprintable():
            raise ImageError(f"{urlsplit(realm).netloc} gives no token that can be read", hint=LOGIN_HINT)
        return answer

    # -- errors ---------------------------------------------------------------------------------------

    def _check(self, response: aiohttp.ClientResponse, what: str) -> None:
        if response.status in (200, 206):
            return
        if response.status in TRANSIENT:
            raise self._unavailable(response, what)
        if response.status in (401, 403, 404):
            reason = "does not have" if response.status == 404 else "does not give us"
            raise ImageNotFound(f"{self.host} {reason} {what}: HTTP {response.status}", hint=LOGIN_HINT)
        raise ImageError(f"{self.host} answers HTTP {response.status} for {what}", hint="check the name")

    def _unavailable(self, response: aiohttp.ClientResponse, what: str) -> RegistryUnavailable:
        retry_after = parse_retry_after(response.headers.get("Retry-After"), longest_seconds=MAX_RETRY_AFTER_SECONDS)
        return RegistryUnavailable(f"{self.host} answers HTTP {response.status} for {what}", retry_after=retry_after)


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


def _reason(error: Exception) -> str:
    """Without the address, which can be a signed one."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "its certificate is not trusted"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "its name is not known"
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error.strerror or type(error.os_error).__name__
    if isinstance(error, TimeoutError):
        return "no answer"
    return type(error).__name__ if isinstance(error, aiohttp.ClientError) else str(error)


def _proxy_options(url: str) -> dict[str, Any]:
    """The proxy of this machine, as options of a request.

    aiohttp's `trust_env` would also read `~/.netrc`, and refuse requests that have a token then.
    """
    parts = urlsplit(url)
    if is_loopback_url(f"//{parts.netloc}"):
        return {}
    proxy = find_upstream_proxy(parts.scheme, parts.hostname or "")
    if proxy is None:
        return {}
    headers = {"Proxy-Authorization": proxy.authorization} if proxy.authorization else None
    return {"proxy": f"http://{proxy.host}:{proxy.port}", "proxy_headers": headers}


def _with_token(headers: dict[str, str], token: str | None) -> dict[str, str]:
    return {**headers, "Authorization": token} if token else headers
