"""OpenAI's Responses as chat completions, and back."""

import json
from typing import Any

import pytest

from capture.dialects.replies import chat_of, chunk, document, events, make_writer, parse, tool_call
from paddock.capture.dialects.base import Route
from paddock.capture.dialects.responses import Responses
from paddock.capture.errors import BadRequest, ErrorReply
from paddock.capture.upstream_request import find_constraint

USER = {"role": "user", "content": "hi"}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: x"}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Patch.", "format": GRAMMAR}
SHELL = {"type": "local_shell"}
SPAWN = {"type": "function", "name": "spawn", "parameters": {"type": "object"}}
SPACE = {"type": "namespace", "name": "agents", "description": "", "tools": [SPAWN]}


def chat(entries: Any, **more: Any) -> dict[str, Any]:
    return chat_of("responses", {"model": "m", "input": entries, **more})


def names(made: dict[str, Any]) -> list[str]:
    return [tool["function"]["name"] for tool in made["tools"]]


def test_plain_text_is_a_message_of_the_user() -> None:
    assert chat("hi")["messages"] == [USER]


def test_instructions_and_first_developer_messages_are_one_system_prompt() -> None:
    developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "b"}]}
    made = chat([developer, USER, developer], instructions="a")["messages"]
    assert made == [{"role": "system", "content": "a\n\nb"}, USER, {"role": "user", "content": "b"}]


def test_items_of_one_turn_are_one_message() -> None:
    items = [
        USER,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Looking."}]},
        {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": '{"a":1}'},
        {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "*** ä"},
        {"type": "local_shell_call", "call_id": "c3", "action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "local_shell_call_output", "id": "c3", "output": "three"},
    ]
    made = chat(items)["messages"]
    assert made[1] == {
        "role": "assistant",
        "content": "Looking.",
        "reasoning_content": "hm",
        "tool_calls": [
            tool_call("bash", '{"a":1}', "c1"),
            tool_call("apply_patch", '{"input": "*** ä"}', "c2"),
            tool_call("local_shell", '{"command": ["ls"]}', "c3"),
        ],
    }
    assert [(each["tool_call_id"], each["content"]) for each in made[2:]] == [
        ("c1", "one"),
        ("c2", "two"),
        ("c3", "three"),
    ]


def test_pictures_of_the_user_and_of_tools() -> None:
    picture = {"type": "input_image", "image_url": "data:image/png;base64,QUJD", "detail": "high"}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, picture]},
        {"type": "function_call_output", "call_id": "c", "output": [picture]},
    ]
    reply = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD", "detail": "high"}}
    assert chat(items)["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "a"}, reply]},
        {"role": "tool", "tool_call_id": "c", "content": "[image]"},
        {"role": "user", "content": [reply]},
    ]


@pytest.mark.parametrize("field", ["content", "encrypted_content"])
def test_a_thought_comes_back_in_either_place(field: str) -> None:
    parsed = json.loads(make_writer("responses").write_document(document(reasoning_content="hm ä", content="a")))
    item = {"type": "reasoning", "summary": [], field: parsed["output"][0][field]}
    assert chat([USER, item])["messages"][1]["reasoning_content"] == "hm ä"


@pytest.mark.parametrize("sealed", ["gAAAAABo", "", "paddock.not base64!", "paddock./w=="])
def test_other_sealed_thoughts_mean_nothing(sealed: str) -> None:
    assert chat([USER, {"type": "reasoning", "summary": [], "encrypted_content": sealed}])["messages"] == [USER]


def test_tools_of_all_kinds_become_functions_and_server_tools_are_left_out() -> None:
    tools = [SPAWN, PATCH, SHELL, SPACE, {"type": "web_search"}, {"type": "code_interpreter"}, {"type": "mcp"}]
    read = parse(Responses(), {"input": "x", "tools": tools})
    assert names(read.chat) == ["spawn", "apply_patch", "local_shell", "agents__spawn"]
    assert "start: x" in read.chat["tools"][1]["function"]["description"]
    assert len(read.notes) == 3


@pytest.mark.parametrize(
    ("tool", "name", "arguments", "item"),
    [
        (SPAWN, "spawn", '{"a":1}', {"type": "function_call", "name": "spawn", "arguments": '{"a":1}'}),
        (
            SPACE,
            "agents__spawn",
            "{}",
            {"type": "function_call", "name": "spawn", "namespace": "agents", "arguments": "{}"},
        ),
        (
            PATCH,
            "apply_patch",
            '{"input": "*** ä"}',
            {"type": "custom_tool_call", "name": "apply_patch", "input": "*** ä"},
        ),
        (
            PATCH,
            "apply_patch",
            '{"patch": "***"}',
            {"type": "custom_tool_call", "name": "apply_patch", "input": "***"},
        ),
        (
            PATCH,
            "apply_patch",
            "*** no json",
            {"type": "custom_tool_call", "name": "apply_patch", "input": "*** no json"},
        ),
        (SHELL, "local_shell", '{"command": ["ls"]}', {"type": "local_shell_call"}),
        (SHELL, "local_shell", '{"command": "ls"}', {"type": "function_call", "name": "local_shell"}),
        ({"type": "shell"}, "shell", '{"commands": ["ls"]}', {"type": "shell_call"}),
        (
            {"type": "apply_patch"},
            "apply_patch",
            '{"type": "delete_file", "path": "a"}',
            {"type": "apply_patch_call"},
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_goes_back_as_its_own_kind(
    tool: dict[str, Any], name: str, arguments: str, item: dict[str, Any], stream: bool
) -> None:
    writer = make_writer("responses", {"tools": [tool], "stream": stream})
    answer = document("tool_calls", tool_calls=[tool_call(name, arguments)])
    written_events = (
        events(writer.write_as_stream(answer))[-1][1]["response"]
        if stream
        else json.loads(writer.write_document(answer))
    )
    (result,) = written_events["output"]
    assert item.items() <= result.items()
    assert (result["call_id"], result["status"]) == ("c1", "completed")
    (again,) = [each for each in chat([USER, result])["messages"] if each["role"] == "assistant"]
    assert again["tool_calls"][0]["id"] == "c1"
    assert again["tool_calls"][0]["function"]["name"] == name


@pytest.mark.parametrize(
    ("more", "forced"),
    [
        ({"tool_choice": "auto"}, None),
        ({"tool_choice": "none"}, None),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "spawn"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "spawn"}]}}, None),
        ({"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"name": "spawn"}]}}, "tool_choice"),
        ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, None),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "response_format"),
    ],
)
def test_force_is_seen(more: dict[str, Any], forced: str | None) -> None:
    constraint = find_constraint(chat("x", tools=[SPAWN, PATCH], **more))
    assert constraint is None if forced is None else constraint is not None and constraint.startswith(forced)


def test_allowed_tools_are_all_there_are() -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "spawn"}]}
    assert names(chat("x", tools=[SPAWN, PATCH], tool_choice=choice)) == ["spawn"]


@pytest.mark.parametrize(("effort", "level"), [("low", "low"), ("xhigh", None), (None, None)])
def test_an_effort_that_every_engine_knows_is_passed_on(effort: str | None, level: str | None) -> None:
    assert chat("x", reasoning={"effort": effort, "summary": "auto"}).get("reasoning_effort") == level


def test_no_effort_turns_thinking_off() -> None:
    assert chat("x", reasoning={"effort": "none"})["chat_template_kwargs"] == {"enable_thinking": False}


def test_an_answer_is_a_response() -> None:
    body = {"instructions": "be good", "metadata": {"a": "b"}, "tools": [SPAWN], "temperature": 0.5}
    parsed = json.loads(make_writer("responses", body).write_document(document(content="Hi.", refusal="no")))
    assert (parsed["object"], parsed["status"], parsed["model"], parsed["error"]) == (
        "response",
        "completed",
        "m",
        None,
    )
    assert [item["content"][0]["type"] for item in parsed["output"]] == ["output_text", "refusal"]
    assert (parsed["instructions"], parsed["metadata"], parsed["tools"]) == ("be good", {"a": "b"}, [SPAWN])
    assert parsed["usage"]["input_tokens_details"]["cached_tokens"] == 2
    assert parsed["usage"]["total_tokens"] == 10


@pytest.mark.parametrize(
    ("reason", "limit", "status"),
    [
        ("stop", 5, "completed"),
        ("length", 5, "incomplete"),
        ("length", None, "completed"),
        ("content_filter", None, "incomplete"),
    ],
)
def test_only_a_limit_of_the_programs_own_makes_an_answer_incomplete(
    reason: str, limit: int | None, status: str
) -> None:
    writer = make_writer("responses", {"max_output_tokens": limit, "stream": True})
    kind, reply = events(writer.write_as_stream(document(reason, content="a")))[-1]
    assert (kind, reply["response"]["status"]) == (f"response.{status}", status)


def test_a_stream_opens_before_anything_else() -> None:
    writer = make_writer("responses", {"stream": True})
    signs = writer.write_keep_alive() + writer.write_keep_alive()
    reply = signs + writer.write_chunk(b"", chunk({"content": "a"}, "stop"), changed=True)
    kinds = [line[7:] for line in reply.decode().splitlines() if line.startswith("event: ")]
    assert kinds[:4] == ["response.created", "response.in_progress", "keepalive", "response.output_item.added"]


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (ErrorReply(400, "long", code="context_length_exceeded"), "context_length_exceeded"),
        (ErrorReply(400, "broke", invites_retry=True), "server_error"),
        (ErrorReply(400, "never"), "invalid_prompt"),
    ],
)
def test_a_failure_in_a_stream_says_whether_to_try_again(fault: ErrorReply, code: str) -> None:
    writer = make_writer("responses", {"stream": True})
    kind, reply = events(writer.write_error(fault))[-1]
    assert (kind, reply["response"]["status"], reply["response"]["error"]["code"]) == (
        "response.failed",
        "failed",
        code,
    )
    assert writer.writes_error_in_stream(fault) is (code == "context_length_exceeded")


# -- memory -------------------------------------------------------------------------------------------


def answered(dialect: Responses, body: dict[str, Any], **message: Any) -> dict[str, Any]:
    read = parse(dialect, body)
    parsed: dict[str, Any] = json.loads(
        dialect.make_writer(read, "m", include_usage=True).write_document(document(**message))
    )
    return parsed


def test_a_response_is_continued_by_its_id() -> None:
    dialect = Responses()
    first = answered(dialect, {"input": "one", "instructions": "only once"}, content="1")
    second = answered(dialect, {"input": "two", "previous_response_id": first["id"]}, content="2")
    read = parse(dialect, {"input": "three", "previous_response_id": second["id"]})
    assert [message["content"] for message in read.chat["messages"]] == ["one", "1", "two", "2", "three"]
    assert dialect.to_chat(read.body) == read.chat
    stored = dialect.lookup_body(Route("lookup", "GET", name=second["id"]), "m")
    assert stored is not None
    assert json.loads(stored) == second


def test_a_response_may_be_continued_twice() -> None:
    dialect = Responses()
    first = answered(dialect, {"input": "one"}, content="1")
    for words in ("two", "other"):
        read = parse(dialect, {"input": words, "previous_response_id": first["id"]})
        assert [message["content"] for message in read.chat["messages"]] == ["one", "1", words]


def test_an_item_is_known_by_its_id() -> None:
    dialect = Responses()
    first = answered(dialect, {"input": "one"}, content="1")
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    read = parse(
        dialect, {"input": [{"role": "user", "content": "one"}, reference, {"role": "user", "content": "two"}]}
    )
    assert [message["content"] for message in read.chat["messages"]] == ["one", "1", "two"]
    with pytest.raises(BadRequest, match="msg_unknown"):
        parse(dialect, {"input": [{"type": "item_reference", "id": "msg_unknown"}]})


@pytest.mark.parametrize("previous", ["resp_unknown", 7, {"a": 1}])
def test_an_unknown_id_is_refused(previous: Any) -> None:
    with pytest.raises(BadRequest, match="previous_response_id") as refusal:
        parse(Responses(), {"input": "x", "previous_response_id": previous})
    assert refusal.value.code == "previous_response_not_found"


def test_what_is_not_to_be_stored_is_not() -> None:
    dialect = Responses()
    first = answered(dialect, {"input": "one", "store": False}, content="1")
    with pytest.raises(BadRequest, match="not stored"):
        parse(dialect, {"input": "x", "previous_response_id": first["id"]})


@pytest.mark.parametrize("name", ["conversation", "prompt"])
def test_what_lives_on_openais_servers_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match=name):
        parse(Responses(), {"input": "x", name: "some_id"})
