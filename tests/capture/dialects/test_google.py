"""Google's generateContent as chat completions, and back."""

import base64
import json
from typing import Any

import pytest

from capture.dialects.replies import chat_of, chunk, document, events, make_writer, parse, tool_call
from paddock.capture.dialects.base import Route
from paddock.capture.dialects.google import Google
from paddock.capture.errors import ErrorReply
from paddock.capture.upstream_request import find_constraint

USER = {"role": "user", "parts": [{"text": "hi"}]}
SAID = {"role": "user", "content": "hi"}


def chat(*contents: Any, **more: Any) -> dict[str, Any]:
    return chat_of("google", {"contents": list(contents), **more})


@pytest.mark.parametrize(
    ("path", "query", "route"),
    [
        ("/v1beta/models/m:generateContent", {}, Route("complete", stream=False, name="m")),
        ("/v1/models/m:streamGenerateContent", {"alt": "sse"}, Route("complete", stream=True, name="m")),
        ("/v1beta/models/m:streamGenerateContent", {}, Route("complete", stream=True, name="m", format="array")),
        ("/models/m:countTokens", {}, Route("count_tokens", stream=False, name="m")),
        ("/v1beta/models/org/m-1.5:generateContent", {}, Route("complete", stream=False, name="org/m-1.5")),
        (
            "/v1beta1/projects/p/locations/l/publishers/google/models/m:generateContent",
            {},
            Route("complete", stream=False, name="m"),
        ),
        ("/v1beta/models", {}, Route("lookup", "GET")),
        ("/v1beta/models/m", {}, Route("lookup", "GET", name="m")),
        ("/v1beta/models/m:embedContent", {}, None),
        ("/v1/chat/completions", {}, None),
    ],
)
def test_paths(path: str, query: dict[str, str], route: Route | None) -> None:
    assert Google().find_route(path, query) == route


@pytest.mark.parametrize("name", ["systemInstruction", "system_instruction"])
@pytest.mark.parametrize("system", ["be good", {"parts": [{"text": "be good"}]}, {"parts": {"text": "be good"}}])
def test_a_system_prompt_comes_first(name: str, system: Any) -> None:
    assert chat(USER, **{name: system})["messages"] == [{"role": "system", "content": "be good"}, SAID]


def test_calls_without_ids_find_their_results() -> None:
    reply = [{"functionCall": {"name": name, "args": {"x": 1}}} for name in ("a", "b", "a")]
    results = [{"functionResponse": {"name": name, "response": {"output": name}}} for name in ("a", "a", "b")]
    made = chat(USER, {"role": "model", "parts": reply}, {"role": "user", "parts": results})["messages"]
    assert [each["id"] for each in made[1]["tool_calls"]] == ["call_0", "call_1", "call_2"]
    assert [(each["tool_call_id"], each["content"]) for each in made[2:]] == [
        ("call_0", "a"),
        ("call_2", "a"),
        ("call_1", "b"),
    ]


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ({"output": "text"}, "text"),
        ({"error": "bad"}, "bad"),
        ({"a": 1, "b": "ä"}, '{"a": 1, "b": "ä"}'),
        ({"output": [1]}, '{"output": [1]}'),
        (None, "null"),
    ],
)
def test_what_a_function_gave_back(response: Any, expected: str) -> None:
    result = {"functionResponse": {"id": "c", "name": "f", "response": response}}
    assert chat(USER, {"role": "function", "parts": [result]})["messages"][1] == {
        "role": "tool",
        "tool_call_id": "c",
        "content": expected,
    }


def test_pictures_of_the_user_and_of_functions() -> None:
    inline = {"inline_data": {"mime_type": "image/png", "data": "QUJD"}}
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}
    result = {"functionResponse": {"id": "c", "name": "f", "response": {"output": "x"}, "parts": [inline]}}
    made = chat({"parts": [{"text": "a"}, inline]}, {"role": "user", "parts": [result]})["messages"]
    assert made[0]["content"] == [{"type": "text", "text": "a"}, picture]
    assert made[1]["content"] == "x\n[image]"
    assert made[2] == {"role": "user", "content": [picture]}


def test_a_thought_comes_back_in_its_signature() -> None:
    parsed = json.loads(
        make_writer("google").write_document(
            document(reasoning_content="hm ä", tool_calls=[tool_call("f", '{"x":1}')])
        )
    )
    parts = parsed["candidates"][0]["content"]["parts"]
    assert parts[0] == {"text": "hm ä", "thought": True}
    (_, whole) = chat(USER, {"role": "model", "parts": parts})["messages"]
    (_, dropped) = chat(USER, {"role": "model", "parts": parts[1:]})["messages"]
    assert whole == dropped
    assert whole["reasoning_content"] == "hm ä"


@pytest.mark.parametrize("signature", ["", "no base64!", base64.b64encode(b"Google's own").decode(), 7, "====", "ä"])
def test_other_signatures_mean_nothing(signature: Any) -> None:
    (_, reply) = chat(USER, {"role": "model", "parts": [{"text": "a", "thoughtSignature": signature}]})["messages"]
    assert reply == {"role": "assistant", "content": "a"}


def test_tools_become_functions_and_server_tools_are_left_out() -> None:
    schema = {
        "type": "OBJECT",
        "properties": {
            "a": {"type": "ARRAY", "items": {"type": "STRING"}, "minItems": "1"},
            "type": {"anyOf": [{"type": "INTEGER"}, {"type": "NUMBER"}], "nullable": True},
            "b": {"type": "STRING", "nullable": True, "enum": ["X"]},
        },
        "propertyOrdering": ["a"],
    }
    plain = {"type": "object", "properties": {"x": {"type": "string"}}}
    tools = [
        {"functionDeclarations": [{"name": "f", "description": "d", "parameters": schema}]},
        {"function_declarations": [{"name": "g", "parametersJsonSchema": plain}, {"name": "h"}]},
        {"googleSearch": {}},
        {"codeExecution": {}},
    ]
    read = parse(Google(), {"contents": [USER], "tools": tools})
    functions = [tool["function"] for tool in read.chat["tools"]]
    assert functions[0]["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"type": "array", "items": {"type": "string"}, "minItems": 1},
            "type": {"anyOf": [{"type": "integer"}, {"type": "number"}]},
            "b": {"type": ["string", "null"], "enum": ["X"]},
        },
    }
    assert functions[1]["parameters"] == plain
    assert functions[2]["parameters"] == {"type": "object", "properties": {}}
    assert len(read.notes) == 2


@pytest.mark.parametrize(
    ("more", "forced"),
    [
        ({"toolConfig": {"functionCallingConfig": {"mode": "AUTO"}}}, None),
        ({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, "tool_choice"),
        ({"tool_config": {"function_calling_config": {"mode": "any"}}}, "tool_choice"),
        ({"generationConfig": {"responseMimeType": "text/plain"}}, None),
        ({"generationConfig": {"responseMimeType": "application/json"}}, "response_format"),
        ({"generationConfig": {"responseSchema": {"type": "OBJECT"}}}, "response_format"),
        ({"generation_config": {"response_json_schema": {"type": "object"}}}, "response_format"),
    ],
)
def test_force_is_seen(more: dict[str, Any], forced: str | None) -> None:
    constraint = find_constraint(chat(USER, tools=[{"functionDeclarations": [{"name": "f"}]}], **more))
    assert constraint is None if forced is None else constraint is not None and constraint.startswith(forced)


def test_sampling_parameters_are_translated() -> None:
    config = {"temperature": 0.5, "topP": 0.9, "topK": 3, "maxOutputTokens": 9, "stopSequences": ["x"], "seed": 1}
    made = chat(USER, generationConfig={**config, "thinkingConfig": {"thinkingBudget": 0}})
    del made["messages"]
    assert made == {
        **{"temperature": 0.5, "top_p": 0.9, "top_k": 3, "max_tokens": 9, "stop": ["x"], "seed": 1},
        "chat_template_kwargs": {"enable_thinking": False},
    }


def test_an_answer_is_a_candidate() -> None:
    parsed = json.loads(
        make_writer("google", route=Route("complete", name="models-m")).write_document(document(content="Hi."))
    )
    assert parsed["candidates"] == [
        {"content": {"role": "model", "parts": [{"text": "Hi."}]}, "index": 0, "finishReason": "STOP"}
    ]
    assert parsed["modelVersion"] == "models-m"
    assert parsed["usageMetadata"]["totalTokenCount"] == 10


@pytest.mark.parametrize(
    ("reason", "finish"),
    [("stop", "STOP"), ("length", "MAX_TOKENS"), ("content_filter", "SAFETY"), ("tool_calls", "STOP")],
)
def test_reasons_to_stop(reason: str, finish: str) -> None:
    parsed = json.loads(make_writer("google").write_document(document(reason, content="a")))
    assert parsed["candidates"][0]["finishReason"] == finish


def test_without_sse_a_stream_is_one_array() -> None:
    writer = make_writer("google", route=Route("complete", stream=True, format="array"))
    out = writer.write_keep_alive() + writer.write_chunk(b"", chunk({"content": "Hi"}), changed=True)
    out += writer.write_keep_alive() + writer.write_chunk(b"", chunk({}, "stop"), changed=True) + writer.write_end()
    assert writer.content_type == "application/json"
    assert [each["candidates"][0]["content"]["parts"] for each in json.loads(out)] == [
        [{"text": "Hi"}],
        [{"text": ""}],
    ]


def test_every_event_of_a_stream_is_one_line_for_javascript_too() -> None:
    text = "a\u2028b\u2029c\\u2028"
    out = make_writer("google").write_chunk(b"", chunk({"content": text}), changed=True).decode()
    assert not {"\u2028", "\u2029"} & set(out)
    ((_, each),) = events(out.encode())
    assert each["candidates"][0]["content"]["parts"] == [{"text": text}]


def test_a_broken_array_ends_with_the_error() -> None:
    writer = make_writer("google", route=Route("complete", stream=True, format="array"))
    out = writer.write_chunk(b"", chunk({"content": "Hi"}), changed=True) + writer.write_error(
        ErrorReply(400, "broke", invites_retry=True)
    )
    assert json.loads(out)[-1]["error"]["code"] == 500


def test_a_broken_stream_is_worth_another_try_and_a_refused_one_is_not() -> None:
    for again, code in ((True, 500), (False, 400)):
        ((_, each),) = events(make_writer("google").write_error(ErrorReply(400, "broke", invites_retry=again)))
        assert list(each) == ["error"]
        assert each["error"]["code"] == code


@pytest.mark.parametrize(
    ("status", "name"),
    [
        (400, "INVALID_ARGUMENT"),
        (401, "UNAUTHENTICATED"),
        (404, "NOT_FOUND"),
        (429, "RESOURCE_EXHAUSTED"),
        (500, "INTERNAL"),
    ],
)
def test_errors_have_their_names(status: int, name: str) -> None:
    assert json.loads(Google().error_body(ErrorReply(status, "no")))["error"] == {
        "code": status,
        "message": "no",
        "status": name,
    }


def test_a_wrapped_request_is_counted() -> None:
    body = {"generateContentRequest": {"model": "models/m", "contents": [USER], "systemInstruction": "s"}}
    assert len(parse(Google(), body, Route("count_tokens")).chat["messages"]) == 2
