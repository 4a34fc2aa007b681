"""The scene interface: where a rollout takes place, and how the agent works there.

There are three scenes. `SandboxScene` runs an agent program in a sandbox, `ImageScene` on an image. `LoopScene`
runs our tool-calling loop in a session with tools, which an environment or a fleet instance provides. `Rollout` uses
only this interface. If a placement backend such as Ray runs the rollout on another machine, there is a `RemoteRun`
instead of a scene.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from paddock.capture.callers import NO_FINDER

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from paddock.capture.paused_time import AgentDeadline
    from paddock.capture.trace import Call
    from paddock.rollouts.judging import Ending, ModelUse
    from paddock.rollouts.rollout import Rollout
    from paddock.rollouts.verifier import VerifierResult
    from paddock.sandbox.base import Sandbox
    from paddock.sandbox.socket_owners import SocketOwnerFinder
    from paddock.tasks.steps import StepPlan

AGENT_STAGE = "agent"
"""The stage in which the agent works. A rollout that gets here has reached every shared dependency."""
PAUSED_STAGE = "paused"
"""What a record has in place of the stage `agent` while a model call waits for the end of a pause."""
INSTALL_STAGE = "install"
"""The stage in which the agent program is fetched. It is shared: if it fails, it fails for the whole batch."""
OPENING_STAGES = ("sandbox", "provision")
"""Stages in which a rollout gets its sandbox, or its tool session."""


@dataclass(frozen=True, slots=True)
class ModelPort:
    """The socket on which the capture proxy listens for the agent's model calls."""

    listener: socket.socket
    base_url: str
    """As the agent sees it; ends in `/v1`."""
    caller_finder: SocketOwnerFinder | None = None
    """Finds the process that made a call."""
    no_finder_reason: str = NO_FINDER
    """Why the caller of a call is unknown, if there is no finder."""


@dataclass(frozen=True, slots=True)
class ModelAccess:
    """What the agent needs to call the model."""

    base_url: str
    api_key: str = field(repr=False)
    """Accepted by the capture proxy of this rollout only."""


class Scene(Protocol):
    """Made for one rollout, with its recorder. The methods are called in this order, each at most once; `close` is
    always called. They write what they see into the record, and raise RolloutError for the part that broke.

    A task with steps goes from `begin_step` to `verify` once for each of them."""

    is_scored: bool
    """Whether there are tests, or a session that scores. If so, an unknown reward is outcome `verifier`."""
    capture_deadline: bool
    """Whether the capture refuses calls when the time is up. An agent program is killed instead."""
    agent_sandbox: Sandbox | None
    """Where the files of the agent are. None before `open`, and for an agent that has no sandbox."""
    steps: Sequence[StepPlan]
    """What the agent is asked one after the other. Empty: only the instruction of the task."""

    @property
    def is_repeatable(self) -> bool:
        """Whether recorded calls can be replayed here: what the agent does again has the same effect. Known after
        `open`."""

    async def open(self) -> None:
        """Prepare everything for the agent. Each scene has its own stages for this."""

    async def begin_step(self, plan: StepPlan) -> None:
        """Prepare one of `steps`, whose predecessor has been scored."""

    async def open_model_port(self) -> ModelPort:
        """A socket that the agent can reach."""

    async def run_agent(self, access: ModelAccess, deadline: AgentDeadline) -> bool:
        """Run the agent, in the stage `agent`. True if its time was up."""

    async def stop_agent(self, exhausted: str | None) -> None:
        """Nothing of the agent runs after this. `exhausted` is the budget that the capture ended it for."""

    async def seal(self) -> None:
        """Keep the work as the agent left it, so that nothing can change it before it is scored."""

    def judge(self, use: ModelUse, calls: Sequence[Call]) -> Ending:
        """The ending of an agent that was neither stopped nor ran out of time."""

    async def verify(self) -> VerifierResult:
        """Score the work, in the stage `verifier`."""

    async def close(self) -> None:
        """Release everything, also after `open` was cancelled. Always runs to its end."""

    async def abort(self) -> None:
        """Ask the agent to stop; may be called at any time."""

    async def messages(self) -> list[dict[str, Any]]:
        """The agent's own transcript, as far as it has got."""


class RemoteRun(Protocol):
    """One rollout on another machine. It writes into the record and the store of the rollout that it is run for."""

    async def run(self, rollout: Rollout) -> Ending:
        """Run all stages on the other machine. Cancelling it ends them."""

    async def abort(self, reason: str) -> bool:
        """Ask it to stop. True if `run` will return by itself; if False, the caller cancels `run`."""
