"""Running verifiers for the plane: each in a restricted child of a fork server, never in this process.

    runner = VerifierRunner()
    answer = await runner.run(VerifierRequest(code, "verify", args=blob, folder=instance_folder))

The fork server has everything imported, so a run costs milliseconds. It starts with the first run and ends with this
process. What a child may do is in `restrictions`.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

import paddock
from paddock.errors import VerifierError
from paddock.fleet.instance.verifier import EXIT_NOT_RUN, RUN_HEADER
from paddock.limits import MEBIBYTE

MIN_SECONDS, MAX_SECONDS = 1.0, 300.0
MAX_STDOUT_BYTES = MEBIBYTE
MAX_ANSWER_BYTES = 16 * MEBIBYTE
READ_BYTES = 65536
STOP_SECONDS = 2.0
GRACE_SECONDS = 10.0
"""How much longer than its timeout a run may take before the fork server counts as broken."""
FORK_SERVER = "paddock.fleet.instance.verifier.fork_server"
KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH")


@dataclass(frozen=True, slots=True)
class VerifierRequest:
    """One run of a verifier on one instance, or on none."""

    code: str
    """The text of `verifier.py`."""
    function_name: str
    args: str | None = None
    """Base64 of the pickled `{"args": (…), "kwargs": {…}}`, as clients send it. Only plain data is read from it."""
    args_array: list[Any] | None = None
    """Positional arguments as JSON, for callers without a pickle."""
    timeout: float = 30.0
    """Seconds; clamped to the range from 1 to 300."""
    instance_id: str | None = None
    env_key: str | None = None
    folder: Path | None = None
    """The instance's folder with its two databases; None for an environment without."""
    memory_bytes: int = 512 * MEBIBYTE
    details: dict[str, Any] = field(default_factory=dict)
    """More attributes of the verifier's `env`: `version`, `data_key`, …"""


RunVerifier = Callable[[VerifierRequest], Awaitable[dict[str, Any]]]


class VerifierRunner:
    """A fork server and its runs. `run` starts it when needed; `close` ends it and all its runs."""

    def __init__(self, parallel: int | None = None) -> None:
        self.closed = False
        self._slots = asyncio.Semaphore(parallel or 2 * (os.cpu_count() or 2))
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self) -> None:
        """Start the fork server now, so that the first run does not wait for it. Raises VerifierError."""
        if self.closed:
            raise VerifierError("the verifier runner is closed")
        if self._server is not None and self._server.poll() is None:
            return
        self._stop_server()
        control, remote_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with remote_control:
            try:
                self._server = _start_fork_server(remote_control)
            except OSError as error:
                control.close()
                raise VerifierError(f"the verifiers' fork server cannot be started: {error}") from error
        self._control = control

    async def run(self, request: VerifierRequest) -> dict[str, Any]:
        """The answer of the verifier: success, result, error, stdout, execution_id, execution_time_ms.

        Code that raises, crashes, hangs or exceeds a limit answers `success: False` with an error that says so.
        Raises VerifierError if it could not be run at all.
        """
        async with self._slots:
            for is_last in (False, True):
                self.start()
                server = self._server
                try:
                    return await self._run_once(request)
                except ConnectionError as error:
                    if self._server is server:
                        self._stop_server()
                    # A verifier changes nothing, so a run that was lost with its fork server is repeated once.
                    if is_last:
                        raise VerifierError(
                            "the verifiers' fork server ended",
                            hint="the kernel may have killed it for lack of memory; see the log of the plane",
                        ) from error
        raise AssertionError

    async def close(self) -> None:
        self.closed = True
        await asyncio.to_thread(self._stop_server)

    def _stop_server(self) -> None:
        """End the fork server, if there is one: it ends its children when its control socket is closed."""
        server, control = self._server, self._control
        self._server, self._control = None, None
        if control is not None:
            control.close()
        if server is not None:
            try:
                server.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()

    async def _run_once(self, request: VerifierRequest) -> dict[str, Any]:
        timeout = min(max(request.timeout, MIN_SECONDS), MAX_SECONDS)
        started_at = time.monotonic()
        sockets = _RunSockets()
        try:
            self._hand_over(sockets, timeout, request.memory_bytes)
            async with asyncio.timeout(timeout + GRACE_SECONDS):
                exit_status, answer, stdout = await self._exchange(sockets, request)
        except TimeoutError:
            limit = timeout + GRACE_SECONDS
            raise VerifierError(f"the verifiers' fork server did not end a run within {limit:g} s") from None
        finally:
            sockets.close()
        return {
            **_read_answer(exit_status, answer, timeout),
            "stdout": stdout,
            "execution_id": f"exec_{uuid.uuid4().hex}",
            "execution_time_ms": round(1000 * (time.monotonic() - started_at)),
        }

    def _hand_over(self, sockets: _RunSockets, timeout: float, memory_bytes: int) -> None:
        assert self._control is not None
        descriptors = [remote.fileno() for remote in sockets.remote]
        try:
            socket.send_fds(self._control, [RUN_HEADER.pack(timeout, memory_bytes)], descriptors)
        except OSError as error:
            raise ConnectionResetError(f"the fork server is gone: {error}") from error
        sockets.close_remote()

    async def _exchange(self, sockets: _RunSockets, request: VerifierRequest) -> tuple[dict[str, Any], bytes, str]:
        """Send the request; the exit status of the child, its answer, and what it printed."""
        loop = asyncio.get_running_loop()
        answer_task = asyncio.ensure_future(_read(sockets.answer, MAX_ANSWER_BYTES))
        stdout_task = asyncio.ensure_future(_read(sockets.stdout, MAX_STDOUT_BYTES + READ_BYTES))
        try:
            with suppress(ConnectionError):
                # If the child is dead already, its exit status says so.
                await loop.sock_sendall(sockets.answer, _encode_request(request))
            exit_status = await _read(sockets.exit_status, READ_BYTES)
            if not exit_status:
                raise ConnectionResetError("the fork server ended before its child")
            # The child has ended, so all it wrote is in the sockets now, and both reads end.
            answer, printed = await answer_task, await stdout_task
        finally:
            answer_task.cancel()
            stdout_task.cancel()
            await asyncio.gather(answer_task, stdout_task, return_exceptions=True)
        text = printed[:MAX_STDOUT_BYTES].decode(errors="replace")
        return orjson.loads(exit_status), answer, text + ("\n… cut off" if len(printed) > MAX_STDOUT_BYTES else "")


class _RunSockets:
    """The three socket pairs of a run: request and answer, standard output, exit status."""

    def __init__(self) -> None:
        pairs = [socket.socketpair() for _ in range(3)]
        self.local = [local for local, _ in pairs]
        self.remote = [remote for _, remote in pairs]
        self.answer, self.stdout, self.exit_status = self.local
        for local in self.local:
            local.setblocking(False)

    def close_remote(self) -> None:
        for remote in self.remote:
            remote.close()

    def close(self) -> None:
        for each in (*self.local, *self.remote):
            each.close()


async def _read(source: socket.socket, limit: int) -> bytes:
    """Everything up to `limit` bytes. After that nothing is read, so backpressure stops the writer."""
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < limit:
        try:
            part = await loop.sock_recv(source, READ_BYTES)
        except ConnectionError:
            break
        if not part:
            break
        data += part
    return bytes(data)


def _encode_request(request: VerifierRequest) -> bytes:
    folder = Path(request.folder) if request.folder is not None else None
    databases = {name: str(folder / f"{name}.sqlite") for name in ("seed", "current")} if folder is not None else {}
    identity = {"env_key": request.env_key or "", "instance_id": request.instance_id or ""}
    document = {
        "code": request.code,
        "function_name": request.function_name,
        "args": request.args,
        "args_array": request.args_array,
        "databases": {name: path for name, path in databases.items() if os.path.exists(path)},
        "attributes": {**request.details, **identity},
    }
    # Not orjson: it refuses integers beyond 64 bits, which arguments may have.
    return json.dumps(document).encode() + b"\n"


def _read_answer(exit_status: dict[str, Any], answer: bytes, timeout: float) -> dict[str, Any]:
    """The answer of the child if it is complete, else an error from its exit status. Raises VerifierError."""
    if exit_status.get("timed_out") or exit_status.get("signal") == "SIGXCPU":
        return _failure("TimeoutError", f"the verifier did not finish within {timeout:g} s")
    if answer.endswith(b"\n") and exit_status.get("code") == 0:
        try:
            document = orjson.loads(answer)
            return {name: document[name] for name in ("success", "result", "error")}
        except (ValueError, KeyError, TypeError):
            return _failure("VerifierCrashed", "the verifier's process wrote something that is not an answer")
    if exit_status.get("code") == EXIT_NOT_RUN:
        raise VerifierError(
            f"the verifier could not be prepared: {answer.decode(errors='replace')[:500] or 'no reason given'}"
        )
    ending = exit_status.get("signal") or f"code {exit_status.get('code')}"
    return _failure("VerifierCrashed", f"the verifier's process ended with {ending} before it gave a result")


def _failure(kind: str, message: str) -> dict[str, Any]:
    return {"success": False, "result": None, "error": {"type": kind, "message": message, "traceback": ""}}


def _start_fork_server(control: socket.socket) -> subprocess.Popen[bytes]:
    # Only these variables: the environment that a child can read must hold no secret of the plane.
    variables = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    variables["PYTHONPATH"] = str(Path(paddock.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-P", "-B", "-m", FORK_SERVER, str(control.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[control.fileno()],
        env=variables,
        cwd="/",
        start_new_session=True,
    )
