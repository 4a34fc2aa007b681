"""A model's address as a user writes it: checked, completed, and without the secrets it may hold."""

from __future__ import annotations

import re
from base64 import b64encode
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from paddock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Address:
    url: str
    """The base that `/chat/completions` is added to."""
    host: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The user and password of the URL, as a server wants them."""
    label: str = ""
    """What the user wrote, secrets masked."""


def parse_address(written: str) -> Address:
    """Read `http(s)://[user:password@]host[:port][/path]`; without a path, `/v1` is added.

    Raises ConfigError for anything else. The message names the address without its secrets.
    """
    label = masked(written)
    hint = "write it as http://host:8000 or https://host/v1"
    try:
        parts = urlsplit(written)
        port = parts.port
    except ValueError:
        raise ConfigError(f"{label} is not a model address", hint=hint) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"\s", written):
        raise ConfigError(f"{label} is not a model address", hint=hint)
    if parts.query or parts.fragment:
        raise ConfigError(f"{label} has more than a path behind its host", hint=f"{hint}; give a key apart from it")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    path = parts.path.rstrip("/").removesuffix("/chat/completions") or "/v1"
    url = f"{parts.scheme}://{host}{f':{port}' if port is not None else ''}{path}"
    headers = {}
    if parts.username is not None:
        credentials = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        headers["Authorization"] = f"Basic {b64encode(credentials).decode()}"
    return Address(url, parts.hostname, headers, label)


def masked(written: str) -> str:
    """What a user wrote, without what stands before an `@`, and without a query."""
    scheme = re.match(r"([a-z][a-z0-9+.-]*://)?", written, re.IGNORECASE)
    start = scheme.group() if scheme is not None else ""
    _, at, place = written[len(start) :].rpartition("@")
    return f"{start}{'***@' if at else ''}{re.split('[?#]', place)[0]}"
