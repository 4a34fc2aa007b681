"""The driver `serve` of OpenCode: the program is an HTTP server in the sandbox.

The instruction is posted to a session; an event announces when the session is idle again. Messages can be read at any
time, and an abort cancels the running model call.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from base64 import b64encode
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import orjson

from paddock.agents.base import AgentExit, AgentRun, Assignment, Report
from paddock.agents.headless import read_object, report_part
from paddock.agents.install import with_ripgrep
from paddock.agents.opencode import PROGRAM, PROVIDER, error_text
from paddock.errors import AgentError
from paddock.net import HttpConnection
from paddock.protocol.sse import EventReader, EventTooLong
from paddock.sandbox.base import Command

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from paddock.net import Streams
    from paddock.sandbox.base import Job, Sandbox

LISTENING = re.compile(rb"opencode server listening on http://[^:]+:(\d+)")
START_SECONDS = 60.0
"""Until the server must listen. It takes one or two; a loaded machine needs more."""
RESPONSE_SECONDS = 30.0
LARGEST_RESPONSE_BYTES = 64 * 1024 * 1024
POLL_SECONDS = 2.0
"""Between requests for the session's status, in case an event was missed."""
ARGUMENTS = ("serve", "--hostname", "127.0.0.1", "--port", "0")


async def start_server(
    sandbox: Sandbox, assignment: Assignment, env: Mapping[str, str], report: Report
) -> OpenCodeServerRun:
    password = secrets.token_urlsafe(18)
    server_env = {**env, "OPENCODE_SERVER_PASSWORD": password}
    job = await sandbox.start(Command(with_ripgrep(PROGRAM, *ARGUMENTS), cwd=sandbox.workdir, env=server_env))
    try:
        port = await asyncio.wait_for(_wait_for_port(job), START_SECONDS)
    except TimeoutError:
        raise AgentError(f"opencode serve did not listen within {START_SECONDS:g} s: {job.tail(500)}") from None
    server = OpenCodeApi(sandbox, port, password)
    created = await server.post("/session", {"title": "rollout"})
    run = OpenCodeServerRun(server, job, str(created["id"]), report)
    await run.prompt(assignment)
    return run


async def _wait_for_port(job: Job) -> int:
    async for line in job.lines():
        match = LISTENING.search(line)
        if match:
            return int(match.group(1))
    raise AgentError(f"opencode serve ended at once: {job.tail(500)}")


class OpenCodeApi:
    """HTTP client of `opencode serve`; its connections go through the sandbox."""

    def __init__(self, sandbox: Sandbox, port: int, password: str) -> None:
        self._sandbox = sandbox
        self._port = port
        token = b64encode(f"opencode:{password}".encode()).decode()
        self._headers = {"authorization": f"Basic {token}"}
        self._calls = self._connection()

    async def get(self, path: str) -> Any:
        return await self._request("GET", path, b"")

    async def post(self, path: str, document: Any = None) -> Any:
        return await self._request("POST", path, b"" if document is None else orjson.dumps(document))

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The events of the server, from now on."""
        connection = self._connection()
        reader = EventReader(max_event_bytes=LARGEST_RESPONSE_BYTES)
        async for piece in connection.stream("/event"):
            try:
                events = reader.feed(piece)
            except EventTooLong as error:
                raise ConnectionError(f"opencode serve: {error}") from error
            for event in events:
                if (document := read_object(event.data)) is not None:
                    yield document

    async def close(self) -> None:
        await self._calls.close()

    def _connection(self) -> HttpConnection:
        url = f"http://127.0.0.1:{self._port}"
        return HttpConnection(url, self._headers, connect=self._dial, max_body_bytes=LARGEST_RESPONSE_BYTES)

    async def _dial(self) -> Streams:
        return await asyncio.open_connection(sock=await self._sandbox.dial(self._port))

    async def _request(self, method: str, path: str, body: bytes) -> Any:
        try:
            async with asyncio.timeout(RESPONSE_SECONDS):
                status, _, response = await self._calls.request(method, path, body)
        except (OSError, TimeoutError) as error:
            raise AgentError(f"opencode serve does not answer {method} {path}: {error!r}") from error
        if status >= 400:
            raise AgentError(f"opencode serve answered {method} {path} with {status}: {response[:300]!r}")
        try:
            return orjson.loads(response) if response else None
        except orjson.JSONDecodeError as error:
            raise AgentError(f"opencode serve answered {method} {path} with something that is not JSON") from error


class OpenCodeServerRun(AgentRun):
    def __init__(self, server: OpenCodeApi, job: Job, session: str, report: Report) -> None:
        self.session = session
        self._server = server
        self._job = job
        self._report = report
        self._error: str | None = None
        self._connected = asyncio.Event()
        self._idle = asyncio.Event()
        self._busy_seen = False
        self._transcript: list[dict[str, Any]] = []
        self._follower = asyncio.create_task(self._follow())

    async def prompt(self, assignment: Assignment) -> None:
        """Post the instruction once the event stream is open, so that a run that fails at once is noticed."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._connected.wait(), RESPONSE_SECONDS)
        document = {
            "parts": [{"type": "text", "text": assignment.instruction}],
            "model": {"providerID": PROVIDER, "modelID": assignment.model},
        }
        await self._server.post(f"/session/{self.session}/prompt_async", document)

    async def wait(self, timeout: float) -> AgentExit:
        ended = asyncio.create_task(self._job.wait())
        idle = asyncio.create_task(self._wait_idle())
        try:
            done, _ = await asyncio.wait((ended, idle), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if ended in done:
                exit_code = ended.result().exit_code
                return AgentExit(exit_code, error=self._error or "opencode serve ended by itself")
            if idle in done:
                idle.result()
                with suppress(AgentError):
                    await self.messages()
                return AgentExit(0, error=self._error)
            await self.abort()
            return AgentExit(None, timed_out=True, error=self._error)
        finally:
            for task in (ended, idle, self._follower):
                task.cancel()
            await self._server.close()

    async def messages(self) -> list[dict[str, Any]]:
        """From the server; once it has ended, the messages that were read last."""
        if not self._follower.done():
            self._transcript = await self._server.get(f"/session/{self.session}/message") or []
        return self._transcript

    async def abort(self) -> None:
        with suppress(AgentError):
            await self._server.post(f"/session/{self.session}/abort")
            await self.messages()

    def log_tail(self, count: int = 4096) -> str:
        return self._job.tail(count)

    async def _wait_idle(self) -> None:
        """Wait for the event, or poll the status if the event stream broke."""
        while not self._idle.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), POLL_SECONDS)
                return
            status = await self._server.get("/session/status")
            is_busy = self.session in (status or {})
            if self._busy_seen and not is_busy:
                return
            self._busy_seen = self._busy_seen or is_busy

    async def _follow(self) -> None:
        try:
            async for event in self._server.events():
                self._handle_event(event)
        except OSError as error:
            self._report("agent_warning", {"warning": f"lost the event stream: {error}"})
            await asyncio.Event().wait()  # the status is polled from here on

    def _handle_event(self, event: dict[str, Any]) -> None:
        kind, data = event.get("type"), event.get("properties") or {}
        part = data.get("part") or {}
        self._connected.set()
        if data.get("sessionID", part.get("sessionID")) != self.session:
            return
        if kind == "session.idle":
            self._idle.set()
        elif kind == "session.status":
            self._busy_seen = True
        elif kind == "session.error":
            self._error = error_text(data.get("error"))
            self._report("agent_error", {"error": self._error})
        elif kind == "message.part.updated" and is_finished(part):
            report_part(part, self._report)


def is_finished(part: dict[str, Any]) -> bool:
    """Parts are announced many times while they grow; only the last announcement counts."""
    if part.get("type") == "tool":
        return (part.get("state") or {}).get("status") in ("completed", "error")
    return bool((part.get("time") or {}).get("end"))
