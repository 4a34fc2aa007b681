"""What becomes of the calls that a model asks for."""

from typing import Any

import pytest

from paddock.errors import ConfigError
from paddock.rollouts.loop.agent import LoopLimits, RequestedToolCall, assistant_message, shorten
from paddock.rollouts.loop.session import ToolResult
from rollouts.loop.fake_session import PIXEL


def call(arguments: Any, **changes: Any) -> dict[str, Any]:
    return {"id": "x", "type": "function", "function": {"name": "say", "arguments": arguments}, **changes}


@pytest.mark.parametrize(
    ("raw", "arguments"),
    [('{"word": 1}', {"word": 1}), ("", {}), ("  ", {}), (None, {}), ({"word": 1}, {"word": 1}), ("{}", {})],
)
def test_arguments_are_read(raw: Any, arguments: dict[str, Any]) -> None:
    assert RequestedToolCall.read(call(raw), 0) == RequestedToolCall("x", "say", arguments)


@pytest.mark.parametrize("raw", ['{"word": ', "[1]", "null", "3", '"text"'])
def test_arguments_that_are_no_object_are_reported_to_the_model(raw: str) -> None:
    wanted = RequestedToolCall.read(call(raw), 0)
    assert wanted.problem is not None
    assert "say" in wanted.problem


def test_a_history_holds_only_arguments_that_engines_take() -> None:
    values = call('{"word": ')
    message = assistant_message({"content": "", "tool_calls": [values]}, [RequestedToolCall.read(values, 0)])
    assert message["tool_calls"][0]["function"]["arguments"] == "{}"


def test_a_history_holds_good_arguments_as_they_were_sampled() -> None:
    values = call('{"word":  1}')
    message = assistant_message({"content": None, "tool_calls": [values]}, [RequestedToolCall.read(values, 0)])
    assert message["tool_calls"][0]["function"]["arguments"] == '{"word":  1}'


def test_a_call_without_an_id_is_given_one() -> None:
    assert RequestedToolCall.read(call("{}", id=None), 7).id == "call_7"


def test_thoughts_are_remembered() -> None:
    assert assistant_message({"content": "hi", "reasoning_content": "hm"}, [])["reasoning_content"] == "hm"


def test_a_short_text_stays_as_it_is() -> None:
    assert shorten("abc", 3) == "abc"
    assert "7 characters left out" in shorten("abcdefghi", 3)


def test_values_become_parts() -> None:
    assert ToolResult.of_value({"a": 1}).text == '{"a":1}'
    assert ToolResult.of_value("plain").text == "plain"
    assert ToolResult.of_value([PIXEL]).images == [PIXEL]
    assert ToolResult.of_value([]).text == "[]"
    assert ToolResult.of_value(None).text == "null"


def test_limits_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="steps"):
        LoopLimits(steps=0)
