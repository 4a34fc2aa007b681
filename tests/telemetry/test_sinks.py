import logging
import sys
import types
from typing import Any

import pytest

from paddock.errors import ConfigError
from paddock.fleet.client.events import McpToolError, RolloutStarted, TaskContext, ToolCallFailedEvent
from paddock.telemetry.sinks import LogfireSink, LogSink, OtelSink, PrometheusSink

CONTEXT = TaskContext("notes", "v1", "t-1", "tool_use")
ERROR = McpToolError(context=CONTEXT, step_count=2, max_steps=9, tool_name="add", error_message='a "b"\n')


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


def test_logfire_gets_every_event(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    standin = types.SimpleNamespace(
        configure=lambda **options: calls.append(options), log=lambda *arguments: calls.append(arguments)
    )
    monkeypatch.setitem(sys.modules, "logfire", standin)
    failed = ToolCallFailedEvent(
        context=CONTEXT, error_type="E", error_message="m", step_count=1, max_steps=2, tool_name="add"
    )
    sink = LogfireSink("t", environment="e", service_name="s")
    sink(ERROR)
    sink(failed)
    assert calls[0]["environment"] == "e"
    assert [call[:2] for call in calls[1:]] == [
        ("warn", "fleet_mcp_tool_error"),
        ("error", "fleet_tool_call_failed"),
    ]
