"""Several processes behind one port, with one capacity and one queue over all of them.

Each worker is a whole server. They share a small table of numbers (how many slots each holds, who waits) and pass on
what belongs to another: a WebSocket as its file descriptor (`handoff`), an HTTP request over a Unix socket
(`forwarding`). A session's token begins with the number of the worker that keeps it. `worker_manager` is the parent
process that starts them.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import mmap
import os
import signal
import socket
import struct
import tempfile
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import h11
from starlette.requests import ClientDisconnect

from paddock.errors import PaddockError, RequestError, WorkerUnavailable
from paddock.protocol import mcp
from paddock.server.app import INTERNAL_HEADER
from paddock.server.forwarding import CONNECTION_ERRORS, STALLED_SECONDS, WorkerConnections
from paddock.server.handoff import HANDSHAKE, MAX_NOTE_BYTES, HandOffSender, claim
from paddock.server.handshake import SESSION_HEADER
from paddock.server.http import (
    SESSION_COOKIE,
    cancel_on_disconnect,
    error_response,
    read_body,
    wait_for_disconnect,
)
from paddock.server.keepalive import EVENT_STREAM
from paddock.server.mcp import refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from paddock.config import Limits
    from paddock.server.access import Header
    from paddock.server.service import Service

logger = logging.getLogger("paddock.workers")

SLOTS_IN_USE, FIRST_TICKET, WAITING, EVICTABLE, SOCKETS, HEARTBEAT, GENERATION, GIVEN_UP = range(8)
COLUMNS = 8
UNRESPONSIVE_SECONDS = 2.0
"""A worker writes its heartbeat ten times a second. One that did not for so long gets nothing new."""
EVICT_NOTE = b"make room"
STREAM_HEADERS = (b"transfer-encoding", b"connection", b"content-length")
GATHER_SECONDS = 5.0


class WorkerTable:
    """Rows of integers in shared memory. The file lock is released when its holder dies."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._memory = mmap.mmap(-1, 8 * (1 + COLUMNS * workers))
        self._lock_file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the table

    @contextmanager
    def locked(self) -> Iterator[None]:
        fcntl.lockf(self._lock_file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._lock_file, fcntl.LOCK_UN)

    def get(self, worker: int, column: int) -> int:
        return int(struct.unpack_from("q", self._memory, 8 * (1 + COLUMNS * worker + column))[0])

    def put(self, worker: int, column: int, value: int) -> None:
        struct.pack_into("q", self._memory, 8 * (1 + COLUMNS * worker + column), value)

    def total(self, column: int) -> int:
        return sum(self.get(worker, column) for worker in range(self.workers))

    def next_ticket(self) -> int:
        (last,) = struct.unpack_from("q", self._memory, 0)
        struct.pack_into("q", self._memory, 0, last + 1)
        return int(last + 1)

    def clear(self, worker: int) -> None:
        """Clear the row of a worker that has ended. `GENERATION` counts the processes that had its number."""
        with self.locked():
            for column in range(GENERATION):
                self.put(worker, column, 0)
            self.put(worker, GENERATION, self.get(worker, GENERATION) + 1)

    def write_heartbeat(self, worker: int) -> None:
        self.put(worker, HEARTBEAT, int(time.monotonic() * 1000))

    def is_silent(self, worker: int, seconds: float) -> bool:
        """Whether its event loop has written no heartbeat for so long."""
        return time.monotonic() * 1000 - self.get(worker, HEARTBEAT) > seconds * 1000

    def is_responsive(self, worker: int) -> bool:
        return not self.is_silent(worker, UNRESPONSIVE_SECONDS)

    def generation(self, worker: int) -> int:
        return self.get(worker, GENERATION)


MAX_STALE_TICKETS = 64
"""How many stale tickets may stay in `_lowest_before` before they are removed."""


class SharedSlotCount:
    """One capacity over all workers. The earliest ticket is served first, in whichever worker it waits."""

    def __init__(self, table: WorkerTable, worker: int, capacity: int) -> None:
        self.capacity = capacity
        self._table = table
        self._worker = worker
        self._lowest_before: dict[int, int] = {}
        """The lowest result of `waiting_before` by ticket: a place in the queue never gets worse."""

    def take(self, ticket: int | None = None) -> bool:
        table = self._table
        with table.locked():
            if table.total(SLOTS_IN_USE) >= self.capacity or self._others_first(ticket):
                return False
            table.put(self._worker, SLOTS_IN_USE, table.get(self._worker, SLOTS_IN_USE) + 1)
            return True

    def give_back(self) -> None:
        with self._table.locked():
            self._table.put(self._worker, SLOTS_IN_USE, self._table.get(self._worker, SLOTS_IN_USE) - 1)

    def in_use(self) -> int:
        return self._table.total(SLOTS_IN_USE)

    def new_ticket(self) -> int:
        with self._table.locked():
            return self._table.next_ticket()

    def publish(self, first: int | None, waiting: int) -> None:
        with self._table.locked():
            self._table.put(self._worker, FIRST_TICKET, first or 0)
            self._table.put(self._worker, WAITING, waiting)
        lowest = self._lowest_before
        if len(lowest) > 2 * waiting + MAX_STALE_TICKETS:
            self._lowest_before = {
                ticket: lowest[ticket] for ticket in lowest if first is not None and ticket >= first
            }

    def waiting_before(self, ticket: int) -> int:
        """An upper bound: a worker with a client ahead of `ticket` counts with all that wait there."""
        with self._table.locked():
            before = sum(
                self._table.get(worker, WAITING)
                for worker in range(self._table.workers)
                if worker != self._worker and 0 < self._table.get(worker, FIRST_TICKET) < ticket
            )
        self._lowest_before[ticket] = min(before, self._lowest_before.get(ticket, before))
        return self._lowest_before[ticket]

    def _others_first(self, ticket: int | None) -> bool:
        heads = [
            self._table.get(worker, FIRST_TICKET) for worker in range(self._table.workers) if worker != self._worker
        ]
        return any(head and (ticket is None or head < ticket) for head in heads)


class SiblingWorkers:
    """The other workers, as one worker sees them: their load, and how to pass connections and requests on to them."""

    def __init__(self, number: int, table: WorkerTable, folder: Path, inbox: socket.socket, limits: Limits) -> None:
        self.number = number
        self.table = table
        self.count = SharedSlotCount(table, number, limits.max_sessions)
        self._message_bytes = limits.message_bytes
        self._inbox = inbox
        self._parent = os.getppid()
        self._hand_offs = HandOffSender(folder)
        self._connections = WorkerConnections(folder, table)

    def start(self, service: Service, adopt: Callable[[socket.socket, bytes], None]) -> None:
        """Start to read what the other workers send."""
        self._inbox.setblocking(False)
        asyncio.get_running_loop().add_reader(self._inbox.fileno(), self._read_inbox, service, adopt)

    def tick(self, service: Service) -> None:
        """Publish the load of this worker, and shut down if the parent process has ended."""
        now = service.manager.clock()
        self.table.write_heartbeat(self.number)
        self.table.put(self.number, EVICTABLE, service.manager.count_evictable(now))
        self.table.put(self.number, SOCKETS, len(service.sockets))
        if os.getppid() != self._parent:
            logger.error("the parent process is gone: shutting down")
            os.kill(os.getpid(), signal.SIGTERM)

    def owner(self, token: str | None) -> int | None:
        """Which other worker keeps the session of `token`; None if it is this one, or none."""
        try:
            worker = int((token or "")[:2], 16)
        except ValueError:
            return None
        if worker == self.number or not 0 <= worker < self.table.workers:
            return None
        # The sessions of a worker that was given up are lost, and any worker may answer so.
        return None if self.table.get(worker, GIVEN_UP) else worker

    def best_for_new_client(self) -> int | None:
        """The worker with the lowest load; None if it is this one."""
        loads = [(self.table.get(w, SLOTS_IN_USE), self.table.get(w, SOCKETS)) for w in range(self.table.workers)]
        responsive = [w for w in range(self.table.workers) if w == self.number or self.table.is_responsive(w)]
        best = min(responsive, key=lambda worker: loads[worker])
        return best if loads[best] < loads[self.number] else None

    # -- passing on -------------------------------------------------------------------------------

    def count_waiting(self) -> int:
        """How many wait for a slot, in all workers."""
        return self.table.total(WAITING)

    def hand_over(self, worker: int, transport: Any, request: bytes) -> bool:
        """Give the WebSocket of a session to the worker that keeps it. The client gets a 503 if none claims it."""
        return self._hand_offs.hand_over(worker, transport, request)

    def offer(self, worker: int, transport: Any, request: bytes, on_return: Callable[[], None]) -> bool:
        """Give a WebSocket without a session to another worker. False if it stays; `on_return` if unclaimed."""
        return self._hand_offs.offer(worker, transport, request, on_return)

    async def request_eviction(self) -> bool:
        """Ask a worker that has an evictable session to close it. False if no worker has one."""
        candidates = [w for w in range(self.table.workers) if w != self.number and self.table.get(w, EVICTABLE) > 0]
        try:
            for worker in candidates[:1]:
                self._hand_offs.send_note(worker, EVICT_NOTE)
        except BlockingIOError:
            # Its queue is full of such requests already.
            return True
        except OSError:
            return False
        return bool(candidates)

    async def forwarded(self, scope: Any, receive: Any, send: Any, header: Header) -> bool:
        """Send an HTTP request on to the worker that keeps its session. False if it is ours."""
        worker = self.owner(header(mcp.SESSION_HEADER) or header(SESSION_HEADER) or session_cookie(header("cookie")))
        if worker is None:
            return False
        try:
            body = await read_body(receive, self._message_bytes)
        except ClientDisconnect:
            return True
        except PaddockError as error:
            await error_response(error)(scope, receive, send)
        else:
            await self.forward(worker, scope, body, receive, send)
        return True

    async def forward(self, worker: int, scope: Any, body: bytes, receive: Any, send: Any) -> None:
        """Relay a request to `worker`, and the response to the client, until the client disconnects."""
        is_mcp, generation = scope["path"] == "/mcp", self.table.generation(worker)
        headers = [
            (name, value)
            for name, value in scope["headers"]
            # `SseKeepAlive` of this worker turns a long answer into a stream, so the other worker must not.
            if name not in STREAM_HEADERS and not (is_mcp and scope["method"] == "POST" and name == b"accept")
        ]
        headers.append((b"content-length", b"%d" % len(body)))
        if all(name != b"host" for name, _ in headers):
            # An HTTP/1.0 request may have none. It is forwarded as HTTP/1.1.
            headers.append((b"host", b"localhost"))
        target = scope.get("raw_path") or quote(scope["path"]).encode()
        if scope["query_string"]:
            target = b"%b?%b" % (target, scope["query_string"])
        start = ResponseStart(send)
        relay = self._relay(worker, scope["method"], target, headers, body, start)
        disconnect_wait = partial(
            _first, partial(wait_for_disconnect, receive), partial(self._connections.wait_until_stalled, worker)
        )
        try:
            await cancel_on_disconnect(disconnect_wait, relay)
        except ClientDisconnect:
            if not self.table.is_silent(worker, STALLED_SECONDS):
                return
            error: PaddockError = WorkerUnavailable(
                f"the worker that keeps this session has not moved for {STALLED_SECONDS:g} s",
                hint="the call may have been carried out: ask for the state before you call again",
            )
        except WorkerUnavailable as unavailable:
            error = unavailable
        except h11.LocalProtocolError as malformed:
            error = RequestError(f"the request cannot be passed on: {malformed}", hint="look at its headers and path")
        except CONNECTION_ERRORS as broken:
            error = await self._connections.explain(worker, generation, broken)
        else:
            return
        if start.is_begun:
            # A stream that has begun can only end.
            await send({"type": "http.response.body", "body": b""})
        else:
            await (refuse(error, scope, body, send) if is_mcp else error_response(error)(scope, receive, send))

    async def _relay(
        self, worker: int, method: str, target: bytes, headers: list[tuple[bytes, bytes]], body: bytes, send: Any
    ) -> None:
        """Raises WorkerUnavailable, or one of CONNECTION_ERRORS."""
        connection = await self._connections.take(worker)
        try:
            response = await connection.send(method, target, headers, body)
            status = response.status_code
            fields = [(name, value) for name, value in response.headers if name not in STREAM_HEADERS]
            if dict(fields).get(b"content-type", b"").startswith(EVENT_STREAM):
                await send({"type": "http.response.start", "status": status, "headers": fields})
                async for piece in connection.body():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
            else:
                content = b"".join([piece async for piece in connection.body()])
                fields.append((b"content-length", b"%d" % len(content)))
                await send({"type": "http.response.start", "status": status, "headers": fields})
                await send({"type": "http.response.body", "body": content})
        except BaseException:
            connection.close()
            raise
        self._connections.put_back(worker, connection)

    async def gather(self, path: str, headers: dict[str, str]) -> list[bytes]:
        """The responses of all other workers to the same GET. A worker that does not answer is skipped."""
        fields = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        fields += [(INTERNAL_HEADER.encode(), b"1"), (b"content-length", b"0")]
        if "host" not in headers:
            fields.append((b"host", b"localhost"))
        candidates = (w for w in range(self.table.workers) if w != self.number and not self.table.get(w, GIVEN_UP))
        responses = await asyncio.gather(*(self._fetch(worker, path, fields) for worker in candidates))
        return [response for response in responses if response is not None]

    async def _fetch(self, worker: int, path: str, headers: list[tuple[bytes, bytes]]) -> bytes | None:
        connection = None
        try:
            async with asyncio.timeout(GATHER_SECONDS):
                connection = await self._connections.take(worker)
                await connection.send("GET", path.encode(), headers, b"")
                response = b"".join([piece async for piece in connection.body()])
        except (*CONNECTION_ERRORS, WorkerUnavailable):
            logger.warning("worker %d did not answer %s", worker, path)
            if connection is not None:
                connection.close()
            return None
        self._connections.put_back(worker, connection)
        return response

    def _read_inbox(self, service: Service, adopt: Callable[[socket.socket, bytes], None]) -> None:
        while True:
            try:
                note, descriptors, _, _ = socket.recv_fds(self._inbox, MAX_NOTE_BYTES, 2)
            except BlockingIOError:
                return
            if note.startswith(HANDSHAKE):
                connection = claim(list(descriptors))
                if connection is not None:
                    adopt(connection, note[len(HANDSHAKE) :])
            elif note == EVICT_NOTE:
                service.manager.evict_one()


class ResponseStart:
    """An ASGI `send` that records whether the response has begun."""

    def __init__(self, send: Any) -> None:
        self._send = send
        self.is_begun = False

    async def __call__(self, event: Any) -> None:
        self.is_begun = True
        await self._send(event)


async def _first(*waits: Callable[[], Any]) -> None:
    """Returns when the first of them does."""
    tasks = [asyncio.ensure_future(wait()) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def session_cookie(header: str | None) -> str | None:
    """The session's token in a Cookie header."""
    for part in (header or "").split(";"):
        name, _, value = part.strip().partition("=")
        if name == SESSION_COOKIE:
            return value
    return None
