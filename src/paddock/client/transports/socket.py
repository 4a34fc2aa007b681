"""One WebSocket connection on picows: text messages in and out. Keeps no state of a session."""

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

MAX_FRAME_BYTES = 1024 * 1024 * 1024
CLOSE_SECONDS = 2.0
"""How long the close handshake may take; then the connection is cut."""
PING_SECONDS = 20.0
"""After this long without data a ping is sent, which has to be answered within the same time."""
HOST_PING_SECONDS = 4.0
"""To a host of a cluster that the gateway redirected us to: no gateway watches this connection."""
MAX_REDIRECTS = 5
TEXT = WSMsgType.TEXT
picows_logger = logging.getLogger("paddock.picows.client")
picows_logger.setLevel(logging.CRITICAL)


class WebSocketConnection(WSListener):
    """Calls `on_message(bytes)` for every message, and `on_lost(socket)` once at the end.

    Both may be called before `open_socket` has returned, when everything arrives in one read.
    """

    def __init__(self, on_message: Callable[[bytes], None], on_lost: Callable[[WebSocketConnection], None]) -> None:
        self.transport: WSTransport
        self.headers: Any = {}
        self.is_lost = False
        self._on_message = on_message
        self._on_lost = on_lost
        self._fragments: list[bytes] = []
        self.code, self.reason = 1006, ""

    def send(self, frame: bytes) -> None:
        self.transport.send(TEXT, frame)

    def close(self) -> None:
        """Send a close frame and hang up."""
        if not self.is_lost:
            self.transport.send_close(WSCloseCode.OK)
            self.transport.disconnect()

    def abort(self) -> None:
        """Cut the connection without a close frame, as a broken network would."""
        self.transport.underlying_transport.abort()

    async def close_and_wait(self) -> None:
        """Close, and wait until that is done. A peer that does not read is cut off."""
        self.close()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
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
        if kind == TEXT and frame.fin and not self._fragments:
            self._on_message(frame.get_payload_as_bytes())
        elif kind == WSMsgType.CLOSE:
            self.code = int(frame.get_close_code())  # type: ignore[call-overload]
            self.reason = frame.get_close_reason() or ""
            transport.send_close(frame.get_close_code())
            transport.disconnect()
        elif kind in (TEXT, WSMsgType.CONTINUATION):
            self._fragments.append(frame.get_payload_as_bytes())
            if frame.fin:
                whole, self._fragments = b"".join(self._fragments), []
                self._on_message(whole)

    def on_ws_disconnected(self, transport: WSTransport) -> None:
        self.is_lost = True
        self._on_lost(self)


def socket_address(url: str, query: str = "") -> str:
    """The WebSocket address of the server at a URL."""
    scheme, host, path, _, _ = urlsplit(url)
    return urlunsplit(("wss" if scheme == "https" else "ws", host, f"{path}/ws", query, ""))


async def open_socket(
    url: str,
    headers: dict[str, str],
    on_message: Callable[[bytes], None],
    on_lost: Callable[[WebSocketConnection], None],
    timeout: float | None,
) -> WebSocketConnection:
    """Open a connection. Raises ConnectFailed, saying what to check."""
    connecting = asyncio.ensure_future(_connect(url, headers, on_message, on_lost, timeout))
    try:
        async with asyncio.timeout(timeout):
            _, socket = await asyncio.shield(connecting)
    except asyncio.CancelledError:
        connecting.add_done_callback(_close_unneeded)
        raise
    except ConnectFailed:
        raise
    except TimeoutError:
        connecting.add_done_callback(_close_unneeded)
        raise ConnectFailed(f"{url} did not answer within {timeout} s", hint="is the server up?") from None
    except WSError as error:
        raise _handshake_error(url, error) from error
    except (OSError, ssl.SSLError) as error:
        raise ConnectFailed(
            f"cannot connect to {url}: {error}", hint="is the server up, and the port right?"
        ) from error
    except Exception as error:
        raise ConnectFailed(f"the handshake with {url} failed: {error!r}") from error
    if not isinstance(socket, WebSocketConnection):
        raise ConnectFailed(f"{url} hung up during the handshake", hint="is the server starting, or behind a proxy?")
    return socket


async def _connect(
    url: str,
    headers: dict[str, str],
    on_message: Callable[[bytes], None],
    on_lost: Callable[[WebSocketConnection], None],
    timeout: float | None,
) -> tuple[WSTransport, WSListener]:
    """Connect, and follow redirects: the gateway of a cluster sends its clients to hosts."""
    ping_seconds = PING_SECONDS
    for _ in range(MAX_REDIRECTS):
        try:
            return await ws_connect(
                lambda: WebSocketConnection(on_message, on_lost),
                url,
                logger_name=picows_logger,
                websocket_handshake_timeout=timeout,
                max_frame_size=MAX_FRAME_BYTES,
                extra_headers=headers,
                enable_auto_ping=True,
                auto_ping_idle_timeout=ping_seconds,
                auto_ping_reply_timeout=ping_seconds,
                max_redirects=0,
            )
        except WSError as error:
            response = getattr(error, "response", None)
            location = (
                response.headers.get("Location") if response is not None and 300 < response.status < 309 else None
            )
            if not location:
                raise
            target = urljoin(url, location)
            if url.startswith("wss:") and not target.startswith("wss:"):
                raise
            url, ping_seconds = target, HOST_PING_SECONDS
    raise ConnectFailed(f"{url} leads nowhere", hint="one redirect follows the other: look at the server")


def _close_unneeded(connecting: asyncio.Future[Any]) -> None:
    """Close a connection that was made after its caller had given up."""
    if not connecting.cancelled() and connecting.exception() is None:
        _, socket = connecting.result()
        if isinstance(socket, WebSocketConnection):
            socket.close()


def _handshake_error(url: str, error: WSError) -> ConnectFailed:
    response = getattr(error, "response", None)
    status = int(response.status) if response is not None else None
    hint = {
        401: "the server wants a token: Client(url, token=...)",
        403: "the server refuses this host or origin, or it has no /ws here: is the base URL right?",
        404: "the server has no /ws here: is the base URL right?",
    }.get(status or 0, "is this an environment server?")
    return ConnectFailed(f"{url} refused the connection ({status or error})", hint=hint, status=status)
