"""Where a rollout of the loop takes place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from paddock.rollouts.loop.tools import Tools
    from paddock.rollouts.outcome import Reward


class Scene(Protocol):
    """Made for one rollout. All but `close` may raise PaddockError: a broken scene is outcome `environment`."""

    kind: str
    """What a record names as its sandbox."""
    is_scored: bool
    """Whether somebody knows what the work is worth. If so, an unknown reward is outcome `verifier`."""

    async def open(self) -> None:
        """Get the place ready: make an instance, open a session."""

    async def tools(self) -> Tools:
        """The task and the tools, once the place is ready."""

    async def score(self, messages: list[dict[str, Any]]) -> Reward:
        """What the work is worth, given the whole conversation. Called at most once, after the last tool call."""

    async def close(self) -> None:
        """Give everything back, also what `open` was cancelled over. Called once, and never cancelled."""

    @property
    def evidence(self) -> dict[str, Any]:
        """What is worth keeping in a record's metadata, as far as it is known now."""

    @property
    def verifier_log(self) -> str:
        """What the verifier printed."""
