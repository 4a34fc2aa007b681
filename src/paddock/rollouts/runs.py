"""What a program calls: run one rollout, run a batch, score a finished one again.

These open what is needed (the store, the model, the connections to it), recover what a killed
process left behind, and close everything again.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paddock.errors import ConfigError, StoreError
from paddock.rollouts.agents import load_agent
from paddock.rollouts.batch import RETRIES, BatchResult
from paddock.rollouts.capture import Upstream
from paddock.rollouts.engine import LOCAL, find_engine
from paddock.rollouts.ledger import owned_sandbox, recover
from paddock.rollouts.limits import Budget
from paddock.rollouts.models import open_model
from paddock.rollouts.models.endpoint import Endpoint
from paddock.rollouts.recipe import Recipe
from paddock.rollouts.resume import check_known
from paddock.rollouts.store import Store
from paddock.rollouts.task_needs import check_can_run
from paddock.rollouts.verifier import Verdict, verify
from paddock.rollouts.weights import Weights

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from paddock.rollouts.agents.base import Agent
    from paddock.rollouts.engine import Engine
    from paddock.rollouts.record import RolloutRecord
    from paddock.rollouts.rollout import Rollout
    from paddock.rollouts.sandbox.base import Sandbox, SandboxSpec
    from paddock.rollouts.task import Task


async def run_rollout(task: Task, *, model: str | Endpoint, **options: Any) -> RolloutRecord:
    """Run one rollout and return its record. Takes the options of `run_batch`, but `n`."""
    result = await run_batch([task], model=model, n=1, **options)
    return result.records[0]


async def run_batch(
    tasks: Iterable[Task],
    *,
    model: str | Endpoint,
    agent: str | Agent = "opencode",
    driver: str | None = None,
    env: str | Callable[[], Any] | None = None,
    env_name: str | None = None,
    seed: int | None = None,
    model_name: str | None = None,
    api_key: str | None = None,
    vllm_url: str | None = None,
    hf_token: str | None = None,
    n: int = 1,
    parallel: int = 1,
    retries: int | None = None,
    batch_id: str | None = None,
    resume: str | None = None,
    store: Store | Path | str | None = None,
    budget: Budget | None = None,
    weight_version: Weights | str | int | Callable[[], str | int | None] | None = None,
    engine: str | Engine = LOCAL,
    on_change: Callable[[Rollout], None] | None = None,
    on_settled: Callable[[RolloutRecord], None] | None = None,
    log: Callable[[str], None] | None = None,
    **settings: Any,
) -> BatchResult:
    """Run `n` rollouts of each task, `parallel` at a time, each to one recorded outcome.

    `model` is a URL, `demo`, `replay:FILE`, `local`, `vllm://repo` or `hf-router://repo:provider`. `settings` are the
    other fields of `Plan`: mode, sandbox, consent, timeouts, agent_timeout, stall_timeout, thinking, temperature,
    context_tokens. `resume` goes on with a batch of the store: members whose outcome is the policy's are not run
    again. Raises ConfigError if there is no such batch, or if it was run with another agent, model, sampling or
    version of a task. `batch_id` names a batch, and goes on with it if there is one. `retries` is how often a member
    that broke outside the policy is run again: by default twice in a batch, and never for a lone rollout (once on
    `ray`, where its node may be lost). The agent
    `loop` works in `env`, a URL or what makes an environment, and begins it with `seed`; `env_name` is what records
    call that environment, by default its URL, or where it is defined. `weight_version` is kept
    with each call whose engine does not tell its own: a version, a function that knows it, or `Weights` to set later.
    `engine` says where they run: `local`, `ray`, or a `RayEngine` with its resources.
    """
    placing = find_engine(engine)
    if resume is not None and batch_id is not None:
        raise ConfigError("both resume and batch_id are given", hint="resume names the batch already")
    if driver is not None and not isinstance(agent, str):
        raise ConfigError("an Agent already has its driver", hint="leave driver out, or name the agent")
    driven = load_agent(agent, driver=driver) if isinstance(agent, str) else agent
    secrets = tuple(secret for secret in (api_key, hf_token, *getattr(env, "secrets", ())) if secret)
    keys: dict[str, Any] = {"name": model_name, "api_key": api_key, "vllm_url": vllm_url, "hf_token": hf_token}
    async with opened(model, keys, store, log, resume=resume) as parts:
        chosen = list(tasks)
        # What was lost with a node is run once more elsewhere, also if it was alone.
        fewest = RETRIES if len(chosen) * n > 1 else 0 if placing is None else 1
        settings = {
            **settings,
            "budget": budget or Budget(),
            "weights": Weights.of(weight_version),
            "secrets": secrets,
        }
        recipe = Recipe(driven, parts.endpoint, settings, env=env, env_name=env_name, seed=seed)
        options: dict[str, Any] = {
            "store": parts.store,
            "upstream": parts.upstream,
            "n": n,
            "parallel": parallel,
            "retries": fewest if retries is None else retries,
            "batch_id": resume or batch_id,
            "on_change": on_change,
            "on_settled": on_settled,
        }
        async with AsyncExitStack() as stack:
            if placing is not None:
                options["place"] = await stack.enter_async_context(placing.opened(recipe, log or _silent))
            return await recipe.batch(chosen, **options).run()


async def reverify(
    rollout_id: str,
    tests: Mapping[str, bytes],
    *,
    store: Store | Path | str | None = None,
    task: Task | None = None,
    sandbox: str = "bwrap",
    consent: bool = False,
    timeout: float = 300.0,
) -> Verdict:
    """Score the sealed work folder of a finished rollout with other tests. The first score is kept too."""
    from paddock.rollouts.limits import SandboxLimits

    if task is not None:
        check_can_run(task, sandbox)
    async with opened_store(store) as kept:
        record = kept.get(rollout_id)
        if record is None:
            raise StoreError(f"there is no rollout {rollout_id!r}", hint="paddock trace list shows them")
        if record.workdir_blob is None:
            raise StoreError(
                f"rollout {record.rollout_id} has no sealed work folder",
                hint=f"it ended with outcome {record.outcome} before its work could be kept",
            )

        def open_sandbox(spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
            return owned_sandbox(kept, sandbox, spec, rollout_id=record.rollout_id, consent=consent, timeout=30.0)

        limits = task.sandbox if task is not None else SandboxLimits()
        sealed = kept.get_blob(record.workdir_blob)
        verdict = await verify(tests, sealed, open_sandbox=open_sandbox, limits=limits, timeout=timeout)
        reward = verdict.reward
        await kept.run(kept.rescore, record.rollout_id, reward.value, reward.reason, reward.parts, "reverified")
        return verdict


@dataclass(frozen=True, slots=True)
class Parts:
    """What rollouts share in one process."""

    store: Store
    upstream: Upstream
    endpoint: Endpoint


@asynccontextmanager
async def opened(
    model: str | Endpoint,
    keys: Mapping[str, Any],
    store: Store | Path | str | None,
    log: Callable[[str], None] | None = None,
    *,
    resume: str | None = None,
) -> AsyncIterator[Parts]:
    async with opened_store(store) as kept, Upstream() as upstream:
        if resume is not None:
            await kept.run(check_known, kept, resume)
        if isinstance(model, Endpoint):
            if any(keys.values()):
                raise ConfigError("an Endpoint already has a name and a key", hint="leave model_name and keys out")
            yield Parts(kept, upstream, model)
            return
        async with open_model(model, **keys, log=log) as endpoint:
            yield Parts(kept, upstream, endpoint)


@asynccontextmanager
async def opened_store(store: Store | Path | str | None) -> AsyncIterator[Store]:
    """The store to write to, recovered. One that is handed in stays open."""
    if isinstance(store, Store):
        yield store
        return
    kept = Store.open(store)
    try:
        await kept.run(recover, kept)
        yield kept
    finally:
        kept.close()


def _silent(_: str) -> None:
    pass
