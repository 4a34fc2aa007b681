"""The record of a rollout, beside its calls and events: who ran what, how it ended, and the logs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paddock.errors import StoreError

if TYPE_CHECKING:
    from paddock.capture.trace import Call
    from paddock.store.outcome import Outcome


@dataclass(slots=True, repr=False)
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
    batch_size: int | None = None
    """How many members the batch has in all."""
    member: int = 0
    """Which of the batch's repetitions of the task this is, from 0."""
    attempt: int = 0
    """How many rollouts of the same member broke before this one."""
    config: dict[str, Any] = field(default_factory=dict)
    """Everything needed to run it again, secrets left out."""
    metadata: dict[str, Any] = field(default_factory=dict)
    run_config: dict[str, Any] = field(default_factory=dict)
    """The public fields of its `RunConfig`, as `RunConfig.to_json` has them."""
    fork: dict[str, Any] = field(default_factory=dict)
    """Of a rollout that replays another one: `source`, `at`, `kind`, `policy`, and `fidelity` at its end."""

    outcome: Outcome | None = None
    reward: float | None = None
    reward_reason: str | None = None
    """Why there is no reward."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    started_at: float = 0.0
    finished_at: float | None = None
    stage: str = "queued"
    """The current stage: queued, install, image, sandbox, setup, provision, tools, agent, verifier or done. `paused`
    is the stage `agent` while a model call waits for the end of a pause."""
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds spent in each stage."""
    pauses: dict[str, Any] = field(default_factory=dict)
    """How often its calls were paused (`count`), and for how long (`seconds`). Empty if none ever waited. This time
    is a part of the stage `agent`, but no deadline counts it."""

    call_count: int = 0
    trainable_calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    weight_version: str | None = None
    """The weight version of its first call of its own."""
    level: str = "text"
    """The lowest capture level of its agent calls: tokens, logprobs or text."""

    exit_code: int | None = None
    agent_session: str | None = None
    """The agent program's own session id."""
    agent_log: str = ""
    verifier_stdout: str = ""
    verifier_stderr: str = ""
    test_exit_code: int | None = None
    install_log: str = ""
    image: dict[str, Any] = field(default_factory=dict)
    """`name`, `digest` and `platform` of the image that the sandboxes had as their root; empty without one."""
    user_ids: str = ""
    """Which user ids of the host the users of the image were; empty without an image."""
    build_log: str = ""
    """What building the image printed."""
    verifier_image: dict[str, Any] = field(default_factory=dict)
    """`name` and `digest` of the image that a separate verifier ran on."""
    verifier_build_log: str = ""
    verifier: dict[str, Any] = field(default_factory=dict)
    """The `mode` in which the tests were run, and the `reason` for it."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """How each step of the task went: see `StepRecord`. Empty for a task without steps."""
    limits: dict[str, str] = field(default_factory=dict)
    """How each limit of the sandbox was enforced."""
    proxy_log: str = ""
    transcript: list[dict[str, Any]] = field(default_factory=list)
    """The agent program's own messages."""
    workdir_blob: str | None = None
    """The sealed work folder, a tar in the store."""
    artifact_blob: str | None = None
    """The artifacts, a tar in the store; None where there are none."""
    artifacts: list[dict[str, Any]] = field(default_factory=list)
    """Each file of the artifacts: its `path` in that tar, its `size`, and the `source` it was kept for."""
    task_blob: str | None = None
    """The files of the task, a tar in the store; None where they were too large or are unknown."""
    task_json_blob: str | None = None
    """The whole task as JSON in the store, to run it again; None where it is too large."""
    workdir_files: list[str] = field(default_factory=list)
    snapshots: dict[str, Any] = field(default_factory=dict)
    """About the snapshots of the work folder: `saved`, `bytes`, `seconds` (spent on reading), `left_out`, `problems`
    (each reason with its number), and in `ends` the snapshot at the end of each step. Empty without any."""
    usage: dict[str, Any] = field(default_factory=dict)
    connections: list[dict[str, Any]] = field(default_factory=list)
    """What the sandboxes connected to, or tried to: see `ConnectionRecord`."""
    store_folder: str = field(default="", compare=False)
    """Where it is stored. Set by the store, and no part of what is stored."""

    def __repr__(self) -> str:
        state = f"({self.stage})" if self.outcome is None else str(self.outcome)
        return (
            f"<RolloutRecord {self.rollout_id} task={self.task_id} agent={self.agent} {state} "
            f"reward={self.reward} calls={self.call_count}>"
        )

    @property
    def calls(self) -> list[Call]:
        """All model calls in their order, with tokens and logprobs, read from the store on each use.

        `call_count` is their number, and needs no store. Raises StoreError if the record was not stored, or was
        deleted since.
        """
        from paddock.store.store import Store

        if not self.store_folder:
            raise StoreError(
                f"rollout {self.rollout_id} is in no store", hint="only stored rollouts have their calls"
            )
        with Store.open(self.store_folder, read_only=True) as store:
            return store.calls(self.rollout_id)

    @property
    def finished(self) -> bool:
        """Whether the rollout has its outcome."""
        return self.outcome is not None

    @property
    def wall_s(self) -> float | None:
        """Seconds from start to end; None while it runs."""
        return None if self.finished_at is None else self.finished_at - self.started_at

    @property
    def trainable(self) -> bool:
        """Whether all that the agent sampled was captured as tokens, and the reward is known."""
        return self.reward is not None and self.trainable_calls > 0 and self.level == "tokens"
