"""Where the images of a registry are fetched from: its mirror if one is configured, then the registry itself."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from paddock.config import PADDOCK_IMAGE_INSECURE, PADDOCK_IMAGE_MIRRORS
from paddock.errors import ImageError
from paddock.loopback import is_loopback_url
from paddock.sandbox.images.reference import DEFAULT_REGISTRY

DEFAULT_REGISTRY_HOST = "registry-1.docker.io"


@dataclass(frozen=True, slots=True)
class RegistryEndpoint:
    """One server that has the images of a registry."""

    url: str
    """Without `/v2` and without a slash at the end."""
    login_key: str
    """Under which its login is stored."""


def find_endpoints(registry: str) -> list[RegistryEndpoint]:
    """The servers to ask for images of `registry`, in this order. Raises ImageError for a mirror without TLS."""
    host = DEFAULT_REGISTRY_HOST if registry == DEFAULT_REGISTRY else registry
    scheme = "http" if may_be_plain(host) else "https"
    endpoints = [RegistryEndpoint(f"{scheme}://{host}", registry)]
    mirror = PADDOCK_IMAGE_MIRRORS.read().get(registry)
    if mirror is not None:
        endpoints.insert(0, _mirror(mirror))
    return endpoints


def _mirror(url: str) -> RegistryEndpoint:
    url = url if "://" in url else f"{'http' if may_be_plain(url.partition('/')[0]) else 'https'}://{url}"
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    if parts.scheme not in ("http", "https") or not host or parts.username:
        raise ImageError("PADDOCK_IMAGE_MIRRORS has a mirror that is no http(s) address", hint="write REGISTRY=URL")
    if parts.scheme == "http" and not may_be_plain(host):
        raise ImageError(
            f"the mirror {host} would be used without TLS", hint=f"use https, or set PADDOCK_IMAGE_INSECURE={host}"
        )
    return RegistryEndpoint(f"{parts.scheme}://{host}{parts.path.rstrip('/').removesuffix('/v2')}", host)


def may_be_plain(host: str) -> bool:
    """Whether a host (`NAME[:PORT]`) may be used without TLS: this machine, and what the settings allow."""
    insecure = PADDOCK_IMAGE_INSECURE.read()
    return host in insecure or (urlsplit(f"//{host}").hostname or "") in insecure or is_loopback_url(f"//{host}")
