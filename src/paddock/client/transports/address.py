"""Where a server is, as a caller writes it."""

from __future__ import annotations

from urllib.parse import urlsplit

from paddock.errors import ConfigError

HINT = "give http://host:port; a Client takes an environment class too"


def server_url(url: str) -> str:
    """The URL of a server, without a slash at its end. Raises ConfigError for what is none."""
    try:
        parts = urlsplit(str(url))
        is_complete = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError as error:
        raise ConfigError(f"{url!r} is no URL of a server: {error}", hint=HINT) from None
    if not is_complete:
        raise ConfigError(f"{url!r} is no URL of a server", hint=HINT)
    return url.rstrip("/")
