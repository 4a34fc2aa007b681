"""The toy tokenizer and the chat template of the replay server."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.models.replay.tokenizer import (
    MARKER_TEXT,
    VOCABULARY,
    AssistantTurn,
    Marker,
    ScriptedToolCall,
    canonical_arguments,
    completion_ids,
    count_turns,
    decode,
    encode,
    encode_with_markers,
    logprob,
    prompt_ids,
    prompt_text,
    token_bytes,
)

WORDS = st.text(alphabet="abz ", max_size=40) | st.text(max_size=40)
TOOLS = [{"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}]


@given(WORDS)
def test_text_comes_back_from_its_ids(text: str) -> None:
    ids = encode(text)
    assert decode(ids) == text
    assert all(0 <= token < 256 or 300 <= token < VOCABULARY for token in ids)


def test_runs_of_small_letters_are_shorter_than_bytes() -> None:
    assert len(encode("the quick brown fox jumps over it")) == 9


@pytest.mark.parametrize("token", [0, 255, 300, 300 + 27**2 - 1, 300 + 27**2, VOCABULARY - 1])
def test_an_id_maps_to_bytes_that_have_that_id(token: int) -> None:
    text = token_bytes(token)
    assert len(text) > 1 or text == bytes([token])
    if token not in (255,):
        assert encode(text.decode()) == (token,)


def test_a_marker_in_text_is_only_bytes_unless_asked_for() -> None:
    text = MARKER_TEXT[Marker.END]
    assert Marker.END not in encode(text)
    assert encode_with_markers(f"a{text}") == [ord("a"), Marker.END]


def test_the_written_prompt_has_the_ids_of_the_prompt() -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Grüße"}]
    assert encode_with_markers(prompt_text(messages, TOOLS)) == prompt_ids(messages, TOOLS)


def test_logprobs_are_negative_distinct_and_full_of_digits() -> None:
    values = [logprob(position, token, 7) for position in range(40) for token in range(40)]
    assert all(-4.0 < value < 0.0 for value in values)
    assert len(set(values)) == len(values)
    assert sum(len(repr(value)) >= 18 for value in values) > len(values) * 0.7
    assert all(json.loads(json.dumps(value)) == value for value in values)
    assert logprob(1, 2, 3) != logprob(1, 2, 4)


ARGUMENTS = st.dictionaries(
    st.text(max_size=5),
    st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    max_size=4,
)
CALLS = st.builds(ScriptedToolCall, st.just("write"), ARGUMENTS.map(canonical_arguments))
TURNS = st.builds(
    AssistantTurn,
    text=WORDS.map(str.strip),
    thinking=WORDS.map(str.strip),
    calls=st.lists(st.builds(ScriptedToolCall, st.just("write"), ARGUMENTS.map(canonical_arguments)), max_size=2).map(
        tuple
    ),
)


def as_an_agent_sends_it(turn: AssistantTurn) -> dict[str, Any]:
    """Arguments written anew with other spaces and another order; whole floats as JavaScript writes them."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.text or None, "reasoning_content": turn.thinking}
    calls = []
    for call in turn.calls:
        anew = json.dumps(dict(reversed(json.loads(call.arguments).items())), indent=1)
        calls.append({"id": "x", "type": "function", "function": {"name": call.name, "arguments": anew}})
    return message | {"tool_calls": calls}


@given(WORDS, TURNS, WORDS)
def test_the_next_prompt_begins_with_this_prompt_and_its_completion(
    ask: str, turn: AssistantTurn, result: str
) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": ask}]}]
    before = prompt_ids(messages, TOOLS) + completion_ids(turn)
    messages += [as_an_agent_sends_it(turn), {"role": "tool", "tool_call_id": "x", "content": result}]
    assert prompt_ids(messages, TOOLS)[: len(before)] == before


def test_whole_floats_and_integers_are_the_same_argument() -> None:
    assert (
        canonical_arguments({"b": 1.0, "a": "é"})
        == canonical_arguments('{"a": "\\u00e9", "b": 1}')
        == '{"a":"é","b":1}'
    )


def test_arguments_that_are_no_json_stay_as_they_are() -> None:
    assert canonical_arguments('{"a": ') == '{"a": '


def test_turns_are_counted_after_the_first_user_message() -> None:
    roles = ["system", "assistant", "user", "assistant", "tool", "assistant", "user"]
    assert count_turns([{"role": role} for role in roles]) == 2


def test_a_long_prompt_is_cheap() -> None:
    line = "def area(width: int, height: int) -> int:\n    return width * height\n"
    costs = []
    for number in range(7):
        messages = [{"role": "user", "content": f"{number}" + line * (40_000 // len(line))}]
        begun = time.process_time()
        prompt_ids(messages, None)
        costs.append(time.process_time() - begun)
    assert min(costs) < 0.05
