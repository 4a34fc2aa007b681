"""The Python API: run one rollout, run a batch, score a finished rollout again. Also: placement backends by name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import AsyncExitStack
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from paddock.errors import ConfigError, StoreError, TaskError
from paddock.limits import SandboxLimits
from paddock.rollouts.batch import RETRIES, Batch, BatchResult
from paddock.rollouts.config import BACKENDS, LOCAL, RunConfig, make_config
from paddock.rollouts.context import open_run, open_store
from paddock.rollouts.sandboxes import owned_sandbox
from paddock.rollouts.verifier import VerifierResult, verify
from paddock.sandbox.network.policy import NO_NETWORK
from paddock.tasks.requirements import check_can_run, describe_warnings
from paddock.tasks.task import Task
from paddock.tasks.taskset import load_tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from paddock.rollouts.context import RunContext
    from paddock.rollouts.rollout import Rollout
    from paddock.rollouts.scene import RemoteRun
    from paddock.sandbox.base import Sandbox, SandboxSpec
    from paddock.store import Store
    from paddock.store.record import RolloutRecord

SANDBOX_SECONDS = 30.0


async def run_rollout(
    task: Task,
    config: RunConfig | None = None,
    *,
    on_change: Callable[[Rollout], None] | None = None,
    log: Callable[[str], None] | None = None,
    **fields: Any,
) -> RolloutRecord:
    """Run one rollout and return its record: `run_rollout(task, RunConfig(model=…))`.

    `fields` are fields of `RunConfig`, in place of the config or of those it has. Takes and raises what `run_batch`
    does; `n` is 1.
    """
    config = make_config(config, {**fields, "n": 1})
    return (await run_batch([task], config, on_change=on_change, log=log)).records[0]


async def run_batch(
    tasks: Iterable[Task] | str | Path,
    config: RunConfig | None = None,
    *,
    on_change: Callable[[Rollout], None] | None = None,
    on_settled: Callable[[RolloutRecord], None] | None = None,
    log: Callable[[str], None] | None = None,
    **fields: Any,
) -> BatchResult:
    """Run `config.n` rollouts of each task, `config.parallel` at a time, each to one recorded outcome.

    `run_batch(tasks, RunConfig(model=…, n=4))`, or with the fields of `RunConfig` as keywords. `on_change` is called
    with a rollout whenever it changes, `on_settled` with the record that a member of a group ends up with, `log` with
    a line about what takes long, or what a task says without effect.

    `tasks` may also be what the command line takes: `run_batch("git+https://…#tasks", …)`.

    Raises TaskError for such a set that cannot be read, ConfigError if the config cannot be used, or if the batch to
    resume does not exist or was run with another agent, model, sampling or version of a task, and ModelError if the
    model cannot be reached.
    """
    config = make_config(config, fields)
    placement = find_placement(config.engine)
    if isinstance(tasks, str | Path):
        task_list = await asyncio.to_thread(load_tasks, tasks)
    elif isinstance(tasks, Iterable):
        task_list = list(tasks)
    else:
        raise ConfigError(f"tasks is {tasks!r}", hint="give a list of tasks, or the name or folder of a task")
    for task in task_list:
        if not isinstance(task, Task):
            raise ConfigError(f"{task!r} is not a Task", hint="load_tasks(NAME) loads tasks by name, folder or file")
    async with AsyncExitStack() as stack:
        context = await stack.enter_async_context(open_run(config, log=log))
        for warning in describe_warnings(task_list):
            (log or _ignore)(warning)
        make_remote = None
        if placement is not None:
            make_remote = await stack.enter_async_context(placement.open(context, log or _ignore))
        # A node may fail, so even a single rollout gets one retry on another node.
        single_retries = 0 if placement is None else 1
        batch = Batch(
            task_list,
            context,
            default_retries=RETRIES if len(task_list) * config.n > 1 else single_retries,
            on_change=on_change,
            on_settled=on_settled,
            make_remote=make_remote,
        )
        return await batch.run()


async def reverify(
    rollout_id: str,
    tests: Mapping[str, bytes],
    *,
    store: Store | Path | str | None = None,
    task: Task | None = None,
    sandbox: str = "bwrap",
    consent: bool = False,
    timeout: float = 300.0,
) -> VerifierResult:
    """Score the sealed work folder of a finished rollout with other tests. The first score is kept too.

    `task` gives the limits and the network of the tests. Without one they have no network.
    Raises StoreError if there is no such rollout or its work was not kept, TaskError if it was run on an image.
    """
    if task is not None:
        check_can_run(task, sandbox)
    async with open_store(store) as opened:
        record = opened.get(rollout_id)
        if record is None:
            raise StoreError(f"there is no rollout {rollout_id!r}", hint="paddock trace list shows them")
        if record.image:
            raise TaskError(
                f"rollout {record.rollout_id} was run on an image, and only its work folder was kept",
                hint="tests of an image would judge another root: run the task again",
            )
        if record.workdir_blob is None:
            raise StoreError(
                f"rollout {record.rollout_id} has no sealed work folder",
                hint=f"it ended with outcome {record.outcome} before its work could be kept",
            )

        def open_sandbox(spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
            owner: dict[str, Any] = {"rollout_id": record.rollout_id, "consent": consent}
            return owned_sandbox(opened, sandbox, spec, timeout=SANDBOX_SECONDS, **owner)

        limits = task.sandbox if task is not None else SandboxLimits()
        work = opened.get_blob(record.workdir_blob)
        network = NO_NETWORK if task is None else task.network.policy("verifier", on_image=task.image is not None)
        verdict = await verify(
            tests, work, open_sandbox=open_sandbox, limits=limits, timeout=timeout, network=network
        )
        reward = verdict.reward
        await opened.run(opened.rescore, record.rollout_id, reward.value, reward.reason, reward.parts, "reverified")
        return verdict


# -- where rollouts run ---------------------------------------------------------------------------------


class PlacementBackend(Protocol):
    """Runs the rollouts of a batch on other machines."""

    def open(
        self, context: RunContext, log: Callable[[str], None]
    ) -> AbstractAsyncContextManager[Callable[[], RemoteRun]]:
        """Connect to the machines. The value of the context makes one `RemoteRun` for each rollout of the batch."""


def find_placement(engine: str | PlacementBackend) -> PlacementBackend | None:
    """The placement backend of that name, imported here. None for `local`: rollouts run in this process."""
    if not isinstance(engine, str):
        return engine
    if engine == LOCAL:
        return None
    module, _, name = BACKENDS[engine].partition(":")
    return cast("PlacementBackend", getattr(import_module(module), name)())


def _ignore(_: str) -> None:
    pass
