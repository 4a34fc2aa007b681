"""Calls come back exactly as they were saved, take little space, and cost only their new part."""

import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
from bench.rollout_store import growing_calls, prompt_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from paddock.capture.trace import Call, Level, Role
from paddock.errors import StoreError
from paddock.store import Store
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord


def exact(value: Any) -> Any:
    """A form in which 1, 1.0 and True differ, NaN is itself, and the order of keys counts."""
    if isinstance(value, float):
        return ("float", value.hex())
    if isinstance(value, dict):
        return [("key", key, exact(inner)) for key, inner in value.items()]
    if isinstance(value, list):
        return ["list", *map(exact, value)]
    return (type(value).__name__, value)


def exact_call(call: Call) -> list[Any]:
    return [(name, exact(getattr(call, name))) for name in Call.__slots__]


texts = st.text(st.characters(codec=None, categories=None), max_size=12)  # lone surrogates too
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))
ids = st.lists(st.integers(0, 2**32 - 1), max_size=6)
odd_ids = st.lists(st.integers(-(2**70), 2**70), max_size=4)
messages = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "tool"]),
        "content": st.sampled_from(["short", "x" * 3000, "y" * 1100]) | values,
    }
)
others = st.dictionaries(st.sampled_from(["tools", "model", "system", "temperature"]), values, max_size=3)
floats = st.lists(st.floats() | st.integers(-5, 5), max_size=5)


@st.composite
def scripts(draw: st.DrawFn) -> list[Call]:
    """Saves in some order: prompts that grow, branch, lose or change a part of their history, are statements
    again; and calls that are replaced after others have built on them."""
    saves: list[Call] = []
    for _ in range(draw(st.integers(1, 8))):
        before = draw(st.sampled_from(saves)) if saves else Call("c0", 0)
        history = deepcopy(before.request.get("messages", []))
        prompt = list(before.prompt_token_ids)
        match draw(st.sampled_from(["grow", "same", "cut", "edit", "new", "front"])):
            case "grow":
                history += draw(st.lists(messages, max_size=2))
                prompt += draw(ids)
            case "cut":
                history, prompt = history[: len(history) // 2], prompt[: len(prompt) // 2]
            case "edit":
                place = draw(st.integers(0, 4))
                history[place : place + 1] = [draw(messages)]
                prompt[place : place + 1] = draw(ids)
            case "new":
                history, prompt = [draw(messages)], draw(ids | odd_ids)
            case "front":
                history, prompt = history[1:], prompt[1:]
            case _:
                pass
        number = draw(st.integers(0, 5))
        completion = draw(ids | odd_ids)
        saves.append(
            Call(
                id=f"c{number}",
                index=number,
                role=draw(st.sampled_from(Role)),
                request={**draw(others), "messages": history, **draw(others)},
                forwarded=draw(others),
                prompt_token_ids=prompt,
                completion_token_ids=completion,
                logprobs=draw(floats),
                tokens=draw(st.lists(texts, max_size=3)),
                top_logprobs=draw(st.lists(st.dictionaries(texts, st.floats(), max_size=2), max_size=2)),
                message=draw(others),
                error=draw(st.none() | texts),
                attempts=[draw(others)],
                started=draw(st.floats()),
                level=draw(st.sampled_from(Level)),
                parent=draw(st.none() | st.just("c0")),
            )
        )
    return saves


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, Store]]:
    folder = tmp_path_factory.mktemp("store")
    with Store.open(folder) as first, Store.open(folder) as second:
        yield first, second


@given(scripts(), st.sets(st.integers(0, 7)))
@settings(max_examples=50)
def test_calls_come_back_exactly_whatever_was_saved_in_whatever_order(
    pair: tuple[Store, Store], saves: list[Call], elsewhere: set[int]
) -> None:
    first, second = pair
    name = f"r-{first.count()}"
    first.begin(RolloutRecord(name, "task"))
    expected: dict[str, Call] = {}
    for number, call in enumerate(saves):
        # The second store knows nothing of what the first remembers.
        (second if number in elsewhere else first).save_call(name, call)
        expected[call.id] = deepcopy(call)
    loaded = first.calls(name)
    assert [call.id for call in loaded] == sorted(expected)
    for call in loaded:
        assert exact_call(call) == exact_call(expected[call.id])


def test_a_replaced_call_does_not_change_those_that_build_on_it(store: Store) -> None:
    store.begin(RolloutRecord("r-one", "task"))
    calls = list(growing_calls(6, output_bytes=1500))
    for call in calls:
        store.save_call("r-one", call)
    calls[2] = Call("c2", 2, request={"messages": [{"role": "user", "content": "other"}]}, prompt_token_ids=[1, 2])
    store.save_call("r-one", calls[2])
    assert store.calls("r-one") == calls


def test_calls_are_in_the_order_of_their_index(store: Store) -> None:
    store.begin(RolloutRecord("r-one", "task"))
    for number in (11, 2, 0, 10):
        store.save_call("r-one", Call(f"c{number}", number))
    store.save_call("r-one", Call("c2", 2, error="replaced"))
    assert [call.id for call in store.calls("r-one")] == ["c0", "c2", "c10", "c11"]


def test_one_and_true_are_not_the_same_history(store: Store) -> None:
    store.begin(RolloutRecord("r-one", "task"))
    for number, value in enumerate((1, True, 1.0, -0.0, 0)):
        store.save_call("r-one", Call(f"c{number}", number, request={"messages": [{"content": value}]}))
    contents = [call.request["messages"][0]["content"] for call in store.calls("r-one")]
    assert [repr(value) for value in contents] == ["1", "True", "1.0", "-0.0", "0"]


def test_what_is_no_json_is_refused_and_leaves_nothing(store: Store) -> None:
    store.begin(RolloutRecord("r-one", "task"))
    store.save_call("r-one", Call("c0", 0, request={"messages": [{"a": 1}]}))
    with pytest.raises(StoreError, match="cannot be stored"):
        store.save_call("r-one", Call("c1", 1, request={"messages": [{"a": 2}], "bad": object()}))
    good = Call("c2", 2, request={"messages": [{"a": 2}, {"a": 3}]})
    store.save_call("r-one", good)
    assert store.calls("r-one")[1] == good


def test_fifty_growing_calls_take_less_than_thrice_their_longest_prompt(store: Store) -> None:
    store.begin(RolloutRecord("r-one", "task"))
    calls = list(growing_calls(50))
    for call in calls:
        store.save_call("r-one", call)
    store.prune()  # also empties the write-ahead log
    assert store.calls("r-one") == calls
    assert store.size_bytes() < 3 * max(map(prompt_bytes, calls)) / 2  # half of what is allowed


def test_system_prompt_and_tools_are_stored_once_for_all_rollouts(store: Store) -> None:
    for number in range(2):
        store.begin(RolloutRecord(f"r-{number}", "task"))
        for call in growing_calls(2, seed=number):
            store.save_call(f"r-{number}", call)
    with store._database.read() as connection:
        shared = connection.execute(
            "SELECT count(*) FROM (SELECT blob FROM blob_references GROUP BY blob HAVING count(*) = 2)"
        ).fetchone()[0]
    assert shared == 2


def test_an_edit_in_the_middle_of_a_long_prompt_costs_only_the_edit(store: Store) -> None:
    store.begin(RolloutRecord("r-one", "task"))
    source = random.Random(1)
    prompt = [source.randrange(150_000) for _ in range(50_000)]
    store.save_call("r-one", Call("c0", 0, prompt_token_ids=prompt))
    store.prune()
    before = store.size_bytes()
    for number in range(1, 10):
        prompt = [*prompt[:20_000], number, *prompt[20_003:]]
        store.save_call("r-one", Call(f"c{number}", number, prompt_token_ids=prompt))
    store.prune()
    assert store.size_bytes() - before < 20_000
    assert store.calls("r-one")[9].prompt_token_ids == prompt


def test_ids_that_share_some_of_their_bytes_are_distinguished(store: Store) -> None:
    store.begin(RolloutRecord("r-one", "task"))
    prompts = [[7, 1, 9], [7, 257, 9], [7, 257, 265], [7, 2**24 + 1, 9], [7, 1], [263, 1]]
    for number, prompt in enumerate(prompts):
        store.save_call("r-one", Call(f"c{number}", number, prompt_token_ids=prompt))
    assert [call.prompt_token_ids for call in store.calls("r-one")] == prompts


def test_another_store_that_goes_on_adds_only_the_new_part(store: Store) -> None:
    store.begin(RolloutRecord("r-one", "task"))
    source = random.Random(1)
    prompt = [source.randrange(150_000) for _ in range(50_000)]
    store.save_call("r-one", Call("c0", 0, prompt_token_ids=prompt))
    store.prune()
    before = store.size_bytes()
    with Store.open(store.path) as other:
        other.save_call("r-one", Call("c1", 1, prompt_token_ids=[*prompt, 5]))
        other.prune()
        assert other.size_bytes() - before < 10_000
        assert other.calls("r-one")[1].prompt_token_ids == [*prompt, 5]


def test_saving_on_reads_nothing_back(store: Store) -> None:
    store.begin(RolloutRecord("r-one", "task"))
    calls = list(growing_calls(8))
    store.save_call("r-one", calls[0])
    statements: list[str] = []
    with store._database.autocommit() as connection:
        connection.set_trace_callback(statements.append)
    for call in calls[1:]:
        store.save_call("r-one", call)
    assert statements
    assert not [statement for statement in statements if "FROM sequences" in statement or "SELECT data" in statement]


def test_nothing_is_remembered_of_a_finished_rollout(store: Store) -> None:
    record = RolloutRecord("r-one", "task")
    store.begin(record)
    store.save_call("r-one", Call("c0", 0, prompt_token_ids=[1]))
    assert len(store._write_caches) == 1
    record.outcome = Outcome.OK
    store.finish(record)
    assert len(store._write_caches) == 0
    late = Call("c1", 1, prompt_token_ids=[1, 2])
    store.save_call("r-one", late)
    assert store.calls("r-one")[1] == late
