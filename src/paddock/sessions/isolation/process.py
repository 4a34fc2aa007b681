"""The server's side of the fork server (`host.py`).

It is started once and shared by all sessions of a server process; a forked worker starts its own. If it dies,
the next `open` starts another.
"""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import os
import selectors
import shutil
import socket
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from paddock.errors import FactoryError, TargetError
from paddock.sessions.isolation.host import COMMAND, NUMBER

logger = logging.getLogger("paddock.sessions")

HOST = Path(__file__).with_name("host.py")
START_SECONDS = 120.0
STOP_SECONDS = 8.0
PRIVATE_PREFIX = "PADDOCK_"
"""Environment variables that begin with it are not passed on: they hold our tokens."""


class HostProcess:
    """One interpreter that hosts `target`, which `loader` resolves.

    It forks a process for each `sessions_per_process` sessions; with 0 all of them live in the host itself.
    """

    def __init__(
        self,
        python: str,
        loader: Path,
        target: str,
        *,
        name: str | None = None,
        sessions_per_process: int = 1,
        flags: tuple[str, ...] = (),
        passes_private_variables: bool = False,
    ) -> None:
        self.python = python
        self.name = target if name is None else name
        self._target = target.encode()
        self._loader = loader
        self._sessions_per_process = sessions_per_process
        self._flags = flags
        self._excluded_prefix = "\0" if passes_private_variables else PRIVATE_PREFIX
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._owner = 0
        self._running: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self) -> dict[str, Any]:
        """Start it and return the description that the loader gives. Raises TargetError."""
        self._owner = os.getpid()
        our_end, host_end = socket.socketpair()
        program = [self.python, *self._flags, str(HOST), str(self._loader)]
        try:
            self._running = subprocess.Popen(
                [*program, str(self._sessions_per_process), str(host_end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=(host_end.fileno(),),
                env={name: value for name, value in os.environ.items() if not name.startswith(self._excluded_prefix)},
            )
        except OSError as error:
            our_end.close()
            raise TargetError(f"{self.python} cannot be started: {error}", hint="name an interpreter") from error
        finally:
            host_end.close()
        self._control = our_end
        atexit.register(self.stop)
        with suppress(OSError):
            our_end.sendall(NUMBER.pack(len(self._target)) + self._target)
        greeting = self._read_greeting(our_end)
        if "error" in greeting:
            self.stop()
            hint = greeting.get("hint") or f"is it installed for {self.python}? it was looked for from {os.getcwd()}"
            raise TargetError(f"{self.name!r} cannot be loaded: {greeting['error']}", hint=hint)
        description: dict[str, Any] = greeting["description"]
        return description

    def ensure_started(self) -> None:
        """Start it unless it runs. Raises TargetError."""
        with self._lock:
            if not self._is_alive():
                self._discard_process()
                self.start()

    def kill(self, number: int) -> None:
        """Kill the process of a session, as soon as no other session lives in it."""
        control = self._control
        if control is not None and self._owner == os.getpid():
            with suppress(OSError):
                control.send(COMMAND.pack(b"k", number))

    def open(self) -> tuple[int, socket.socket]:
        """The number of a new session, and our end of its socket. Blocks while the host has to be started.

        Raises FactoryError or TargetError.
        """
        with self._lock:
            our_end, host_end = socket.socketpair()
            number = next(self._numbers)
            try:
                if not (self._is_alive() and self._send_socket(number, host_end)):
                    if self._running is not None and self._owner == os.getpid():
                        logger.warning("the process of %s has ended: starting another", self.name)
                    self._discard_process()
                    self.start()
                    if not self._send_socket(number, host_end):
                        raise FactoryError(f"the process of {self.name} takes no session", hint="its log tells why")
            except BaseException:
                our_end.close()
                raise
            finally:
                host_end.close()
            return number, our_end

    def stop(self) -> None:
        """End it, and wait until it has."""
        running, self._running = self._running, None
        if running is None or self._owner != os.getpid():
            return
        atexit.unregister(self.stop)
        if self._control is not None:
            self._control.close()
        try:
            running.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()

    @property
    def pid(self) -> int | None:
        return self._running.pid if self._running is not None else None

    def _send_socket(self, number: int, host_end: socket.socket) -> bool:
        """False if the host does not receive it: it may have died since the last check."""
        assert self._control is not None
        try:
            socket.send_fds(self._control, [COMMAND.pack(b"+", number)], [host_end.fileno()])
        except OSError:
            return False
        return True

    def _is_alive(self) -> bool:
        return self._owner == os.getpid() and self._running is not None and self._running.poll() is None

    def _discard_process(self) -> None:
        """Drop a process that has died, or that belongs to the process we were forked from."""
        if self._running is not None:
            if self._owner == os.getpid():
                self._running.kill()
                self._running.wait()
            else:
                # It is a child of another process: only that one can wait for it.
                self._running.returncode = 0
        if self._control is not None:
            self._control.close()
        self._running = self._control = None

    def _read_greeting(self, control: socket.socket) -> dict[str, Any]:
        """Read one JSON line, within `START_SECONDS`."""
        deadline = time.monotonic() + START_SECONDS
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(control, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(deadline - time.monotonic(), 0)):
                    return {"error": f"it did not start within {START_SECONDS:g} s", "hint": "see its log"}
                chunk = b""
                with suppress(OSError):
                    chunk = control.recv(65536)
                if not chunk:
                    return {"error": "its process ended at once", "hint": f"try: {self.python} -c 'print(1)'"}
                line += chunk
        greeting: dict[str, Any] = json.loads(line)
        return greeting


def find_interpreter(name: str) -> str:
    """The interpreter for the folder of a virtual environment, a path, or a command name. Raises TargetError."""
    path = Path(name).expanduser()
    program = path / "bin" / "python" if path.is_dir() else path if path.is_file() else shutil.which(name)
    if program is None or not os.access(program, os.X_OK):
        raise TargetError(
            f"there is no interpreter at {name!r}",
            hint="give the folder of a virtual environment, or its bin/python",
        )
    return str(Path(program).absolute())
