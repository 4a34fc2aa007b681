"""Reading what a browser asks for: every parameter is checked, and a wrong one is named."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

from paddock.rollouts.outcome import Outcome
from paddock.rollouts.store.search import SORTS, Order, Search
from paddock.web.answers import NotFound, PageError

if TYPE_CHECKING:
    from collections.abc import Collection

    from starlette.requests import Request

Choice = TypeVar("Choice", bound=str)

LONGEST = 500
MOST_ROWS = 1000
FURTHEST = 10_000_000
SEARCHED = (
    "task", "agent", "model", "outcome", "batch", "min_reward", "max_reward", "since", "until", "q", "running",
)  # fmt: skip
RUNNING = "running"
"""Stands among the outcomes for rollouts that have none yet."""


def check_names(request: Request, known: Collection[str]) -> None:
    unknown = sorted(set(request.query_params) - set(known))
    if unknown:
        raise PageError(
            f"there is no parameter {unknown[0][:80]!r}", hint=f"known here: {', '.join(known) or 'none'}"
        )


def text(request: Request, name: str) -> str | None:
    given = request.query_params.get(name)
    if not given:
        return None
    if len(given) > LONGEST:
        raise PageError(f"{name} has {len(given)} characters", hint=f"{LONGEST} are allowed")
    return sound(given, name)


def sound(given: str, name: str) -> str:
    """A text that can be looked for."""
    try:
        given.encode()
    except UnicodeEncodeError:
        raise PageError(f"{name} is not valid text", hint="encode it as UTF-8") from None
    return given


def number(request: Request, name: str) -> float | None:
    given = request.query_params.get(name)
    if not given:
        return None
    try:
        found = float(given)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise PageError(f"{name} is {given[:80]!r}", hint="give a number")
    return found


def whole(request: Request, name: str, usual: int, least: int, most: int) -> int:
    given = request.query_params.get(name)
    if not given:
        return usual
    digits = given.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 16 and least <= int(given) <= most):
        raise PageError(f"{name} is {given[:80]!r}", hint=f"give a whole number from {least} to {most}")
    return int(given)


def choice(request: Request, name: str, known: Collection[Choice], usual: Choice) -> Choice:
    given = request.query_params.get(name)
    if not given:
        return usual
    for each in known:
        if each == given:
            return each
    raise PageError(f"{name} is {given[:80]!r}", hint=f"use {', '.join(known)}")


def flag(request: Request, name: str) -> bool | None:
    given = request.query_params.get(name)
    if not given:
        return None
    return choice(request, name, ("1", "true", "0", "false"), "0") in ("1", "true")


def path_text(request: Request, name: str) -> str:
    given = str(request.path_params[name])
    if len(given) > LONGEST or "\0" in given:
        raise NotFound(f"there is no {name} of {len(given)} characters", hint="copy it from the page")
    return sound(given, name)


def search(request: Request) -> Search:
    """Which rollouts are meant."""
    outcomes = [each for each in request.query_params.getlist("outcome") if each]
    known = (*(str(each) for each in Outcome), RUNNING)
    for each in outcomes:
        if each not in known:
            raise PageError(f"outcome is {each[:80]!r}", hint=f"use {', '.join(known)}")
    return Search(
        task=text(request, "task"),
        agent=text(request, "agent"),
        model=text(request, "model"),
        batch=text(request, "batch"),
        outcomes=tuple("" if each == RUNNING else each for each in outcomes),
        min_reward=number(request, "min_reward"),
        max_reward=number(request, "max_reward"),
        since=number(request, "since"),
        until=number(request, "until"),
        words=text(request, "q"),
        running=flag(request, "running"),
    )


def sorting(request: Request) -> tuple[str, Order]:
    orders: tuple[Order, ...] = ("asc", "desc")
    return choice(request, "sort", tuple(SORTS), "started"), choice(request, "order", orders, "desc")


def paging(request: Request, usual: int = 100) -> tuple[int, int]:
    """Offset and limit."""
    return whole(request, "offset", 0, 0, FURTHEST), whole(request, "limit", usual, 1, MOST_ROWS)
