"""The runner, on checks of a plain number."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from paddock.errors import ConfigError
from paddock.testing import Doubtful, Result, Skipped, Suite, Wrong


def outcome_of(claim: Callable[[int], Awaitable[str | None]], timeout: float = 5.0) -> Result:
    suite: Suite[int] = Suite()
    suite.check("do better")(claim)
    [result] = asyncio.run(suite.run(3, timeout=timeout))
    return result


def test_a_claim_that_returns_has_passed() -> None:
    async def it_is_three(number: int) -> str:
        return f"it is {number}"

    result = outcome_of(it_is_three)
    assert (result.name, result.outcome, result.detail) == ("it is three", "passed", "it is 3")
    assert result.hint is None
    assert result.seconds > 0


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Wrong("no"), ("failed", "no", "do better")),
        (Wrong("no", "try 4"), ("failed", "no", "try 4")),
        (Doubtful("hardly"), ("warning", "hardly", "do better")),
        (Skipped("odd"), ("skipped", "odd", None)),
        (ConfigError("bad", hint="set it"), ("failed", "bad", "set it")),
        (ConfigError("bad"), ("failed", "bad", "do better")),
        (KeyError("x"), ("failed", "KeyError: 'x'", "do better")),
        (TimeoutError("theirs"), ("failed", "TimeoutError: theirs", "do better")),
    ],
)
def test_what_a_claim_raises_is_its_result(error: Exception, expected: tuple[str, str, str | None]) -> None:
    async def it_raises(_: int) -> None:
        raise error

    result = outcome_of(it_raises)
    assert (result.outcome, result.detail, result.hint) == expected


def test_a_claim_that_hangs_fails() -> None:
    async def it_hangs(_: int) -> None:
        await asyncio.sleep(60)

    result = outcome_of(it_hangs, timeout=0.01)
    assert (result.outcome, result.detail) == ("failed", "nothing came back within 0.01 s")


def test_what_a_failed_claim_carries_is_skipped() -> None:
    suite: Suite[int] = Suite()

    @suite.check("")
    async def it_is_four(number: int) -> None:
        if number != 4:
            raise Wrong("no")

    @suite.check("", needs=[it_is_four])
    async def it_is_two_twice(_: int) -> None:
        raise AssertionError("never looked at")

    @suite.check("", needs=[it_is_two_twice])
    async def it_is_even(_: int) -> None:
        raise AssertionError("never looked at")

    @suite.check("")
    async def it_is_small(_: int) -> None:
        pass

    results = asyncio.run(suite.run(3))
    assert [result.outcome for result in results] == ["failed", "skipped", "skipped", "passed"]
    assert results[1].detail == "only checked when it is four"


def test_an_excuse_turns_a_failure_into_a_note() -> None:
    suite: Suite[int] = Suite()

    @suite.check("do better", excuse=lambda number: "too small" if number < 5 else None)
    async def it_is_ten(_: int) -> None:
        raise Wrong("it is not")

    [excused] = asyncio.run(suite.run(3))
    [blamed] = asyncio.run(suite.run(7))
    assert (excused.outcome, excused.detail, excused.hint) == ("info", "too small: it is not", None)
    assert (blamed.outcome, blamed.hint) == ("failed", "do better")


def test_each_check_is_announced() -> None:
    suite: Suite[int] = Suite()
    announced: list[tuple[str, int, int]] = []

    @suite.check("")
    async def first_claim(_: int) -> None: ...

    @suite.check("")
    async def second_claim(_: int) -> None: ...

    asyncio.run(suite.run(3, announce=lambda *progress: announced.append(progress)))
    assert announced == [("first claim", 0, 2), ("second claim", 1, 2)]


def test_a_long_detail_is_cut_to_one_line() -> None:
    async def it_talks(_: int) -> None:
        raise Wrong("word\n" * 1000)

    assert len(outcome_of(it_talks).detail) == 400
