"""One WebSocket connection on picows: text messages in and out, nothing remembered."""

from __future__ import annotations

import asyncio
import logging
import ssl
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit, urlunsplit

from picows import WSCloseCode, WSListener, WSMsgType, ws_connect
from picows.common import WSError

from paddock.errors import ConnectFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from picows import WSFrame, WSTransport

LARGEST_FRAME = 1024 * 1024 * 1024
HANG_UP_SECONDS = 2.0
"""How long a goodbye may take to be sent; then the connection is cut."""
PATIENCE = 20.0
PATIENCE_WITH_HOSTS = 4.0
MOST_REDIRECTS = 5
quiet = logging.getLogger("paddock.picows.client")
quiet.setLevel(logging.CRITICAL)


class Link(WSListener):
    """`received(bytes)` for every message, `lost(link)` once at the end.

    Both may be called before `connect` has returned, when all of it arrives together.
    """

    def __init__(self, received: Callable[[bytes], None], lost: Callable[[Link], None]) -> None:
        self.transport: WSTransport
        self.headers: Any = {}
        self.is_lost = False
        self._received = received
        self._lost = lost
        self._parts: list[bytes] = []
        self.code, self.reason = 1006, ""

    def send(self, frame: bytes) -> None:
        self.transport.send(WSMsgType.TEXT, frame)

    def close(self) -> None:
        """Say goodbye and hang up."""
        if not self.is_lost:
            self.transport.send_close(WSCloseCode.OK)
            self.transport.disconnect()

    def abort(self) -> None:
        """Hang up without a word, as a broken network would."""
        self.transport.underlying_transport.abort()

    async def leave(self) -> None:
        """Say goodbye, hang up and wait until that is done. A peer that does not read is cut off."""
        self.close()
        try:
            async with asyncio.timeout(HANG_UP_SECONDS):
                await self.wait_lost()
        except TimeoutError:
            self.abort()
            await self.wait_lost()

    async def wait_lost(self) -> None:
        await self.transport.wait_disconnected()

    def on_ws_connected(self, transport: WSTransport) -> None:
        self.transport = transport
        self.headers = transport.response.headers

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        kind = frame.msg_type
        if kind == WSMsgType.TEXT and frame.fin:
            self._received(frame.get_payload_as_bytes())
        elif kind == WSMsgType.CLOSE:
            self.code = int(frame.get_close_code())  # type: ignore[call-overload]
            self.reason = frame.get_close_reason() or ""
            transport.send_close(frame.get_close_code())
            transport.disconnect()
        elif kind in (WSMsgType.TEXT, WSMsgType.CONTINUATION):
            self._parts.append(frame.get_payload_as_bytes())
            if frame.fin:
                whole, self._parts = b"".join(self._parts), []
                self._received(whole)

    def on_ws_disconnected(self, transport: WSTransport) -> None:
        self.is_lost = True
        self._lost(self)


def socket_address(url: str, query: str = "") -> str:
    """Where the server behind a URL takes WebSockets."""
    scheme, host, path, _, _ = urlsplit(url)
    return urlunsplit(("wss" if scheme == "https" else "ws", host, f"{path}/ws", query, ""))


async def connect(
    url: str,
    headers: dict[str, str],
    received: Callable[[bytes], None],
    lost: Callable[[Link], None],
    timeout: float | None,
) -> Link:
    """Open a connection. Raises ConnectFailed, saying what to check."""
    connecting = asyncio.ensure_future(_connect(url, headers, received, lost, timeout))
    try:
        async with asyncio.timeout(timeout):
            _, link = await asyncio.shield(connecting)
    except asyncio.CancelledError:
        connecting.add_done_callback(_close_unwanted)
        raise
    except ConnectFailed:
        raise
    except TimeoutError:
        connecting.add_done_callback(_close_unwanted)
        raise ConnectFailed(f"{url} did not answer within {timeout} s", hint="is the server up?") from None
    except WSError as error:
        raise _refused(url, error) from error
    except (OSError, ssl.SSLError) as error:
        raise ConnectFailed(
            f"cannot connect to {url}: {error}", hint="is the server up, and the port right?"
        ) from error
    except Exception as error:
        raise ConnectFailed(f"the handshake with {url} failed: {error!r}") from error
    if not isinstance(link, Link):
        raise ConnectFailed(f"{url} hung up during the handshake", hint="is the server starting, or behind a proxy?")
    return link


async def _connect(
    url: str,
    headers: dict[str, str],
    received: Callable[[bytes], None],
    lost: Callable[[Link], None],
    timeout: float | None,
) -> tuple[WSTransport, WSListener]:
    """Follow a door that sends its clients to hosts. Only we watch over a socket to a host: ask it more often."""
    silence = PATIENCE
    for _ in range(MOST_REDIRECTS):
        try:
            return await ws_connect(
                lambda: Link(received, lost),
                url,
                logger_name=quiet,
                websocket_handshake_timeout=timeout,
                max_frame_size=LARGEST_FRAME,
                extra_headers=headers,
                enable_auto_ping=True,
                auto_ping_idle_timeout=silence,
                auto_ping_reply_timeout=silence,
                max_redirects=0,
            )
        except WSError as error:
            response = getattr(error, "response", None)
            where = response.headers.get("Location") if response is not None and 300 < response.status < 309 else None
            if not where:
                raise
            target = urljoin(url, where)
            if url.startswith("wss:") and not target.startswith("wss:"):
                raise
            url, silence = target, PATIENCE_WITH_HOSTS
    raise ConnectFailed(f"{url} leads nowhere", hint="one redirect follows the other: look at the server")


def _close_unwanted(connecting: asyncio.Future[Any]) -> None:
    """A connection that came about after its caller had given up."""
    if not connecting.cancelled() and connecting.exception() is None:
        _, link = connecting.result()
        if isinstance(link, Link):
            link.close()


def _refused(url: str, error: WSError) -> ConnectFailed:
    response = getattr(error, "response", None)
    status = int(response.status) if response is not None else None
    hint = {
        401: "the server wants a token: Client(url, token=...)",
        403: "the server refuses this host or origin",
        404: "the server has no /ws here: is the base URL right?",
    }.get(status or 0, "is this an environment server?")
    return ConnectFailed(f"{url} refused the connection ({status or error})", hint=hint, status=status)
