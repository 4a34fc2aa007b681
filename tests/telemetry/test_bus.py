import logging
import sys
import types
from typing import Any

import pytest

from paddock.errors import ConfigError
from paddock.fleet.events import McpToolError, RolloutStarted, TaskContext, ToolCallFailedEvent
from paddock.telemetry.bus import Bus
from paddock.telemetry.sinks.logfire import LogfireSink
from paddock.telemetry.sinks.logs import LogSink
from paddock.telemetry.sinks.otel import OtelSink
from paddock.telemetry.sinks.prometheus import PrometheusSink

CONTEXT = TaskContext("notes", "v1", "t-1", "tool_use")
ERROR = McpToolError(context=CONTEXT, step_count=2, max_steps=9, tool_name="add", error_message='a "b"\n')


def test_every_sink_hears_every_event_until_it_leaves() -> None:
    bus, first, second = Bus(), [], []  # type: ignore[var-annotated]
    leave = bus.subscribe(first.append)
    bus.subscribe(second.append)
    bus.emit(ERROR)
    leave()
    bus.emit(ERROR)
    assert (len(first), len(second)) == (1, 2)


def test_a_sink_that_raises_is_counted_and_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def broken(event: Any) -> None:
        raise OSError("full")

    bus, heard = Bus(), []  # type: ignore[var-annotated]
    bus.subscribe(broken)
    bus.subscribe(heard.append)
    bus.emit(ERROR)
    assert heard == [ERROR]
    assert sum(bus.failures.values()) == 1
    assert "fleet_mcp_tool_error" in caplog.text


def test_attributes_are_flat_and_carry_the_task() -> None:
    assert RolloutStarted(context=CONTEXT).attributes() == {
        "env_key": "notes", "env_version": "v1", "task_key": "t-1", "modality": "tool_use",
    }  # fmt: skip
    assert ERROR.attributes()["tool_name"] == "add"


def test_logs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "paddock.events"):
        LogSink()(ERROR)
        LogSink()(RolloutStarted(context=CONTEXT))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "tool_name='add'" in caplog.text


def test_prometheus_counts_by_few_labels() -> None:
    sink = PrometheusSink()
    for _ in range(3):
        sink(ERROR)
    line = 'paddock_events_total{event="fleet_mcp_tool_error",env_key="notes",modality="tool_use",tool_name="add"} 3'
    assert line in sink.render()


def test_backends_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "logfire", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    with pytest.raises(ConfigError, match="logfire"):
        LogfireSink("t", environment="e", service_name="s")
    with pytest.raises(ConfigError, match="opentelemetry"):
        OtelSink()


def test_logfire_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    standin = types.SimpleNamespace(
        configure=lambda **named: told.append(named), log=lambda *given: told.append(given)
    )
    monkeypatch.setitem(sys.modules, "logfire", standin)
    failed = ToolCallFailedEvent(
        context=CONTEXT, error_type="E", error_message="m", step_count=1, max_steps=2, tool_name="add"
    )
    sink = LogfireSink("t", environment="e", service_name="s")
    sink(ERROR)
    sink(failed)
    assert told[0]["environment"] == "e"
    assert [given[:2] for given in told[1:]] == [
        ("warn", "fleet_mcp_tool_error"),
        ("error", "fleet_tool_call_failed"),
    ]
