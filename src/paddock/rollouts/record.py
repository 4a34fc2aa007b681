"""What is kept of a rollout beside its calls and events: who ran what, how it ended, and the evidence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paddock.rollouts.outcome import Outcome


@dataclass(slots=True)
class RolloutRecord:
    """One rollout. `outcome` is None while it runs, and is written once."""

    rollout_id: str
    task_id: str
    task_hash: str = ""
    instruction: str = ""
    agent: str = "opencode"
    driver: str = "run"
    model: str = ""
    mode: str = "transparent_proxy"
    sandbox: str = "bwrap"
    sandbox_id: str | None = None
    batch_id: str | None = None
    member: int = 0
    """Which of the batch's repetitions of the task this is, from 0."""
    attempt: int = 0
    """How many rollouts of the same member broke before this one."""
    config: dict[str, Any] = field(default_factory=dict)
    """Everything needed to run it again, secrets left out."""
    metadata: dict[str, Any] = field(default_factory=dict)

    outcome: Outcome | None = None
    reward: float | None = None
    reward_reason: str | None = None
    """Why there is no reward."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    started_at: float = 0.0
    finished_at: float | None = None
    stage: str = "queued"
    """Where it stands, or stood when it ended: queued, install, sandbox, setup, agent, verifier, done."""
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds spent in each stage."""

    calls: int = 0
    trainable_calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    level: str = "text"
    """The least that its agent calls gave back: tokens, logprobs or text."""

    exit_code: int | None = None
    agent_session: str | None = None
    """The agent program's own session id."""
    agent_log: str = ""
    verifier_stdout: str = ""
    verifier_stderr: str = ""
    test_exit_code: int | None = None
    install_log: str = ""
    proxy_log: str = ""
    transcript: list[dict[str, Any]] = field(default_factory=list)
    """The agent program's own messages."""
    workdir_blob: str | None = None
    """The sealed work folder, a tar in the store."""
    task_blob: str | None = None
    """The files that the task brought, a tar in the store; None where they were too large, or are not known."""
    workdir_files: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return self.outcome is not None

    @property
    def wall_s(self) -> float | None:
        return None if self.finished_at is None else self.finished_at - self.started_at

    @property
    def trainable(self) -> bool:
        """All that the agent sampled was captured token by token, and somebody knows what it was worth."""
        return self.reward is not None and self.trainable_calls > 0 and self.level == "tokens"
