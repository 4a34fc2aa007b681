"""The tree finds the same as comparing every call with every other."""

import random
import time

from hypothesis import given
from hypothesis import strategies as st

from paddock.rollouts.prefixes import Prefixes
from paddock.rollouts.trace import Call, Role, link, shared_prefix

IDS = st.lists(st.integers(1, 2), max_size=6)
CALLS = st.lists(st.tuples(IDS.filter(bool), IDS, st.booleans()), max_size=12)


def made(pairs: list[tuple[list[int], list[int], bool]]) -> list[Call]:
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
def test_the_tree_finds_what_comparing_all_finds(pairs: list[tuple[list[int], list[int], bool]]) -> None:
    calls, tree = made(pairs), Prefixes()
    for call in calls:
        found = tree.add(call)
        earlier = [each for each in calls[: call.index] if each.role is not Role.RETRIED]
        link(call, earlier)
        assert (found.answered and found.answered.id, found.answered_tokens) == (call.parent, call.shared_tokens)
        assert (found.furthest, found.shared_tokens) == furthest(call, earlier)
        assert found.whole is whole(call, earlier)


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
    tree = Prefixes()
    first, other, again, longer = (
        Call(f"c{n}", n, prompt_token_ids=ids, completion_token_ids=sampled)
        for n, (ids, sampled) in enumerate([([1, 2], [5]), ([1, 3], [6]), ([1, 2], [7]), ([1, 2, 5, 9], [8])])
    )
    assert [tree.add(call).answered for call in (first, other, again)] == [None, None, None]
    found = tree.add(longer)
    assert (found.answered, found.answered_tokens) == (first, 3)


@given(CALLS, st.randoms(use_true_random=False))
def test_calls_that_end_in_another_order_are_linked_to_those_that_began_before(
    pairs: list[tuple[list[int], list[int], bool]], order: random.Random
) -> None:
    calls, tree = made(pairs), Prefixes()
    ended = list(calls)
    order.shuffle(ended)
    known: list[Call] = []
    for call in ended:
        found = tree.add(call)
        link(call, sorted((each for each in known if usable(each, call)), key=lambda each: each.index))
        assert (found.answered and found.answered.id, found.answered_tokens) == (call.parent, call.shared_tokens)
        known.append(call)


def usable(each: Call, call: Call) -> bool:
    return each.index < call.index and each.role is not Role.RETRIED


def test_a_call_that_was_asked_again_later_is_gone_on_from_no_more() -> None:
    tree = Prefixes()
    first, second = (Call(f"c{n}", n, prompt_token_ids=[1, 2], completion_token_ids=[3]) for n in range(2))
    tree.add(first)
    first.role = Role.RETRIED
    assert tree.add(second).furthest is None
    assert tree.add(Call("c2", 2, prompt_token_ids=[1, 2, 3, 4])).whole is second


def test_a_thousand_calls_of_one_conversation_are_quick() -> None:
    tree = Prefixes()
    prompt = list(range(300, 800))
    spent = 0.0
    for index in range(1000):
        call = Call(f"c{index}", index, prompt_token_ids=prompt, completion_token_ids=[index + 1000] * 8)
        began = time.process_time()
        found = tree.add(call)
        spent += time.process_time() - began
        assert found.whole is None or found.whole.index == index - 1
        prompt = [*prompt, *call.completion_token_ids, *range(12)]
    assert spent < 1.0
