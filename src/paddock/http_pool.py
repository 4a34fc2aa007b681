"""HTTP connections of an event loop, shared by all clients on it. Knows no endpoint and no error.

They close with the loop, so a client that was never closed leaves no socket behind.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING, Any

import aiohttp

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

KEEP_ALIVE_SECONDS = 4.0
"""How long an idle connection is kept. Common servers close theirs after 5 s, and a request that meets a closing
connection may or may not have run."""
CONNECT_SECONDS = 10.0

_sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[aiohttp.ClientSession, Any]]
_sessions = weakref.WeakKeyDictionary()


async def http_pool() -> aiohttp.ClientSession:
    """The connections of the running loop. Callers pass `allow_redirects=False`: a redirect would
    send the POST, with the key in its headers, to an address that the user did not choose."""
    loop = asyncio.get_running_loop()
    entry = _sessions.get(loop)
    if entry is None or entry[0].closed:
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            headers={"User-Agent": "paddock"},
        )
        guard = _close_with_loop(session)
        entry = _sessions[loop] = (session, guard)
        await anext(guard)
    return entry[0]


async def _close_with_loop(session: aiohttp.ClientSession) -> AsyncGenerator[None]:
    # A loop that ends properly (`asyncio.run` does) closes its unfinished generators: the one hook it offers.
    try:
        yield
    finally:
        await session.close()
