"""What is learnt of jobs while they are done."""

import time
from collections.abc import Callable

import pytest

from paddock.sessions.jobs import SMOOTHING, WEIGHED_EVERY, Call, Pace

QUICK = lambda: None  # noqa: E731
WAITING = lambda: time.sleep(0.003)  # noqa: E731


def weighed(pace: Pace, function: Callable[[], None], count: int) -> int:
    return sum(pace.run(Call(function, lambda *_: None), number) for number in range(count))


def test_few_of_many_alike_are_weighed() -> None:
    assert weighed(Pace(), QUICK, 20 * WEIGHED_EVERY) < 40


@pytest.mark.parametrize(("before", "now"), [(QUICK, WAITING), (WAITING, QUICK)], ids=["long", "short"])
def test_a_change_is_noticed_soon(before: Callable[[], None], now: Callable[[], None]) -> None:
    """Five milliseconds each, on the one thread that short jobs share: a hundred and more would be a standstill."""
    pace, enough = Pace(), WEIGHED_EVERY + 2 * SMOOTHING
    weighed(pace, before, enough)
    assert pace.is_long() is (before is WAITING)
    weighed(pace, now, enough)
    assert pace.is_long() is (now is WAITING)
