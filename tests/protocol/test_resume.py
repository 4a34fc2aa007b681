import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.errors import InvalidMessage, ReplyExpired, SessionBusy
from paddock.protocol.resume import KEPT_BYTES, WINDOW, WINDOW_BYTES, ReplyLedger, Verdict


def test_a_new_number_is_carried_out() -> None:
    assert ReplyLedger().admit(1) is Verdict.EXECUTE


def test_a_repeated_number_waits_while_the_first_runs() -> None:
    ledger = ReplyLedger()
    ledger.admit(1)
    assert ledger.admit(1) is Verdict.UNDER_WAY


def test_a_repeated_number_gets_the_kept_answer() -> None:
    ledger = ReplyLedger()
    ledger.admit(1)
    ledger.record(1, b"one")
    assert ledger.admit(1) == b"one"
    assert ledger.admit(1) == b"one"


def test_an_empty_answer_is_an_answer() -> None:
    ledger = ReplyLedger()
    ledger.admit(1)
    ledger.record(1, b"")
    assert ledger.admit(1) == b""


def test_an_old_number_is_refused_and_never_run_again() -> None:
    ledger = ReplyLedger()
    for number in range(WINDOW + 1):
        ledger.admit(number)
        ledger.record(number, b"x")
    with pytest.raises(ReplyExpired):
        ledger.admit(0)
    assert ledger.admit(1) == b"x"


def test_the_bytes_kept_are_bounded() -> None:
    ledger = ReplyLedger()
    for number in range(10):
        ledger.admit(number)
        ledger.record(number, bytes(KEPT_BYTES // 4))
    remaining = [number for number in range(10) if _is_kept(ledger, number)]
    assert remaining == [6, 7, 8, 9]


def test_the_newest_answer_is_kept_whatever_its_size() -> None:
    ledger = ReplyLedger()
    ledger.admit(1)
    ledger.record(1, b"small")
    ledger.admit(2)
    ledger.record(2, bytes(KEPT_BYTES * 2))
    assert len(ledger.admit(2)) == KEPT_BYTES * 2  # type: ignore[arg-type]
    assert not _is_kept(ledger, 1)


def test_a_number_below_the_highest_is_not_run() -> None:
    ledger = ReplyLedger()
    ledger.admit(5)
    with pytest.raises(ReplyExpired):
        ledger.admit(4)


def test_answers_that_are_not_acknowledged_are_all_kept_whatever_their_size() -> None:
    ledger = ReplyLedger()
    for number in range(1, WINDOW + 1):
        ledger.admit(number, 0)
        ledger.record(number, bytes(KEPT_BYTES // 8))
    assert all(_is_kept(ledger, number) for number in range(1, WINDOW + 1))


def test_nothing_is_executed_while_too_many_bytes_are_not_acknowledged() -> None:
    ledger = ReplyLedger()
    for number in range(1, 5):
        ledger.admit(number, 0)
        ledger.record(number, bytes(WINDOW_BYTES // 4))
    with pytest.raises(SessionBusy, match="not acknowledged"):
        ledger.admit(5, 0)
    assert ledger.admit(5, 1) is Verdict.EXECUTE


def test_what_was_not_begun_can_be_sent_again() -> None:
    ledger = ReplyLedger()
    for number in (1, 2, 3):
        ledger.admit(number, 0)
    for number in (3, 2):
        ledger.retract(number)
    assert ledger.admit(1, 0) is Verdict.UNDER_WAY
    assert [ledger.admit(number, 0) for number in (2, 3)] == [Verdict.EXECUTE] * 2


def test_one_answer_may_be_larger_than_the_window() -> None:
    ledger = ReplyLedger()
    for number in range(1, 4):
        assert ledger.admit(number) is Verdict.EXECUTE
        ledger.record(number, bytes(WINDOW_BYTES + 1))


def test_an_acknowledged_answer_is_dropped() -> None:
    ledger = ReplyLedger()
    for number in (1, 2, 3):
        ledger.admit(number, number - 2 if number > 1 else 0)
        ledger.record(number, b"x")
    assert [_is_kept(ledger, number) for number in (1, 2, 3)] == [False, True, True]


def test_a_number_beyond_the_window_is_refused_and_may_come_later() -> None:
    ledger = ReplyLedger()
    ledger.admit(1, 0)
    with pytest.raises(InvalidMessage, match="id"):
        ledger.admit(WINDOW + 1, 0)
    assert ledger.admit(WINDOW + 1, 1) is Verdict.EXECUTE


def test_numbers_of_a_client_may_begin_anywhere() -> None:
    assert ReplyLedger().admit(5000, 4999) is Verdict.EXECUTE


def test_an_acknowledgement_reaches_no_further_than_the_request_that_carries_it() -> None:
    ledger = ReplyLedger()
    ledger.admit(1, 99)
    ledger.record(1, b"x")
    assert ledger.admit(1, 99) == b"x"


@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=60))
def test_no_number_is_ever_run_twice(attempts: list[tuple[int, bool]]) -> None:
    ledger, run = ReplyLedger(), []
    for number, answered in attempts:
        try:
            verdict = ledger.admit(number)
        except ReplyExpired:
            continue
        if verdict is Verdict.EXECUTE:
            run.append(number)
            if answered:
                ledger.record(number, b"answer")
    assert len(run) == len(set(run))


def _is_kept(ledger: ReplyLedger, number: int) -> bool:
    try:
        return isinstance(ledger.admit(number), bytes)
    except ReplyExpired:
        return False
