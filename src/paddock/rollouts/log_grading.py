"""The reward of tests whose output is graded outside of their sandbox (see `LogGrader`)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from paddock.errors import SandboxError, TaskError
from paddock.rollouts.verifier import find_abnormal_end
from paddock.store.outcome import Reward
from paddock.tasks.swebench.package import grade_log

if TYPE_CHECKING:
    from paddock.sandbox.base import Completed
    from paddock.tasks.settings import LogGrader

PARTS = {"FAIL_TO_PASS": "fail_to_pass", "PASS_TO_PASS": "pass_to_pass"}


async def grade_tests(grader: LogGrader, done: Completed, timeout: float) -> Reward:
    """1.0 if every test of the row passed, else 0.0; unknown if the log does not say. Parts are shares of tests."""
    try:
        problem = find_abnormal_end(done, timeout)
    except SandboxError as error:
        problem = error.message
    if problem is None and done.truncated:
        problem = "the tests printed more than is kept, so their log is not whole"
    if problem is not None:
        return Reward.unknown(problem)
    try:
        grade = await asyncio.to_thread(grade_log, grader, done.stdout.decode(errors="replace"))
    except TaskError as error:
        return Reward.unknown(f"{error.message} ({error.hint})")
    if grade.problem:
        return Reward.unknown(grade.problem)
    counts = {name: (grade.passed[name], len(grade.failed[name])) for name in PARTS}
    parts = {PARTS[name]: passed / (passed + failed) for name, (passed, failed) in counts.items() if passed + failed}
    return Reward(1.0 if grade.resolved else 0.0, None, parts)
