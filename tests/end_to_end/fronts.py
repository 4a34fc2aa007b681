"""`paddock e2b up` as a process of its own, and what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.peers import peer_python

from .processes import HERE, quiet_environment

CLIENT_SECONDS = 60.0


@dataclass
class FrontProcess:
    process: subprocess.Popen[str]
    variables: dict[str, str]
    store: Path

    def run(self, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """A command that has E2B's variables, in the interpreter that has E2B's SDK."""
        values = {**quiet_environment(), **self.variables, **variables}
        return subprocess.run(
            [peer_python("e2b"), *command],
            capture_output=True,
            text=True,
            timeout=CLIENT_SECONDS,
            env=values,
            check=False,
        )

    def client(self, script: str) -> dict[str, Any]:
        finished = self.run(HERE / "clients" / script)
        assert finished.returncode == 0, f"{script} ended with code {finished.returncode}\n{finished.stderr[-4000:]}"
        answer: dict[str, Any] = json.loads(finished.stdout)
        return answer

    def inside(self) -> list[int]:
        """Processes of sandboxes that are this front's."""
        return [pid for pid in children(self.process.pid) if b"--unshare-all" in command_of(pid)]


@contextmanager
def front(folder: Path, *options: str) -> Iterator[FrontProcess]:
    """A front on a free port, ended with SIGTERM unless it is gone."""
    store = folder / "store"
    command = [sys.executable, "-m", "paddock", "e2b", "up", "--port", "0", "--json", "--store", str(store), *options]
    with (folder / "front.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=quiet_environment())
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (folder / "front.log").read_text()
        yield FrontProcess(process, json.loads(line)["variables"], store)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        if process.stdout is not None:
            process.stdout.close()


def children(pid: int) -> list[int]:
    collected: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            collected += [int(child), *children(int(child))]
    return collected


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def wait_until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
