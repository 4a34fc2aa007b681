"""Prompts kept as what they add are the same ids as whole ones."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from paddock.rollouts.tokens import Prompt, begins_with

IDS = st.lists(st.integers(0, 3), max_size=5)


def packed(ids: list[int]) -> bytes:
    return array("I", ids).tobytes()


@given(st.lists(st.tuples(IDS, st.integers(0, 20)), min_size=1, max_size=6), IDS)
def test_a_chain_of_prompts_is_the_same_as_lists(chain: list[tuple[list[int], int]], sampled: list[int]) -> None:
    whole: list[int] = []
    prompt: Prompt | None = None
    for added, cut in chain:
        head = min(cut, len(whole))
        before, known = prompt, list(whole)
        whole = [*whole[:head], *added]
        prompt = Prompt(packed(added), prompt, head)
        assert len(prompt) == len(whole)
        for start in range(len(whole) + 1):
            assert list(prompt[start:]) == whole[start:]
        if before is not None:
            expected = whole[: len(known) + len(sampled)] == known + sampled
            assert begins_with(prompt, before, array("I", sampled)) == expected
        assert list(prompt) == whole
        assert prompt == array("I", whole)
    assert prompt is not None
    assert prompt.tobytes() == packed(whole)
