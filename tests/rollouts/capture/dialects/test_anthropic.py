"""Anthropic's Messages as chat completions, and back."""

import json
from typing import Any

import pytest

from paddock.rollouts.capture.dialects.anthropic import Anthropic
from paddock.rollouts.capture.refusals import BadRequest, Fault
from paddock.rollouts.capture.shaping import constraint
from rollouts.capture.dialects.telling import asked, call, chat_of, chunk, document, events, writer

USER = {"role": "user", "content": "hi"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}


def chat(*messages: Any, **more: Any) -> dict[str, Any]:
    return chat_of("anthropic", {"model": "m", "max_tokens": 9, "messages": list(messages), **more})


@pytest.mark.parametrize(
    ("system", "told"),
    [
        ("be good", "be good"),
        (
            [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}],
            "a\n\nb",
        ),
        ([{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "b"}], "b"),
    ],
)
def test_a_system_prompt_comes_first(system: Any, told: str) -> None:
    assert chat(USER, system=system)["messages"] == [{"role": "system", "content": told}, USER]


def test_a_later_system_message_is_the_users() -> None:
    later = {"role": "system", "content": [{"type": "text", "text": "note"}]}
    assert chat(USER, later)["messages"] == [USER, {"role": "user", "content": "note"}]


def test_a_turn_with_thoughts_text_and_calls_is_one_message() -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "anything"},
        {"type": "redacted_thinking", "data": "xyz"},
        {"type": "text", "text": "Looking."},
        {"type": "tool_use", "id": "t1", "name": "bash", "input": {"command": "ls"}},
        {"type": "tool_use", "id": "t2", "name": "bash", "input": {}},
    ]
    (_, said) = chat(USER, {"role": "assistant", "content": blocks})["messages"]
    calls = [call("bash", '{"command": "ls"}', "t1"), call("bash", "{}", "t2")]
    assert said == {"role": "assistant", "content": "Looking.", "reasoning_content": "hm", "tool_calls": calls}


def test_results_come_before_text_and_pictures_after_all_results() -> None:
    blocks = [
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "one"}, IMAGE]},
        {"type": "tool_result", "tool_use_id": "t2", "content": "two", "is_error": True},
        {"type": "tool_result", "tool_use_id": "t3"},
        {"type": "text", "text": "go on"},
    ]
    assert chat({"role": "user", "content": blocks})["messages"] == [
        {"role": "tool", "tool_call_id": "t1", "content": "one\n[image]"},
        {"role": "tool", "tool_call_id": "t2", "content": "two"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": [PICTURE, {"type": "text", "text": "go on"}]},
    ]


def test_pictures_and_documents_of_the_user() -> None:
    url = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    paper = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "words"}}
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "QUJD"}}
    (message,) = chat({"role": "user", "content": [IMAGE, url, paper, pdf]})["messages"]
    assert [part["type"] for part in message["content"]] == ["image_url", "image_url", "text", "file"]


def test_tools_become_functions_and_server_tools_are_left_out() -> None:
    tools = [
        {"name": "bash", "description": "run", "input_schema": {"type": "object"}, "cache_control": {}},
        {"type": "custom", "name": "b", "input_schema": {"type": "object"}},
        {"type": "bash_20250124", "name": "shell"},
        {"type": "web_search_20250305", "name": "web_search"},
    ]
    read = asked(Anthropic(), {"messages": [USER], "tools": tools})
    assert [tool["function"]["name"] for tool in read.chat["tools"]] == ["bash", "b", "shell"]
    assert read.chat["tools"][0]["function"]["parameters"] == {"type": "object"}
    assert read.notes == ["the tool 'web_search_20250305' runs on Anthropic's servers and was left out"]


def test_tools_may_change_in_the_middle() -> None:
    tools: list[dict[str, Any]] = [{"name": name, "input_schema": {}} for name in ("a", "b")]
    definition = {"type": "tool_definition", "definition": {"name": "c", "input_schema": {}}}
    changes = [
        {"type": "tool_addition", "tool": definition},
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "a"}},
    ]
    made = chat(USER, {"role": "system", "content": changes}, tools=tools)
    assert [tool["function"]["name"] for tool in made["tools"]] == ["b", "c"]
    assert made["messages"] == [USER]


@pytest.mark.parametrize(
    ("more", "forced"),
    [
        ({"tool_choice": {"type": "auto"}}, None),
        ({"tool_choice": {"type": "none"}}, None),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "bash"}}, "tool_choice"),
        ({"output_config": {"effort": "high"}}, None),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "response_format"),
        ({"output_format": {"type": "json_schema", "schema": {}}}, "response_format"),
    ],
)
def test_force_is_seen(more: dict[str, Any], forced: str | None) -> None:
    tools = [{"name": "bash", "input_schema": {}}]
    found = constraint(chat(USER, tools=tools, **more))
    assert found is None if forced is None else found is not None and found.startswith(forced)


def test_sampling_is_told_under_its_other_names() -> None:
    more = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "stop_sequences": ["x"], "stream": True}
    made = chat(USER, **more, thinking={"type": "disabled"}, metadata={"user_id": "u"})
    assert made == {
        "model": "m",
        "messages": [USER],
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "stop": ["x"],
        "stream": True,
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": False},
    }


def test_an_answer_is_a_message() -> None:
    told = json.loads(
        writer("anthropic").document(
            document("tool_calls", content="Hi.", reasoning_content="hm", tool_calls=[call("bash", '{"a":1}')])
        )
    )
    assert told["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": told["content"][0]["signature"]},
        {"type": "text", "text": "Hi."},
        {"type": "tool_use", "id": "c1", "name": "bash", "input": {"a": 1}},
    ]
    assert (told["type"], told["role"], told["model"], told["stop_reason"]) == (
        "message",
        "assistant",
        "m",
        "tool_use",
    )
    assert told["usage"] == {
        "input_tokens": 5,
        "cache_read_input_tokens": 2,
        "cache_creation_input_tokens": 0,
        "output_tokens": 3,
    }


@pytest.mark.parametrize(
    ("reason", "message", "stop"),
    [
        ("stop", {"content": "a"}, "end_turn"),
        ("length", {"content": "a"}, "max_tokens"),
        ("stop", {"tool_calls": [call("b", "{}")]}, "tool_use"),
        ("content_filter", {"content": "a"}, "refusal"),
        ("stop", {"refusal": "no"}, "refusal"),
    ],
)
def test_reasons_to_stop(reason: str, message: dict[str, Any], stop: str) -> None:
    assert json.loads(writer("anthropic").document(document(reason, **message)))["stop_reason"] == stop


def test_a_stop_sequence_is_named() -> None:
    whole = document(content="a")
    whole["choices"][0]["stop_reason"] = "END"
    told = json.loads(writer("anthropic").document(whole))
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", "END")


@pytest.mark.parametrize("arguments", ["{not json", "[1]", '"text"', '{"a": NaN', "1" * 400, "[" * 2000])
def test_arguments_that_are_no_object_go_round_unchanged(arguments: str) -> None:
    told = json.loads(writer("anthropic").document(document(tool_calls=[call("bash", arguments)])))
    (block,) = told["content"]
    assert isinstance(block["input"], dict)
    (_, said) = chat(USER, {"role": "assistant", "content": [block]})["messages"]
    assert said["tool_calls"][0]["function"]["arguments"] == arguments


def test_a_stream_tells_one_block_after_the_other() -> None:
    tell = writer("anthropic", {"stream": True})
    first = {"index": 0, "id": "c1", "function": {"name": "bash", "arguments": ""}}
    pieces = [
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning": "h"}),
        chunk({"content": "Hi"}),
        chunk({"tool_calls": [first]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]}),
        chunk({}, "tool_calls"),
        {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}},
    ]
    told = events(b"".join(tell.chunk(b"", piece, changed=True) for piece in pieces) + tell.end())
    assert [kind for kind, _ in told] == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        "message_delta",
        "message_stop",
    ]
    assert [data["index"] for _, data in told if "index" in data] == [0] * 4 + [1] * 3 + [2] * 3
    assert told[-2][1]["usage"]["output_tokens"] == 2


def test_an_overflow_is_told_in_the_known_words() -> None:
    fault = Fault(400, "maximum context length is 100 tokens, you have 2,000", code="context_length_exceeded")
    told = json.loads(Anthropic().error(fault))
    assert told["error"] == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 2000 tokens > 100 maximum",
    }


@pytest.mark.parametrize(
    ("status", "kind"), [(401, "authentication_error"), (404, "not_found_error"), (400, "invalid_request_error")]
)
def test_errors_have_their_kinds(status: int, kind: str) -> None:
    assert json.loads(Anthropic().error(Fault(status, "no")))["error"]["type"] == kind


def test_a_thread_is_continued_and_an_unknown_one_is_not_found() -> None:
    dialect, tools = Anthropic(), [{"name": "bash", "input_schema": {}}]
    first = asked(dialect, {"messages": [USER], "tools": tools, "system": "s", "thread": {"type": "create"}})
    answer = json.loads(dialect.writer(first, "m", usage=True).document(document(content="Hello.")))
    thread = {"type": "continue", "previous_message_id": answer["id"]}
    second = asked(dialect, {"messages": [{"role": "user", "content": "more"}], "thread": thread})
    assert [message["role"] for message in second.chat["messages"]] == ["system", "user", "assistant", "user"]
    assert second.chat["tools"] == first.chat["tools"]
    assert dialect.chat_form(second.body) == second.chat
    with pytest.raises(BadRequest) as refusal:
        asked(dialect, {"messages": [USER], "thread": {**thread, "previous_message_id": "msg_x"}})
    assert (refusal.value.status, refusal.value.code) == (404, "thread_not_found")


def test_a_thread_that_was_not_asked_for_is_not_kept() -> None:
    dialect = Anthropic()
    first = asked(dialect, {"messages": [USER]})
    answer = json.loads(dialect.writer(first, "m", usage=True).document(document(content="Hello.")))
    with pytest.raises(BadRequest):
        asked(dialect, {"messages": [USER], "thread": {"type": "continue", "previous_message_id": answer["id"]}})
