"""The tree finds the same as comparing every call with every other."""

import random
import time

from hypothesis import given
from hypothesis import strategies as st

from paddock.capture.prefix_tree import PrefixTree
from paddock.capture.trace import Call, Role, shared_prefix

IDS = st.lists(st.integers(1, 2), max_size=6)
CALLS = st.lists(st.tuples(IDS.filter(bool), IDS, st.booleans()), max_size=12)


def link(call: Call, earlier: list[Call]) -> None:
    """Set the parent by comparing the call with all earlier ones."""
    best: Call | None = None
    longest = (0, 0)
    for other in earlier:
        size = len(other.prompt_token_ids)
        if not 0 < size < len(call.prompt_token_ids) or call.prompt_token_ids[:size] != other.prompt_token_ids:
            continue
        following = call.prompt_token_ids[size : size + len(other.completion_token_ids)]
        shared = (size, size + shared_prefix(other.completion_token_ids, following))
        if shared >= longest:
            best, longest = other, shared
    call.parent = best.id if best else None
    call.shared_tokens = longest[1]


def make_calls(pairs: list[tuple[list[int], list[int], bool]]) -> list[Call]:
    return [
        Call(
            f"c{index}",
            index,
            prompt_token_ids=before,
            completion_token_ids=after,
            role=Role.RETRIED if dropped else Role.AGENT,
        )
        for index, (before, after, dropped) in enumerate(pairs)
    ]


@given(CALLS)
def test_the_tree_finds_the_same_as_comparing_all(pairs: list[tuple[list[int], list[int], bool]]) -> None:
    calls, tree = make_calls(pairs), PrefixTree()
    for call in calls:
        continuation = tree.add(call)
        earlier = [each for each in calls[: call.index] if each.role is not Role.RETRIED]
        link(call, earlier)
        assert (continuation.parent and continuation.parent.id, continuation.parent_tokens) == (
            call.parent,
            call.shared_tokens,
        )
        assert (continuation.furthest, continuation.shared_tokens) == furthest(call, earlier)
        assert continuation.whole is whole(call, earlier)


def furthest(call: Call, earlier: list[Call]) -> tuple[Call | None, int]:
    best, longest = None, 0
    for each in earlier:
        shared = shared_prefix(each.prompt_token_ids + each.completion_token_ids, call.prompt_token_ids)
        if shared >= longest and shared > 0:
            best, longest = each, shared
    return best, longest


def whole(call: Call, earlier: list[Call]) -> Call | None:
    best, size = None, -1
    for each in earlier:
        begun = each.prompt_token_ids + each.completion_token_ids
        if call.prompt_token_ids[: len(begun)] == begun and len(begun) >= size:
            best, size = each, len(begun)
    return best


def test_a_parent_is_continued_and_not_only_similar() -> None:
    tree = PrefixTree()
    first, other, again, longer = (
        Call(f"c{n}", n, prompt_token_ids=ids, completion_token_ids=sampled)
        for n, (ids, sampled) in enumerate([([1, 2], [5]), ([1, 3], [6]), ([1, 2], [7]), ([1, 2, 5, 9], [8])])
    )
    assert [tree.add(call).parent for call in (first, other, again)] == [None, None, None]
    continuation = tree.add(longer)
    assert (continuation.parent, continuation.parent_tokens) == (first, 3)


@given(CALLS, st.randoms(use_true_random=False))
def test_calls_that_end_in_another_order_are_linked_to_earlier_ones(
    pairs: list[tuple[list[int], list[int], bool]], order: random.Random
) -> None:
    calls, tree = make_calls(pairs), PrefixTree()
    ended = list(calls)
    order.shuffle(ended)
    added: list[Call] = []
    for call in ended:
        continuation = tree.add(call)
        link(call, sorted((each for each in added if usable(each, call)), key=lambda each: each.index))
        assert (continuation.parent and continuation.parent.id, continuation.parent_tokens) == (
            call.parent,
            call.shared_tokens,
        )
        added.append(call)


def usable(each: Call, call: Call) -> bool:
    return each.index < call.index and each.role is not Role.RETRIED


def test_a_retried_call_is_not_continued() -> None:
    tree = PrefixTree()
    first, second = (Call(f"c{n}", n, prompt_token_ids=[1, 2], completion_token_ids=[3]) for n in range(2))
    tree.add(first)
    first.role = Role.RETRIED
    assert tree.add(second).furthest is None
    assert tree.add(Call("c2", 2, prompt_token_ids=[1, 2, 3, 4])).whole is second


def test_a_thousand_calls_of_one_conversation_are_quick() -> None:
    tree = PrefixTree()
    prompt = list(range(300, 800))
    spent = 0.0
    for index in range(1000):
        call = Call(f"c{index}", index, prompt_token_ids=prompt, completion_token_ids=[index + 1000] * 8)
        began = time.process_time()
        continuation = tree.add(call)
        spent += time.process_time() - began
        assert continuation.whole is None or continuation.whole.index == index - 1
        prompt = [*prompt, *call.completion_token_ids, *range(12)]
    assert spent < 1.0
