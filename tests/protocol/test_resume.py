import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.errors import InvalidMessage, ReplyExpired, SessionBusy
from paddock.protocol.resume import KEPT_BYTES, WINDOW, WINDOW_BYTES, ReplyCache, Verdict


def test_a_new_number_is_carried_out() -> None:
    assert ReplyCache().admit(1) is Verdict.EXECUTE


def test_a_repeated_number_waits_while_the_first_runs() -> None:
    cache = ReplyCache()
    cache.admit(1)
    assert cache.admit(1) is Verdict.UNDER_WAY


def test_a_repeated_number_gets_the_kept_answer() -> None:
    cache = ReplyCache()
    cache.admit(1)
    cache.record(1, b"one")
    assert cache.admit(1) == b"one"
    assert cache.admit(1) == b"one"


def test_an_empty_answer_is_an_answer() -> None:
    cache = ReplyCache()
    cache.admit(1)
    cache.record(1, b"")
    assert cache.admit(1) == b""


def test_an_old_number_is_refused_and_never_run_again() -> None:
    cache = ReplyCache()
    for number in range(WINDOW + 1):
        cache.admit(number)
        cache.record(number, b"x")
    with pytest.raises(ReplyExpired):
        cache.admit(0)
    assert cache.admit(1) == b"x"


def test_the_bytes_kept_are_bounded() -> None:
    cache = ReplyCache()
    for number in range(10):
        cache.admit(number)
        cache.record(number, bytes(KEPT_BYTES // 4))
    remaining = [number for number in range(10) if _is_kept(cache, number)]
    assert remaining == [6, 7, 8, 9]


def test_the_newest_answer_is_kept_whatever_its_size() -> None:
    cache = ReplyCache()
    cache.admit(1)
    cache.record(1, b"small")
    cache.admit(2)
    cache.record(2, bytes(KEPT_BYTES * 2))
    assert len(cache.admit(2)) == KEPT_BYTES * 2  # type: ignore[arg-type]
    assert not _is_kept(cache, 1)


def test_a_number_below_the_highest_is_not_run() -> None:
    cache = ReplyCache()
    cache.admit(5)
    with pytest.raises(ReplyExpired):
        cache.admit(4)


def test_answers_that_are_not_acknowledged_are_all_kept_whatever_their_size() -> None:
    cache = ReplyCache()
    for number in range(1, WINDOW + 1):
        cache.admit(number, 0)
        cache.record(number, bytes(KEPT_BYTES // 8))
    assert all(_is_kept(cache, number) for number in range(1, WINDOW + 1))


def test_nothing_is_executed_while_too_many_bytes_are_not_acknowledged() -> None:
    cache = ReplyCache()
    for number in range(1, 5):
        cache.admit(number, 0)
        cache.record(number, bytes(WINDOW_BYTES // 4))
    with pytest.raises(SessionBusy, match="not acknowledged"):
        cache.admit(5, 0)
    assert cache.admit(5, 1) is Verdict.EXECUTE


def test_what_was_not_begun_can_be_sent_again() -> None:
    cache = ReplyCache()
    for number in (1, 2, 3):
        cache.admit(number, 0)
    for number in (3, 2):
        cache.retract(number)
    assert cache.admit(1, 0) is Verdict.UNDER_WAY
    assert [cache.admit(number, 0) for number in (2, 3)] == [Verdict.EXECUTE] * 2


def test_one_answer_may_be_larger_than_the_window() -> None:
    cache = ReplyCache()
    for number in range(1, 4):
        assert cache.admit(number) is Verdict.EXECUTE
        cache.record(number, bytes(WINDOW_BYTES + 1))


def test_an_acknowledged_answer_is_dropped() -> None:
    cache = ReplyCache()
    for number in (1, 2, 3):
        cache.admit(number, number - 2 if number > 1 else 0)
        cache.record(number, b"x")
    assert [_is_kept(cache, number) for number in (1, 2, 3)] == [False, True, True]


def test_a_number_beyond_the_window_is_refused_and_may_come_later() -> None:
    cache = ReplyCache()
    cache.admit(1, 0)
    with pytest.raises(InvalidMessage, match="id"):
        cache.admit(WINDOW + 1, 0)
    assert cache.admit(WINDOW + 1, 1) is Verdict.EXECUTE


def test_numbers_of_a_client_may_begin_anywhere() -> None:
    assert ReplyCache().admit(5000, 4999) is Verdict.EXECUTE


def test_an_acknowledgement_reaches_no_further_than_the_request_that_carries_it() -> None:
    cache = ReplyCache()
    cache.admit(1, 99)
    cache.record(1, b"x")
    assert cache.admit(1, 99) == b"x"


@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=60))
def test_no_number_is_ever_run_twice(attempts: list[tuple[int, bool]]) -> None:
    cache, run = ReplyCache(), []
    for number, answered in attempts:
        try:
            verdict = cache.admit(number)
        except ReplyExpired:
            continue
        if verdict is Verdict.EXECUTE:
            run.append(number)
            if answered:
                cache.record(number, b"answer")
    assert len(run) == len(set(run))


def _is_kept(cache: ReplyCache, number: int) -> bool:
    try:
        return isinstance(cache.admit(number), bytes)
    except ReplyExpired:
        return False
