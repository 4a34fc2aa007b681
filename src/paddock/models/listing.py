"""The models that a server lists, and what answers at a URL that lists none: an environment, a web page.

The key is sent to the server of the URL alone.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson

from paddock.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import aiohttp

    from paddock.models.endpoint import ModelUrl

LIST_SECONDS = 15.0
LARGEST_LIST_BYTES = 4 * 1024 * 1024
LIST_HINT = "check that the server runs there, or give the model's name"
NAME_HINT = "give the model's name"
HTML = "text/html"


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """An answer to GET."""

    status: int
    content_type: str
    body: bytes

    @property
    def document(self) -> Any:
        """The body as JSON, or None."""
        try:
            return orjson.loads(self.body) if self.status == 200 else None
        except orjson.JSONDecodeError:
            return None

    @property
    def models(self) -> list[str]:
        """The names that a list of models has."""
        document = self.document
        entries = document.get("data") if isinstance(document, dict) else None
        if not isinstance(entries, list):
            return []
        return [entry["id"] for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]


async def list_models(server: ModelUrl, api_key: str | None) -> list[str]:
    """The names that `GET /models` lists, at least one.

    Raises ModelError if the server does not answer, refuses, or lists nothing. The error names what answers there.
    """
    import aiohttp

    headers = dict(server.headers) if api_key is None else {**server.headers, "Authorization": f"Bearer {api_key}"}
    timeout = aiohttp.ClientTimeout(total=LIST_SECONDS, sock_connect=LIST_SECONDS)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session:
            page = await _get(session, f"{server.url}/models", headers)
            if page.models:
                return page.models
            raise await _explain(session, server, page, headers)
    except TimeoutError:
        raise ModelError(f"{server.label} did not answer within {LIST_SECONDS:g} s", hint=LIST_HINT) from None
    except aiohttp.ClientError as error:
        raise ModelError(f"{server.label} does not answer: {_reason(error)}", hint=LIST_HINT) from None


async def _explain(
    session: aiohttp.ClientSession, server: ModelUrl, page: ServerAnswer, headers: Mapping[str, str]
) -> ModelError:
    """The error for a server that lists no models."""
    label = server.label
    if page.status in (401, 403):
        return ModelError(f"{label} wants another key (status {page.status})", hint="set PADDOCK_MODEL_API_KEY")
    if page.document is not None and page.content_type != HTML:
        return ModelError(f"{label} lists no models", hint=NAME_HINT)
    import aiohttp

    with suppress(aiohttp.ClientError, TimeoutError):
        error = await _identify(session, server, page, headers)
        if error is not None:
            return error
    return ModelError(f"{label} does not list its models (status {page.status})", hint=NAME_HINT)


async def _identify(
    session: aiohttp.ClientSession, server: ModelUrl, page: ServerAnswer, headers: Mapping[str, str]
) -> ModelError | None:
    """The error for a server that is something else, which other paths of it tell."""
    label = server.label
    parts = urlsplit(server.url)
    origin = f"{parts.scheme}://{parts.netloc}"
    if parts.path != "/v1" and (await _get(session, f"{origin}/v1/models", headers)).models:
        return ModelError(f"{label} is the wrong path: the models are at {origin}/v1", hint=f"give {origin}/v1")
    if is_environment((await _get(session, f"{origin}/metadata", {})).document):
        hint = f"give the URL of an inference engine; to act in the environment, add --agent loop --env {origin}"
        return ModelError(f"{label} is an environment server, not a model", hint=hint)
    if HTML in (page.content_type, (await _get(session, f"{origin}/", {})).content_type):
        return ModelError(
            f"{label} is a web page, not a model (status {page.status})",
            hint="give the base URL of the API, as http://host:8000/v1",
        )
    return None


def is_environment(metadata: Any) -> bool:
    """Whether this is what an OpenEnv server has at `/metadata`."""
    return isinstance(metadata, dict) and isinstance(metadata.get("name"), str) and "description" in metadata


async def _get(session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> ServerAnswer:
    async with session.get(url, headers=headers, allow_redirects=False) as response:
        body = b""
        while len(body) < LARGEST_LIST_BYTES and (more := await response.content.read(LARGEST_LIST_BYTES)):
            body += more
        return ServerAnswer(response.status, response.content_type, body)


def _reason(error: aiohttp.ClientError) -> str:
    """What went wrong, without the request, which may hold a key."""
    os_error = getattr(error, "os_error", None)
    if os_error is not None:
        return os_error.strerror or "no connection"
    return type(error).__name__
