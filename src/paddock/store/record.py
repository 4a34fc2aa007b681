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
    """Unique in the store."""
    task_id: str
    """The name of the task."""
    task_hash: str = ""
    """Two tasks with the same hash are the same problem."""
    instruction: str = ""
    """What the agent was told to do."""
    agent: str = "opencode"
    """The name of the agent."""
    driver: str = "run"
    """How the agent was driven: run or serve."""
    model: str = ""
    """The URL of the model without credentials, or its name."""
    mode: str = "transparent_proxy"
    """transparent_proxy or black_box."""
    sandbox: str = "bwrap"
    """The sandbox backend."""
    sandbox_id: str | None = None
    """Which sandbox it was; None before it is open."""
    batch_id: str | None = None
    """The batch that it belongs to; None without one."""
    batch_size: int | None = None
    """How many members the batch has in all."""
    member: int = 0
    """Which of the batch's repetitions of the task this is, from 0."""
    attempt: int = 0
    """How many rollouts of the same member broke before this one."""
    config: dict[str, Any] = field(default_factory=dict)
    """Everything needed to run it again, secrets left out."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The metadata of the task."""
    run_config: dict[str, Any] = field(default_factory=dict)
    """The public fields of its `RunConfig`, as `RunConfig.to_json` has them."""
    fork: dict[str, Any] = field(default_factory=dict)
    """Of a rollout that replays another one: `source`, `at`, `kind`, `policy`, and `fidelity` at its end."""

    outcome: Outcome | None = None
    """How it ended; None while it runs."""
    reward: float | None = None
    """The reward; None is unknown, never 0."""
    reward_reason: str | None = None
    """Why there is no reward."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """The parts of the reward that the verifier named."""
    error: str | None = None
    """What broke, in one line."""
    started_at: float = 0.0
    """Seconds since the epoch."""
    finished_at: float | None = None
    """Seconds since the epoch; None while it runs."""
    stage: str = "queued"
    """The current stage: queued, install, image, sandbox, setup, provision, tools, agent, verifier or done. `paused`
    is the stage `agent` while a model call waits for the end of a pause."""
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds spent in each stage."""
    pauses: dict[str, Any] = field(default_factory=dict)
    """How often its calls were paused (`count`), and for how long (`seconds`). Empty if none ever waited. This time
    is a part of the stage `agent`, but no deadline counts it."""

    call_count: int = 0
    """How many model calls it made."""
    trainable_calls: int = 0
    """How many of them can be trained on."""
    prompt_tokens: int = 0
    """Tokens of all prompts together."""
    completion_tokens: int = 0
    """Tokens that were sampled."""
    weight_version: str | None = None
    """The weight version of its first call of its own."""
    level: str = "text"
    """The lowest capture level of its agent calls: tokens, logprobs or text."""

    exit_code: int | None = None
    """The exit code of the agent program."""
    agent_session: str | None = None
    """The agent program's own session id."""
    agent_log: str = ""
    """The end of what the agent program printed."""
    verifier_stdout: str = ""
    """The end of what the verifier printed."""
    verifier_stderr: str = ""
    """The end of what the verifier printed as errors."""
    test_exit_code: int | None = None
    """The exit code of the verifier."""
    install_log: str = ""
    """What installing the agent printed."""
    image: dict[str, Any] = field(default_factory=dict)
    """`name`, `digest` and `platform` of the image that the sandboxes had as their root; empty without one."""
    user_ids: str = ""
    """Which user ids of the host the users of the image were; empty without an image."""
    build_log: str = ""
    """What building the image printed."""
    verifier_image: dict[str, Any] = field(default_factory=dict)
    """`name` and `digest` of the image that a separate verifier ran on."""
    verifier_build_log: str = ""
    """What building the image of a separate verifier printed."""
    verifier: dict[str, Any] = field(default_factory=dict)
    """The `mode` in which the tests were run, and the `reason` for it."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """How each step of the task went: see `StepRecord`. Empty for a task without steps."""
    limits: dict[str, str] = field(default_factory=dict)
    """How each limit of the sandbox was enforced."""
    proxy_log: str = ""
    """What the model proxy reported."""
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
    """The files in the work folder at the end."""
    snapshots: dict[str, Any] = field(default_factory=dict)
    """About the snapshots of the work folder: `saved`, `bytes`, `seconds` (spent on reading), `left_out`, `problems`
    (each reason with its number), and in `ends` the snapshot at the end of each step. Empty without any."""
    usage: dict[str, Any] = field(default_factory=dict)
    """What the sandbox used, such as processor time and memory."""
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
