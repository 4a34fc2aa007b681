"""Rollouts for a trainer that brings prompts: an agent in a sandbox, or a model that acts in an environment.

Equal prompts are members of one group. Works on a thread of its own, so that a trainer needs no event loop, and
keeps the store, the model and the connections open from one call to the next. For a trainer that lets Paddock choose
the tasks, see `stream`.
"""

from __future__ import annotations

import asyncio
import atexit
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from paddock.capture.gate import CallGate
from paddock.errors import ConfigError
from paddock.loop_thread import LoopThread
from paddock.models.weight_version import Weights
from paddock.rollouts.batch import new_batch_id
from paddock.tasks.task import Task
from paddock.train.sources import Source, open_sources

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from paddock.models.endpoint import Endpoint
    from paddock.rollouts.config import RunConfig
    from paddock.train.sampled import SampledRollout
    from paddock.train.sources import OpenSource

NOT_FOR_PROMPTS = ("n", "env", "seed", "engine")
"""Fields of `RunConfig` that the prompts decide, or that need a whole batch."""


class PromptRollouts:
    """Rolls out prompts. `options` are those of `Source.create`: `environment`, `silent`, `policy`, and the fields of
    `RunConfig`. In place of the model there may be several sources: the task of a prompt names its source in
    `metadata["source"]`, or `run` gets the names."""

    def __init__(
        self,
        model: str | Endpoint | RunConfig | Sequence[Source],
        *,
        make_task: Callable[[Any], Task] | None = None,
        weight_version: Any = None,
        **options: Any,
    ) -> None:
        if unused := next((name for name in NOT_FOR_PROMPTS if name in options), None):
            raise ConfigError(f"{unused} has no effect: each prompt is one rollout", hint="leave it out")
        self._sources = make_sources(model, **options)
        self.weights = Weights.of(weight_version)
        """Calls that begin record its version."""
        self.gate = CallGate()
        """Pauses all calls. Use it on the thread of the rollouts."""
        self._make_task = make_task or make_prompt_task
        self._thread = LoopThread("paddock-rollouts")
        self._stack = AsyncExitStack()
        self._opened: dict[str, OpenSource] = {}
        self._opening = asyncio.Lock()
        self._running: set[Future[Any]] = set()

    @property
    def source_names(self) -> list[str]:
        """The names of the sources, in their order."""
        return [source.name for source in self._sources]

    def run(self, prompts: Sequence[Any], names: Sequence[str] | None = None) -> list[SampledRollout]:
        """One rollout for each prompt, in their order. `names` are the sources of the prompts."""
        future = self.submit(prompts, names)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def run_async(self, prompts: Sequence[Any], names: Sequence[str] | None = None) -> list[SampledRollout]:
        """`run` for a trainer with an event loop. Several calls run beside each other."""
        return await asyncio.wrap_future(self.submit(prompts, names))

    def submit(self, prompts: Sequence[Any], names: Sequence[str] | None = None) -> Future[list[SampledRollout]]:
        """Start one rollout for each prompt. The future has them in the order of the prompts."""
        future = self._thread.submit(self._run, prompts, names)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def cancel(self) -> None:
        """Cut off the rollouts that are under way, from any thread: `run` raises CancelledError."""
        for future in list(self._running):
            future.cancel()

    def close(self) -> None:
        """Give everything back. Closing again does nothing."""
        atexit.unregister(self.close)
        if self._opened:
            self._opened = {}
            self._thread.call(self._stack.aclose)
        self._thread.close()

    async def _run(self, prompts: Sequence[Any], names: Sequence[str] | None) -> list[SampledRollout]:
        opened = await self._open()
        tasks = [self._make_task(prompt) for prompt in prompts]
        groups: dict[tuple[str, Task], int] = {}
        chosen = [self._source_of(task) for task in tasks] if names is None else names
        keys = list(zip(chosen, tasks, strict=True))
        for key in keys:
            groups[key] = groups.get(key, 0) + 1
        batch_id = new_batch_id()
        running = [
            asyncio.ensure_future(self._source(opened, name).run([task], n=n, batch_id=f"{batch_id}.{number}"))
            for number, ((name, task), n) in enumerate(groups.items())
        ]
        try:
            results = await asyncio.gather(*running)
        finally:
            for each in running:
                each.cancel()
        unread = {key: iter(result) for key, result in zip(groups, results, strict=True)}
        return [next(unread[key]) for key in keys]

    async def _open(self) -> dict[str, OpenSource]:
        async with self._opening:
            if not self._opened:
                opening = open_sources(self._sources, self.weights, self.gate)
                self._opened = await self._stack.enter_async_context(opening)
                # A trainer does not say when it is done.
                atexit.register(self.close)
        return self._opened

    def _source_of(self, task: Task) -> str:
        return str(task.metadata.get("source", self._sources[0].name))

    def _source(self, opened: dict[str, OpenSource], name: str) -> OpenSource:
        if name not in opened:
            raise ConfigError(f"there is no source {name!r}", hint=f"the sources are {', '.join(opened)}")
        return opened[name]


def make_sources(model: str | Endpoint | RunConfig | Sequence[Source], **options: Any) -> list[Source]:
    """The sources that a trainer was given, or the one that the options describe. Raises ConfigError."""
    if isinstance(model, Source):
        model = [model]
    if isinstance(model, str) or not hasattr(model, "__iter__"):
        return [Source.create(model, **options)]
    if options:
        raise ConfigError(f"{', '.join(options)} is given beside sources", hint="give it to each source")
    return list(model)


def make_prompt_task(prompt: Any) -> Task:
    """A prompt as a task: a text, or the texts of the user in a conversation."""
    if isinstance(prompt, str):
        return Task(prompt)
    texts = [message_text(message.get("content")) for message in prompt if message.get("role") == "user"]
    return Task("\n\n".join(texts))


def message_text(content: Any) -> str:
    """The text of a message's content, one line for each text part."""
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if part.get("type") == "text")
    return str(content or "")
