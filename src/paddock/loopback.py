"""Which hosts are this machine, without asking a name server."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Whether a host name, or an IP address without brackets, means this machine."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def is_loopback_url(url: str) -> bool:
    """Whether the host of a URL, or of `//HOST[:PORT]`, means this machine."""
    return is_loopback(urlsplit(url).hostname or "")
