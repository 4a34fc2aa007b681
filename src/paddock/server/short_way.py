"""Tool calls over HTTP that are answered at once: without a task, and without the ASGI application.

An agent's call of a tool that runs inline, in a session that is idle, needs to wait for nothing. What uvicorn and the
application do around a request that might costs more than such a call. uvicorn parses the request as ever; one that
cannot be answered here takes the common way from its beginning, and nothing of it has been done.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from paddock.errors import PaddockError
from paddock.protocol import jsonrpc
from paddock.protocol.jsonrpc import Call
from paddock.server.access import check_access, lookup
from paddock.server.connection_limits import LimitedProtocol
from paddock.server.hello import LEASE_HEADER
from paddock.server.mcp import SESSION_HEADER, HttpCaller, speaks_known_version
from paddock.server.one_write import GatheringTransport
from paddock.server.rpc import respond_at_once, written
from paddock.sessions.numbered import HEADER as REQUEST_NUMBER

if TYPE_CHECKING:
    from paddock.server.access import Header
    from paddock.server.service import Service

LARGEST = 65536
"""A larger body is not kept here."""
MOST_KEPT = 65536
"""How much may be answered in one turn of the loop."""
BROKEN = b"HTTP/1.1 500 Internal Server Error\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
logger = logging.getLogger("paddock.server")


class ShortWayProtocol(LimitedProtocol):
    """uvicorn's HTTP protocol, which asks `answer_at_once` before it begins a request."""

    service: Service
    _kept: bytes | None = None
    """What has come of the body, for as long as the request may still go the short way."""
    _header: Header

    def on_headers_complete(self) -> None:
        # An answer that was written since the data came has begun to wait for the next request: this is it.
        self._unset_keepalive_if_required()
        if self.url == b"/mcp" and self._is_simple(header := lookup(self.headers)):
            self._kept, self._header = b"", header
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._kept is None:
            super().on_body(body)
        else:
            self._kept += body

    def on_message_complete(self) -> None:
        body, self._kept = self._kept, None
        if body is not None:
            self._is_arriving = False
            if self._is_answered(body):
                return
            super().on_headers_complete()
            super().on_body(body)
        super().on_message_complete()

    def _is_answered(self, body: bytes) -> bool:
        try:
            answer = answer_at_once(self.service, self._header, body)
        except Exception:
            logger.exception("a call could not be handled")
            self.transport.write(BROKEN)
            self.transport.close()
            return True
        if answer is not None:
            self._reply(answer)
        return answer is not None

    def _is_simple(self, header: Header) -> bool:
        """Whether nothing but its content decides how the request is answered, and no other is under way."""
        parser = self.parser
        if parser.get_method() != b"POST" or parser.get_http_version() != "1.1" or not parser.should_keep_alive():
            return False
        if parser.should_upgrade() or self.expect_100_continue or self._is_full():
            return False
        if self.pipeline or (self.cycle is not None and not self.cycle.response_complete):
            return False
        length = header("content-length")
        return length is not None and length.isdecimal() and int(length) <= LARGEST

    def _is_full(self) -> bool:
        """Whether answers wait for the client to read. Only the common way waits along."""
        kept = self.transport.kept if isinstance(self.transport, GatheringTransport) else 0
        return self.flow.write_paused or kept > MOST_KEPT

    def _reply(self, body: bytes) -> None:
        defaults = b"".join([b"%b: %b\r\n" % header for header in self.server_state.default_headers])
        self.transport.write(
            b"HTTP/1.1 200 OK\r\n%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (defaults, len(body), body)
        )
        self.on_response_complete()


def answer_at_once(service: Service, header: Header, body: bytes) -> bytes | None:
    """The answer to a POST to `/mcp`; None if it has to go the common way, or is refused there."""
    if service.stopping or service.colleagues is not None or header(LEASE_HEADER) is not None:
        return None
    if header(REQUEST_NUMBER) is not None:
        return None
    if not speaks_known_version(header):
        return None
    token = header(SESSION_HEADER)
    try:
        check_access(service.config.access, header)
        call = jsonrpc.parse(body)
        if not isinstance(call, Call) or len(body) > service.config.limits.message_bytes:
            return None
        if token is not None:
            service.manager.find(token)
    except PaddockError:
        return None
    response = respond_at_once(service, HttpCaller(service, token), call)
    return None if response is None else written(response)
