"""Who may talk to the server: a bearer token, our own host names, our own browser origins."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from paddock.errors import Forbidden, Unauthorized
from paddock.loopback import is_loopback

if TYPE_CHECKING:
    from paddock.config import Access

Header = Callable[[str], str | None]
TEST_CLIENT = "testserver"
"""The host name that Starlette's test client sends. No public site has a name without a dot."""


def lookup(headers: Iterable[tuple[bytes, bytes]]) -> Header:
    """A function that returns a header by its lower-case name. Of a repeated header, the first counts."""
    first: dict[bytes, bytes] = {}
    for name, value in headers:
        first.setdefault(name, value)

    def header(name: str) -> str | None:
        value = first.get(name.encode())
        return None if value is None else str(value, "latin-1")

    return header


def check_access(access: Access, header: Header) -> None:
    """Let a request pass, or raise Unauthorized or Forbidden. `header` looks up a header by name."""
    check_browser(access, header)
    if access.token is not None and not has_token(access, header) and not has_cookie(access, header):
        raise Unauthorized(
            "this server wants its token",
            hint="send 'Authorization: Bearer TOKEN' (Client(url, token=...), or PADDOCK_AUTH_TOKEN)",
        )


def has_token(access: Access, header: Header) -> bool:
    """Whether the request carries the server's token. Compares in constant time."""
    scheme, _, token = (header("authorization") or "").partition(" ")
    expected = (access.token or "").encode()
    # A header may hold any byte.
    return hmac.compare_digest(token.strip().encode(errors="replace"), expected) and scheme.lower() == "bearer"


def page_cookie(token: str) -> tuple[str, str]:
    """Name and value of the cookie that a browser gets for the token. Servers on other ports have other names:
    browsers do not tell ports apart."""
    name = hashlib.sha256(b"paddock page name" + token.encode()).hexdigest()[:12]
    value = hmac.new(token.encode(), b"paddock page", hashlib.sha256).hexdigest()
    return f"paddock_page_{name}", value


def has_cookie(access: Access, header: Header) -> bool:
    """Whether the request comes from our own page, in a browser that was given the token."""
    cookies = header("cookie")
    if cookies is None or access.token is None or not _is_own_page(header):
        return False
    name, value = page_cookie(access.token)
    pairs = [part.strip().partition("=") for part in cookies.split(";")]
    return any(
        cookie == name and hmac.compare_digest(content.encode(errors="replace"), value.encode())
        for cookie, _, content in pairs
    )


def _is_own_page(header: Header) -> bool:
    """Not a page of another port of this machine: cookies are sent along from there too."""
    if header("sec-fetch-site") not in (None, "same-origin", "none"):
        return False
    origin = header("origin")
    return origin is None or origin.partition("://")[2].lower() == (header("host") or "").lower()


def check_browser(access: Access, header: Header) -> None:
    """Refuse pages of other sites, and names that merely resolve to us (DNS rebinding)."""
    host = _host_name(header("host") or "")
    if access.token is None and host and not is_loopback(host) and host not in (*access.hosts, TEST_CLIENT):
        raise Forbidden(
            f"this server does not answer for the host {host!r}",
            hint="name it with --allow-host, or in Access(hosts=...), if it is yours",
        )
    origin = header("origin")
    if origin is None or origin in access.origins:
        return
    try:
        name = _host_name(urlsplit(origin).netloc)
    except ValueError:
        name = ""
    if name != host and not (is_loopback(name) and is_loopback(host)):
        raise Forbidden(f"pages of {origin} may not use this server", hint="allow it with --allow-origin")


def _host_name(netloc: str) -> str:
    """The host without its port: `[::1]:80` is `::1`."""
    if netloc.startswith("["):
        return netloc[1:].partition("]")[0].lower()
    return netloc.partition(":")[0].lower()
