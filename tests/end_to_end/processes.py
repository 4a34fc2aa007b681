"""Servers and clients as child processes: started, waited for and ended by their own id."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.peers import peer_python

HERE = Path(__file__).parent
STARTUP_SECONDS = 60.0
SHUTDOWN_SECONDS = 20.0
CLIENT_SECONDS = 90.0


@dataclass(frozen=True, slots=True)
class Server:
    """A server and who made it: `paddock`, or an oracle (`openenv`, `fastmcp`)."""

    framework: str
    url: str


@contextmanager
def serving(
    framework: str, command: list[str | Path], port: int, log: Path, *, ends_with: int | None = None
) -> Iterator[Server]:
    """The server that `command` starts on `port`, from its first healthy answer to its SIGTERM.

    Where `ends_with` is given, the process must end with that code.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=quiet_environment())
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(url, process, log)
        yield Server(framework, url)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
    if ends_with is not None:
        assert code == ends_with, log.read_text()[-4000:]


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + STARTUP_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with code {process.returncode}\n{log.read_text()}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.05)
    raise TimeoutError(f"{url} was not healthy within {STARTUP_SECONDS} s\n{log.read_text()}")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_client(peer: str, script: str, *arguments: str) -> dict[str, Any]:
    """What `clients/SCRIPT` prints when the peer's interpreter runs it: one JSON object."""
    command = [peer_python(peer), HERE / "clients" / script, *arguments]
    finished = subprocess.run(
        command, capture_output=True, text=True, timeout=CLIENT_SECONDS, env=quiet_environment(), check=False
    )
    if finished.returncode != 0:
        raise RuntimeError(f"{script} ended with code {finished.returncode}\n{finished.stderr}")
    answer: dict[str, Any] = json.loads(finished.stdout)
    return answer


def paddock_command(environment: str, port: int) -> list[str | Path]:
    serve = [sys.executable, "-m", "paddock", "serve", environment]
    return [*serve, "--max-sessions", "4", "--port", str(port)]


def openenv_command(framework: str, environment: str, port: int) -> list[str | Path]:
    """Serve an environment class written for OpenEnv, by OpenEnv or by Paddock."""
    peer = {"openenv": "openenv", "paddock": "both"}[framework]
    return [peer_python(peer), HERE / "servers" / "openenv_app.py", framework, environment, str(port)]


def fastmcp_command(port: int) -> list[str | Path]:
    return [peer_python("fastmcp"), HERE / "servers" / "fastmcp_app.py", str(port)]


def quiet_environment() -> dict[str, str]:
    """Our environment without what would send loopback traffic elsewhere or ask the internet."""
    remaining = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return {**remaining, "PYTHONUNBUFFERED": "1", "FASTMCP_CHECK_FOR_UPDATES": "off"}
