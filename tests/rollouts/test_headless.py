"""What agents print, as events and as a transcript: from lines to texts, tools and errors."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from paddock.rollouts.agents import headless
from paddock.rollouts.agents.base import AgentExit
from paddock.rollouts.agents.headless import HeadlessRun
from paddock.rollouts.agents.mini_swe_agent import MiniSweAgentRun
from paddock.rollouts.agents.opencode_run import OpenCodeRun
from paddock.rollouts.agents.pi import PiRun
from paddock.rollouts.agents.stream_json import StreamJsonRun
from paddock.rollouts.sandbox.base import Completed, Job

TOLD = [
    ("agent_text", {"kind": "reasoning", "text": "Hm."}),
    ("agent_text", {"kind": "text", "text": "I write."}),
    ("agent_tool", {"tool": "bash", "status": "completed", "input": {"command": "ls"}, "output": "a.txt"}),
    ("agent_tool", {"tool": "bash", "status": "error", "input": {"command": "no"}, "error": "not found"}),
    ("agent_error", {"error": "it broke"}),
]
"""What every program below tells, each in its own words."""


class Printed(Job):
    """A job that has printed some lines. It ends by itself, or when a signal comes that it obeys."""

    def __init__(self, lines: list[bytes], obeys: int | None = None) -> None:
        self.pid = 1
        self.signals: list[int] = []
        self._lines = lines
        self._obeys = obeys
        self._ended = asyncio.Event()
        if obeys is None:
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
        if number in (self._obeys, signal.SIGKILL):
            self._ended.set()

    def tail(self, count: int = 4096) -> str:
        return "the end"


def ran(kind: type[HeadlessRun], *events: Any) -> tuple[list[Any], list[dict[str, Any]], AgentExit, str | None]:
    """Everything that was told, the transcript, the end and the session."""
    told: list[Any] = []

    async def play() -> tuple[list[dict[str, Any]], AgentExit, str | None]:
        lines = [event if isinstance(event, bytes) else json.dumps(event).encode() for event in events]
        run = kind(Printed(lines), "Do it.", lambda name, data: told.append((name, data)))
        ended = await run.wait(5)
        return await run.messages(), ended, run.session

    return told, *asyncio.run(play())


def message(role: str, *blocks: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": role, "session_id": "s1", "message": {"id": "m1", "role": role, "content": list(blocks)}, **more}


def pi_message(*blocks: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "message_end", "message": {"role": "assistant", "content": list(blocks), **more}}


def pi_tool(call: str, command: str, output: str, failed: bool) -> list[dict[str, Any]]:
    of = {"toolCallId": call, "toolName": "bash"}
    result = {"content": [{"type": "text", "text": output}]}
    return [
        {"type": "tool_execution_start", **of, "args": {"command": command}},
        {"type": "tool_execution_end", **of, "result": result, "isError": failed},
    ]


def function(call: str, command: str) -> dict[str, Any]:
    return {"id": call, "function": {"name": "bash", "arguments": json.dumps({"command": command})}}


SAYINGS: dict[type[HeadlessRun], list[Any]] = {
    StreamJsonRun: [
        {"type": "system", "subtype": "init", "session_id": "s1"},
        message("assistant", {"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "I write."}),
        message("assistant", {"type": "tool_use", "id": "c1", "name": "bash", "input": {"command": "ls"}}),
        message("user", {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "a.txt"}]}),
        message("assistant", {"type": "tool_use", "id": "c2", "name": "bash", "input": {"command": "no"}}),
        message("user", {"type": "tool_result", "tool_use_id": "c2", "content": "not found", "is_error": True}),
        {"type": "result", "is_error": True, "error": {"message": "it broke"}, "session_id": "s1"},
    ],
    PiRun: [
        {"type": "session", "id": "s1"},
        {"type": "message_end", "message": {"role": "user", "content": [{"type": "text", "text": "Do it."}]}},
        pi_message({"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "I write."}),
        *pi_tool("c1", "ls", "a.txt", failed=False),
        *pi_tool("c2", "no", "not found", failed=True),
        pi_message(stopReason="error", errorMessage="it broke"),
    ],
    OpenCodeRun: [
        {"type": "reasoning", "sessionID": "s1", "part": {"type": "reasoning", "text": "Hm.", "messageID": "m"}},
        {"type": "text", "part": {"type": "text", "text": "I write.", "messageID": "m"}},
        {
            "type": "tool_use",
            "part": {
                "type": "tool",
                "tool": "bash",
                "messageID": "m",
                "state": {"status": "completed", "input": {"command": "ls"}, "output": "a.txt"},
            },
        },
        {
            "type": "tool_use",
            "part": {
                "type": "tool",
                "tool": "bash",
                "messageID": "m",
                "state": {"status": "error", "input": {"command": "no"}, "error": "not found"},
            },
        },
        {"type": "error", "error": "it broke"},
    ],
    MiniSweAgentRun: [
        {"role": "system", "content": "You are"},
        {"role": "user", "content": "Do it."},
        {
            "role": "assistant",
            "content": "I write.",
            "reasoning_content": "Hm.",
            "tool_calls": [function("c1", "ls"), function("c2", "no")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "a.txt", "returncode": 0},
        {"role": "tool", "tool_call_id": "c2", "content": "not found", "returncode": 127},
        {"role": "exit", "content": "broke", "exit_status": "it"},
    ],
}


@pytest.mark.parametrize("kind", SAYINGS, ids=lambda kind: kind.__name__)
def test_every_program_tells_the_same_in_its_own_words(kind: type[HeadlessRun]) -> None:
    told, messages, ended, session = ran(kind, *SAYINGS[kind])
    wanted = list(TOLD)
    if kind is MiniSweAgentRun:
        wanted[-1], session = ("agent_error", {"error": "it: broke"}), "s1"
    assert told == wanted
    assert session == "s1"
    assert ended == AgentExit(3, error=wanted[-1][1]["error"])
    assert messages[0] == {"info": {"role": "user"}, "parts": [{"type": "text", "text": "Do it."}]}
    assert [part["type"] for each in messages[1:] for part in each["parts"]] == ["reasoning", "text", "tool", "tool"]


@pytest.mark.parametrize("kind", SAYINGS, ids=lambda kind: kind.__name__)
def test_what_it_does_not_know_is_passed_over(kind: type[HeadlessRun]) -> None:
    odd: list[Any] = [
        b"plain words",
        b"[1]",
        b"",
        {"type": "new", "role": "new"},
        {"type": "assistant", "message": 3},
    ]
    odd += [{"type": "user", "message": {"content": "text"}}, {"type": "assistant", "message": {"content": [1]}}]
    told, messages, ended, _ = ran(kind, *odd, *SAYINGS[kind])
    assert len(told) == len(TOLD)
    assert ended.exit_code == 3
    assert len(messages) >= 2


def test_an_event_of_an_odd_form_is_warned_of_and_the_next_is_read() -> None:
    odd = {"type": "message_end", "message": {"role": "assistant", "content": ["no block"]}}
    told, _, _, _ = ran(PiRun, odd, *SAYINGS[PiRun])
    assert [kind for kind, _ in told] == ["agent_warning", *(kind for kind, _ in TOLD)]
    assert "not understood" in told[0][1]["warning"]


def test_a_tool_that_has_not_ended_is_in_the_transcript_as_running() -> None:
    told, messages, _, _ = ran(PiRun, pi_tool("c1", "sleep 9", "", failed=False)[0])
    assert told == []
    assert messages[1]["parts"][0]["state"] == {"status": "running", "input": {"command": "sleep 9"}}


def test_an_end_without_a_beginning_is_told_too() -> None:
    told, _, _, _ = ran(PiRun, pi_tool("c1", "ls", "a.txt", failed=False)[1])
    assert told == [("agent_tool", {"tool": "unknown", "status": "completed", "output": "a.txt"})]


def test_a_program_that_prints_without_end_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headless, "LONGEST_TRANSCRIPT", 2000)
    told, messages, _, _ = ran(StreamJsonRun, *[message("assistant", {"type": "text", "text": "x" * 100})] * 500)
    assert 0 < len(told) < 15
    assert len(json.dumps(messages)) < 4000


@pytest.mark.parametrize(
    ("asked", "obeys", "signals"),
    [
        (signal.SIGKILL, signal.SIGKILL, [signal.SIGKILL]),
        (signal.SIGTERM, signal.SIGTERM, [signal.SIGTERM]),
        (signal.SIGTERM, signal.SIGKILL, [signal.SIGTERM, signal.SIGKILL]),
    ],
)
def test_an_abort_asks_first_where_that_works(
    monkeypatch: pytest.MonkeyPatch, asked: signal.Signals, obeys: int, signals: list[int]
) -> None:
    monkeypatch.setattr(headless, "STOP_GRACE", 0.05)

    class Asked(PiRun):
        stop_signal = asked

    async def play() -> tuple[list[int], AgentExit]:
        job = Printed([], obeys=obeys)
        run = Asked(job, "Do it.", lambda name, data: None)
        waiting = asyncio.create_task(run.wait(5))
        await asyncio.sleep(0)
        await run.abort()
        return job.signals, await waiting

    sent, ended = asyncio.run(play())
    assert sent == signals
    assert ended.exit_code == 3
