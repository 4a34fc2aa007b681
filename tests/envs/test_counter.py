"""The shipped counter."""

import pytest

from paddock.envs.counter import Add, Counter


def test_a_number_that_is_no_reward_changes_nothing() -> None:
    counter = Counter()
    counter.step(Add(amount=3))
    with pytest.raises(OverflowError):
        counter.step(Add(amount=10**400))
    assert (counter.state.total, counter.state.step_count) == (3, 1)
