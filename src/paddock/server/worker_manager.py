"""The parent process of the workers: starts them, restarts one that dies, stops them all.

Invariant: when a worker ends, only its own sessions are lost. Its slots are returned at once, the others go on, and
it is restarted: soon if it had run for a while, with exponential backoff if it keeps failing. A worker that fails
again and again at its start is given up, and its connections go to the others.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import socket
import tempfile
import time
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from paddock.errors import ConfigError, PaddockError
from paddock.server.listening import bind, url_of
from paddock.server.run import run
from paddock.server.workers import GIVEN_UP, SiblingWorkers, WorkerTable
from paddock.sessions.isolation.channel import describe_exit

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.server.service import Service

logger = logging.getLogger("paddock.workers")

MAX_WORKERS = 64
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 8.0
EARLY_SECONDS = 10.0
"""A worker that ends sooner has failed at its start."""
MAX_EARLY_ENDS = 8
"""In a row, of the same worker."""
EXIT_SECONDS = 30.0
"""Beside `drain_grace`, for a worker to close its environments and end. Then it is killed."""


def serve_workers(app: Any, host: str, port: int, workers: int, announce: Callable[[str], None] | None) -> None:
    """Run `workers` processes until SIGTERM or Ctrl-C; start one anew when it dies.

    Raises PaddockError when all of them were given up.
    """
    if workers > MAX_WORKERS:
        raise ConfigError(f"{workers} workers are too many", hint=f"use at most {MAX_WORKERS}")
    folder = Path(tempfile.mkdtemp(prefix="paddock-"))
    try:
        listening = [bind(host, port, shared=True)]
        bound_port = listening[0].getsockname()[1]
        listening += [bind(host, bound_port, shared=True) for _ in range(workers - 1)]
        manager = WorkerManager(app, folder, listening)
        if announce is not None:
            announce(url_of(listening[0], host))
        manager.run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class WorkerManager:
    def __init__(self, app: Any, folder: Path, listening: list[socket.socket]) -> None:
        self.app = app
        self.folder = folder
        self.listening = listening
        self.table = WorkerTable(len(listening))
        self.workers: dict[int, int] = {}
        """The number of each worker that runs, by its process id."""
        self._restart_at: dict[int, float] = {}
        """When each worker that ended is to be started again."""
        self._started: dict[int, float] = {}
        self._early_ends: dict[int, int] = {}
        self._kill_at: float | None = None
        """When workers that have not ended by then are killed; None unless all are to end."""
        self._killed: set[int] = set()
        self._internal_sockets = [self._bind_internal(number) for number in range(len(listening))]
        self._wakeup_read, self._wakeup_write = os.pipe()

    def is_stopping(self) -> bool:
        return self._kill_at is not None

    def run(self) -> None:
        os.set_blocking(self._wakeup_write, False)
        os.set_blocking(self._wakeup_read, False)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for name in STOP_SIGNALS:
            signal.signal(name, self._stop)
        self._reap()  # Children that ended before SIGCHLD was handled.
        for number in range(len(self.listening)):
            self._start(number)
        while self.workers or (self._restart_at and not self.is_stopping()):
            self._wait()
            self._reap()
            now = time.monotonic()
            if self._kill_at is not None and self._kill_at <= now:
                self._kill_all()
            for number in [number for number, restart_at in self._restart_at.items() if restart_at <= now]:
                del self._restart_at[number]
                self._start(number)
        signal.set_wakeup_fd(-1)
        if self._killed:
            raise PaddockError(
                f"{len(self._killed)} of the workers did not end and were killed",
                hint="their environments were not closed; the log tells more",
            )
        if not self.is_stopping():
            raise PaddockError("no worker could be kept running", hint="the log tells why each of them ended")

    def _wait(self) -> None:
        """Until a signal arrives, or a worker is to be started or killed."""
        times = [*self._restart_at.values(), *([] if self._kill_at is None else [self._kill_at])]
        until = min(times, default=inf)
        pause = None if until == inf else max(until - time.monotonic(), 0)
        select.select([self._wakeup_read], [], [], pause)
        with suppress(BlockingIOError):
            while os.read(self._wakeup_read, 4096):
                pass

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            # Processes that an environment's module started are our children too.
            if pid in self.workers:
                self._record_end(self.workers.pop(pid), status)

    def _bind_internal(self, number: int) -> tuple[socket.socket, socket.socket]:
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
        # Until the worker has reset its handlers, a signal would run those of the parent.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            pid = os.fork()
            if pid == 0:
                self._run_worker(number)
            self.workers[pid] = number
            self._started[number] = time.monotonic()
        except OSError as error:
            logger.error("worker %d could not be started, which is tried again: %s", number, error)
            self._restart_at[number] = time.monotonic() + LONGEST_PAUSE_SECONDS
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        if self.is_stopping():
            self._stop()

    def _run_worker(self, number: int) -> NoReturn:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for name in (*STOP_SIGNALS, signal.SIGCHLD):
                signal.signal(name, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            for index, listening in enumerate(self.listening):
                if index != number:
                    # Or the kernel would still queue connections for it when that worker is given up.
                    listening.close()
            http, inbox = self._internal_sockets[number]
            service: Service = self.app.state.service
            service.siblings = SiblingWorkers(number, self.table, self.folder, inbox, service.config.limits)
            run(self.app, [self.listening[number], http])
            code = 0
        except KeyboardInterrupt:
            code = 0
        except BaseException:
            logger.exception("worker %d failed", number)
        finally:
            os._exit(code)

    def _record_end(self, number: int, status: int) -> None:
        self.table.clear(number)
        if self.is_stopping():
            return
        ended_early = time.monotonic() - self._started[number] < EARLY_SECONDS
        ends = self._early_ends[number] = self._early_ends.get(number, 0) + 1 if ended_early else 0
        if ends > MAX_EARLY_ENDS:
            self._give_up(number, status)
            return
        pause = min(FIRST_PAUSE_SECONDS * 2 ** max(ends - 1, 0), LONGEST_PAUSE_SECONDS)
        why = describe_exit(status)
        logger.error("worker %d ended (%s): its sessions are lost, a new one takes its place", number, why)
        self._restart_at[number] = time.monotonic() + pause

    def _give_up(self, number: int, status: int) -> None:
        why = describe_exit(status)
        logger.error(
            "worker %d ended (%s) for the %d. time in a row: it is given up", number, why, MAX_EARLY_ENDS + 1
        )
        self.table.put(number, GIVEN_UP, 1)
        self.listening[number].close()

    def _kill_all(self) -> None:
        """Kill the workers that have not ended in time."""
        self._kill_at = inf
        for pid, number in self.workers.items():
            logger.error("worker %d has not ended in time: it is killed", number)
            self._killed.add(number)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _stop(self, *_: object) -> None:
        if self._kill_at is None:
            self._kill_at = time.monotonic() + self.app.state.service.config.limits.drain_grace + EXIT_SECONDS
        for pid in self.workers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
