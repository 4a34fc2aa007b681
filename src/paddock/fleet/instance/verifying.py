"""Running verifiers for the plane: each in a limited child of a warden process, never in this one.

    answer = await execute_verifier(VerifierRequest(code, "verify", args=blob, folder=instance_folder))

The warden has everything imported and forks for each run, so a run costs milliseconds. It is started with the
first run and ends when this process does. What a child may do is in `verifier/jail.py`.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import socket
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

import paddock
from paddock.errors import VerifierError
from paddock.fleet.instance.verifier import NOT_RUN, ORDER

SHORTEST, LONGEST = 1.0, 300.0
MEBIBYTE = 1024 * 1024
MOST_STDOUT = MEBIBYTE
MOST_ANSWER = 16 * MEBIBYTE
CHUNK = 65536
END_SECONDS = 2.0
GRACE = 10.0
"""How much longer than its timeout a run is waited for, before the warden itself counts as broken."""
WARDEN = "paddock.fleet.instance.verifier.warden"
KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH")


@dataclass(frozen=True, slots=True)
class VerifierRequest:
    """One run of a verifier on one instance."""

    code: str
    """The text of `verifier.py`."""
    function_name: str
    args: str | None = None
    """Base64 of the pickled `{"args": (…), "kwargs": {…}}`, as clients send it. Only plain data is taken from it."""
    args_array: list[Any] | None = None
    """Positional arguments as JSON, for callers without a pickle."""
    folder: Path | str | None = None
    """The instance's folder with its two databases; None for an environment without."""
    env_key: str = ""
    instance_id: str = ""
    timeout: float = 30.0
    """Seconds; brought into the range from 1 to 300."""
    memory_bytes: int = 512 * MEBIBYTE
    bundle_cache_hit: bool = False
    details: dict[str, Any] = field(default_factory=dict)
    """More attributes of the verifier's `env`: `version`, `data_key`, …"""


async def execute_verifier(request: VerifierRequest) -> dict[str, Any]:
    """What the verifier says: success, result, error, stdout, execution_id, execution_time_ms, bundle_cache_hit.

    Code that raises, crashes, hangs or uses too much answers `success: False` with an error that says so.
    Raises VerifierError if it could not be run at all.
    """
    return await default_verifiers().execute(request)


class Verifiers:
    """A warden and the runs in its care. `execute` starts it when needed; `close` ends it and all its runs."""

    def __init__(self, parallel: int | None = None) -> None:
        self.closed = False
        self._slots = asyncio.Semaphore(parallel or 2 * (os.cpu_count() or 2))
        self._warden: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self) -> None:
        """Start the warden now, so that the first run does not wait for it. Raises VerifierError after `close`."""
        if self.closed:
            raise VerifierError("no verifier runs any more: this was closed")
        if self._warden is not None and self._warden.poll() is None:
            return
        self._forget()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._warden = _start_warden(theirs)
            except OSError as error:
                ours.close()
                raise VerifierError(f"the verifier's warden process cannot be started: {error}") from error
        self._control = ours

    async def execute(self, request: VerifierRequest) -> dict[str, Any]:
        async with self._slots:
            for last in (False, True):
                self.start()
                warden = self._warden
                try:
                    return await self._run(request)
                except ConnectionError as error:
                    if self._warden is warden:
                        self._forget()
                    # A verifier changes nothing, so a run that was lost with its warden is begun again.
                    if last:
                        raise VerifierError(
                            "the verifier's warden process ended",
                            hint="it may have been killed for want of memory; see the log of the plane",
                        ) from error
        raise AssertionError

    async def close(self) -> None:
        await asyncio.to_thread(self.close_now)

    def close_now(self) -> None:
        """Like `close`, for an end without a loop."""
        self.closed = True
        self._forget()

    def _forget(self) -> None:
        """End the warden, if there is one: it ends its children first when its socket is closed."""
        warden, control = self._warden, self._control
        self._warden, self._control = None, None
        if control is not None:
            control.close()
        if warden is not None:
            try:
                warden.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                warden.kill()
                warden.wait()

    async def _run(self, request: VerifierRequest) -> dict[str, Any]:
        timeout = min(max(request.timeout, SHORTEST), LONGEST)
        began = time.monotonic()
        lines = _Lines()
        try:
            self._hand_over(lines, timeout, request.memory_bytes)
            async with asyncio.timeout(timeout + GRACE):
                verdict, answer, stdout = await self._listen(lines, request)
        except TimeoutError:
            raise VerifierError(f"the verifier's warden did not end a run within {timeout + GRACE:g} s") from None
        finally:
            lines.close()
        spoken = _understood(verdict, answer, timeout)
        return {
            **spoken,
            "stdout": stdout,
            "execution_id": f"exec_{uuid.uuid4().hex}",
            "execution_time_ms": round(1000 * (time.monotonic() - began)),
            "bundle_cache_hit": request.bundle_cache_hit,
        }

    def _hand_over(self, lines: _Lines, timeout: float, memory_bytes: int) -> None:
        assert self._control is not None
        handles = [line.fileno() for line in lines.theirs]
        try:
            socket.send_fds(self._control, [ORDER.pack(timeout, memory_bytes)], handles)
        except OSError as error:
            raise ConnectionResetError(f"the warden is gone: {error}") from error
        lines.let_go()

    async def _listen(self, lines: _Lines, request: VerifierRequest) -> tuple[dict[str, Any], bytes, str]:
        loop = asyncio.get_running_loop()
        answering = asyncio.ensure_future(_read(lines.answer, MOST_ANSWER))
        printing = asyncio.ensure_future(_read(lines.stdout, MOST_STDOUT + CHUNK))
        try:
            with suppress(ConnectionError):
                # A child that is dead already says so by its verdict.
                await loop.sock_sendall(lines.answer, _document(request))
            said = await _read(lines.verdict, CHUNK)
            if not said:
                raise ConnectionResetError("the warden ended before its child")
            # All that the child wrote is in the sockets now; nobody else holds their other ends.
            answer, printed = await answering, await printing
        finally:
            answering.cancel()
            printing.cancel()
            await asyncio.gather(answering, printing, return_exceptions=True)
        text = printed[:MOST_STDOUT].decode(errors="replace")
        return orjson.loads(said), answer, text + ("\n… cut off" if len(printed) > MOST_STDOUT else "")


class _Lines:
    """The three connections of a run: request and answer, what it prints, and what became of it."""

    def __init__(self) -> None:
        pairs = [socket.socketpair() for _ in range(3)]
        self.ours = [ours for ours, _ in pairs]
        self.theirs = [theirs for _, theirs in pairs]
        self.answer, self.stdout, self.verdict = self.ours
        for line in self.ours:
            line.setblocking(False)

    def let_go(self) -> None:
        for line in self.theirs:
            line.close()

    def close(self) -> None:
        for line in (*self.ours, *self.theirs):
            line.close()


async def _read(line: socket.socket, most: int) -> bytes:
    """Everything that comes; no more than `most`, and a writer that goes on then has to wait."""
    loop = asyncio.get_running_loop()
    seen = bytearray()
    while len(seen) < most:
        try:
            part = await loop.sock_recv(line, CHUNK)
        except ConnectionError:
            break
        if not part:
            break
        seen += part
    return bytes(seen)


def _document(request: VerifierRequest) -> bytes:
    folder = Path(request.folder) if request.folder is not None else None
    databases = {name: str(folder / f"{name}.sqlite") for name in ("seed", "current")} if folder is not None else {}
    document = {
        "code": request.code,
        "function_name": request.function_name,
        "args": request.args,
        "args_array": request.args_array,
        "databases": {name: path for name, path in databases.items() if os.path.exists(path)},
        "about": {**request.details, "env_key": request.env_key, "instance_id": request.instance_id},
    }
    # Not orjson: it refuses integers beyond 64 bits, which arguments may have.
    return json.dumps(document).encode() + b"\n"


def _understood(verdict: dict[str, Any], answer: bytes, timeout: float) -> dict[str, Any]:
    """The answer of the child if it gave a whole one, else what the warden saw."""
    if verdict.get("timed_out") or verdict.get("signal") == "SIGXCPU":
        return _failed("TimeoutError", f"the verifier did not finish within {timeout:g} s")
    if answer.endswith(b"\n") and verdict.get("code") == 0:
        try:
            spoken = orjson.loads(answer)
            return {name: spoken[name] for name in ("success", "result", "error")}
        except (ValueError, KeyError, TypeError):
            return _failed("VerifierCrashed", "the verifier's process said something that is not an answer")
    if verdict.get("code") == NOT_RUN:
        raise VerifierError(
            f"the verifier could not be made ready: {answer.decode(errors='replace')[:500] or 'no word'}"
        )
    how = verdict.get("signal") or f"code {verdict.get('code')}"
    return _failed("VerifierCrashed", f"the verifier's process ended with {how} before it gave a result")


def _failed(kind: str, message: str) -> dict[str, Any]:
    return {"success": False, "result": None, "error": {"type": kind, "message": message, "traceback": ""}}


def _start_warden(line: socket.socket) -> subprocess.Popen[bytes]:
    # Only these variables: what a child can read of its environment must hold no secret of the plane.
    variables = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    variables["PYTHONPATH"] = str(Path(paddock.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-P", "-B", "-m", WARDEN, str(line.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[line.fileno()],
        env=variables,
        cwd="/",
        start_new_session=True,
    )


_default: tuple[asyncio.AbstractEventLoop, Verifiers] | None = None


def default_verifiers() -> Verifiers:
    """The warden of this process, made anew when another loop has taken over."""
    global _default
    loop = asyncio.get_running_loop()
    if _default is None or _default[0] is not loop or _default[1].closed:
        close_default_verifiers()
        _default = (loop, Verifiers())
    return _default[1]


@atexit.register
def close_default_verifiers() -> None:
    """End the warden of this process; the next run starts another."""
    global _default
    if _default is not None:
        _default[1].close_now()
        _default = None
