"""Tools have a beginning and an end, as far as the answer, the agent and the next request tell them."""

from typing import Any

from paddock.web.tool_spans import ToolSpans

from .browser import Browser


def asked(call_id: str, name: str = "bash", **arguments: Any) -> dict[str, Any]:
    return {"kind": "tool_call", "id": call_id, "name": name, "arguments": arguments}


def test_a_tool_ends_at_the_latest_with_the_request_that_has_its_result() -> None:
    spans = ToolSpans()
    spans.begin(asked("t1"), "c0", 10.0)
    span = spans.end({"id": "t1", "error": True}, "c1", 12.5)
    assert span is not None
    assert (span.seconds, span.ended_by, span.error, span.result_in) == (2.5, "request", True, "c1")
    assert spans.end({"id": "t1"}, "c2", 13.0) is None


def test_reports_of_the_agent_tell_tools_of_one_answer_apart() -> None:
    spans = ToolSpans()
    spans.begin(asked("t1", command="sleep 2"), "c0", 10.0)
    spans.begin(asked("t2", command="ls"), "c0", 10.0)
    spans.report({"tool": "bash", "input": {"command": "ls"}, "status": "error"}, 10.1)
    spans.report({"tool": "bash", "input": {"command": "as the agent writes it"}}, 12.0)
    spans.report({"tool": "write", "input": {}}, 12.1)
    for name in ("t1", "t2"):
        spans.end({"id": name}, "c1", 12.2)
    assert [(span.ended, span.ended_by, span.error) for span in spans.spans] == [
        (12.0, "agent", False), (10.1, "agent", True),
    ]  # fmt: skip


def test_a_report_that_was_read_late_is_no_end() -> None:
    spans = ToolSpans()
    spans.begin(asked("t1"), "c0", 10.0)
    spans.begin(asked("t1"), "c1", 11.0)
    spans.report({"tool": "bash"}, 99.0)
    spans.end({"id": "t1"}, "c1", 11.0)
    [span] = spans.spans
    assert (span.started, span.ended, span.ended_by) == (10.0, 11.0, "request")


def test_tools_of_a_rollout_are_listed(browser: Browser, ids: dict[str, str]) -> None:
    tools = browser.api(f"rollouts/{ids['solve']}/tools")["tools"]
    assert tools
    for tool in tools:
        assert tool["name"]
        assert tool["started"] <= tool["ended"]
    results = [item for item in browser.api(f"rollouts/{ids['solve']}/transcript")["items"] if "seconds" in item]
    assert len(results) == len(tools)
