import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.errors import ReplyExpired
from paddock.protocol.resume import KEPT_BYTES, KEPT_REPLIES, ReplyLedger, Verdict


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
    for number in range(KEPT_REPLIES + 1):
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
    kept = [number for number in range(10) if _is_kept(ledger, number)]
    assert kept == [6, 7, 8, 9]


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
