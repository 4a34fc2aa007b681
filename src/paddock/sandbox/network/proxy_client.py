"""One program inside that talks to the egress proxy: HTTP/1.1, parsed by h11 on both sides.

A request is parsed and written again, never passed on as it came: what h11 takes for one request is sent as exactly
that one (no request smuggling). Each request goes out on a connection of its own.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import h11

from paddock.sandbox.network.access import BAD_GATEWAY, BAD_REQUEST, GATEWAY_TIMEOUT, ConnectionRefusal
from paddock.sandbox.network.relay import PIECE_BYTES, relay, reset

if TYPE_CHECKING:
    from paddock.sandbox.network.egress import EgressProxy, OutboundConnection

    Headers = list[tuple[bytes, bytes]]

MOST_HEAD_BYTES = 64 * 1024
SWITCHING_PROTOCOLS = 101
PROXY_NAME = b"Paddock egress proxy"
DRAIN_SECONDS = 2.0
AUTHORITY = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[^\s:/@\[\]\\?#]+):(?P<port>[0-9]{1,5})")
FRAMING = {b"content-length", b"transfer-encoding"}
"""Headers that say how long a body is. The proxy writes them itself, so `Connection` cannot take them away."""
HOP_BY_HOP = {
    b"connection",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
    b"expect",
}
"""Headers that are meant for the next machine only (RFC 9110, 7.6.1)."""


class ProxyClient:
    def __init__(self, proxy: EgressProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MOST_HEAD_BYTES)
        self._host, self._port = "", 0
        """What the current request asks for, as far as it is known."""

    async def run(self) -> None:
        """Serve requests until the client or the proxy ends the connection."""
        while True:
            try:
                async with asyncio.timeout(self._proxy.limits.head_seconds):
                    request = await self._next_event()
                if not isinstance(request, h11.Request):
                    return
                self._host, self._port = "", 0
                await (self._tunnel(request) if request.method == b"CONNECT" else self._forward(request))
            except ConnectionRefusal as refusal:
                await self._refuse(refusal)
            except h11.RemoteProtocolError as error:
                await self._refuse(ConnectionRefusal(str(error), status=error.error_status_hint))
                return
            if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
                await self._drain_client()
                return
            self._http.start_next_cycle()

    # -- CONNECT --------------------------------------------------------------------------------------

    async def _tunnel(self, request: h11.Request) -> None:
        match = AUTHORITY.fullmatch(request.target.decode("latin-1"))
        if match is None:
            raise ConnectionRefusal("CONNECT takes HOST:PORT", status=BAD_REQUEST)
        self._host, self._port = match["host"].strip("[]"), int(match["port"])
        async with self._proxy.connect(self._host, self._port, scheme="https") as outbound:
            if outbound.proxy is not None:
                await self._pass_connect_on(outbound)
            await self._send(h11.Response(status_code=200, headers=[], reason=b"Connection established"))
            first_bytes = self._http.trailing_data[0]
            await relay((self._reader, self._writer), outbound, self._proxy.limits.idle_seconds, first_bytes)

    async def _pass_connect_on(self, outbound: OutboundConnection) -> None:
        """Open the tunnel at the proxy that this machine uses."""
        assert outbound.proxy is not None
        authority = f"{self._host}:{self._port}"
        headers = [("Host", authority)]
        if outbound.proxy.authorization is not None:
            headers.append(("Proxy-Authorization", outbound.proxy.authorization))
        head = "".join(f"{name}: {value}\r\n" for name, value in headers)
        outbound.writer.write(f"CONNECT {authority} HTTP/1.1\r\n{head}\r\n".encode())
        async with asyncio.timeout(self._proxy.limits.connect_seconds):
            try:
                answer = await outbound.reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                answer = b""
        if re.match(rb"HTTP/1\.[01] 2[0-9][0-9]", answer) is None:
            status = answer.partition(b"\r\n")[0].decode("ascii", "replace") or "no answer"
            raise ConnectionRefusal(f"the proxy of this machine refused it: {status}", status=BAD_GATEWAY)

    # -- plain http -----------------------------------------------------------------------------------

    async def _forward(self, request: h11.Request) -> None:
        path = self._parse_absolute(request.target.decode("latin-1"))
        async with self._proxy.connect(self._host, self._port, scheme="http") as outbound:
            if self._http.they_are_waiting_for_100_continue:
                await self._send(h11.InformationalResponse(status_code=100, headers=[]))
            exchange = h11.Connection(h11.CLIENT, max_incomplete_event_size=MOST_HEAD_BYTES)
            target = path if outbound.proxy is None else f"http://{self._authority}{path}"
            headers = self._request_headers(request, outbound)
            outgoing = h11.Request(method=request.method, target=target.encode("latin-1"), headers=headers)
            await self._write_out(outbound, exchange, outgoing)
            sending = asyncio.ensure_future(self._send_body(outbound, exchange))
            try:
                await self._return_response(outbound, exchange)
            except h11.RemoteProtocolError as error:
                raise ConnectionRefusal(f"{self._host} does not speak HTTP: {error}", status=BAD_GATEWAY) from None
            finally:
                sending.cancel()
                # The end of the response decides: a host may answer before it has read the whole body.
                await asyncio.gather(sending, return_exceptions=True)
            if exchange.our_state is h11.SWITCHED_PROTOCOL:
                await self._relay_upgraded(outbound, exchange)

    async def _relay_upgraded(self, outbound: OutboundConnection, exchange: h11.Connection) -> None:
        """Both sides speak another protocol from here on, such as WebSocket."""
        self._writer.write(exchange.trailing_data[0])
        first_bytes = self._http.trailing_data[0]
        await relay((self._reader, self._writer), outbound, self._proxy.limits.idle_seconds, first_bytes)

    def _parse_absolute(self, target: str) -> str:
        """Remember host and port, and return the rest. Raises ConnectionRefusal."""
        try:
            parts = urlsplit(target)
            port = 80 if parts.port is None else parts.port
        except ValueError as error:
            raise ConnectionRefusal(f"the address cannot be read: {error}", status=BAD_REQUEST) from None
        if parts.scheme != "http" or not parts.hostname:
            reason = "this is a proxy: ask for http://HOST/PATH, or use CONNECT"
            raise ConnectionRefusal(reason, status=BAD_REQUEST)
        if "\\" in target:
            raise ConnectionRefusal("an address with a backslash is not taken", status=BAD_REQUEST)
        self._host, self._port = parts.hostname, port
        path = parts.path or "/"
        return f"{path}?{parts.query}" if parts.query else path

    @property
    def _authority(self) -> str:
        """Host and port as a URL has them. A user name in front of them is not passed on."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return host if self._port == 80 else f"{host}:{self._port}"

    def _request_headers(self, request: h11.Request, outbound: OutboundConnection) -> Headers:
        received = list(request.headers)
        headers = [(b"Host", self._authority.encode("latin-1"))]
        headers += end_to_end_headers(received, {b"host", *FRAMING})
        framing = [(name, value) for name, value in received if name in FRAMING]
        # Of both, only the chunks count: a host that reads the length instead would see another request.
        is_chunked = any(name == b"transfer-encoding" for name, _ in framing)
        headers += [(b"Transfer-Encoding", b"chunked")] if is_chunked else framing
        if outbound.proxy is not None and outbound.proxy.authorization is not None:
            headers.append((b"Proxy-Authorization", outbound.proxy.authorization.encode()))
        protocol = next((value for name, value in received if name == b"upgrade"), None)
        if protocol is not None and not framing:
            return [*headers, (b"Connection", b"upgrade"), (b"Upgrade", protocol)]
        return [*headers, (b"Connection", b"close")]

    async def _send_body(self, outbound: OutboundConnection, exchange: h11.Connection) -> None:
        while True:
            event = await self._next_event()
            if isinstance(event, h11.Data):
                await self._write_out(outbound, exchange, h11.Data(data=event.data))
            elif isinstance(event, h11.EndOfMessage):
                await self._write_out(outbound, exchange, h11.EndOfMessage())
                return
            else:
                return

    async def _write_out(self, outbound: OutboundConnection, exchange: h11.Connection, event: h11.Event) -> None:
        data = exchange.send(event) or b""
        outbound.live.sent_bytes += len(data)
        outbound.writer.write(data)
        await outbound.writer.drain()

    async def _return_response(self, outbound: OutboundConnection, exchange: h11.Connection) -> None:
        while True:
            event = exchange.next_event()
            if event is h11.NEED_DATA:
                data = await self._read_response(outbound)
                outbound.live.received_bytes += len(data)
                exchange.receive_data(data)
            elif isinstance(event, h11.Response):
                headers = end_to_end_headers(list(event.headers), set())
                await self._send(
                    h11.Response(status_code=event.status_code, headers=headers, reason=bytes(event.reason))
                )
            elif isinstance(event, h11.InformationalResponse):
                if event.status_code == SWITCHING_PROTOCOLS:
                    switched = [(name, value) for name, value in event.headers if name != b"connection"]
                    headers = [*switched, (b"Connection", b"upgrade")]
                    await self._send(h11.InformationalResponse(status_code=SWITCHING_PROTOCOLS, headers=headers))
                    return
            elif isinstance(event, h11.Data):
                await self._send(h11.Data(data=event.data))
            elif isinstance(event, h11.EndOfMessage):
                await self._send(h11.EndOfMessage())
                return
            elif isinstance(event, h11.ConnectionClosed | type(h11.PAUSED)):
                return

    async def _read_response(self, outbound: OutboundConnection) -> bytes:
        seconds = self._proxy.limits.idle_seconds
        while True:
            sent_bytes = outbound.live.sent_bytes
            try:
                async with asyncio.timeout(seconds):
                    return await outbound.reader.read(PIECE_BYTES)
            except TimeoutError:
                if outbound.live.sent_bytes == sent_bytes:  # else an upload goes on
                    reason = f"{self._host} did not answer within {seconds:g} s"
                    raise ConnectionRefusal(reason, status=GATEWAY_TIMEOUT) from None
            except OSError as error:
                reason = f"the connection to {self._host} broke: {error.strerror or error}"
                raise ConnectionRefusal(reason, status=BAD_GATEWAY) from None

    # -- the program inside ---------------------------------------------------------------------------

    async def _next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        while True:
            event = self._http.next_event()
            if event is not h11.NEED_DATA:
                return event
            self._http.receive_data(await self._reader.read(PIECE_BYTES))

    async def _send(self, event: h11.Event) -> None:
        async with asyncio.timeout(self._proxy.limits.idle_seconds):
            self._writer.write(self._http.send(event) or b"")
            await self._writer.drain()

    async def _refuse(self, refusal: ConnectionRefusal) -> None:
        """Answer why, if nothing was answered yet. Tools show the reason phrase of a failed CONNECT, not the body."""
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            reset(self._writer)  # it has a part of another answer, and must not take that for the whole
            return
        text = refusal.describe(self._host, self._port, self._proxy.policy, self._proxy.phase)
        if not self._host:
            refusals = self._proxy.recent_refusals()
            text += "".join(f"Refused: {each.host}:{each.port}: {each.reason}.\n" for each in refusals)
        phrase = refusal.reason.encode("ascii", "replace")
        body = text.encode()
        headers = [
            (b"Content-Type", b"text/plain; charset=utf-8"),
            (b"Content-Length", str(len(body)).encode()),
            (b"Server", PROXY_NAME),
            (b"Connection", b"close"),
        ]
        await self._send(h11.Response(status_code=refusal.status, headers=headers, reason=phrase))
        await self._send(h11.Data(data=body))
        await self._send(h11.EndOfMessage())
        await self._drain_client()

    async def _drain_client(self) -> None:
        """Let the client read the answer: a connection that is closed with unread bytes is reset."""
        with suppress(OSError, TimeoutError):
            await self._writer.drain()
            self._writer.write_eof()
            async with asyncio.timeout(DRAIN_SECONDS):
                while await self._reader.read(PIECE_BYTES):
                    pass


def end_to_end_headers(headers: Headers, dropped: set[bytes]) -> Headers:
    """Without those for the next machine, those that `Connection` names, and `dropped`. Names are in lower case."""
    named = {part.strip().lower() for name, value in headers if name == b"connection" for part in value.split(b",")}
    return [(name, value) for name, value in headers if name not in HOP_BY_HOP | named | dropped]
