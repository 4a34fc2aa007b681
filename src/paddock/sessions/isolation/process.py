"""The host of child processes, as the server sees it.

It is started once and shared by all sessions of a server process; a forked worker starts its own. One that died is
replaced when the next session opens.
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
from paddock.sessions.isolation.host import NUMBER, ORDER

logger = logging.getLogger("paddock.sessions")

HOST = Path(__file__).with_name("host.py")
START_SECONDS = 120.0
STOP_SECONDS = 8.0
OURS = "PADDOCK_"
"""Variables that are not for the environment: they hold our tokens."""


class Process:
    """One interpreter that hosts `place`, as `loader` finds it.

    It forks a process for each `sessions_per_process` sessions; with 0 all of them live in the host itself.
    """

    def __init__(
        self,
        python: str,
        loader: Path,
        place: str,
        *,
        name: str | None = None,
        sessions_per_process: int = 1,
        flags: tuple[str, ...] = (),
        passes_our_variables: bool = False,
    ) -> None:
        self.python = python
        self.name = place if name is None else name
        self._place = place.encode()
        self._loader = loader
        self._sessions_per_process = sessions_per_process
        self._flags = flags
        self._left_out = "\0" if passes_our_variables else OURS
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._owner = 0
        self._running: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self) -> dict[str, Any]:
        """Start it and return what it tells about itself. Raises TargetError."""
        self._owner = os.getpid()
        near, far = socket.socketpair()
        program = [self.python, *self._flags, str(HOST), str(self._loader)]
        try:
            self._running = subprocess.Popen(
                [*program, str(self._sessions_per_process), str(far.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=(far.fileno(),),
                env={name: value for name, value in os.environ.items() if not name.startswith(self._left_out)},
            )
        except OSError as error:
            near.close()
            raise TargetError(f"{self.python} cannot be started: {error}", hint="name an interpreter") from error
        finally:
            far.close()
        self._control = near
        atexit.register(self.stop)
        with suppress(OSError):
            near.sendall(NUMBER.pack(len(self._place)) + self._place)
        told = self._first_words(near)
        if "error" in told:
            self.stop()
            hint = told.get("hint") or f"is it installed for {self.python}? it was looked for from {os.getcwd()}"
            raise TargetError(f"{self.name!r} cannot be loaded: {told['error']}", hint=hint)
        about: dict[str, Any] = told["about"]
        return about

    def ensure_started(self) -> None:
        """Raises TargetError."""
        with self._lock:
            if not self._is_alive():
                self._forget()
                self.start()

    def kill(self, number: int) -> None:
        """End the process of a session, as soon as no other session lives in it."""
        control = self._control
        if control is not None and self._owner == os.getpid():
            with suppress(OSError):
                control.send(ORDER.pack(b"k", number))

    def open(self) -> tuple[int, socket.socket]:
        """The number of a new session, and our end of its socket; blocks while the host has to be started.

        Raises FactoryError or TargetError.
        """
        with self._lock:
            near, far = socket.socketpair()
            number = next(self._numbers)
            try:
                if not (self._is_alive() and self._hand_over(number, far)):
                    if self._running is not None and self._owner == os.getpid():
                        logger.warning("the process of %s has ended: starting another", self.name)
                    self._forget()
                    self.start()
                    if not self._hand_over(number, far):
                        raise FactoryError(f"the process of {self.name} takes no session", hint="its log tells why")
            except BaseException:
                near.close()
                raise
            finally:
                far.close()
            return number, near

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

    def _hand_over(self, number: int, far: socket.socket) -> bool:
        """False if nobody takes it: a process that was killed may not have been noticed yet."""
        assert self._control is not None
        try:
            socket.send_fds(self._control, [ORDER.pack(b"+", number)], [far.fileno()])
        except OSError:
            return False
        return True

    def _is_alive(self) -> bool:
        return self._owner == os.getpid() and self._running is not None and self._running.poll() is None

    def _forget(self) -> None:
        """What is left of one that died, or that belongs to the process we were forked from."""
        if self._running is not None:
            if self._owner == os.getpid():
                self._running.kill()
                self._running.wait()
            else:
                # Not ours to wait for.
                self._running.returncode = 0
        if self._control is not None:
            self._control.close()
        self._running = self._control = None

    def _first_words(self, control: socket.socket) -> dict[str, Any]:
        """One line, within the time that an interpreter may take to import what it needs."""
        deadline = time.monotonic() + START_SECONDS
        words = b""
        with selectors.DefaultSelector() as selector:
            selector.register(control, selectors.EVENT_READ)
            while not words.endswith(b"\n"):
                if not selector.select(max(deadline - time.monotonic(), 0)):
                    return {"error": f"it did not start within {START_SECONDS:g} s", "hint": "see its log"}
                piece = b""
                with suppress(OSError):
                    piece = control.recv(65536)
                if not piece:
                    return {"error": "its process ended at once", "hint": f"try: {self.python} -c 'print(1)'"}
                words += piece
        told: dict[str, Any] = json.loads(words)
        return told


def interpreter(named: str) -> str:
    """The program that a virtual environment's folder, a path or a name stands for. Raises TargetError."""
    path = Path(named).expanduser()
    found = path / "bin" / "python" if path.is_dir() else path if path.is_file() else shutil.which(named)
    if found is None or not os.access(found, os.X_OK):
        raise TargetError(
            f"there is no interpreter at {named!r}",
            hint="give the folder of a virtual environment, or its bin/python",
        )
    return str(Path(found).absolute())
