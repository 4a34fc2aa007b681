"""From the state of an instance to a grade. A grade that is not known is None, with the reason; it is never 0."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from paddock.fleet.errors import FleetError, VerifierInvalid
from paddock.fleet.partial import judge_error, partial_reward
from paddock.fleet.retry import Backoff, Budget
from paddock.fleet.verifiers import entry_point, execute_body

if TYPE_CHECKING:
    from paddock.fleet.handle import InstanceHandle

JUDGE_RUNS = 3
"""How often a verifier is run whose judge fails."""


@dataclass(frozen=True, slots=True)
class Grade:
    reward: float | None = None
    failure_reason: str | None = None
    """None when the reward is to be trusted."""
    verifier_success: bool = False
    error: str | None = None
    stdout: str | None = None
    execution_id: str | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be graded, and how."""

    task: dict[str, Any]
    final_answer: str | None = None
    conversation: list[dict[str, Any]] | None = None
    partial: bool = False

    @property
    def source(self) -> str | None:
        found = self.task.get("verifier_code") or self.task.get("verifier_func")
        return found if isinstance(found, str) else None


async def grade(question: Question, handle: InstanceHandle | None, *, seconds: float) -> Grade:
    """Run the task's verifier at the plane. Failures become the reason of an unknown grade."""
    if not question.source:
        return Grade(failure_reason="no_verifier")
    if handle is None:
        return Grade(failure_reason="no_fleet_env")
    try:
        body = _body(question, question.source, handle.instance_id)
    except VerifierInvalid as error:
        return Grade(failure_reason="verifier_invalid", error=f"{error}{f' ({error.hint})' if error.hint else ''}")
    budget = Budget(seconds)
    pauses = Backoff(first=1.0, longest=10.0)
    for run in range(1, JUDGE_RUNS + 1):
        try:
            answer = await handle.plane.execute_verifier(body, seconds=budget.left)
        except FleetError as error:
            gone = await handle.is_gone()
            return Grade(failure_reason="instance_expired" if gone else "verifier_exception", error=str(error))
        result = _read(answer, partial=question.partial)
        pause = pauses.pause(run)
        if result.failure_reason != "judge_error" or run == JUDGE_RUNS or pause >= budget.left:
            break
        await asyncio.sleep(pause)
    if result.failure_reason == "verifier_failed" and await handle.is_gone():
        return Grade(failure_reason="instance_expired", error=result.error, execution_id=result.execution_id)
    return result


def _body(question: Question, source: str, instance_id: str) -> dict[str, Any]:
    entry = entry_point(source, question.task.get("verifier_function"))
    arguments: dict[str, Any] = {}
    if question.final_answer is not None and entry.takes("final_answer"):
        arguments["final_answer"] = question.final_answer
    asks = entry.parameters is not None and "conversation" in entry.parameters
    if question.conversation is not None and asks:
        arguments["conversation"] = orjson.dumps(question.conversation, default=str).decode()
    key = str(question.task.get("task_key") or "unknown")
    return execute_body(key=key, source=source, entry=entry, instance_id=instance_id, arguments=arguments)


def _read(answer: dict[str, Any], *, partial: bool) -> Grade:
    stdout = answer.get("stdout") if isinstance(answer.get("stdout"), str) else None
    execution_id = answer.get("execution_id")
    known: dict[str, Any] = {
        "stdout": stdout,
        "execution_id": execution_id if isinstance(execution_id, str) else None,
        "verifier_success": bool(answer["success"]),
    }
    if stdout and (said := judge_error(stdout)) is not None:
        return Grade(failure_reason="judge_error", error=said, **known)
    if not answer["success"]:
        return Grade(failure_reason="verifier_failed", error=_error_text(answer.get("error")), **known)
    value = answer.get("result")
    score = value.get("score") if isinstance(value, dict) else value
    if score is None:
        return Grade(failure_reason="verifier_no_result", error="the verifier returned no score", **known)
    if not isinstance(score, int | float) or not math.isfinite(score):
        said = f"the verifier returned {type(score).__name__}, which is no score"
        return Grade(failure_reason="verifier_bad_result", error=said, **known)
    reward = float(score)
    if partial and reward == 0.0 and stdout and (share := partial_reward(stdout)) is not None:
        reward = share
    return Grade(reward=reward, **known)


def _error_text(error: Any) -> str:
    if isinstance(error, dict):
        return f"{error.get('type', 'error')}: {error.get('message', '')}"
    return str(error) if error else "the verifier failed without saying why"
