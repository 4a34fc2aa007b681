"""Several processes behind one port, with one capacity and one queue over all of them.

Each worker is a whole server. They share a small table of numbers (who holds how many slots, who
waits) and pass on what belongs to another: a WebSocket as its file descriptor, an HTTP request over a
Unix socket. A session's token begins with the number of the worker that keeps it.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import mmap
import os
import shutil
import signal
import socket
import struct
import tempfile
import time
from array import array
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import h11
from starlette.requests import ClientDisconnect

from paddock.errors import ConfigError, HostLost, PaddockError
from paddock.net import HttpConnection
from paddock.server.app import INSIDE_HEADER
from paddock.server.http import (
    SESSION_COOKIE,
    SESSION_HEADER,
    disconnected,
    error_response,
    read_body,
    unless_left,
)
from paddock.server.listening import bind, url_of
from paddock.server.mcp import refuse
from paddock.server.run import run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paddock.config import Limits
    from paddock.server.access import Header
    from paddock.server.service import Service

logger = logging.getLogger("paddock.workers")

MOST_WORKERS = 64
HELD, FIRST, WAITING, GIVING_WAY, SOCKETS = range(5)
COLUMNS = 5
RESTART_PAUSE = 0.5
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
ROOM = b"make room"
HANDSHAKE = b"handshake "
LARGEST_NOTE = 64 * 1024
STREAM_HEADERS = (b"transfer-encoding", b"connection", b"content-length")


class Table:
    """Rows of integers in memory that all workers see. The lock dies with its holder."""

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
        """Forget a worker that is no more."""
        with self.locked():
            for column in range(COLUMNS):
                self.put(worker, column, 0)


class SharedCount:
    """One capacity over all workers. Who waits longest, wherever, is served first."""

    def __init__(self, table: Table, worker: int, capacity: int) -> None:
        self.capacity = capacity
        self._table = table
        self._worker = worker
        self._lowest_before: dict[int, int] = {}
        """The least that `waiting_before` has told, by ticket: nobody can get ahead of one who waits."""

    def take(self, ticket: int | None = None) -> bool:
        table = self._table
        with table.locked():
            if table.total(HELD) >= self.capacity or self._others_first(ticket):
                return False
            table.put(self._worker, HELD, table.get(self._worker, HELD) + 1)
            return True

    def give_back(self) -> None:
        with self._table.locked():
            self._table.put(self._worker, HELD, self._table.get(self._worker, HELD) - 1)

    def taken(self) -> int:
        return self._table.total(HELD)

    def new_ticket(self) -> int:
        with self._table.locked():
            return self._table.next_ticket()

    def publish(self, first: int | None, waiting: int) -> None:
        with self._table.locked():
            self._table.put(self._worker, FIRST, first or 0)
            self._table.put(self._worker, WAITING, waiting)
        told = self._lowest_before
        self._lowest_before = {ticket: told[ticket] for ticket in told if first is not None and ticket >= first}

    def waiting_before(self, ticket: int) -> int:
        """At most so many: where somebody waits ahead of `ticket`, those who came after it count too."""
        with self._table.locked():
            before = sum(
                self._table.get(other, WAITING)
                for other in range(self._table.workers)
                if other != self._worker and 0 < self._table.get(other, FIRST) < ticket
            )
        self._lowest_before[ticket] = min(before, self._lowest_before.get(ticket, before))
        return self._lowest_before[ticket]

    def _others_first(self, ticket: int | None) -> bool:
        heads = [self._table.get(other, FIRST) for other in range(self._table.workers) if other != self._worker]
        return any(head and (ticket is None or head < ticket) for head in heads)


class NotReached(ConnectionError):
    """Another worker takes no connection: nothing was sent to it."""


BROKEN_OFF = (OSError, h11.RemoteProtocolError)


class Colleagues:
    """What one worker knows of the others, and how it passes things on to them."""

    def __init__(self, number: int, table: Table, folder: Path, inbox: socket.socket, limits: Limits) -> None:
        self.number = number
        self.table = table
        self.count = SharedCount(table, number, limits.max_sessions)
        self._message_bytes = limits.message_bytes
        self._folder = folder
        self._inbox = inbox
        self._parent = os.getppid()
        self._outbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._outbox.setblocking(False)
        self._idle: dict[int, list[HttpConnection]] = {}

    def start(self, service: Service, adopt: Callable[[socket.socket, bytes], None]) -> None:
        """Begin to read what the others send."""
        self._inbox.setblocking(False)
        asyncio.get_running_loop().add_reader(self._inbox.fileno(), self._read_inbox, service, adopt)

    def tick(self, service: Service) -> None:
        """Publish what others decide by, and end if the parent has."""
        now = service.manager.clock()
        self.table.put(self.number, GIVING_WAY, service.manager.giving_way(now))
        self.table.put(self.number, SOCKETS, len(service.sockets))
        if os.getppid() != self._parent:
            logger.error("the parent process is gone: shutting down")
            os.kill(os.getpid(), signal.SIGTERM)

    def owner(self, token: str | None) -> int | None:
        """Which other worker keeps the session of `token`; None if it is this one, or nobody."""
        try:
            worker = int((token or "")[:2], 16)
        except ValueError:
            return None
        return worker if worker != self.number and worker < self.table.workers else None

    def best_for_newcomer(self) -> int | None:
        """A worker with less to do than this one, if there is one."""
        loads = [(self.table.get(w, HELD), self.table.get(w, SOCKETS)) for w in range(self.table.workers)]
        best = min(range(self.table.workers), key=lambda worker: loads[worker])
        return best if loads[best] < loads[self.number] else None

    # -- passing on -------------------------------------------------------------------------------

    def hand_over(self, worker: int, transport: Any, request: bytes) -> bool:
        """Give a WebSocket to the worker that should have it. False if it did not take it."""
        descriptor = os.dup(transport.get_extra_info("socket").fileno())
        try:
            address = str(self._folder / f"{worker}.inbox")
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))]
            self._outbox.sendmsg([HANDSHAKE + request], rights, 0, address)
        except OSError as error:
            logger.warning("worker %d takes no connection: %s", worker, error)
            return False
        finally:
            os.close(descriptor)
        transport.abort()
        return True

    async def ask_for_room(self) -> bool:
        """Ask a worker with a session that gives way to close it. True if there was one to ask."""
        others = [w for w in range(self.table.workers) if w != self.number and self.table.get(w, GIVING_WAY) > 0]
        try:
            for worker in others[:1]:
                self._outbox.sendto(ROOM, str(self._folder / f"{worker}.inbox"))
        except OSError:
            # It has much to read already, or is gone.
            return False
        return bool(others)

    async def forwarded(self, scope: Any, receive: Any, send: Any, header: Header) -> bool:
        """Send an HTTP request on to the worker that keeps its session. False if it is ours."""
        worker = self.owner(header("mcp-session-id") or header(SESSION_HEADER) or _cookie(header("cookie")))
        if worker is None:
            return False
        if scope["path"] == "/mcp" and scope["method"] == "GET":
            await _send(send, 405, [(b"allow", b"POST, DELETE")], b"")
            return True
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
        """Let `worker` answer a request for as long as its client waits for that."""
        is_mcp = scope["path"] == "/mcp"
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            # A long answer is made a stream here, and once is enough.
            if name not in STREAM_HEADERS and not (is_mcp and name == b"accept")
        }
        query = scope["query_string"].decode("latin-1")
        target = f"{scope['path']}?{query}" if query else scope["path"]
        asking = self.request(worker, scope["method"], target, body, headers)
        try:
            status, received, answer = await unless_left(partial(disconnected, receive), asking)
        except ClientDisconnect:
            return
        except BROKEN_OFF as error:
            lost = _lost(error)
            await (refuse(lost, scope, body, send) if is_mcp else error_response(lost)(scope, receive, send))
            return
        kept = [(k.encode(), v.encode("latin-1")) for k, v in received.items() if k.encode() not in STREAM_HEADERS]
        await _send(send, status, kept, answer)

    async def request(
        self, worker: int, method: str, target: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """One HTTP exchange with another worker. Raises NotReached, or another of BROKEN_OFF once it has begun."""
        idle = self._idle.setdefault(worker, [])
        connect = partial(_connect, str(self._folder / f"{worker}.http"))
        connection = idle.pop() if idle else HttpConnection("http://localhost", connect=connect)
        answer = await connection.request(method, target, body, headers)
        idle.append(connection)
        return answer

    async def gather(self, path: str, headers: dict[str, str]) -> list[bytes]:
        """The answers of all other workers to the same GET. One that is gone is left out."""
        answers = []
        for worker in range(self.table.workers):
            if worker != self.number:
                try:
                    answers.append((await self.request(worker, "GET", path, b"", {**headers, INSIDE_HEADER: "1"}))[2])
                except BROKEN_OFF:
                    logger.warning("worker %d did not answer %s", worker, path)
        return answers

    def _read_inbox(self, service: Service, adopt: Callable[[socket.socket, bytes], None]) -> None:
        while True:
            try:
                note, descriptors, _, _ = socket.recv_fds(self._inbox, LARGEST_NOTE, 1)
            except BlockingIOError:
                return
            if note.startswith(HANDSHAKE) and descriptors:
                adopt(socket.socket(fileno=descriptors[0]), note[len(HANDSHAKE) :])
            elif note == ROOM:
                service.manager.make_room()


def serve_workers(app: Any, host: str, port: int, workers: int, announce: Callable[[str], None] | None) -> None:
    """Run `workers` processes until SIGTERM or Ctrl-C; start one anew when it dies."""
    if workers > MOST_WORKERS:
        raise ConfigError(f"{workers} workers are too many", hint=f"use at most {MOST_WORKERS}")
    folder = Path(tempfile.mkdtemp(prefix="paddock-"))
    try:
        listening = [bind(host, port, shared=True)]
        taken = listening[0].getsockname()[1]
        listening += [bind(host, taken, shared=True) for _ in range(workers - 1)]
        office = Office(app, folder, listening)
        if announce is not None:
            announce(url_of(listening[0], host))
        office.run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Office:
    """The parent: starts the workers, replaces one that dies, ends them all."""

    def __init__(self, app: Any, folder: Path, listening: list[socket.socket]) -> None:
        self.app = app
        self.folder = folder
        self.listening = listening
        self.table = Table(len(listening))
        self.workers: dict[int, int] = {}
        self._stopping = False
        self._insides = [self._inside(number) for number in range(len(listening))]

    def is_stopping(self) -> bool:
        return self._stopping

    def run(self) -> None:
        for name in STOP_SIGNALS:
            signal.signal(name, self._stop)
        for number in range(len(self.listening)):
            self._start(number)
        while self.workers:
            try:
                pid, status = os.waitpid(-1, 0)
            except InterruptedError:
                continue
            except ChildProcessError:
                break
            # What an environment's module started is a child of ours too.
            if pid in self.workers:
                self._ended(self.workers.pop(pid), status)

    def _inside(self, number: int) -> tuple[socket.socket, socket.socket]:
        """The two Unix sockets of a worker. Bound here, so that they outlive a worker that dies."""
        http = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        http.bind(str(self.folder / f"{number}.http"))
        inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        inbox.bind(str(self.folder / f"{number}.inbox"))
        return http, inbox

    def _start(self, number: int) -> None:
        """Start a worker, unless all are to end."""
        if self.is_stopping():
            return
        # A signal must not find a worker that still takes it as the parent would.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            pid = os.fork()
            if pid == 0:
                self._be_worker(number)
            self.workers[pid] = number
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        if self.is_stopping():
            self._stop()

    def _be_worker(self, number: int) -> NoReturn:
        code = 1
        try:
            for name in STOP_SIGNALS:
                signal.signal(name, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            http, inbox = self._insides[number]
            service: Service = self.app.state.service
            service.colleagues = Colleagues(number, self.table, self.folder, inbox, service.config.limits)
            run(self.app, [self.listening[number], http])
            code = 0
        except KeyboardInterrupt:
            code = 0
        except BaseException:
            logger.exception("worker %d failed", number)
        finally:
            os._exit(code)

    def _ended(self, number: int, status: int) -> None:
        self.table.clear(number)
        if self.is_stopping():
            return
        logger.error("worker %d ended (%s): its sessions are lost, a new one takes its place", number, _why(status))
        time.sleep(RESTART_PAUSE)
        self._start(number)

    def _stop(self, *_: object) -> None:
        self._stopping = True
        for pid in self.workers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


def _why(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}"
    return f"exit code {os.WEXITSTATUS(status)}"


async def _connect(path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        return await asyncio.open_unix_connection(path)
    except OSError as error:
        raise NotReached(str(error)) from error


def _lost(error: Exception) -> HostLost:
    """What a client is told whose call got no answer of the worker that keeps its session."""
    if isinstance(error, NotReached):
        message = f"the worker that keeps this session cannot be reached, the call was not carried out: {error}"
    else:
        message = f"the worker that keeps this session broke off, the call may have been carried out: {error}"
    return HostLost(message, hint="its sessions are lost with a worker; open a new one")


def _cookie(header: str | None) -> str | None:
    for part in (header or "").split(";"):
        name, _, value = part.strip().partition("=")
        if name == SESSION_COOKIE:
            return value
    return None


async def _send(send: Any, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})
