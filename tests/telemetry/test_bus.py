from typing import Any

import pytest

from paddock.fleet.client.events import McpToolError, RolloutStarted, TaskContext
from paddock.telemetry.bus import Bus

CONTEXT = TaskContext("notes", "v1", "t-1", "tool_use")
ERROR = McpToolError(context=CONTEXT, step_count=2, max_steps=9, tool_name="add", error_message='a "b"\n')


def test_every_sink_gets_every_event_until_it_unsubscribes() -> None:
    bus, first, second = Bus(), [], []  # type: ignore[var-annotated]
    leave = bus.subscribe(first.append)
    bus.subscribe(second.append)
    bus.emit(ERROR)
    leave()
    bus.emit(ERROR)
    assert (len(first), len(second)) == (1, 2)


def test_a_sink_that_raises_is_counted_and_affects_no_other(caplog: pytest.LogCaptureFixture) -> None:
    def broken(event: Any) -> None:
        raise OSError("full")

    bus, received = Bus(), []  # type: ignore[var-annotated]
    bus.subscribe(broken)
    bus.subscribe(received.append)
    bus.emit(ERROR)
    assert received == [ERROR]
    assert sum(bus.failures.values()) == 1
    assert "fleet_mcp_tool_error" in caplog.text


def test_attributes_are_flat_and_carry_the_task() -> None:
    assert RolloutStarted(context=CONTEXT).attributes() == {
        "env_key": "notes", "env_version": "v1", "task_key": "t-1", "modality": "tool_use",
    }  # fmt: skip
    assert ERROR.attributes()["tool_name"] == "add"
