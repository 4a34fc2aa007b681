"""Any body gets a reply or an error of its dialect, and a refused one leaves no record."""

import asyncio
import copy
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from capture.dialects.replay_proxy import replay_proxy
from capture.dialects.replies import BLOCK_DIALECTS
from paddock.capture.dialects import DIALECTS
from paddock.capture.dialects.base import Route
from paddock.capture.errors import BadRequest
from paddock.testing.dialect_clients import CLIENTS
from paddock.testing.dialects import SCRIPT

VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "name", "parts", "id", "x"]), inner, max_size=3
        ),
    ),
    max_leaves=6,
)
DEEP: Any = json.loads("[" * 300 + "]" * 300)
WRONG: list[Any] = [None, 7, "x", [7], {}, [[]], {"type": "x"}, DEEP]
TEXT = {"type": "text", "text": "t"}
BYTES = {"type": "base64", "media_type": "i", "data": "d"}
DEFINED = {"type": "tool_definition", "definition": {"name": "d", "input_schema": {}}}
SCHEMA = {"type": "OBJECT", "properties": {"a": {"type": "STRING", "nullable": True}}}
RICH: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "x"}], "tools": [], "stream": False},
    "responses": {
        "model": "m",
        "instructions": "i",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"role": "user", "content": [{"type": "input_image", "image_url": "u"}]},
            {"type": "reasoning", "summary": [{"text": "s"}], "content": [{"text": "t"}], "encrypted_content": "e"},
            {"type": "function_call", "call_id": "c", "name": "n", "arguments": "{}", "namespace": "s"},
            {"type": "custom_tool_call", "call_id": "c", "name": "n", "input": "i"},
            {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}},
            {"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file", "path": "p"}},
            {"type": "tool_search_call", "call_id": "c", "arguments": {}},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
            {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "x"}]},
            {"type": "tool_search_output", "call_id": "c", "tools": [{"type": "function", "name": "f"}]},
            {"type": "additional_tools", "tools": [{"type": "function", "name": "f"}]},
        ],
        "tools": [
            {"type": "function", "name": "f", "parameters": {}},
            {"type": "custom", "name": "g", "format": {"type": "grammar", "definition": "d"}},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "h"}]},
            {"type": "local_shell"},
        ],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "f"}]},
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
    },
    "anthropic": {
        "model": "m",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "user", "content": [{"type": "image", "source": BYTES}]},
            {"role": "user", "content": [{"type": "document", "source": {"type": "content", "content": [TEXT]}}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "i", "name": "n", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "i", "content": [TEXT]}]},
            {"role": "system", "content": [{"type": "tool_addition", "tool": DEFINED}]},
        ],
        "tools": [{"name": "f", "input_schema": {}}, {"type": "bash_20250124", "name": "b"}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "disabled"},
        "thread": {"type": "create"},
    },
    "google": {
        "systemInstruction": {"parts": [{"text": "s"}]},
        "contents": [
            {"role": "user", "parts": [{"text": "x"}, {"inlineData": {"mimeType": "image/png", "data": "d"}}]},
            {"role": "user", "parts": [{"fileData": {"fileUri": "u"}}, {"codeExecutionResult": {"output": "o"}}]},
            {"role": "model", "parts": [{"text": "t", "thought": True}, {"executableCode": {"code": "c"}}]},
            {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {}}, "thoughtSignature": "s"}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"o": 1}, "parts": []}}]},
        ],
        "tools": [{"functionDeclarations": [{"name": "f", "parameters": SCHEMA}]}],
        "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
        "generationConfig": {"temperature": 1, "thinkingConfig": {"thinkingBudget": 1}},
    },
}  # fmt: skip


def rich_body(dialect: str) -> dict[str, Any]:
    client = CLIENTS[dialect]
    return RICH.get(dialect) or client.request(client.user_turn("x")).body


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    paths = [path] if path else []
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in inner:
        paths += paths_in(each, (*path, name))
    return paths


def changed(body: Any, path: tuple[Any, ...], value: Any, *, missing: bool) -> Any:
    body = copy.deepcopy(body)
    inner = body
    for name in path[:-1]:
        inner = inner[name]
    if missing:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return body


def read_or_refused(dialect: str, body: Any) -> str | None:
    """The refusal, or None if the body was read."""
    dialect_object = DIALECTS[dialect]()
    try:
        read = dialect_object.parse(json.dumps(body).encode(), Route("complete", stream=True))
    except BadRequest as refusal:
        return str(refusal)
    assert dialect_object.to_chat(read.body)["messages"] == read.chat["messages"]
    assert all(isinstance(message, dict) for message in read.chat["messages"])
    return None


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_single_wrong_value_is_read_or_refused(dialect: str) -> None:
    body, results = rich_body(dialect), []
    for path in paths_in(body):
        for value in WRONG:
            results.append(read_or_refused(dialect, changed(body, path, value, missing=False)))
        results.append(read_or_refused(dialect, changed(body, path, None, missing=True)))
    refusals = [refusal for refusal in results if refusal is not None]
    assert all(0 < len(refusal) < 500 for refusal in refusals)
    assert 0 < len(refusals) < len(results)


@pytest.mark.parametrize("dialect", DIALECTS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_several_wrong_values_are_read_or_refused(dialect: str, data: st.DataObject) -> None:
    body = rich_body(dialect)
    for path in data.draw(st.lists(st.sampled_from(paths_in(body)), min_size=2, max_size=3)):
        if path in paths_in(body):
            body = changed(body, path, data.draw(VALUES), missing=data.draw(st.booleans()))
    refusal = read_or_refused(dialect, body)
    assert refusal is None or 0 < len(refusal) < 500


@pytest.mark.parametrize("dialect", DIALECTS)
@settings(max_examples=30, deadline=None)
@given(raw=st.binary(max_size=20))
@example(raw=b"")
@example(raw=b"null")
@example(raw=b"[" * 5000)
@example(raw=b'{"a":' * 5000)
def test_bytes_that_are_no_request_are_refused(dialect: str, raw: bytes) -> None:
    with pytest.raises(BadRequest):
        DIALECTS[dialect]().parse(raw, Route("complete"))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_half_of_an_emoji_is_replaced(dialect: str) -> None:
    """Programs in JavaScript write it as an escape when they cut a text within an emoji."""
    client = CLIENTS[dialect]
    written = json.dumps(client.request(client.user_turn("HERE")).body)
    raw = written.replace("HERE", r"a\ud83d b\ude00 c\\ud83d d\ud83d\ude00").encode()
    parsed = DIALECTS[dialect]().parse(raw, Route("complete"))
    assert parsed.chat["messages"][-1]["content"] == "a\ufffd b\ufffd c\\ud83d d😀"


@pytest.mark.parametrize("dialect", ["responses", "anthropic", "google"])
def test_too_deep_nesting_is_refused_everywhere(dialect: str) -> None:
    nested = '{"properties":' * 450 + '{"items":' * 450 + "{}" + "}" * 900
    for path in paths_in(RICH[dialect]):
        written = json.dumps(changed(RICH[dialect], path, "HERE", missing=False)).replace('"HERE"', nested)
        with pytest.raises(BadRequest, match="deep"):
            DIALECTS[dialect]().parse(written.encode(), Route("complete"))


def test_the_rich_bodies_are_accepted() -> None:
    for dialect, body in RICH.items():
        assert DIALECTS[dialect]().parse(json.dumps(body).encode(), Route("complete")).chat["messages"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_refused_body_changes_nothing(dialect: str) -> None:
    async def body() -> None:
        async with replay_proxy(SCRIPT) as proxy:
            subject = proxy.subject(dialect)
            for wrong in [*WRONG, []] if dialect in BLOCK_DIALECTS else WRONG:
                if isinstance(wrong, str) and dialect == "responses":
                    continue  # the only dialect in which a conversation may be plain text
                request = subject.client.request([])
                request.body[subject.client.conversation_field] = wrong
                status, _ = await subject.send_refused(request)
                assert status == 400
            assert not proxy.capture.calls
            assert not proxy.model.log
            reply, _ = await subject.send(subject.client.user_turn("hello"))
            assert reply.text == "Hello there, ünïcode."
            assert len(proxy.capture.calls) == 1

    assert dialect in CLIENTS
    asyncio.run(asyncio.wait_for(body(), 30))
