"""Suites of checks: small functions, each a claim about a subject, run one after the other.

Knows nothing of environments, servers or sandboxes: a suite is a list of functions, and its subject
is whatever they take. A check returns (perhaps with a remark) if its claim holds, and raises a
`CheckVerdict` if it does not; any other exception counts as a failure too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import ClassVar, Generic, Literal, TypeVar

from paddock.errors import PaddockError

SubjectT = TypeVar("SubjectT")
CheckOutcome = Literal["passed", "failed", "warning", "info", "skipped"]
"""How a check ended. Only `failed` means that something must change."""
Claim = Callable[[SubjectT], Awaitable[str | None]]
Announce = Callable[[str, int, int], None]
"""Called with the name of the check that begins, how many are done, and how many there are."""

MAX_DETAIL_CHARACTERS = 400


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one check."""

    name: str
    """The claim that was checked."""
    outcome: CheckOutcome
    """How the check ended."""
    detail: str = ""
    """What was found."""
    hint: str | None = None
    """What to do about it."""
    seconds: float = 0.0
    """How long the check took."""
    fault: str | None = None
    """The name of a common fault of tasks, from the table in docs/tasks.md."""


class CheckVerdict(Exception):
    """Ends a check with a result. Without a hint, that of the check is used."""

    outcome: ClassVar[CheckOutcome]

    def __init__(self, detail: str, hint: str | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.hint = hint


class Wrong(CheckVerdict):
    """The claim does not hold."""

    outcome = "failed"


class Doubtful(CheckVerdict):
    """The claim holds, but not as well as it should."""

    outcome = "warning"


def require(holds: bool, otherwise: object) -> None:
    """Raise Wrong with the reason `otherwise` if the claim does not hold."""
    if not holds:
        raise Wrong(str(otherwise))


class Skipped(CheckVerdict):
    """The claim does not apply."""

    outcome = "skipped"


@dataclass(frozen=True, slots=True)
class Check(Generic[SubjectT]):
    """A claim about a subject, what to do when it does not hold, and what it builds on."""

    claim: Claim[SubjectT]
    """The function that checks it."""
    hint: str
    """What to do when the claim does not hold."""
    needs: tuple[Claim[SubjectT], ...] = ()
    """Claims that have to hold before this one can be checked."""
    excuse: Callable[[SubjectT], str | None] | None = None
    """Why a failure is only a note for this subject; None if it counts."""

    @property
    def name(self) -> str:
        """The claim, from the name of its function."""
        return name_of(self.claim)


class Suite(Generic[SubjectT]):
    """An ordered list of checks for one kind of subject."""

    def __init__(self) -> None:
        self.checks: list[Check[SubjectT]] = []

    def check(
        self,
        hint: str,
        *,
        needs: Iterable[Claim[SubjectT]] = (),
        excuse: Callable[[SubjectT], str | None] | None = None,
    ) -> Callable[[Claim[SubjectT]], Claim[SubjectT]]:
        """Register a function. Its name is the claim, `hint` says what to do when it does not hold."""

        def register(claim: Claim[SubjectT]) -> Claim[SubjectT]:
            self.checks.append(Check(claim, hint, tuple(needs), excuse))
            return claim

        return register

    async def run(
        self, subject: SubjectT, *, timeout: float = 60.0, announce: Announce | None = None
    ) -> list[Result]:
        """Every check's result, in order. A check gets `timeout` seconds; none can stop the others."""
        results: list[Result] = []
        broken: set[Claim[SubjectT]] = set()
        for done, check in enumerate(self.checks):
            if announce is not None:
                announce(check.name, done, len(self.checks))
            missing = next((need for need in check.needs if need in broken), None)
            if missing is not None:
                broken.add(check.claim)
                results.append(Result(check.name, "skipped", f"only checked when {name_of(missing)}"))
                continue
            result = await run_check(check, subject, timeout)
            if result.outcome == "failed":
                broken.add(check.claim)
            results.append(result)
        return results


async def run_check(check: Check[SubjectT], subject: SubjectT, timeout: float) -> Result:
    """One check's result; never raises, except for a cancellation of the caller."""
    started = perf_counter()
    try:
        async with asyncio.timeout(timeout) as deadline:
            remark = await check.claim(subject)
        result = Result(check.name, "passed", remark or "")
    except CheckVerdict as verdict:
        hint = verdict.hint or (None if verdict.outcome == "skipped" else check.hint)
        result = Result(check.name, verdict.outcome, verdict.detail, hint)
    except PaddockError as error:
        result = Result(check.name, "failed", error.message, error.hint or check.hint)
    except Exception as error:
        late = isinstance(error, TimeoutError) and deadline.expired()
        detail = f"nothing came back within {timeout:g} s" if late else f"{type(error).__name__}: {error}"
        result = Result(check.name, "failed", detail, check.hint)
    excuse = check.excuse(subject) if check.excuse is not None and result.outcome == "failed" else None
    if excuse is not None:
        result = replace(result, outcome="info", detail=f"{excuse}: {result.detail}", hint=None)
    seconds = round(perf_counter() - started, 6)
    return replace(result, detail=shorten(result.detail), seconds=seconds)


def name_of(claim: Callable[..., object]) -> str:
    """The claim in words: the name of its function."""
    return str(getattr(claim, "__name__", claim)).replace("_", " ")


def shorten(text: str, length: int = MAX_DETAIL_CHARACTERS) -> str:
    """One line, cut when it gets long."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1] + "…"
