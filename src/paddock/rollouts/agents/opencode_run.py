"""`opencode run`: one instruction on standard input, one JSON event a line on standard output."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson

from paddock.rollouts.agents.base import AgentExit, AgentRun, Assignment, Report
from paddock.rollouts.agents.opencode import command_line
from paddock.rollouts.sandbox.base import Command

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paddock.rollouts.sandbox.base import Job, Sandbox

ARGUMENTS = ("run", "--format", "json", "--title", "rollout")
LONGEST_TRANSCRIPT = 32 * 1024 * 1024
"""Bytes of events that are kept: whoever owns the sandbox' output can print without end."""
READ_REST = 5.0
"""Seconds for the last lines to come in after the program has ended."""


async def start_run(sandbox: Sandbox, assignment: Assignment, env: Mapping[str, str], report: Report) -> OpenCodeRun:
    # As an argument the instruction would reach the model in quotes; on standard input it arrives as it is.
    stdin = assignment.instruction.encode()
    job = await sandbox.start(Command(command_line(*ARGUMENTS), cwd=sandbox.workdir, env=env, stdin=stdin))
    return OpenCodeRun(job, assignment.instruction, report)


class OpenCodeRun(AgentRun):
    """Collects the parts that the program prints into messages of its own form."""

    def __init__(self, job: Job, instruction: str, report: Report) -> None:
        self._job = job
        self._report = report
        self._error: str | None = None
        self._kept = 0
        self._messages: dict[str, dict[str, Any]] = {
            "": {"info": {"role": "user"}, "parts": [{"type": "text", "text": instruction}]}
        }
        self._reader = asyncio.create_task(self._read())

    async def wait(self, timeout: float) -> AgentExit:
        try:
            done = await self._job.wait(timeout)
            await asyncio.wait([self._reader], timeout=READ_REST)
        finally:
            self._reader.cancel()
        return AgentExit(done.exit_code, timed_out=done.timed_out, error=self._error)

    async def messages(self) -> list[dict[str, Any]]:
        return list(self._messages.values())

    async def abort(self) -> None:
        await self._job.kill()

    def log_tail(self, count: int = 4096) -> str:
        return self._job.tail(count)

    async def _read(self) -> None:
        async for line in self._job.lines():
            event = read_object(line)
            if event is not None:
                self._kept += len(line)
                self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        kind = str(event.get("type"))
        self.session = event.get("sessionID") or self.session
        if kind == "error":
            self._error = error_text(event.get("error"))
            self._report("agent_error", {"error": self._error})
            return
        part = event.get("part")
        if not isinstance(part, dict):
            return
        if self._kept > LONGEST_TRANSCRIPT:
            return
        name = str(part.get("messageID") or "unnamed")
        info = {"id": name, "sessionID": self.session, "role": "assistant"}
        self._messages.setdefault(name, {"info": info, "parts": []})["parts"].append(part)
        report_part(part, self._report)


def read_object(line: bytes) -> dict[str, Any] | None:
    """The JSON object in a line; None for a plain word of the program, which is in its log anyway."""
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def report_part(part: dict[str, Any], report: Report) -> None:
    """Announce a finished part: what the agent said, thought, or did with a tool."""
    kind = part.get("type")
    if kind in ("text", "reasoning") and part.get("text"):
        report("agent_text", {"kind": kind, "text": part["text"]})
    elif kind == "tool":
        state = part.get("state") or {}
        told = {key: state.get(key) for key in ("status", "title", "input", "output", "error") if state.get(key)}
        report("agent_tool", {"tool": part.get("tool"), **told})


def error_text(error: Any) -> str:
    """OpenCode's error object in one line."""
    if not isinstance(error, dict):
        return str(error)
    data = error.get("data")
    message = data.get("message") if isinstance(data, dict) else None
    return f"{error.get('name', 'error')}: {message}" if message else str(error.get("name", error))
