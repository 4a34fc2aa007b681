"""What the agent has spent on the model, and when it must stop. No IO, no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from paddock.rollouts.trace import Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from paddock.rollouts.limits import Budget
    from paddock.rollouts.trace import Call

Exhausted = Literal["calls", "tokens", "time"]

SIDE_CALLS = frozenset((Role.TITLE, Role.COMPACTION))
LEAST_SIDE_CALLS = 8
"""Side calls are free up to the same number as calls, and at least this many: no agent works through them."""


def completion_tokens(call: Call) -> int:
    """How many tokens were sampled, as far as anybody told."""
    if call.completion_token_ids:
        return len(call.completion_token_ids)
    told = call.usage.get("completion_tokens")
    return told if isinstance(told, int) else len(call.logprobs)


def tokens_spent(calls: Iterable[Call], granted: Mapping[str, int]) -> int:
    """What was sampled, and what calls that still run were `granted`: they may sample all of it."""
    return sum(granted.get(call.id, 0) if call.ended is None else completion_tokens(call) for call in calls)


def calls_spent(calls: Iterable[Call], *, side: bool) -> int:
    """Calls that run or went well. One that the agent repeated was still answered, so it counts."""
    return sum((call.role in SIDE_CALLS) is side and call.ok for call in calls)


def exhausted(
    budget: Budget, calls: Sequence[Call], role: Role, seconds_left: float | None, granted: Mapping[str, int]
) -> Exhausted | None:
    """What the next call would overdraw."""
    if seconds_left is not None and seconds_left <= 0:
        return "time"
    if budget.completion_tokens is not None and tokens_spent(calls, granted) >= budget.completion_tokens:
        return "tokens"
    if budget.calls is not None:
        side = role in SIDE_CALLS
        most = max(budget.calls, LEAST_SIDE_CALLS) if side else budget.calls
        if calls_spent(calls, side=side) >= most:
            return "calls"
    return None


def room(budget: Budget, calls: Sequence[Call], granted: Mapping[str, int]) -> int:
    """The most tokens that the next call may sample."""
    if budget.completion_tokens is None:
        return budget.max_tokens_per_call
    return max(1, min(budget.max_tokens_per_call, budget.completion_tokens - tokens_spent(calls, granted)))
