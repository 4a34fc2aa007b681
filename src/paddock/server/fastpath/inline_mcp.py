"""Tool calls over HTTP that are answered inline: without a task, and without the ASGI application.

A call of a tool that runs inline, in a session that is idle, waits for nothing. uvicorn parses the request as usual.
A request that cannot be answered here takes the plain path from its beginning: nothing was executed.

Measured gain: 1.7 times the calls over 16 connections.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from paddock.errors import PaddockError
from paddock.protocol import jsonrpc, mcp
from paddock.protocol.jsonrpc import RpcCall
from paddock.server.access import check_access, lookup
from paddock.server.handshake import LEASE_HEADER
from paddock.server.http import REQUEST_NUMBER_HEADER
from paddock.server.http_protocol import LimitedProtocol
from paddock.server.mcp import HttpCaller, speaks_known_version
from paddock.server.rpc import encode_response, respond_inline

if TYPE_CHECKING:
    from paddock.server.access import Header
    from paddock.server.service import Service

MAX_BODY_BYTES = 65536
"""A request with a larger body takes the plain path."""
MAX_ANSWERED_BYTES = 65536
"""How much is answered here for the requests of one read. uvloop applies backpressure only after the iteration."""
FAILED_RESPONSE = b"HTTP/1.1 500 Internal Server Error\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
logger = logging.getLogger("paddock.server")


class InlineMcpProtocol(LimitedProtocol):
    """uvicorn's HTTP protocol, which tries `answer_inline` before it begins a request."""

    service: Service
    _body: bytes | None = None
    """The body so far; None if the request takes the plain path."""
    _header: Header
    _answered_bytes = 0

    def data_received(self, data: bytes) -> None:
        self._answered_bytes = 0
        super().data_received(data)

    def on_headers_complete(self) -> None:
        # An answer that was written since the data came has started the keep-alive timer.
        self._unset_keepalive_if_required()
        if self.url == b"/mcp" and self._is_simple(header := lookup(self.headers)):
            self._body, self._header = b"", header
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._body is None:
            super().on_body(body)
        else:
            self._body += body

    def on_message_complete(self) -> None:
        body, self._body = self._body, None
        if body is not None:
            self._is_arriving = False
            if self._answer(body):
                return
            super().on_headers_complete()
            super().on_body(body)
        super().on_message_complete()

    def _answer(self, body: bytes) -> bool:
        """Answer the request, if that is possible inline. False if it takes the plain path."""
        try:
            answer = answer_inline(self.service, self._header, body)
        except Exception:
            logger.exception("a call could not be handled")
            self.transport.write(FAILED_RESPONSE)
            self.transport.close()
            return True
        if answer is not None:
            self._reply(answer)
        return answer is not None

    def _is_simple(self, header: Header) -> bool:
        """Whether the request has no unusual headers, and no other request of the connection is being answered."""
        parser = self.parser
        if parser.get_method() != b"POST" or parser.get_http_version() != "1.1" or not parser.should_keep_alive():
            return False
        if parser.should_upgrade() or self.expect_100_continue or self._has_unread_answers():
            return False
        if self.pipeline or (self.cycle is not None and not self.cycle.response_complete):
            return False
        length = header("content-length")
        return length is not None and length.isdecimal() and int(length) <= MAX_BODY_BYTES

    def _has_unread_answers(self) -> bool:
        """Whether the client does not read its answers. Only the plain path can wait until it does."""
        return self.flow.write_paused or self._answered_bytes > MAX_ANSWERED_BYTES

    def _reply(self, body: bytes) -> None:
        self._answered_bytes += len(body)
        defaults = b"".join([b"%b: %b\r\n" % header for header in self.server_state.default_headers])
        self.transport.write(
            b"HTTP/1.1 200 OK\r\n%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (defaults, len(body), body)
        )
        self.on_response_complete()


def answer_inline(service: Service, header: Header, body: bytes) -> bytes | None:
    """The answer to a POST to `/mcp`; None if it has to take the plain path, or is refused there."""
    if service.stopping or service.siblings is not None or header(LEASE_HEADER) is not None:
        return None
    if header(REQUEST_NUMBER_HEADER) is not None:
        return None
    if not speaks_known_version(header):
        return None
    token = header(mcp.SESSION_HEADER)
    try:
        check_access(service.config.access, header)
        call = jsonrpc.parse(body)
        if not isinstance(call, RpcCall) or len(body) > service.config.limits.message_bytes:
            return None
        if token is not None:
            service.manager.find(token)
    except PaddockError:
        return None
    response = respond_inline(service, HttpCaller(service, token), call)
    return None if response is None else encode_response(response)
