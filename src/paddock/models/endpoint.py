"""A model endpoint as a value, and the URL that a user writes for it.

The key stays on the host: no message of this module contains it.
"""

from __future__ import annotations

import re
from base64 import b64encode
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from paddock.errors import ConfigError
from paddock.protocol.redact import mask_url

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        """What records and messages call the model."""
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
