"""A program that works through one instruction and prints what it does, one JSON event a line.

A subclass says what an event means, in `take`, by calling `add_text`, `start_tool`, `end_tool` and `fail`. Out of
these come the live events of the rollout and a transcript of one form for all programs: messages with parts.
"""

from __future__ import annotations

import asyncio
import signal
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from paddock.rollouts.agents.base import AgentExit, AgentRun, Report

if TYPE_CHECKING:
    from paddock.rollouts.sandbox.base import Job

LONGEST_TRANSCRIPT = 32 * 1024 * 1024
"""Bytes of events that are kept: whoever owns the sandbox' output can print without end."""
READ_REST = 5.0
"""Seconds for the last lines to come in after the program has ended."""
WARNING_LENGTH = 300
STOP_GRACE = 0.4
"""Seconds that a program which can be asked to stop is given before it is killed."""


class HeadlessRun(AgentRun):
    """Reads the events of a job as they come, and collects them into messages."""

    stop_signal: ClassVar[signal.Signals] = signal.SIGKILL
    """What asks the program to stop; others than SIGKILL are followed by it."""

    def __init__(self, job: Job, instruction: str, report: Report) -> None:
        self._job = job
        self._report = report
        self._error: str | None = None
        self._kept = 0
        self._tools: dict[str, dict[str, Any]] = {}
        self._messages: dict[str, dict[str, Any]] = {
            "": {"info": {"role": "user"}, "parts": [{"type": "text", "text": instruction}]}
        }
        self._reader = asyncio.create_task(self._read())

    @abstractmethod
    def take(self, event: dict[str, Any]) -> None:
        """Understand one event. What it does not know it passes over."""

    # -- for `take` ---------------------------------------------------------------------------------

    def add_text(self, message: str, text: Any, *, kind: str = "text") -> None:
        """The agent said something or, with kind `reasoning`, thought it. `message` names what it belongs to."""
        if isinstance(text, str) and text.strip():
            self.add_part(message, {"type": kind, "text": text})

    def start_tool(self, message: str, call_id: str, tool: Any, given: Any) -> None:
        """A tool is called. It is told when it has ended."""
        state = {"status": "running", "input": given}
        part = {"type": "tool", "callID": call_id, "tool": str(tool), "state": state}
        self._tools[call_id] = part
        self._keep(message, part)

    def end_tool(self, call_id: str, output: Any, *, failed: bool = False) -> None:
        """The call of that id has ended, with an output or with an error."""
        part = self._tools.pop(call_id, None)
        if part is None:
            part = {"type": "tool", "callID": call_id, "tool": "unknown", "state": {}}
        if self._kept <= LONGEST_TRANSCRIPT:
            told = {"status": "error", "error": output} if failed else {"status": "completed", "output": output}
            part["state"].update(told)
            report_part(part, self._report)

    @property
    def open_tools(self) -> list[str]:
        """Calls that have not ended."""
        return list(self._tools)

    def add_part(self, message: str, part: dict[str, Any]) -> None:
        """A finished part of a message, which is reported too."""
        if self._keep(message, part):
            report_part(part, self._report)

    def fail(self, error: str) -> None:
        """The program says what went wrong. That it did is for the rollout to judge."""
        self._error = error
        self._report("agent_error", {"error": error})

    # -- for the rollout ----------------------------------------------------------------------------

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
        await self._job.kill(self.stop_signal)
        if self.stop_signal is not signal.SIGKILL:
            await self._job.wait(STOP_GRACE)

    def log_tail(self, count: int = 4096) -> str:
        return self._job.tail(count)

    async def _read(self) -> None:
        async for line in self._job.lines():
            event = read_object(line)
            if event is not None:
                self._kept += len(line)
                self._understand(event)

    def _understand(self, event: dict[str, Any]) -> None:
        """Whoever owns the sandbox' output can print anything: an event of an odd form must not end the reading."""
        try:
            self.take(event)
        except Exception as error:
            self._report("agent_warning", {"warning": f"an event was not understood: {error!r}"[:WARNING_LENGTH]})

    def _keep(self, message: str, part: dict[str, Any]) -> bool:
        if self._kept > LONGEST_TRANSCRIPT:
            return False
        name = message or "unnamed"
        info = {"id": name, "sessionID": self.session, "role": "assistant"}
        self._messages.setdefault(name, {"info": info, "parts": []})["parts"].append(part)
        return True


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
