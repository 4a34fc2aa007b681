"""`RunContext`: a run's config with what was opened for it, shared by all rollouts of the run in one process.

Opens the store, the model and the connections to it, recovers what a killed process left behind, and closes
everything again.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from paddock.agents import load_agent
from paddock.agents.equipment import check_can_use
from paddock.capture.gate import CallGate
from paddock.capture.masking import Mask
from paddock.capture.settings import TokenSettings
from paddock.capture.tokens.opening import RenderingSource
from paddock.capture.upstream import Upstream
from paddock.errors import ConfigError
from paddock.models import open_model
from paddock.models.catalog import DEMO
from paddock.models.endpoint import Endpoint
from paddock.models.weight_version import Weights
from paddock.rollouts.demo import demo_script
from paddock.rollouts.image_scene import ImageScene
from paddock.rollouts.local_model import warn_of_long_prompt
from paddock.rollouts.loop.agent import LoopAgent, LoopLimits
from paddock.rollouts.resume import check_batch_exists
from paddock.rollouts.sandbox_scene import SandboxScene
from paddock.rollouts.sandboxes import owned_sandbox, recover
from paddock.sandbox import choose_backend, find_backend
from paddock.store import Store
from paddock.tasks.requirements import check_can_run, uses_image

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from paddock.agents.base import AgentBase
    from paddock.limits import RolloutTimeouts
    from paddock.rollouts.config import RunConfig
    from paddock.rollouts.loop.session import ToolSessions
    from paddock.rollouts.recorder import RolloutRecorder
    from paddock.rollouts.scene import Scene
    from paddock.sandbox.base import Sandbox, SandboxSpec
    from paddock.sandbox.network.connections import ConnectionRecord
    from paddock.tasks.task import Task


DAY_SECONDS = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class RunContext:
    """What all rollouts of a run share. `create` makes one, `open_run` also opens what it needs."""

    config: RunConfig
    agent: AgentBase
    endpoint: Endpoint
    store: Store
    upstream: Upstream
    sessions: ToolSessions | None = None
    """Where the agent `loop` works. None: an agent program works in a sandbox."""
    weights: Weights = field(default_factory=Weights)
    """The weight version that is stored with a call if the inference engine reports none."""
    gate: CallGate = field(default_factory=CallGate)
    """Pauses the model calls of the run."""
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """Strings that must appear in no record, beside the endpoint's own key."""

    @classmethod
    def create(
        cls,
        config: RunConfig,
        *,
        endpoint: Endpoint,
        store: Store,
        upstream: Upstream,
        sessions: ToolSessions | None = None,
        secrets: Iterable[str] = (),
    ) -> RunContext:
        """`sessions` are those of a fleet or a trainer; without them the config's `env` is used.

        Raises ConfigError if the agent cannot work there, SandboxError for a sandbox that needs consent.
        """
        agent = make_agent(config)
        if config.snapshots:
            check_snapshots(config, agent)
        if isinstance(agent, LoopAgent):
            from paddock.rollouts.loop.environment import environment_sessions

            sessions = sessions or environment_sessions(config)
        elif sessions is not None or config.env is not None:
            hint = "add --agent loop, or leave the environment out"
            raise ConfigError(f"the agent {agent.name} works in a sandbox, not in an environment", hint=hint)
        elif config.seed is not None:
            raise ConfigError(f"the agent {agent.name} has no environment to seed", hint="leave the seed out")
        else:
            choose_backend(config.sandbox, consent=config.consent)
        return cls(
            config,
            agent,
            endpoint,
            store,
            upstream,
            sessions,
            Weights.of(config.weight_version),
            config.gate or CallGate(),
            secrets=(*config.secrets, *secrets),
        )

    def make_scene(self, task: Task, timeouts: RolloutTimeouts, recorder: RolloutRecorder) -> Scene:
        """The scene of one rollout, not opened yet. Raises TaskError if the task needs what is missing here."""
        check_can_use(self.agent, task)
        # With a tool session, only the task's tests run in a sandbox, so only they can need something.
        if self.sessions is None or task.is_scored:
            check_can_run(task, self.config.sandbox)
        if self.sessions is None and uses_image(task, self.config.sandbox):
            return ImageScene(task, self, timeouts, recorder)
        if self.sessions is None:
            return SandboxScene(task, self, timeouts, recorder)
        from paddock.rollouts.loop.scene import LoopScene

        return LoopScene(task, self, self.sessions, timeouts, recorder)

    def open_sandbox(
        self,
        spec: SandboxSpec,
        *,
        rollout_id: str,
        timeout: float,
        on_connection: Callable[[ConnectionRecord], None],
    ) -> AbstractAsyncContextManager[Sandbox]:
        """A sandbox of the run's backend, registered in the store. `on_connection` gets its connections."""
        return owned_sandbox(
            self.store,
            self.config.sandbox,
            spec,
            rollout_id=rollout_id,
            consent=self.config.consent,
            timeout=timeout,
            on_connection=on_connection,
        )

    @property
    def scene_kind(self) -> str:
        """What a record has in its field `sandbox`: the backend, or the kind of the tool session."""
        return self.config.sandbox if self.sessions is None else self.sessions.kind

    def mask(self, *secrets: str) -> Mask:
        """A mask for the secrets of the run, and for these."""
        return Mask.of_endpoint(self.endpoint, (*secrets, *self.secrets))

    def describe(self) -> dict[str, Any]:
        """The settings that are stored with a rollout, so that it can be repeated. Without secrets."""
        config = self.config
        return {
            **self.agent.describe(),
            "model": self.endpoint.display_name,
            "model_name": self.endpoint.name,
            "mode": config.mode,
            "sandbox": self.scene_kind,
            "budget": asdict(config.budget),
            "agent_timeout": config.agent_timeout,
            "stall_timeout": config.stall_timeout,
            "verifier_mode": config.verifier_mode,
            "network": None if config.agent_network is None else str(config.agent_network),
            "token_mode": config.token_mode,
            "tokenizer": config.tokenizer,
            "renderer": config.renderer,
            "thinking": config.thinking,
            "temperature": config.temperature,
            "top_logprobs": config.top_logprobs,
            "context_tokens": config.context_tokens,
            "weight_version": self.weights.current(),
            **({} if self.sessions is None else self.sessions.settings),
        }


def check_snapshots(config: RunConfig, agent: AgentBase) -> None:
    """Raises ConfigError where there is no work folder that can be read while the agent works."""
    if isinstance(agent, LoopAgent):
        raise ConfigError("snapshots are of a work folder, and the agent loop has none", hint="leave snapshots out")
    if not find_backend(config.sandbox).supports_snapshots:
        reason = f"the work folder of a {config.sandbox} sandbox cannot be read while the agent works"
        raise ConfigError(f"there are no snapshots: {reason}", hint="use --sandbox bwrap, or leave snapshots out")


def make_agent(config: RunConfig) -> AgentBase:
    """The driver that a config names, or the one that it has. Raises ConfigError."""
    if not isinstance(config.agent, str):
        return config.agent
    agent = load_agent(config.agent, driver=config.driver)
    return LoopAgent(LoopLimits(steps=config.max_steps)) if isinstance(agent, LoopAgent) else agent


@asynccontextmanager
async def open_run(
    config: RunConfig,
    *,
    sessions: ToolSessions | None = None,
    secrets: Iterable[str] = (),
    log: Callable[[str], None] | None = None,
) -> AsyncIterator[RunContext]:
    """Open the store and the model, and yield the context. Raises ConfigError if there is no batch to resume."""
    # An agent that cannot be loaded is reported before anything is opened.
    agent = make_agent(config)
    config = replace(config, agent=agent, driver=None)
    async with open_store(config.store) as store, Upstream() as upstream:
        if config.resume is not None:
            await store.run(check_batch_exists, store, config.resume)
        if config.snapshots:
            await store.run(store.expire_snapshots, config.snapshot_limits.days * DAY_SECONDS)
        async with open_endpoint(config, log) as endpoint:
            if config.token_mode:
                tokens = TokenSettings(config.tokenizer, config.renderer)
                rendering = await RenderingSource(tokens, endpoint, upstream, thinking=config.thinking).check()
                if log is not None:
                    log(f"token mode: renderer {rendering.family}, tokenizer {rendering.tokenizer.name_or_path}")
            if log is not None and (warning := await warn_of_long_prompt(agent, endpoint, upstream)):
                log(warning)
            yield RunContext.create(
                config, endpoint=endpoint, store=store, upstream=upstream, sessions=sessions, secrets=secrets
            )


@asynccontextmanager
async def open_endpoint(config: RunConfig, log: Callable[[str], None] | None = None) -> AsyncIterator[Endpoint]:
    """The endpoint of the config's model. Starts a server if the model needs one. Raises ModelError, ConfigError."""
    if isinstance(config.model, Endpoint):
        yield config.model
        return
    agent = make_agent(config)
    demo = demo_script(agent.name, agent.tools) if config.model == DEMO else None
    async with open_model(config.model, **config.model_keys(), demo=demo, log=log) as endpoint:
        yield endpoint


@asynccontextmanager
async def open_store(store: Store | Path | str | None) -> AsyncIterator[Store]:
    """The store to write to, recovered. One that is passed in stays open."""
    if isinstance(store, Store):
        yield store
        return
    opened = Store.open(store)
    try:
        await opened.run(recover, opened)
        yield opened
    finally:
        opened.close()
