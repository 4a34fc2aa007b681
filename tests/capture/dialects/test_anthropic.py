"""Anthropic's Messages as chat completions, and back."""

import json
from typing import Any

import pytest

from capture.dialects.replies import chat_of, chunk, document, events, make_writer, parse, tool_call
from paddock.capture.dialects.anthropic import Anthropic
from paddock.capture.errors import BadRequest, ErrorReply
from paddock.capture.upstream_request import find_constraint

USER = {"role": "user", "content": "hi"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}


def chat(*messages: Any, **more: Any) -> dict[str, Any]:
    return chat_of("anthropic", {"model": "m", "max_tokens": 9, "messages": list(messages), **more})


@pytest.mark.parametrize(
    ("system", "text"),
    [
        ("be good", "be good"),
        (
            [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}],
            "a\n\nb",
        ),
        ([{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "b"}], "b"),
    ],
)
def test_a_system_prompt_comes_first(system: Any, text: str) -> None:
    assert chat(USER, system=system)["messages"] == [{"role": "system", "content": text}, USER]


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
    (_, reply) = chat(USER, {"role": "assistant", "content": blocks})["messages"]
    calls = [tool_call("bash", '{"command": "ls"}', "t1"), tool_call("bash", "{}", "t2")]
    assert reply == {"role": "assistant", "content": "Looking.", "reasoning_content": "hm", "tool_calls": calls}


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
    read = parse(Anthropic(), {"messages": [USER], "tools": tools})
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
    constraint = find_constraint(chat(USER, tools=tools, **more))
    assert constraint is None if forced is None else constraint is not None and constraint.startswith(forced)


def test_sampling_parameters_are_translated() -> None:
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
    parsed = json.loads(
        make_writer("anthropic").write_document(
            document("tool_calls", content="Hi.", reasoning_content="hm", tool_calls=[tool_call("bash", '{"a":1}')])
        )
    )
    assert parsed["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": parsed["content"][0]["signature"]},
        {"type": "text", "text": "Hi."},
        {"type": "tool_use", "id": "c1", "name": "bash", "input": {"a": 1}},
    ]
    assert (parsed["type"], parsed["role"], parsed["model"], parsed["stop_reason"]) == (
        "message",
        "assistant",
        "m",
        "tool_use",
    )
    assert parsed["usage"] == {
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
        ("stop", {"tool_calls": [tool_call("b", "{}")]}, "tool_use"),
        ("content_filter", {"content": "a"}, "refusal"),
        ("stop", {"refusal": "no"}, "refusal"),
    ],
)
def test_reasons_to_stop(reason: str, message: dict[str, Any], stop: str) -> None:
    assert json.loads(make_writer("anthropic").write_document(document(reason, **message)))["stop_reason"] == stop


def test_a_stop_sequence_is_named() -> None:
    whole = document(content="a")
    whole["choices"][0]["stop_reason"] = "END"
    parsed = json.loads(make_writer("anthropic").write_document(whole))
    assert (parsed["stop_reason"], parsed["stop_sequence"]) == ("stop_sequence", "END")


@pytest.mark.parametrize("arguments", ["{not json", "[1]", '"text"', '{"a": NaN', "1" * 400, "[" * 2000])
def test_arguments_that_are_no_object_go_round_unchanged(arguments: str) -> None:
    parsed = json.loads(make_writer("anthropic").write_document(document(tool_calls=[tool_call("bash", arguments)])))
    (block,) = parsed["content"]
    assert isinstance(block["input"], dict)
    (_, reply) = chat(USER, {"role": "assistant", "content": [block]})["messages"]
    assert reply["tool_calls"][0]["function"]["arguments"] == arguments


def test_a_stream_sends_one_block_after_the_other() -> None:
    writer = make_writer("anthropic", {"stream": True})
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
    written_events = events(
        b"".join(writer.write_chunk(b"", piece, changed=True) for piece in pieces) + writer.write_end()
    )
    assert [kind for kind, _ in written_events] == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        "message_delta",
        "message_stop",
    ]
    assert [data["index"] for _, data in written_events if "index" in data] == [0] * 4 + [1] * 3 + [2] * 3
    assert written_events[-2][1]["usage"]["output_tokens"] == 2


def test_an_overflow_has_the_text_that_the_program_recognizes() -> None:
    fault = ErrorReply(400, "maximum context length is 100 tokens, you have 2,000", code="context_length_exceeded")
    parsed = json.loads(Anthropic().error_body(fault))
    assert parsed["error"] == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 2000 tokens > 100 maximum",
    }


@pytest.mark.parametrize(
    ("status", "kind"), [(401, "authentication_error"), (404, "not_found_error"), (400, "invalid_request_error")]
)
def test_errors_have_their_kinds(status: int, kind: str) -> None:
    assert json.loads(Anthropic().error_body(ErrorReply(status, "no")))["error"]["type"] == kind


def test_a_thread_is_continued_and_an_unknown_one_is_not_found() -> None:
    dialect, tools = Anthropic(), [{"name": "bash", "input_schema": {}}]
    first = parse(dialect, {"messages": [USER], "tools": tools, "system": "s", "thread": {"type": "create"}})
    answer = json.loads(
        dialect.make_writer(first, "m", include_usage=True).write_document(document(content="Hello."))
    )
    thread = {"type": "continue", "previous_message_id": answer["id"]}
    second = parse(dialect, {"messages": [{"role": "user", "content": "more"}], "thread": thread})
    assert [message["role"] for message in second.chat["messages"]] == ["system", "user", "assistant", "user"]
    assert second.chat["tools"] == first.chat["tools"]
    assert dialect.to_chat(second.body) == second.chat
    with pytest.raises(BadRequest) as refusal:
        parse(dialect, {"messages": [USER], "thread": {**thread, "previous_message_id": "msg_x"}})
    assert (refusal.value.status, refusal.value.code) == (404, "thread_not_found")


def test_a_thread_that_was_not_asked_for_is_not_kept() -> None:
    dialect = Anthropic()
    first = parse(dialect, {"messages": [USER]})
    answer = json.loads(
        dialect.make_writer(first, "m", include_usage=True).write_document(document(content="Hello."))
    )
    with pytest.raises(BadRequest):
        parse(dialect, {"messages": [USER], "thread": {"type": "continue", "previous_message_id": answer["id"]}})
