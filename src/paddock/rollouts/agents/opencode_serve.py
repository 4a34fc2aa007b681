"""`opencode serve`: the program as a server in the sandbox, which we dial into and talk to.

The instruction is posted to a session; events tell when it is idle again. Messages can be read at any
time, and an abort drops the model call that is under way.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from base64 import b64encode
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import orjson

from paddock.errors import AgentError
from paddock.net import HttpConnection
from paddock.rollouts.agents.base import AgentExit, AgentRun, Assignment, Report
from paddock.rollouts.agents.headless import read_object, report_part
from paddock.rollouts.agents.opencode import PROVIDER, command_line
from paddock.rollouts.agents.opencode_run import error_text
from paddock.rollouts.sandbox.base import Command

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from paddock.net import Streams
    from paddock.rollouts.sandbox.base import Job, Sandbox

LISTENING = re.compile(rb"opencode server listening on http://[^:]+:(\d+)")
START = 60.0
"""Seconds until the server must listen; a loaded machine needs more than the usual one or two."""
ANSWER = 30.0
LARGEST_ANSWER = 64 * 1024 * 1024
POLL = 2.0
"""Seconds between looks at the session's status, should an event have been missed."""
ARGUMENTS = ("serve", "--hostname", "127.0.0.1", "--port", "0")


async def start_serve(
    sandbox: Sandbox, assignment: Assignment, env: Mapping[str, str], report: Report
) -> OpenCodeServe:
    password = secrets.token_urlsafe(18)
    full = {**env, "OPENCODE_SERVER_PASSWORD": password}
    job = await sandbox.start(Command(command_line(*ARGUMENTS), cwd=sandbox.workdir, env=full))
    try:
        port = await asyncio.wait_for(_listening(job), START)
    except TimeoutError:
        raise AgentError(f"opencode serve did not listen within {START:g} s: {job.tail(500)}") from None
    server = Server(sandbox, port, password)
    created = await server.post("/session", {"title": "rollout"})
    run = OpenCodeServe(server, job, str(created["id"]), report)
    await run.prompt(assignment)
    return run


async def _listening(job: Job) -> int:
    async for line in job.lines():
        found = LISTENING.search(line)
        if found:
            return int(found.group(1))
    raise AgentError(f"opencode serve ended at once: {job.tail(500)}")


class Server:
    """The HTTP side of `opencode serve`, reached through the sandbox."""

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
        """Everything the server announces, from now on."""
        connection = self._connection()
        rest = b""
        async for piece in connection.stream("/event"):
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) > LARGEST_ANSWER:
                raise ConnectionError("an event of opencode serve has no end")
            for line in lines:
                if line.startswith(b"data:") and (event := read_object(line[5:])) is not None:
                    yield event

    async def close(self) -> None:
        await self._calls.close()

    def _connection(self) -> HttpConnection:
        url = f"http://127.0.0.1:{self._port}"
        return HttpConnection(url, self._headers, connect=self._dial, largest=LARGEST_ANSWER)

    async def _dial(self) -> Streams:
        return await asyncio.open_connection(sock=await self._sandbox.dial(self._port))

    async def _request(self, method: str, path: str, body: bytes) -> Any:
        try:
            async with asyncio.timeout(ANSWER):
                status, _, answer = await self._calls.request(method, path, body)
        except (OSError, TimeoutError) as error:
            raise AgentError(f"opencode serve does not answer {method} {path}: {error!r}") from error
        if status >= 400:
            raise AgentError(f"opencode serve answered {method} {path} with {status}: {answer[:300]!r}")
        try:
            return orjson.loads(answer) if answer else None
        except orjson.JSONDecodeError as error:
            raise AgentError(f"opencode serve answered {method} {path} with something that is not JSON") from error


class OpenCodeServe(AgentRun):
    def __init__(self, server: Server, job: Job, session: str, report: Report) -> None:
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
        """Begin, once the events are being heard: a run that fails at once is over before the next look."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._connected.wait(), ANSWER)
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
        """As the server tells them; what was read last once it is gone."""
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
        """Idle by event, or by status when the stream of events broke."""
        while not self._idle.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), POLL)
                return
            status = await self._server.get("/session/status")
            working = self.session in (status or {})
            if self._busy_seen and not working:
                return
            self._busy_seen = self._busy_seen or working

    async def _follow(self) -> None:
        try:
            async for event in self._server.events():
                self._take(event)
        except OSError as error:
            self._report("agent_warning", {"warning": f"lost the event stream: {error}"})
            await asyncio.Event().wait()  # the status is polled from here on

    def _take(self, event: dict[str, Any]) -> None:
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
    """Parts are announced many times while they grow; only the last time counts."""
    if part.get("type") == "tool":
        return (part.get("state") or {}).get("status") in ("completed", "error")
    return bool((part.get("time") or {}).get("end"))
