"""Pacing: no unit is taken too old, none is discarded, and the trainer is never left without a unit."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddock.train.pacing import Pacing


def make(batch_size: int = 2, max_staleness: int | None = 1, max_ready: int = 100) -> Pacing:
    return Pacing(batch_size=batch_size, max_staleness=max_staleness, max_ready=max_ready)


def fill(pacing: Pacing, first: int = 0) -> list[int]:
    """Start all that may start."""
    started = []
    while pacing.can_start():
        started.append(first + len(started))
        pacing.start(started[-1])
    return started


def test_as_many_start_as_have_a_place_up_to_the_limit() -> None:
    assert len(fill(make(batch_size=4, max_staleness=0))) == 4
    assert len(fill(make(batch_size=4, max_staleness=2))) == 12


def test_units_of_an_earlier_version_keep_their_places() -> None:
    pacing = make(batch_size=1, max_staleness=1)
    assert fill(pacing) == [0, 1]
    pacing.finish(1, 0)
    assert pacing.can_take(1)
    pacing.take(1)
    pacing.advance(1)
    pacing.start(2)
    pacing.finish(2, 1)
    # Unit 0 is of version 0 and still running: the only place of version 1 is its own.
    assert not pacing.can_take(2)
    pacing.finish(0, 0)
    assert pacing.can_take(0)
    assert pacing.take(0) == 1
    pacing.advance(2)
    assert pacing.can_take(2)


def test_an_update_that_comes_early_is_due_units_first() -> None:
    pacing = make(batch_size=2, max_staleness=0)
    fill(pacing)
    assert pacing.due(1) == 2
    for unit in (0, 1):
        pacing.finish(unit, 0)
        pacing.take(unit)
    assert pacing.due(1) == 0


def test_a_unit_that_is_dropped_frees_its_place() -> None:
    pacing = make(batch_size=1, max_staleness=0)
    fill(pacing)
    assert not pacing.can_start()
    pacing.drop(0)
    assert pacing.can_start()


def test_without_a_limit_finished_units_that_wait_stop_new_ones() -> None:
    pacing = make(max_staleness=None, max_ready=2)
    for unit in range(5):
        pacing.start(unit)
    pacing.finish(0, 0)
    assert pacing.can_start()
    pacing.finish(1, 0)
    assert not pacing.can_start()
    assert pacing.can_take(1)


def test_a_newer_oldest_version_gives_more_time() -> None:
    pacing = make(batch_size=1, max_staleness=0)
    pacing.start(0)
    pacing.advance(1)
    pacing.finish(0, 1)
    assert pacing.take(0) == 0


def test_a_unit_that_is_too_old_has_no_place_and_nobody_waits_for_it() -> None:
    pacing = make(batch_size=1, max_staleness=1)
    fill(pacing)
    pacing.advance(2)
    assert pacing.is_too_old(0)
    assert pacing.due(3) == 0
    assert fill(pacing, first=2) == [2, 3]
    pacing.finish(2, 2)
    assert pacing.can_take(2)


@settings(max_examples=200, deadline=None)
@given(
    batch_size=st.integers(1, 5),
    max_staleness=st.integers(0, 3),
    parallel=st.integers(1, 20),
    seed=st.integers(0, 2**32),
    dropped=st.floats(0, 0.5),
)
def test_no_unit_is_ever_too_old_and_the_trainer_always_goes_on(
    batch_size: int, max_staleness: int, parallel: int, seed: int, dropped: float
) -> None:
    """Rollouts finish in any order, long after newer ones; some are dropped."""
    chance = random.Random(seed)
    pacing = make(batch_size, max_staleness)
    running: list[int] = []
    ready: list[int] = []
    number = taken = 0
    while taken < 8 * batch_size:
        while pacing.can_start() and len(running) < parallel:
            pacing.start(number)
            running.append(number)
            number += 1
        allowed = [unit for unit in ready if pacing.can_take(unit)]
        if allowed and chance.random() < 0.7:
            ready.remove(allowed[0])
            assert pacing.take(allowed[0]) <= max_staleness
            taken += 1
            if pacing.taken == batch_size:
                assert pacing.due(pacing.version + 1) == 0
                pacing.advance(pacing.version + 1)
            continue
        assert running or allowed, "nothing runs and nothing may be taken"
        if running:
            # Mostly a young one: old ones are overtaken again and again.
            unit = running.pop(chance.randrange(len(running)) if chance.random() < 0.3 else -1)
            if chance.random() < dropped:
                pacing.drop(unit)
            else:
                pacing.finish(unit, pacing.oldest[unit])
                ready.append(unit)
    assert taken == 8 * batch_size


@pytest.mark.parametrize("early", [1, 2, 3])
def test_a_trainer_that_takes_what_is_due_never_exceeds_the_limit(early: int) -> None:
    """It updates whenever it may, also before it has taken `batch_size` units."""
    pacing = make(batch_size=4, max_staleness=1)
    number, ready = 0, [0]
    ready.clear()
    for _ in range(50):
        while pacing.can_start():
            pacing.start(number)
            pacing.finish(number, pacing.version)
            ready.append(number)
            number += 1
        for _ in range(early):
            unit = next(unit for unit in ready if pacing.can_take(unit))
            ready.remove(unit)
            assert pacing.take(unit) <= 1
        if not pacing.due(pacing.version + 1):
            pacing.advance(pacing.version + 1)
