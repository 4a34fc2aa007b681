"""A program that works through one instruction and prints one JSON event per line.

A subclass reads an event in `handle_event` and calls `add_text`, `start_tool`, `end_tool` and `fail`. These make the
live events of the rollout, and a transcript with the same form for all programs: messages with parts.
"""

from __future__ import annotations

import asyncio
import signal
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from paddock.agents.base import AgentExit, AgentRun, Report

if TYPE_CHECKING:
    from paddock.sandbox.base import Job

MAX_TRANSCRIPT_BYTES = 32 * 1024 * 1024
"""Events that are kept: a process in the sandbox can print without end."""
READ_REST_SECONDS = 5.0
"""For the last lines to arrive after the program has ended."""
MAX_WARNING_CHARACTERS = 300
STOP_GRACE_SECONDS = 0.4
"""Between the stop signal and SIGKILL."""


class HeadlessRun(AgentRun):
    """Reads the events of a job as they are printed, and collects them into messages."""

    stop_signal: ClassVar[signal.Signals] = signal.SIGKILL
    """Asks the program to stop. SIGKILL follows any other signal."""

    def __init__(self, job: Job, instruction: str, report: Report) -> None:
        self._job = job
        self._report = report
        self._error: str | None = None
        self._kept_bytes = 0
        self._open_tools: dict[str, dict[str, Any]] = {}
        self._messages: dict[str, dict[str, Any]] = {
            "": {"info": {"role": "user"}, "parts": [{"type": "text", "text": instruction}]}
        }
        self._reader = asyncio.create_task(self._read())

    @abstractmethod
    def handle_event(self, event: dict[str, Any]) -> None:
        """Read one event. Events of an unknown kind are ignored."""

    # -- for `handle_event` -------------------------------------------------------------------------

    def add_text(self, message: str, text: Any, *, kind: str = "text") -> None:
        """The agent wrote a text or, with kind `reasoning`, a thought. `message` is the id of its message."""
        if isinstance(text, str) and text.strip():
            self.add_part(message, {"type": kind, "text": text})

    def start_tool(self, message: str, call_id: str, tool: Any, arguments: Any) -> None:
        """A tool is called. It is reported when it has ended."""
        state = {"status": "running", "input": arguments}
        part = {"type": "tool", "callID": call_id, "tool": str(tool), "state": state}
        self._open_tools[call_id] = part
        self._keep(message, part)

    def end_tool(self, call_id: str, output: Any, *, failed: bool = False) -> None:
        """The call with that id has ended, with an output or with an error."""
        part = self._open_tools.pop(call_id, None)
        if part is None:
            part = {"type": "tool", "callID": call_id, "tool": "unknown", "state": {}}
        if not self.is_transcript_full:
            state = {"status": "error", "error": output} if failed else {"status": "completed", "output": output}
            part["state"].update(state)
            report_part(part, self._report)

    @property
    def open_tools(self) -> list[str]:
        """The ids of calls that have not ended."""
        return list(self._open_tools)

    @property
    def is_transcript_full(self) -> bool:
        """Whether the transcript has reached its limit: further output is not kept."""
        return self._kept_bytes > MAX_TRANSCRIPT_BYTES

    def add_part(self, message: str, part: dict[str, Any]) -> None:
        """Add and report a finished part of a message."""
        if self._keep(message, part):
            report_part(part, self._report)

    def warn(self, warning: str) -> None:
        """Report a warning as an event of the rollout."""
        self._report("agent_warning", {"warning": warning})

    def fail(self, error: str) -> None:
        """The program printed an error. The rollout decides what it means."""
        self._error = error
        self._report("agent_error", {"error": error})

    # -- for the rollout ----------------------------------------------------------------------------

    async def wait(self, timeout: float) -> AgentExit:
        try:
            done = await self._job.wait(timeout)
            await asyncio.wait([self._reader], timeout=READ_REST_SECONDS)
        finally:
            self._reader.cancel()
        return AgentExit(done.exit_code, timed_out=done.timed_out, error=self._error)

    async def messages(self) -> list[dict[str, Any]]:
        return list(self._messages.values())

    async def abort(self) -> None:
        await self._job.kill(self.stop_signal)
        if self.stop_signal is not signal.SIGKILL:
            await self._job.wait(STOP_GRACE_SECONDS)

    def log_tail(self, count: int = 4096) -> str:
        """The end of what the program printed, `count` characters at most."""
        return self._job.tail(count)

    async def _read(self) -> None:
        async for line in self._job.lines():
            event = read_object(line)
            if event is None:
                continue
            self._kept_bytes += len(line)
            try:
                self.handle_event(event)
            except Exception as error:
                # Any process in the sandbox can print here: an event of an odd form must not end the reading.
                self.warn(f"an event was not understood: {error!r}"[:MAX_WARNING_CHARACTERS])

    def _keep(self, message: str, part: dict[str, Any]) -> bool:
        if self.is_transcript_full:
            return False
        name = message or "unnamed"
        info = {"id": name, "sessionID": self.session, "role": "assistant"}
        self._messages.setdefault(name, {"info": info, "parts": []})["parts"].append(part)
        return True


class StreamJsonRun(HeadlessRun):
    """Events of `--output-format stream-json`: whole messages in Anthropic's form, and a result at the end."""

    def handle_event(self, event: dict[str, Any]) -> None:
        kind, message = event.get("type"), event.get("message")
        self.session = event.get("session_id") or self.session
        if kind == "result" and event.get("is_error"):
            error = event.get("error")
            error = error.get("message") if isinstance(error, dict) else error
            self.fail(str(error or event.get("result") or event.get("subtype")))
        elif kind in ("assistant", "user") and isinstance(message, dict):
            blocks = message.get("content")
            for block in blocks if isinstance(blocks, list) else ():
                # A user message is the instruction, or one for a sub-agent, unless it holds the result of a tool.
                if isinstance(block, dict) and (kind == "assistant" or block.get("type") == "tool_result"):
                    self._handle_block(str(message.get("id") or ""), block)

    def _handle_block(self, message: str, block: dict[str, Any]) -> None:
        match block.get("type"):
            case "text":
                self.add_text(message, block.get("text"))
            case "thinking":
                self.add_text(message, block.get("thinking"), kind="reasoning")
            case "tool_use":
                self.start_tool(message, str(block.get("id")), block.get("name"), block.get("input"))
            case "tool_result":
                call_id, failed = str(block.get("tool_use_id")), block.get("is_error") is True
                self.end_tool(call_id, block_text(block.get("content")), failed=failed)


def read_object(line: bytes) -> dict[str, Any] | None:
    """The JSON object in a line; None for other output, which is in the job's log."""
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def block_text(content: Any) -> str:
    """The text of a content: a string, or a list of blocks of which some hold a text."""
    if isinstance(content, list):
        return "\n".join(str(block.get("text", "")) for block in content if isinstance(block, dict))
    return "" if content is None else str(content)


def report_part(part: dict[str, Any], report: Report) -> None:
    """Report a finished part: a text, a thought or a tool call."""
    kind = part.get("type")
    if kind in ("text", "reasoning") and part.get("text"):
        report("agent_text", {"kind": kind, "text": part["text"]})
    elif kind == "tool":
        state = part.get("state") or {}
        details = {key: state.get(key) for key in ("status", "title", "input", "output", "error") if state.get(key)}
        report("agent_tool", {"tool": part.get("tool"), **details})
