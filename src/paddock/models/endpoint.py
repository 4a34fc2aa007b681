"""A model endpoint as a value, the URL that a user writes for it, and the list of models that it serves.

The key stays on the host: no message of this module contains it.
"""

from __future__ import annotations

import re
from base64 import b64encode
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import orjson

from paddock.errors import ConfigError, ModelError
from paddock.protocol.redact import mask_url

if TYPE_CHECKING:
    from collections.abc import Mapping

    import aiohttp

LIST_SECONDS = 15.0
LARGEST_LIST_BYTES = 4 * 1024 * 1024
LIST_HINT = "check that the server runs there, or give the model's name"
URL_HINT = "write it as http://host:8000 or https://host/v1"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible server."""

    url: str
    """The base URL, to which `/chat/completions` is added, as in `http://host:8000/v1`."""
    name: str
    """The model's name there."""
    api_key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    label: str | None = None
    """What the user wrote (`replay:script.json`, `vllm://org/repo`); shown instead of the URL."""
    engine: str | None = None
    """A name in `paddock.capture.engines` if it is known; None lets the proxy detect the engine."""

    @property
    def display_name(self) -> str:
        return self.label or self.name


@dataclass(frozen=True, slots=True)
class ModelUrl:
    """A model URL, checked and completed. Its secrets are in `headers`, not in `url`."""

    url: str
    """The base URL, to which `/chat/completions` is added."""
    host: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The user and password of the URL as an Authorization header."""
    label: str = ""
    """What the user wrote, secrets masked."""


def parse_model_url(text: str) -> ModelUrl:
    """Read `http(s)://[user:password@]host[:port][/path]`; without a path, `/v1` is added.

    Raises ConfigError for anything else. The message shows the URL without its secrets.
    """
    label = mask_url(text)
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ConfigError(f"{label} is not a model address", hint=URL_HINT) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"\s", text):
        raise ConfigError(f"{label} is not a model address", hint=URL_HINT)
    if parts.query or parts.fragment:
        raise ConfigError(
            f"{label} has more than a path behind its host", hint=f"{URL_HINT}; give a key apart from it"
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    path = parts.path.rstrip("/").removesuffix("/chat/completions") or "/v1"
    url = f"{parts.scheme}://{host}{f':{port}' if port is not None else ''}{path}"
    headers = {}
    if parts.username is not None:
        credentials = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        headers["Authorization"] = f"Basic {b64encode(credentials).decode()}"
    return ModelUrl(url, parts.hostname, headers, label)


async def list_models(server: ModelUrl, api_key: str | None) -> list[str]:
    """The names that `GET /models` lists, at least one.

    Raises ModelError if the server does not answer, refuses, or lists nothing.
    """
    import aiohttp

    headers = dict(server.headers) if api_key is None else {**server.headers, "Authorization": f"Bearer {api_key}"}
    timeout = aiohttp.ClientTimeout(total=LIST_SECONDS, sock_connect=LIST_SECONDS)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{server.url}/models", headers=headers, allow_redirects=False) as response,
        ):
            status = response.status
            raw = await response.content.read(LARGEST_LIST_BYTES) if status == 200 else b""
            while (
                status == 200
                and len(raw) < LARGEST_LIST_BYTES
                and (more := await response.content.read(LARGEST_LIST_BYTES))
            ):
                raw += more
    except TimeoutError:
        raise ModelError(f"{server.label} did not answer within {LIST_SECONDS:g} s", hint=LIST_HINT) from None
    except aiohttp.ClientError as error:
        raise ModelError(f"{server.label} does not answer: {_reason(error)}", hint=LIST_HINT) from None
    if status in (401, 403):
        raise ModelError(f"{server.label} wants another key (status {status})", hint="set PADDOCK_MODEL_API_KEY")
    if status != 200:
        raise ModelError(f"{server.label} does not list its models (status {status})", hint="give the model's name")
    names = _read_names(raw)
    if not names:
        raise ModelError(f"{server.label} lists no models", hint="give the model's name")
    return names


def _reason(error: aiohttp.ClientError) -> str:
    """What went wrong, without the request, which may hold a key."""
    os_error = getattr(error, "os_error", None)
    if os_error is not None:
        return os_error.strerror or "no connection"
    return type(error).__name__


def _read_names(raw: bytes) -> list[str]:
    try:
        document: Any = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return []
    entries = document.get("data") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        return []
    return [entry["id"] for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
