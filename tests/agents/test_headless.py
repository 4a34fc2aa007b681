"""What agents print, as events and as a transcript: from lines to texts, tools and errors."""

import asyncio
import json
import signal
from typing import Any

import pytest

from agents.printed import REPORTED, PrintedJob, check_parser, run_printed
from paddock.agents import headless
from paddock.agents.base import AgentExit
from paddock.agents.headless import StreamJsonRun


def message(role: str, *blocks: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": role, "session_id": "s1", "message": {"id": "m1", "role": role, "content": list(blocks)}, **more}


PRINTED: list[Any] = [
    {"type": "system", "subtype": "init", "session_id": "s1"},
    message("assistant", {"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "I write."}),
    message("assistant", {"type": "tool_use", "id": "c1", "name": "bash", "input": {"command": "ls"}}),
    message("user", {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "a.txt"}]}),
    message("assistant", {"type": "tool_use", "id": "c2", "name": "bash", "input": {"command": "no"}}),
    message("user", {"type": "tool_result", "tool_use_id": "c2", "content": "not found", "is_error": True}),
    {"type": "result", "is_error": True, "error": {"message": "it broke"}, "session_id": "s1"},
]


def tool_use(command: str) -> dict[str, Any]:
    return message("assistant", {"type": "tool_use", "id": "c1", "name": "bash", "input": {"command": command}})


def test_stream_json_is_reported() -> None:
    check_parser(StreamJsonRun, PRINTED)
    assert run_printed(StreamJsonRun, *PRINTED)[3] == "s1"


def test_an_event_of_an_odd_form_is_warned_of_and_the_next_is_read() -> None:
    class Strict(StreamJsonRun):
        def handle_event(self, event: dict[str, Any]) -> None:
            super().handle_event({**event, "type": event["type"]})

    reported, _, _, _ = run_printed(Strict, {"kind": "odd"}, *PRINTED)
    assert [kind for kind, _ in reported] == ["agent_warning", *(kind for kind, _ in REPORTED)]
    assert "not understood" in reported[0][1]["warning"]


def test_a_tool_that_has_not_ended_is_in_the_transcript_as_running() -> None:
    reported, messages, _, _ = run_printed(StreamJsonRun, tool_use("sleep 9"))
    assert reported == []
    assert messages[1]["parts"][0]["state"] == {"status": "running", "input": {"command": "sleep 9"}}


def test_an_end_without_a_beginning_is_reported_too() -> None:
    reported, _, _, _ = run_printed(StreamJsonRun, PRINTED[3])
    assert reported == [("agent_tool", {"tool": "unknown", "status": "completed", "output": "a.txt"})]


def test_a_program_that_prints_without_end_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headless, "MAX_TRANSCRIPT_BYTES", 2000)
    reported, messages, _, _ = run_printed(
        StreamJsonRun, *[message("assistant", {"type": "text", "text": "x" * 100})] * 500
    )
    assert 0 < len(reported) < 15
    assert len(json.dumps(messages)) < 4000


@pytest.mark.parametrize(
    ("first_signal", "stops_on", "signals"),
    [
        (signal.SIGKILL, signal.SIGKILL, [signal.SIGKILL]),
        (signal.SIGTERM, signal.SIGTERM, [signal.SIGTERM]),
        (signal.SIGTERM, signal.SIGKILL, [signal.SIGTERM, signal.SIGKILL]),
    ],
)
def test_an_abort_sends_the_stop_signal_before_sigkill(
    monkeypatch: pytest.MonkeyPatch, first_signal: signal.Signals, stops_on: int, signals: list[int]
) -> None:
    monkeypatch.setattr(headless, "STOP_GRACE_SECONDS", 0.05)

    class Stopping(StreamJsonRun):
        stop_signal = first_signal

    async def play() -> tuple[list[int], AgentExit]:
        job = PrintedJob([], stops_on=stops_on)
        run = Stopping(job, "Do it.", lambda name, data: None)
        waiting = asyncio.create_task(run.wait(5))
        await asyncio.sleep(0)
        await run.abort()
        return job.signals, await waiting

    sent, ended = asyncio.run(play())
    assert sent == signals
    assert ended.exit_code == 3
