"""Runs a driver's output parser on printed lines, without a sandbox."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from typing import Any

from paddock.agents.base import AgentExit, Assignment
from paddock.agents.headless import HeadlessRun
from paddock.sandbox.base import Completed, Job

ASSIGNMENT = Assignment("Do it.", "http://127.0.0.1:7000/v1", "paddock-key", max_tokens=77, context_tokens=40_000)
REPORTED = [
    ("agent_text", {"kind": "reasoning", "text": "Hm."}),
    ("agent_text", {"kind": "text", "text": "I write."}),
    ("agent_tool", {"tool": "bash", "status": "completed", "input": {"command": "ls"}, "output": "a.txt"}),
    ("agent_tool", {"tool": "bash", "status": "error", "input": {"command": "no"}, "error": "not found"}),
    ("agent_error", {"error": "it broke"}),
]
"""What a thought, a text, a tool call, a failed one and an error are reported as, for every program."""
ODD_LINES: list[Any] = [
    b"plain words",
    b"[1]",
    b"",
    {"type": "new", "role": "new"},
    {"type": "assistant", "message": 3},
    {"type": "user", "message": {"content": "text"}},
    {"type": "assistant", "message": {"content": [1]}},
    {"type": "item.completed", "item": 3},
    {"type": "assistant"},
]
"""Output that no driver knows."""


class PrintedJob(Job):
    """A job that has printed some lines. It ends by itself, or when a signal comes that it stops_on."""

    def __init__(self, lines: list[bytes], stops_on: int | None = None) -> None:
        self.pid = 1
        self.signals: list[int] = []
        self._lines = lines
        self._stops_on = stops_on
        self._ended = asyncio.Event()
        if stops_on is None:
            self._ended.set()

    async def lines(self) -> AsyncIterator[bytes]:
        for line in self._lines:
            yield line
            await asyncio.sleep(0)

    async def wait(self, timeout: float | None = None) -> Completed:
        try:
            await asyncio.wait_for(self._ended.wait(), timeout)
        except TimeoutError:
            await self.kill()
            return Completed(None, timed_out=True)
        return Completed(3)

    async def kill(self, number: int = signal.SIGKILL) -> None:
        self.signals.append(number)
        if number in (self._stops_on, signal.SIGKILL):
            self._ended.set()

    def tail(self, count: int = 4096) -> str:
        return "the end"


def run_printed(
    run_class: type[HeadlessRun], *events: Any
) -> tuple[list[Any], list[dict[str, Any]], AgentExit, str | None]:
    """The reported events, the transcript, the exit and the session of a program that printed these events."""
    reported: list[Any] = []

    async def play() -> tuple[list[dict[str, Any]], AgentExit, str | None]:
        lines = [event if isinstance(event, bytes) else json.dumps(event).encode() for event in events]
        run = run_class(PrintedJob(lines), "Do it.", lambda name, data: reported.append((name, data)))
        ended = await run.wait(5)
        return await run.messages(), ended, run.session

    return reported, *asyncio.run(play())


def check_parser(run_class: type[HeadlessRun], events: list[Any], error: str = "it broke") -> None:
    """A program that prints what `REPORTED` says is reported so, and odd lines change nothing."""
    expected = [*REPORTED[:-1], ("agent_error", {"error": error})]
    for lines in (events, [*ODD_LINES, *events]):
        reported, messages, ended, _ = run_printed(run_class, *lines)
        assert reported == expected
        assert ended == AgentExit(3, error=error)
        assert messages[0] == {"info": {"role": "user"}, "parts": [{"type": "text", "text": "Do it."}]}
        parts = [part["type"] for message in messages[1:] for part in message["parts"]]
        assert parts == ["reasoning", "text", "tool", "tool"]
