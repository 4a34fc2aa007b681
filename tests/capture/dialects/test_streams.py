"""However an answer is cut into chunks, its stream says what its document says."""

import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from capture.dialects.replies import BLOCK_DIALECTS, chat_of, chunk, document, events, make_writer, tool_call
from paddock.testing.dialect_clients import CLIENTS

TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
ARGUMENTS = st.dictionaries(TEXTS, st.one_of(TEXTS, st.integers(-(2**53), 2**53), st.none()), max_size=3).map(
    lambda value: json.dumps(value, ensure_ascii=False)
)
MESSAGES = st.fixed_dictionaries(
    {"content": TEXTS},
    optional={
        "reasoning_content": TEXTS,
        "tool_calls": st.lists(
            st.builds(tool_call, st.sampled_from(["bash", "read"]), ARGUMENTS), min_size=1, max_size=3
        ),
    },
)


def cut(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def chunks(message: dict[str, Any], size: int, *, together: bool) -> list[dict[str, Any]]:
    """A message as an engine may stream it: piece by piece, calls one after the other or side by side."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for name in ("reasoning_content", "content"):
        deltas += [{name: piece} for piece in cut(message.get(name) or "", size)]
    pieces: list[list[dict[str, Any]]] = []
    for index, each in enumerate(message.get("tool_calls", ())):
        opening = {"index": index, "id": each["id"], "function": {"name": each["function"]["name"], "arguments": ""}}
        more = [
            {"index": index, "function": {"arguments": piece}} for piece in cut(each["function"]["arguments"], size)
        ]
        pieces.append([opening, *more])
    if together:
        for row in range(max((len(each) for each in pieces), default=0)):
            deltas.append({"tool_calls": [each[row] for each in pieces if row < len(each)]})
    else:
        deltas += [{"tool_calls": [piece]} for each in pieces for piece in each]
    return [*map(chunk, deltas), chunk({}, "stop")]


@pytest.mark.parametrize("dialect", BLOCK_DIALECTS)
@settings(max_examples=60, deadline=None)
@given(message=MESSAGES, size=st.integers(1, 6), together=st.booleans())
def test_a_stream_equals_the_document(dialect: str, message: dict[str, Any], size: int, together: bool) -> None:
    for number, each in enumerate(message.get("tool_calls", ())):
        each["id"] = f"c{number}"
    client = CLIENTS[dialect]
    whole = document(**message)
    reply = client.read_reply(json.loads(make_writer(dialect).write_document(whole)))
    writer = make_writer(dialect, {"stream": True})
    out = b"".join(writer.write_chunk(b"", piece, changed=True) for piece in chunks(message, size, together=together))
    out += writer.write_chunk(b"", {"choices": [], "usage": whole["usage"]}, changed=True) + writer.write_end()
    assert client.read_reply(client.assemble(events(out))) == reply
    replayed = client.read_reply(
        client.assemble(events(make_writer(dialect, {"stream": True}).write_as_stream(whole)))
    )
    assert replayed == reply
    assert (reply.text, reply.thinking) == (message["content"], message.get("reasoning_content", ""))
    expected = [json.loads(each["function"]["arguments"]) for each in message.get("tool_calls", ())]
    assert [each.arguments for each in reply.calls] == expected


@pytest.mark.parametrize("dialect", CLIENTS)
@settings(max_examples=40, deadline=None)
@given(message=MESSAGES)
def test_a_reply_that_comes_back_is_unchanged(dialect: str, message: dict[str, Any]) -> None:
    for number, each in enumerate(message.get("tool_calls", ())):
        each["id"] = f"c{number}"
    assume(any(message.values()))
    client = CLIENTS[dialect]
    writer = make_writer(dialect)
    reply = json.loads(writer.write_document(document(**message)))
    conversation = client.user_turn("x") + client.reply_turn(reply)
    body = client.request(conversation).body
    returned = chat_of(dialect, body)["messages"][1]
    assert (returned["content"] or "", returned.get("reasoning_content") or "") == (
        message["content"],
        message.get("reasoning_content", ""),
    )
    calls = [(each["id"], each["function"]["name"]) for each in returned.get("tool_calls") or ()]
    assert calls == [(each["id"], each["function"]["name"]) for each in message.get("tool_calls", ())]
    values = [json.loads(each["function"]["arguments"]) for each in returned.get("tool_calls") or ()]
    assert values == [json.loads(each["function"]["arguments"]) for each in message.get("tool_calls", ())]


@pytest.mark.parametrize("dialect", BLOCK_DIALECTS)
def test_a_call_whose_name_comes_late_or_never_is_sent(dialect: str) -> None:
    for name in ("bash", None):
        writer = make_writer(dialect, {"stream": True})
        pieces = [{"index": 0, "function": {"arguments": '{"a":'}}, {"index": 0, "function": {"arguments": "1}"}}]
        if name:
            pieces.append({"index": 0, "id": "c", "function": {"name": name}})
        out = b"".join(
            writer.write_chunk(b"", {"choices": [{"index": 0, "delta": {"tool_calls": [piece]}}]}, changed=True)
            for piece in pieces
        )
        reply = CLIENTS[dialect].read_reply(CLIENTS[dialect].assemble(events(out + writer.write_end())))
        assert [(each.name, each.arguments) for each in reply.calls] == [(name or "call", {"a": 1})]


def test_other_choices_are_left_out() -> None:
    writer = make_writer("anthropic", {"stream": True})
    out = writer.write_chunk(b"", {"choices": [{"index": 1, "delta": {"content": "other"}}]}, changed=True)
    assert b"other" not in out
