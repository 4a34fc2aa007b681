"""The outcome of a rollout whose agent has ended, from what was seen at the model and in the sandbox. No IO.

Exit codes do not decide. The functions are asked in this order, and the first that returns an ending decides: who
stopped the rollout, how the sandbox ended, and what the model endpoint did.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from paddock.rollouts.outcome import Outcome

if TYPE_CHECKING:
    from paddock.rollouts.blame import Blame


class Ending(NamedTuple):
    outcome: Outcome
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ModelUse:
    """What the model calls of a rollout say about its end."""

    blame: Blame
    exhausted: str | None = None
    """The budget that was used up."""
    lost: str | None = None
    """Why a call could not be kept."""


def judge_stop(use: ModelUse, *, aborted: str | None, timed_out: bool) -> Ending | None:
    """The ending of a rollout that did not end by itself, or whose calls are incomplete."""
    if aborted is not None:
        return Ending(Outcome.CANCELLED, aborted)
    if use.lost is not None:
        return Ending(Outcome.ENVIRONMENT, f"calls could not be recorded: {use.lost}")
    if timed_out and use.blame.outcome is not None:
        return Ending(use.blame.outcome, use.blame.error)
    if timed_out:
        refusals = f"; {use.blame.error}" if use.blame.error else ""
        return Ending(Outcome.TIMEOUT, f"the agent did not finish in time{refusals}")
    return None


def judge_sandbox(exit_code: int | None, killed_for: str | None) -> Ending | None:
    """The ending of a rollout whose sandbox used too much, or ended before the agent did."""
    if killed_for:
        return Ending(Outcome.BUDGET, f"the sandbox used more {killed_for} than allowed")
    if exit_code is None:
        return Ending(Outcome.SANDBOX, "the sandbox ended by itself")
    return None


def judge_model(use: ModelUse) -> Ending | None:
    """The ending of a rollout that the endpoint or a budget ended.

    The endpoint comes first: answers that broke off may have used up the tokens, and the agent got nothing for them.
    """
    if use.blame.outcome is not None:
        return Ending(use.blame.outcome, use.blame.error)
    if use.exhausted is not None:
        return Ending(Outcome.BUDGET, f"the budget of {use.exhausted} was used up")
    return None
