"""Pi: its configuration, the roles of its calls, and its output."""

from typing import Any

from agents.printed import ASSIGNMENT, check_parser, run_printed
from paddock.agents import pi
from paddock.agents.pi import Pi, PiRun
from paddock.capture.trace import Role


def message(*blocks: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "message_end", "message": {"role": "assistant", "content": list(blocks), **more}}


def tool(call: str, command: str, output: str, failed: bool) -> list[dict[str, Any]]:
    of = {"toolCallId": call, "toolName": "bash"}
    result = {"content": [{"type": "text", "text": output}]}
    return [
        {"type": "tool_execution_start", **of, "args": {"command": command}},
        {"type": "tool_execution_end", **of, "result": result, "isError": failed},
    ]


PRINTED: list[Any] = [
    {"type": "session", "id": "s1"},
    {"type": "message_end", "message": {"role": "user", "content": [{"type": "text", "text": "Do it."}]}},
    message({"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "I write."}),
    *tool("c1", "ls", "a.txt", failed=False),
    *tool("c2", "no", "not found", failed=True),
    message(stopReason="error", errorMessage="it broke"),
]


def test_it_gets_one_model_and_does_not_retry() -> None:
    (provider,) = pi.models(ASSIGNMENT)["providers"].values()
    assert (provider["baseUrl"], provider["apiKey"]) == (ASSIGNMENT.base_url, ASSIGNMENT.api_key)
    assert [model["id"] for model in provider["models"]] == [ASSIGNMENT.model]
    assert (provider["models"][0]["contextWindow"], provider["models"][0]["maxTokens"]) == (40_000, 77)
    settings = pi.settings(ASSIGNMENT)
    assert settings["retry"]["enabled"] is False
    assert settings["compaction"] == {"reserveTokens": 77, "keepRecentTokens": (40_000 - 77) // 2}


def test_a_call_without_tools_is_a_summary() -> None:
    assert Pi().classify({"messages": []}, {}) is Role.COMPACTION
    assert Pi().classify({"messages": [], "tools": [{}]}, {}) is None


def test_its_output_is_reported() -> None:
    check_parser(PiRun, PRINTED)
    assert run_printed(PiRun, *PRINTED)[3] == "s1"
