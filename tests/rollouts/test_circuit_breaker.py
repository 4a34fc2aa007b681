"""The circuit breaker of a batch: one retries for all, and one success closes it for good."""

import asyncio

from paddock.rollouts.circuit_breaker import CircuitBreaker
from paddock.store.record import RolloutRecord

FAILED = RolloutRecord("r1", "t1")


def test_only_the_first_failure_retries() -> None:
    breaker = CircuitBreaker()
    assert [breaker.claim_retry() for _ in range(3)] == [True, False, False]


def test_the_others_wait_until_the_retries_have_ended() -> None:
    async def act() -> None:
        breaker = CircuitBreaker()
        await breaker.wait_until_decided()
        breaker.claim_retry()
        waiting = asyncio.ensure_future(breaker.wait_until_decided())
        await asyncio.sleep(0)
        assert not waiting.done()
        breaker.decide(FAILED)
        await waiting
        assert breaker.failure is FAILED

    asyncio.run(act())


def test_an_open_breaker_stops_retries() -> None:
    breaker = CircuitBreaker()
    breaker.claim_retry()
    breaker.decide(FAILED)
    assert not breaker.claim_retry()


def test_after_one_success_a_failure_does_not_open_the_breaker() -> None:
    breaker = CircuitBreaker()
    breaker.claim_retry()
    breaker.record_success()
    breaker.decide(FAILED)
    assert breaker.failure is None
    assert not breaker.claim_retry()
