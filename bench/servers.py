"""Servers under test: how each is started, awaited and ended."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Literal

from scripts.peers import REPOSITORY, peer_python

HOST = "127.0.0.1"
START_SECONDS = 90.0
STOP_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """Which server to run, and what it serves."""

    project: Literal["paddock", "openenv"]
    target: str
    max_sessions: int
    workers: int = 1

    @property
    def label(self) -> str:
        served = self.target.rpartition(":")[2]
        return f"{self.project} {served}" + (f" x{self.workers}" if self.workers > 1 else "")

    def command(self, port: int) -> list[str]:
        """The command line that starts the server."""
        if self.project == "paddock":
            program = [sys.executable, "-m", "paddock", "serve", self.target]
        else:
            program = [str(peer_python("openenv")), "-m", "bench.openenv_app", self.target]
        command = [*program, "--host", HOST, "--port", str(port)]
        command += ["--max-sessions", str(self.max_sessions)]
        if self.workers > 1:
            command += ["--workers", str(self.workers)]
        return command


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers."""

    spec: ServerSpec
    url: str
    group: int
    """The process group that holds the server and its workers."""


@contextmanager
def running(spec: ServerSpec) -> Iterator[Server]:
    """Run a server until the block ends.

    Raises:
        RuntimeError: it ended or stayed silent instead of answering `/health`; the message
            carries the end of its log.
    """
    port = _free_port()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            spec.command(port),
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            server = Server(spec, f"http://{HOST}:{port}", process.pid)
            _wait_healthy(server, process, log)
            yield server
        finally:
            _stop(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_healthy(server: Server, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        time.sleep(0.1)
    log.seek(0)
    last_lines = log.read().decode(errors="replace")[-2000:]
    raise RuntimeError(f"{server.spec} did not become healthy; its log ends:\n{last_lines}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    # Workers share the group: whatever the server left behind ends with it.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
