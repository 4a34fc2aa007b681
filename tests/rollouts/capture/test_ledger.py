"""The shortcut to a call's parent finds the same parent as comparing all calls."""

from hypothesis import given
from hypothesis import strategies as st

from paddock.rollouts.capture.ledger import fingerprint, possible_parents
from paddock.rollouts.trace import Call, link

IDS = st.lists(st.integers(1, 2), max_size=6)
PAIRS = st.lists(st.tuples(IDS, IDS), max_size=8)


@given(PAIRS, st.lists(st.integers(1, 2), min_size=1, max_size=8))
def test_the_shortcut_finds_the_same_parent(pairs: list[tuple[list[int], list[int]]], prompt: list[int]) -> None:
    earlier = [
        Call(f"c{index}", index, prompt_token_ids=before, completion_token_ids=after)
        for index, (before, after) in enumerate(pairs)
    ]
    slow, fast = (Call("new", 99, prompt_token_ids=prompt) for _ in range(2))
    link(slow, earlier)
    link(fast, possible_parents(fast, earlier))
    assert (slow.parent, slow.shared_tokens) == (fast.parent, fast.shared_tokens)


def test_the_same_messages_have_the_same_fingerprint_in_any_order_of_keys() -> None:
    assert fingerprint([{"a": 1, "b": 2}]) == fingerprint([{"b": 2, "a": 1}])
    assert fingerprint([{"a": 1}]) != fingerprint([{"a": 2}])
