import json
from typing import Any

import pytest

from paddock.fleet import CONTEXT_TOOL_NAMES, CONTEXT_TOOLS, ContextManager

SYSTEM = {"role": "system", "content": "be good"}
TASK = {"role": "user", "content": [{"type": "text", "text": "the task"}, {"type": "image_url", "image_url": {}}]}


def talk(turns: int) -> list[dict[str, Any]]:
    reply: list[dict[str, Any]] = [SYSTEM, TASK]
    for turn in range(turns):
        call = {"id": f"c{turn}", "function": {"name": "add", "arguments": f'{{"n": {turn}}}'}}
        reply.append({"role": "assistant", "content": f"a{turn}", "tool_calls": [call]})
        reply.append({"role": "tool", "tool_call_id": f"c{turn}", "content": f"result {turn}"})
        reply.append({"role": "tool", "tool_call_id": f"d{turn}", "content": f"second {turn}"})
    return reply


def run(manager: ContextManager, name: str, history: Any = (), /, **arguments: Any) -> Any:
    return json.loads(manager.execute_tool(name, arguments, list(history))[0])


def tracked(history: list[dict[str, Any]]) -> ContextManager:
    manager = ContextManager(max_output_chars=20)
    for message in history:
        manager.track_message(message)
    return manager


@pytest.mark.parametrize(("keep", "left"), [(0, 1), (1, 1), (2, 2), ("2", 2), (2.0, 2), (None, 4), (99, 4)])
def test_whole_turns_are_dropped_and_the_task_stays(keep: Any, left: int) -> None:
    history = talk(4)
    _, remaining = tracked(history).execute_tool("manage_context", {"keep_recent_turns": keep}, history)
    assert remaining[:2] == [SYSTEM, TASK]
    assert remaining[2:] == history[len(history) - 3 * left :]
    called = {call["id"][1:] for message in remaining for call in message.get("tool_calls", ())}
    assert {message["tool_call_id"][1:] for message in remaining if message["role"] == "tool"} == called


@pytest.mark.parametrize("keep", [-1, "two", [], True, 1.5])
def test_an_invalid_number_is_refused_and_nothing_is_dropped(keep: Any) -> None:
    history = talk(4)
    text, remaining = ContextManager().execute_tool("manage_context", {"keep_recent_turns": keep}, history)
    assert "keep_recent_turns" in json.loads(text)["error"]
    assert remaining == history


def test_what_is_dropped_can_still_be_found() -> None:
    history = talk(4)
    manager = tracked(history[2:])
    _, remaining = manager.execute_tool("manage_context", {"keep_recent_turns": 1}, history)
    assert run(manager, "check_context", remaining) == {"visible_turns": 1, "total_turns": 4, "dropped_turns": 3}
    assert run(manager, "search_history", pattern="RESULT 0")["matches"][0]["role"] == "tool"
    assert run(manager, "search_history", pattern='"n": 0')["matches"][0]["role"] == "assistant"


def test_messages_that_were_never_tracked_are_not_lost_when_dropped() -> None:
    manager = ContextManager()
    manager.execute_tool("manage_context", {"keep_recent_turns": 1}, talk(3))
    assert run(manager, "search_history", pattern="result 0")["matches"]


def test_the_history_is_a_copy() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "before"}]}
    manager = tracked([message])
    message["content"][0]["text"] = "after"  # type: ignore[index]
    assert run(manager, "search_history", pattern="before")["matches"]


def test_content_in_parts_is_searched_and_the_place_is_shown() -> None:
    long = {"role": "user", "content": [{"type": "text", "text": "x" * 5000 + "needle" + "y" * 5000}]}
    result = run(tracked([TASK, long]), "search_history", pattern="needle")["matches"]
    assert result[0]["index"] == 1
    assert "needle" in result[0]["snippet"]
    assert len(result[0]["snippet"]) == 200


def test_every_long_output_stays_viewable() -> None:
    manager = ContextManager(max_output_chars=20)
    first, second = ("\n".join(f"{name} {line}" for line in range(120)) for name in ("first", "second"))
    assert "output 1" in manager.truncate_output(first)
    assert manager.truncate_output(second).startswith(second[:20])
    assert manager.truncate_output("short") == "short"
    assert manager.last_full_output == second
    page = run(manager, "view_tool_output", page=3, output_id=1)
    assert (page["page"], page["total_pages"], page["total_lines"]) == (3, 3, 120)
    assert page["content"].splitlines()[-1] == "first 119"
    assert run(manager, "search_tool_output", pattern="SECOND 7")["matches"][0] == {"line": 8, "content": "second 7"}


@pytest.mark.parametrize(
    "arguments",
    [{"page": 0}, {"page": 4}, {"page": -1}, {"page": 1, "page_size": 0}, {"page": "x"}, {"page": 1, "output_id": 9}],
)
def test_a_missing_page_is_reported(arguments: dict[str, Any]) -> None:
    manager = ContextManager(max_output_chars=5)
    manager.truncate_output("\n".join("line" for _ in range(120)))
    assert run(manager, "view_tool_output", **arguments)["error"]


@pytest.mark.parametrize("pattern", [None, "", 3, []])
def test_a_pattern_is_required(pattern: Any) -> None:
    assert "pattern" in run(ContextManager(), "search_history", pattern=pattern)["error"]


def test_arguments_that_are_no_object_and_unknown_tools_are_refused() -> None:
    assert json.loads(ContextManager().execute_tool("search_history", "pattern", [])[0])["error"]
    assert json.loads(ContextManager().execute_tool("nope", {}, [])[0])["error"] == "Unknown context tool: nope"


def test_there_are_five_tools_and_callers_get_copies() -> None:
    manager = ContextManager()
    manager.get_tools()[0]["function"]["name"] = "mine"
    assert [tool["function"]["name"] for tool in CONTEXT_TOOLS] == [
        "check_context", "manage_context", "search_history", "search_tool_output", "view_tool_output",
    ]  # fmt: skip
    assert all(manager.is_context_tool(name) for name in CONTEXT_TOOL_NAMES)
    assert ContextManager().execute_tool("view_tool_output", {"page": 1}, [])[0] == "No truncated output available."
