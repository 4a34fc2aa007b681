"""Retry: pauses, deadlines, and which failures are repeated."""

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from paddock import retry as module
from paddock.errors import PaddockError
from paddock.retry import Backoff, Deadline, FailedAttempt, parse_retry_after, retry


class Broken(PaddockError):
    retry_after: float | None = None


@dataclass
class Work:
    """Fails `failures` times."""

    failures: int
    retry_after: float | None = None
    attempts: int = 0

    async def __call__(self, seconds: float) -> str:
        self.attempts += 1
        if self.attempts <= self.failures:
            error = Broken("no")
            error.retry_after = self.retry_after
            raise error
        return "done"


QUICK = Backoff(first_seconds=0.001, longest_seconds=0.002, attempts=4)


def run(work: Work, *, seconds: float = 5.0, backoff: Backoff = QUICK, **options: Any) -> str:
    async def main() -> str:
        values = {"may_retry": lambda error: True, **options}
        return await retry(work, errors=Broken, deadline=Deadline(seconds), backoff=backoff, **values)

    return asyncio.run(main())


def test_work_is_repeated_until_it_succeeds() -> None:
    work = Work(failures=3)
    assert run(work) == "done"
    assert work.attempts == 4


def test_the_last_failure_says_how_many_attempts_were_made() -> None:
    with pytest.raises(Broken) as caught:
        run(Work(failures=9))
    assert caught.value.data["attempts"] == 4


def test_a_failure_that_must_not_be_repeated_is_raised_at_once() -> None:
    work = Work(failures=9)
    with pytest.raises(Broken):
        run(work, may_retry=lambda error: False)
    assert work.attempts == 1


def test_a_pause_that_outlasts_the_deadline_is_not_begun() -> None:
    work = Work(failures=9, retry_after=60.0)
    with pytest.raises(Broken):
        run(work, seconds=1.0)
    assert work.attempts == 1


def test_failures_that_do_not_count_are_limited_by_the_deadline() -> None:
    work = Work(failures=20)
    assert run(work, counts=lambda error: False) == "done"
    assert work.attempts == 21


def test_failures_during_startup_do_not_count() -> None:
    work = Work(failures=8)
    assert run(work, backoff=Backoff(0.001, 0.002, 2, startup_seconds=5.0, startup_pause_seconds=0.001)) == "done"


def test_each_failure_is_reported_before_its_pause() -> None:
    reported: list[FailedAttempt[Broken]] = []

    async def report(failed: FailedAttempt[Broken]) -> None:
        reported.append(failed)

    run(Work(failures=2), before_retry=report)
    assert [failed.attempt for failed in reported] == [1, 2]


def test_an_attempt_gets_its_own_limit_or_what_the_deadline_leaves() -> None:
    collected: list[float] = []

    async def work(seconds: float) -> None:
        collected.append(seconds)

    for limit in (None, 0.5):
        asyncio.run(
            retry(
                work,
                errors=Broken,
                deadline=Deadline(2.0),
                backoff=QUICK,
                may_retry=lambda error: False,
                attempt_seconds=limit,
            )
        )
    assert collected[0] == pytest.approx(2.0, abs=0.1)
    assert collected[1] == 0.5


def test_pauses_double_up_to_the_longest_with_full_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "jitter", lambda low, high: high)
    backoff = Backoff(first_seconds=1.0, longest_seconds=5.0)
    assert [backoff.pause(attempt) for attempt in range(4)] == [1.0, 2.0, 4.0, 5.0]
    assert backoff.pause(0, retry_after=30.0) == 30.0
    assert backoff.pause(3, is_startup=True) == 0.5


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("2", 2.0),
        ("0.5", 0.5),
        ("-1", 0.0),
        ("99999", 120.0),
        ("", None),
        ("soon", None),
        ("nan", None),
        ("inf", 120.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
    ],
)
def test_retry_after_is_a_number_or_a_date(value: str, seconds: float | None) -> None:
    assert parse_retry_after(value, longest_seconds=120.0) == seconds
