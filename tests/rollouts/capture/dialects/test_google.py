"""Google's generateContent as chat completions, and back."""

import base64
import json
from typing import Any

import pytest

from paddock.rollouts.capture.dialects.base import Place
from paddock.rollouts.capture.dialects.google import Google
from paddock.rollouts.capture.refusals import Fault
from paddock.rollouts.capture.shaping import constraint
from rollouts.capture.dialects.telling import asked, call, chat_of, chunk, document, events, writer

USER = {"role": "user", "parts": [{"text": "hi"}]}
SAID = {"role": "user", "content": "hi"}


def chat(*contents: Any, **more: Any) -> dict[str, Any]:
    return chat_of("google", {"contents": list(contents), **more})


@pytest.mark.parametrize(
    ("path", "query", "place"),
    [
        ("/v1beta/models/m:generateContent", {}, Place("complete", stream=False, name="m")),
        ("/v1/models/m:streamGenerateContent", {"alt": "sse"}, Place("complete", stream=True, name="m")),
        ("/v1beta/models/m:streamGenerateContent", {}, Place("complete", stream=True, name="m", form="array")),
        ("/models/m:countTokens", {}, Place("count", stream=False, name="m")),
        ("/v1beta/models/org/m-1.5:generateContent", {}, Place("complete", stream=False, name="org/m-1.5")),
        (
            "/v1beta1/projects/p/locations/l/publishers/google/models/m:generateContent",
            {},
            Place("complete", stream=False, name="m"),
        ),
        ("/v1beta/models", {}, Place("look", "GET")),
        ("/v1beta/models/m", {}, Place("look", "GET", name="m")),
        ("/v1beta/models/m:embedContent", {}, None),
        ("/v1/chat/completions", {}, None),
    ],
)
def test_paths(path: str, query: dict[str, str], place: Place | None) -> None:
    assert Google().find(path, query) == place


@pytest.mark.parametrize("name", ["systemInstruction", "system_instruction"])
@pytest.mark.parametrize("system", ["be good", {"parts": [{"text": "be good"}]}, {"parts": {"text": "be good"}}])
def test_a_system_prompt_comes_first(name: str, system: Any) -> None:
    assert chat(USER, **{name: system})["messages"] == [{"role": "system", "content": "be good"}, SAID]


def test_calls_without_ids_find_their_results() -> None:
    said = [{"functionCall": {"name": name, "args": {"x": 1}}} for name in ("a", "b", "a")]
    results = [{"functionResponse": {"name": name, "response": {"output": name}}} for name in ("a", "a", "b")]
    made = chat(USER, {"role": "model", "parts": said}, {"role": "user", "parts": results})["messages"]
    assert [each["id"] for each in made[1]["tool_calls"]] == ["call_0", "call_1", "call_2"]
    assert [(each["tool_call_id"], each["content"]) for each in made[2:]] == [
        ("call_0", "a"),
        ("call_2", "a"),
        ("call_1", "b"),
    ]


@pytest.mark.parametrize(
    ("response", "told"),
    [
        ({"output": "text"}, "text"),
        ({"error": "bad"}, "bad"),
        ({"a": 1, "b": "ä"}, '{"a": 1, "b": "ä"}'),
        ({"output": [1]}, '{"output": [1]}'),
        (None, "null"),
    ],
)
def test_what_a_function_gave_back(response: Any, told: str) -> None:
    result = {"functionResponse": {"id": "c", "name": "f", "response": response}}
    assert chat(USER, {"role": "function", "parts": [result]})["messages"][1] == {
        "role": "tool",
        "tool_call_id": "c",
        "content": told,
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
    told = json.loads(
        writer("google").document(document(reasoning_content="hm ä", tool_calls=[call("f", '{"x":1}')]))
    )
    parts = told["candidates"][0]["content"]["parts"]
    assert parts[0] == {"text": "hm ä", "thought": True}
    (_, whole) = chat(USER, {"role": "model", "parts": parts})["messages"]
    (_, dropped) = chat(USER, {"role": "model", "parts": parts[1:]})["messages"]
    assert whole == dropped
    assert whole["reasoning_content"] == "hm ä"


@pytest.mark.parametrize("signature", ["", "no base64!", base64.b64encode(b"Google's own").decode(), 7, "====", "ä"])
def test_other_signatures_mean_nothing(signature: Any) -> None:
    (_, said) = chat(USER, {"role": "model", "parts": [{"text": "a", "thoughtSignature": signature}]})["messages"]
    assert said == {"role": "assistant", "content": "a"}


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
    read = asked(Google(), {"contents": [USER], "tools": tools})
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
    found = constraint(chat(USER, tools=[{"functionDeclarations": [{"name": "f"}]}], **more))
    assert found is None if forced is None else found is not None and found.startswith(forced)


def test_sampling_is_told_under_its_other_names() -> None:
    config = {"temperature": 0.5, "topP": 0.9, "topK": 3, "maxOutputTokens": 9, "stopSequences": ["x"], "seed": 1}
    made = chat(USER, generationConfig={**config, "thinkingConfig": {"thinkingBudget": 0}})
    del made["messages"]
    assert made == {
        **{"temperature": 0.5, "top_p": 0.9, "top_k": 3, "max_tokens": 9, "stop": ["x"], "seed": 1},
        "chat_template_kwargs": {"enable_thinking": False},
    }


def test_an_answer_is_a_candidate() -> None:
    told = json.loads(writer("google", place=Place("complete", name="models-m")).document(document(content="Hi.")))
    assert told["candidates"] == [
        {"content": {"role": "model", "parts": [{"text": "Hi."}]}, "index": 0, "finishReason": "STOP"}
    ]
    assert told["modelVersion"] == "models-m"
    assert told["usageMetadata"]["totalTokenCount"] == 10


@pytest.mark.parametrize(
    ("reason", "finish"),
    [("stop", "STOP"), ("length", "MAX_TOKENS"), ("content_filter", "SAFETY"), ("tool_calls", "STOP")],
)
def test_reasons_to_stop(reason: str, finish: str) -> None:
    told = json.loads(writer("google").document(document(reason, content="a")))
    assert told["candidates"][0]["finishReason"] == finish


def test_without_sse_a_stream_is_one_array() -> None:
    tell = writer("google", place=Place("complete", stream=True, form="array"))
    out = tell.keep_alive() + tell.chunk(b"", chunk({"content": "Hi"}), changed=True)
    out += tell.keep_alive() + tell.chunk(b"", chunk({}, "stop"), changed=True) + tell.end()
    assert tell.content_type == "application/json"
    assert [each["candidates"][0]["content"]["parts"] for each in json.loads(out)] == [
        [{"text": "Hi"}],
        [{"text": ""}],
    ]


def test_every_event_of_a_stream_is_one_line_for_javascript_too() -> None:
    text = "a\u2028b\u2029c\\u2028"
    out = writer("google").chunk(b"", chunk({"content": text}), changed=True).decode()
    assert not {"\u2028", "\u2029"} & set(out)
    ((_, told),) = events(out.encode())
    assert told["candidates"][0]["content"]["parts"] == [{"text": text}]


def test_a_broken_array_ends_with_the_error() -> None:
    tell = writer("google", place=Place("complete", stream=True, form="array"))
    out = tell.chunk(b"", chunk({"content": "Hi"}), changed=True) + tell.fail(Fault(400, "broke", again=True))
    assert json.loads(out)[-1]["error"]["code"] == 500


def test_a_broken_stream_is_worth_another_try_and_a_refused_one_is_not() -> None:
    for again, code in ((True, 500), (False, 400)):
        ((_, told),) = events(writer("google").fail(Fault(400, "broke", again=again)))
        assert list(told) == ["error"]
        assert told["error"]["code"] == code


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
    assert json.loads(Google().error(Fault(status, "no")))["error"] == {
        "code": status,
        "message": "no",
        "status": name,
    }


def test_a_wrapped_request_is_counted() -> None:
    body = {"generateContentRequest": {"model": "models/m", "contents": [USER], "systemInstruction": "s"}}
    assert len(asked(Google(), body, Place("count")).chat["messages"]) == 2
