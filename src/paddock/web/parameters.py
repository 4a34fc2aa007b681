"""Query and path parameters of a request. Each is checked, and the error for a wrong one names it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

import orjson

from paddock.server.http import read_body
from paddock.store.outcome import Outcome
from paddock.store.search import SORTS, Order, Search
from paddock.web.responses import PageError, PageNotFound

if TYPE_CHECKING:
    from collections.abc import Collection

    from starlette.requests import Request

Choice = TypeVar("Choice", bound=str)

MAX_CHARACTERS = 500
MAX_ROWS = 1000
MAX_OFFSET = 10_000_000
MAX_BODY_BYTES = 256 * 1024
SEARCH_NAMES = (
    "task", "agent", "model", "outcome", "batch", "weights", "cause", "tag", "min_reward", "max_reward", "since",
    "until", "q", "running",
)  # fmt: skip
RUNNING = "running"
"""Selects rollouts without an outcome."""


def check_names(request: Request, allowed: Collection[str]) -> None:
    unknown = sorted(set(request.query_params) - set(allowed))
    if unknown:
        raise PageError(
            f"there is no parameter {unknown[0][:80]!r}", hint=f"known here: {', '.join(allowed) or 'none'}"
        )


def text(request: Request, name: str) -> str | None:
    value = request.query_params.get(name)
    if not value:
        return None
    if len(value) > MAX_CHARACTERS:
        raise PageError(f"{name} has {len(value)} characters", hint=f"{MAX_CHARACTERS} are allowed")
    return check_encoding(value, name)


def check_encoding(value: str, name: str) -> str:
    """The text itself. Raises PageError for lone surrogates, which SQLite cannot take."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PageError(f"{name} is not valid text", hint="encode it as UTF-8") from None
    return value


def number(request: Request, name: str) -> float | None:
    value = request.query_params.get(name)
    if not value:
        return None
    try:
        parsed = float(value)
    except ValueError:
        parsed = math.nan
    if not math.isfinite(parsed):
        raise PageError(f"{name} is {value[:80]!r}", hint="give a number")
    return parsed


def integer(request: Request, name: str, default: int, minimum: int, maximum: int) -> int:
    value = request.query_params.get(name)
    if not value:
        return default
    digits = value.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 16 and minimum <= int(value) <= maximum):
        raise PageError(f"{name} is {value[:80]!r}", hint=f"give a whole number from {minimum} to {maximum}")
    return int(value)


def choice(request: Request, name: str, choices: Collection[Choice], default: Choice) -> Choice:
    value = request.query_params.get(name)
    if not value:
        return default
    for each in choices:
        if each == value:
            return each
    raise PageError(f"{name} is {value[:80]!r}", hint=f"use {', '.join(choices)}")


def flag(request: Request, name: str) -> bool | None:
    value = request.query_params.get(name)
    if not value:
        return None
    return choice(request, name, ("1", "true", "0", "false"), "0") in ("1", "true")


def path_text(request: Request, name: str) -> str:
    value = str(request.path_params[name])
    if len(value) > MAX_CHARACTERS or "\0" in value:
        raise PageNotFound(f"there is no {name} of {len(value)} characters", hint="copy it from the page")
    return check_encoding(value, name)


def read_search(request: Request) -> Search:
    outcomes = [each for each in request.query_params.getlist("outcome") if each]
    allowed = (*(str(each) for each in Outcome), RUNNING)
    for each in outcomes:
        if each not in allowed:
            raise PageError(f"outcome is {each[:80]!r}", hint=f"use {', '.join(allowed)}")
    return Search(
        task=text(request, "task"),
        agent=text(request, "agent"),
        model=text(request, "model"),
        batch=text(request, "batch"),
        weights=text(request, "weights"),
        cause=text(request, "cause"),
        tag=text(request, "tag"),
        outcomes=tuple("" if each == RUNNING else each for each in outcomes),
        min_reward=number(request, "min_reward"),
        max_reward=number(request, "max_reward"),
        since=number(request, "since"),
        until=number(request, "until"),
        words=text(request, "q"),
        running=flag(request, "running"),
    )


async def read_tag_change(request: Request) -> tuple[list[str], list[str], list[str]]:
    """The ids of rollouts, the tags to add and those to remove, from the body of a request."""
    try:
        body = orjson.loads(await read_body(request.receive, MAX_BODY_BYTES))
        lists = [body[name] for name in ("rollouts", "add", "remove")]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        lists = []
    if not lists or not all(isinstance(each, list) and all(isinstance(text, str) for text in each) for each in lists):
        raise PageError("this is no change of tags", hint='send {"rollouts": [ID], "add": [TAG], "remove": [TAG]}')
    return lists[0], lists[1], lists[2]


def sorting(request: Request) -> tuple[str, Order]:
    orders: tuple[Order, ...] = ("asc", "desc")
    return choice(request, "sort", tuple(SORTS), "started"), choice(request, "order", orders, "desc")


def paging(request: Request, default_limit: int = 100) -> tuple[int, int]:
    """Offset and limit."""
    return integer(request, "offset", 0, 0, MAX_OFFSET), integer(request, "limit", default_limit, 1, MAX_ROWS)
