"""Bodies of requests, read with a deadline: whoever stops sending is not waited for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable
    from typing import TypeVar

    ValueT = TypeVar("ValueT")

BODY_SECONDS = 30.0
"""For a body that is read as a whole."""
STALL_SECONDS = 30.0
"""For the next piece of a file that is uploaded."""


async def whole_body(request: web.Request) -> bytes:
    """The body. Raises HTTPRequestTimeout if it does not arrive in time."""
    return await in_time(request.read(), BODY_SECONDS)


async def pieces(content: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The pieces of an upload. Raises HTTPRequestTimeout if one of them does not arrive in time."""
    while True:
        try:
            piece = await next_piece(anext(content))
        except StopAsyncIteration:
            return
        yield piece


async def next_piece(work: Awaitable[ValueT]) -> ValueT:
    """The next part of an upload. Raises HTTPRequestTimeout if it does not arrive in time."""
    return await in_time(work, STALL_SECONDS)


async def in_time(work: Awaitable[ValueT], seconds: float) -> ValueT:
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise web.HTTPRequestTimeout(reason=f"the body did not arrive within {seconds:g} s") from None
