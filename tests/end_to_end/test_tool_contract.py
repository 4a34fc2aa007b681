"""Tools called by steps, exchange by exchange, against OpenEnv's server and against Paddock."""

from typing import Any

import pytest

from .messages import (
    HELLO_RESULT,
    NOT_A_DICTIONARY,
    NOT_A_STRING,
    NOT_PERMITTED,
    REQUIRED,
    TAKES_A_MESSAGE,
    Table,
    exchanges,
    refused,
    said,
    step,
    violation,
)
from .processes import Server
from .shapes import Some
from .wire import Socket, request

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(60, func_only=True)]


def observed(observation: Any, reward: float | None = None, **more: Any) -> dict[str, Any]:
    data = {"observation": observation, "reward": reward, "done": False, **more}
    return {"type": "observation", "data": data}


def called(tool: str, result: Any, error: Any = None) -> dict[str, Any]:
    return observed({"metadata": {}, "tool_name": tool, "result": result, "error": error})


def tool_failed(tool: str, kind: str) -> dict[str, Any]:
    return called(tool, None, {"error_type": kind, "message": Some(str)})


def call(tool: str, **arguments: Any) -> dict[str, Any]:
    return step(type="call_tool", tool_name=tool, arguments=arguments)


ECHO_FRAMES: Table = {
    "list": (
        step(type="list_tools"),
        observed(
            {
                "metadata": {},
                "tools": [
                    {"name": name, "description": Some(str), "input_schema": TAKES_A_MESSAGE}
                    for name in ("echo_message", "echo_with_length")
                ],
            }
        ),
    ),
    "call": (call("echo_message", message="hi"), called("echo_message", said("hi"))),
    "call for an object": (
        call("echo_with_length", message="hello"),
        called("echo_with_length", HELLO_RESULT),
    ),
    "call without a type": (
        step(tool_name="echo_message", arguments={"message": "hi"}),
        called("echo_message", said("hi")),
    ),
    "unknown tool": (call("nope"), tool_failed("nope", "tool_not_found")),
    "tool without a name": (call(""), tool_failed("", "tool_not_found")),
    "reset as a tool": (call("reset"), tool_failed("reset", "tool_not_found")),
    "missing argument": (call("echo_message"), tool_failed("echo_message", "invalid_args")),
    "no arguments": (
        step(type="call_tool", tool_name="echo_message"),
        tool_failed("echo_message", "invalid_args"),
    ),
    "argument too many": (
        call("echo_message", message="a", more=1),
        tool_failed("echo_message", "invalid_args"),
    ),
    "empty step": (step(), refused(violation("missing", ["tool_name"], REQUIRED, {}))),
    "call without a tool": (
        step(type="call_tool"),
        refused(violation("missing", ["tool_name"], REQUIRED, {"type": "call_tool"})),
    ),
    "unknown action": (
        step(type="bogus", tool_name="echo_message"),
        refused(violation("literal_error", ["type"], "Input should be 'call_tool'", "bogus", expected="'call_tool'")),
    ),
    "list with a field too many": (
        step(type="list_tools", more=1),
        refused(violation("extra_forbidden", ["more"], NOT_PERMITTED, 1)),
    ),
    "call with a field too many": (
        step(type="call_tool", tool_name="echo_message", timeout_s=3),
        refused(violation("extra_forbidden", ["timeout_s"], NOT_PERMITTED, 3)),
    ),
    "arguments in a list": (
        step(type="call_tool", tool_name="echo_message", arguments=[1]),
        refused(violation("dict_type", ["arguments"], NOT_A_DICTIONARY, [1])),
    ),
    "number as tool": (
        step(tool_name=3),
        refused(violation("string_type", ["tool_name"], NOT_A_STRING, 3)),
    ),
}


@exchanges(ECHO_FRAMES)
def test_the_echo_answers_a_frame(echo: Server, sent: Any, answer: Any) -> None:
    with Socket(echo.url) as connection:
        assert connection.ask(sent) == answer


def test_reset_metadata_is_sent_in_both_places(echo: Server) -> None:
    with Socket(echo.url) as connection:
        answer = connection.ask({"type": "reset"})
    metadata = answer["data"]["metadata"]
    assert metadata != {}
    assert answer == observed({"metadata": metadata}, 0.0, metadata=metadata)
    over_http = {"observation": {"metadata": metadata}, "reward": 0.0, "done": False, "metadata": metadata}
    assert request(echo.url, "POST", "/reset").body == over_http


def test_every_tool_step_counts(echo: Server) -> None:
    with Socket(echo.url) as connection:
        connection.ask({"type": "reset", "data": {"episode_id": "mine"}})
        for sent in (step(type="list_tools"), call("echo_message", message="hi"), call("nope")):
            connection.ask(sent)
        assert connection.ask({"type": "state"})["data"] == {"episode_id": "mine", "step_count": 3}


def test_a_megabyte_comes_back_whole(echo: Server) -> None:
    message = "ü" * 500_000
    with Socket(echo.url) as connection:
        answer = connection.ask(call("echo_message", message=message))
    assert answer["data"]["observation"]["result"]["data"] == message


def test_a_tool_is_called_over_http(echo: Server) -> None:
    body = {**call("echo_message", message="hi"), "timeout_s": 5}
    answer = request(echo.url, "POST", "/step", {"action": body["data"], "timeout_s": 5})
    assert answer.body == {**called("echo_message", said("hi"))["data"], "metadata": None}


def test_the_schema_describes_the_tool_actions(echo: Server) -> None:
    schema = request(echo.url, "GET", "/schema").body
    assert set(schema["action"]["properties"]) == {"metadata", "type", "tool_name", "arguments"}
    assert schema["action"]["required"] == ["tool_name"]
    observation = {"done", "reward", "metadata", "tool_name", "result", "error"}
    assert set(schema["observation"]["properties"]) == observation
    assert {"episode_id", "step_count"} <= set(schema["state"]["properties"])


def test_paddock_knows_a_wrong_type_for_a_bad_argument(echo_server: Server) -> None:
    with Socket(echo_server.url) as connection:
        answer = connection.ask(call("echo_message", message=3))
    assert answer == tool_failed("echo_message", "invalid_args")
