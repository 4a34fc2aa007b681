"""Writes the steps of a rollout into its record, and joins what their programs printed."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from paddock.rollouts.steps import CONTINUING_OUTCOMES, NOT_REACHED, StepRecord, min_reward_failure
from paddock.store.outcome import Outcome, Reward

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paddock.rollouts.recorder import RolloutRecorder
    from paddock.tasks.steps import StepPlan

JOINED_LOGS = ("agent_log", "verifier_stdout", "verifier_stderr")
JOINED_LOG_CHARACTERS = 256 * 1024
"""Kept of each joined log; what is dropped is the beginning."""


class StepLog:
    """The results of the steps of a task, and the joined logs and transcript of all that have run."""

    def __init__(self, recorder: RolloutRecorder, names: Sequence[str]) -> None:
        self.results = [StepRecord(name, reward_reason=NOT_REACHED) for name in names]
        self._recorder = recorder
        self._record = recorder.record
        self._logs = dict.fromkeys(JOINED_LOGS, "")
        self._transcript: list[dict[str, Any]] = []

    @contextmanager
    def record_step(self, plan: StepPlan) -> Iterator[StepRecord]:
        """A step is run while the block lasts. However it ends, the record has all that is known of the step."""
        record, result = self._record, self.results[plan.number - 1]
        record.exit_code = record.test_exit_code = None
        record.verifier, record.transcript = {}, []
        record.artifacts, record.artifact_blob = [], None
        for name in JOINED_LOGS:
            setattr(record, name, "")
        began = time.monotonic()
        result.begin()
        self._write()
        self._recorder.emit("step", {"step": plan.name, "number": plan.number, "steps": len(self.results)})
        try:
            yield result
        finally:
            result.seconds = time.monotonic() - began
            result.exit_code, result.test_exit_code = record.exit_code, record.test_exit_code
            result.verifier = record.verifier
            if result.outcome is not None:
                result.workdir_blob, result.artifact_blob = record.workdir_blob, record.artifact_blob
            self._join_logs(plan.name)
            self._write()
            values = {"step": plan.name, "outcome": result.outcome, "reward": result.reward}
            self._recorder.emit("step_end", values)

    def goes_on(self, plan: StepPlan, *, is_scored: bool) -> bool:
        """Whether the next step is run."""
        result = self.results[plan.number - 1]
        if result.outcome is None or Outcome(result.outcome) not in CONTINUING_OUTCOMES:
            return False
        if not is_scored:
            return True
        if result.reward is None:
            return False
        failure = min_reward_failure(plan.step, Reward(result.reward, None, result.reward_parts))
        if failure is not None:
            self._explain_unreached(failure)
        return failure is None

    def _explain_unreached(self, reason: str) -> None:
        for result in self.results:
            if result.started_at is None:
                result.reward_reason = f"{NOT_REACHED}: {reason}"
        self._write()

    def _join_logs(self, step: str) -> None:
        record = self._record
        for name in JOINED_LOGS:
            text = getattr(record, name)
            if text:
                self._logs[name] += f"== step {step} ==\n{text.rstrip()}\n"
            setattr(record, name, self._logs[name][-JOINED_LOG_CHARACTERS:])
        self._transcript += record.transcript
        record.transcript = list(self._transcript)

    def _write(self) -> None:
        self._record.steps = [self._recorder.mask.value(result.to_json()) for result in self.results]
