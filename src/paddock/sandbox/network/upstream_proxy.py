"""The proxy that this machine itself uses, if any. Its credentials stay on the host."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from paddock import config
from paddock.sandbox.network.addresses import parse_address
from paddock.sandbox.network.machine_settings import DEFAULT_PORTS


@dataclass(frozen=True, slots=True)
class UpstreamProxy:
    host: str
    port: int
    authorization: str | None = field(default=None, repr=False)
    """The value of `Proxy-Authorization`."""

    @classmethod
    def parse(cls, url: str) -> UpstreamProxy | None:
        """None for a proxy of another kind than http."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port or DEFAULT_PORTS["http"]
        except ValueError:
            return None
        if parts.scheme != "http" or not parts.hostname:
            return None
        if parts.username is None:
            return cls(parts.hostname, port)
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        return cls(parts.hostname, port, f"Basic {base64.b64encode(pair.encode()).decode()}")


def find_upstream_proxy(scheme: str, host: str) -> UpstreamProxy | None:
    """The proxy of this machine for a host. None: connect directly."""
    url = (config.HTTPS_PROXY if scheme == "https" else config.HTTP_PROXY).read()
    if not url or parse_address(host) is not None or is_excluded(host, config.NO_PROXY.read()):
        return None
    return UpstreamProxy.parse(url)


def is_excluded(host: str, no_proxy: str) -> bool:
    """Whether a list such as `localhost,.example.org` names the host."""
    host = host.lower().removesuffix(".")
    for entry in no_proxy.replace(" ", ",").split(","):
        name = entry.strip().lower().removeprefix("*").removeprefix(".")
        if entry.strip() == "*" or (name and (host == name or host.endswith(f".{name}"))):
            return True
    return False
