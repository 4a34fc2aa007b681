"""A server of several workers in processes of its own, for tests that talk to one."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from running import wait_until
from wire import Http, RawSocket, Socket, open_socket


class WorkerServer:
    """`worker_server.py` in processes of its own."""

    def __init__(self, folder: Path, workers: int, capacity: int, *besides: str) -> None:
        self.folder = folder
        script = str(Path(__file__).with_name("worker_server.py"))
        command = [sys.executable, script, str(folder), str(workers), str(capacity), *besides]
        self.log = (folder / "log").open("w")
        self.process = subprocess.Popen(command, stderr=self.log)
        self.clients = ExitStack()
        try:
            wait_until(lambda: self.address() or self.process.poll() is not None, 15)
            self.port = int(self.address().rpartition(":")[2])
            wait_until(lambda: len(self.processes()) == workers and self.is_up(), 15)
        except BaseException:
            self.process.kill()  # Its workers notice it.
            self.process.wait()
            self.log.close()
            raise

    def address(self) -> str:
        path = self.folder / "url"
        return path.read_text() if path.exists() else ""

    def is_up(self) -> bool:
        try:
            return self.health()["status"] == "healthy"
        except (OSError, ValueError, KeyError):
            return False

    def processes(self) -> list[int]:
        listed = subprocess.run(["ps", "--ppid", str(self.process.pid), "-o", "pid="], capture_output=True, text=True)
        return [int(pid) for pid in listed.stdout.split()]

    def http(self) -> Http:
        client = Http(self.port)
        self.clients.callback(client.close)
        return client

    def socket(self, path: str = "/ws", **headers: str) -> Socket:
        return self.clients.enter_context(open_socket(self.port, path, **headers))

    def raw(self, path: str = "/ws", headers: str = "") -> RawSocket:
        client = RawSocket(self.port, path, headers)
        self.clients.callback(client.close)
        return client

    def health(self) -> Any:
        client = Http(self.port, 5)
        try:
            return client("GET", "/health").json
        finally:
            client.close()

    def unix_socket(self, name: str) -> Path:
        """Where the parent has bound a socket of a worker."""
        opened = {str(link.readlink()) for link in Path(f"/proc/{self.process.pid}/fd").iterdir()}
        rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
        own = [Path(row[7]) for row in rows if f"socket:[{row[6]}]" in opened and row[7:]]
        return next(path for path in own if path.name == name)

    def http_elsewhere(self, token: str) -> Http:
        """A connection to a worker that does not keep the session of `token`."""
        while True:
            client = self.http()
            text = client("GET", "/metrics", paddock_inside="1").body.decode()
            if f'worker="{int(token[:2], 16)}"' not in text:
                return client

    def notes(self, kind: str) -> list[str]:
        path = self.folder / "notes"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.partition(" ")[2] for line in lines if line.startswith(kind)]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(15)
        self.clients.close()
        self.log.close()
        return code


StartServer = Callable[..., WorkerServer]


@pytest.fixture
def worker_server(tmp_path: Path) -> Iterator[Callable[..., WorkerServer]]:
    made: list[WorkerServer] = []

    def start(workers: int = 2, capacity: int = 4, *besides: str) -> WorkerServer:
        made.append(WorkerServer(tmp_path, workers, capacity, *besides))
        return made[-1]

    yield start
    for one in made:
        if one.process.poll() is None:
            one.stop()
