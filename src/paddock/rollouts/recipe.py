"""What kind of rollouts to run, as one value: enough to make them here, or on another machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paddock.errors import ConfigError
from paddock.rollouts.batch import Batch
from paddock.rollouts.loop.agent import LoopAgent
from paddock.rollouts.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paddock.rollouts.agents.base import Agent
    from paddock.rollouts.models.endpoint import Endpoint
    from paddock.rollouts.task import Task

USE_LOOP = "add --agent loop, or leave the environment out"


@dataclass(frozen=True, slots=True)
class Recipe:
    agent: Agent
    endpoint: Endpoint
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The other fields of `Plan`."""
    env: str | Callable[[], Any] | None = None
    """Where the agent `loop` works: a URL, or what makes an environment."""
    env_name: str | None = None
    """What records call it. None: its URL, or where it is defined."""
    seed: int | None = None

    def batch(self, tasks: Sequence[Task], **options: Any) -> Batch:
        """A batch of such rollouts; `options` are those of `Batch`. Raises ConfigError if it cannot be."""
        if isinstance(self.agent, LoopAgent):
            from paddock.rollouts.loop.runs import environment_batch

            options = {**options, "env": self.env, "env_name": self.env_name, "seed": self.seed}
            return environment_batch(tasks, self.agent, self.endpoint, settings=dict(self.settings), **options)
        if self.env is not None:
            name = self.agent.name
            raise ConfigError(f"the agent {name} works in a sandbox, not in an environment", hint=USE_LOOP)
        if self.seed is not None:
            raise ConfigError(f"the agent {self.agent.name} has no environment to seed", hint="leave the seed out")
        return Batch(tasks, Plan(self.agent, self.endpoint, **self.settings), **options)
