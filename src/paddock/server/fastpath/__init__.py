"""Everything that exists only for speed. The server works the same without it, only slower.

`PADDOCK_FASTPATH=0` disables it, and the folder may be deleted: nothing else imports it, but for `service.py`,
which asks for `FastPath` and goes on without. Each module states the gain that justifies it.

    websocket      frames on picows, without ASGI
    quick_step     reads an ordinary step without parsing its envelope
    conversation   carries out an ordinary step without dispatch
    threads        runs short steps in batches
    off_loop       lets a thread write its answer itself
    batch_writer   writes the answers of one loop iteration together
    inline_mcp     answers an inline tool call over HTTP without a task and without ASGI
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.server.fastpath.batch_writer import BatchWriter
from paddock.server.fastpath.inline_mcp import InlineMcpProtocol
from paddock.server.fastpath.quick_step import QuickStepReader
from paddock.server.fastpath.threads import BatchingThreads
from paddock.server.fastpath.websocket import FastProtocol

if TYPE_CHECKING:
    from paddock.server.service import Service


class FastPath:
    """The fast variants of the parts of one service."""

    make_threads = BatchingThreads
    http_protocol = InlineMcpProtocol

    def __init__(self, service: Service) -> None:
        self.service = service
        self.step_reader = QuickStepReader(service.spec.routed_action_type)
        self.batch_writer: BatchWriter

    def start(self) -> None:
        """The loop runs."""
        self.batch_writer = BatchWriter(self.service.sockets)

    def make_websocket_protocol(self, server_state: Any) -> FastProtocol:
        return FastProtocol(self, server_state)
