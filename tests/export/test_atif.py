"""ATIF: steps, observations and subagents."""

import pytest

from export.rollouts import END, call, exported
from paddock.capture.trace import Call, Role
from paddock.export.atif import tool_call


def talk() -> list[Call]:
    """A call with a tool, its result, an answer; a subagent in between."""
    user = {"role": "user", "content": "fix it"}
    system = {"role": "system", "content": "be good"}
    ask = {"id": "t1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    answer = {"role": "assistant", "content": None, "tool_calls": [ask]}
    result = {"role": "tool", "tool_call_id": "t1", "content": "a.py"}
    tools = [{"type": "function", "function": {"name": "bash", "parameters": {}}}]
    return [
        call(0, [1], [2, END], request={"messages": [system, user], "tools": tools}, message=answer),
        call(1, [7], [8], Role.SUBAGENT, session="s2", started=1000.2),
        call(2, [1, 2, END, 5], [6, END], request={"messages": [system, user, answer, result], "tools": tools}),
    ]


def test_results_are_with_their_calls_and_subagents_beside() -> None:
    (trajectory,) = exported("atif", talk())
    steps = trajectory["steps"]
    assert [step["source"] for step in steps] == ["system", "user", "agent", "agent"]
    assert [step["step_id"] for step in steps] == [1, 2, 3, 4]
    results = steps[2]["observation"]["results"]
    assert {"source_call_id": "t1", "content": "a.py"} in results
    assert {"subagent_trajectory_ref": [{"trajectory_id": "r1/c1"}]} in results
    assert [each["trajectory_id"] for each in trajectory["subagent_trajectories"]] == ["r1/c1"]
    assert steps[2]["tool_calls"][0]["arguments"] == {"command": "ls"}
    assert steps[3]["metrics"]["completion_token_ids"] == [6, END]
    assert trajectory["final_metrics"]["extra"]["reward"] == 0.5


def test_a_rewritten_history_is_marked_as_copied() -> None:
    calls = talk()
    summary = {"messages": [{"role": "system", "content": "be good"}, {"role": "user", "content": "so far: ls"}]}
    (trajectory,) = exported("atif", [*calls, call(3, [1, 9], [4, END], request=summary)])
    copied = [step for step in trajectory["steps"] if step.get("is_copied_context")]
    assert [step["message"] for step in copied] == ["be good", "so far: ls"]


@pytest.mark.parametrize("written", ["not json", '["a"]', ""])
def test_arguments_that_are_no_object_are_kept(written: str) -> None:
    converted = tool_call({"id": "x", "function": {"name": "f", "arguments": written}})
    assert converted["arguments"] == ({"": written} if written else {})
