"""TRL's `AsyncGRPOTrainer(rollout_worker=…)` on a stream: groups come in the order in which they finish.

The trainer pulls: a group counts as taken when the trainer asks for a sample of it, so the staleness limit of the
stream holds for what is trained on, and nothing gets old in a queue.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paddock.errors import ConfigError, RolloutError
from paddock.loop_thread import LoopThread
from paddock.train.prompt_rollouts import make_prompt_task, make_sources
from paddock.train.sampled import version_numbers
from paddock.train.stream import Stream
from paddock.train.stream_config import StreamConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from paddock.models.endpoint import Endpoint
    from paddock.rollouts.config import RunConfig
    from paddock.tasks.task import Task
    from paddock.train.sampled import ScoredGroup

TRL_STALENESS = 4
"""The default of TRL's `max_staleness`."""
NOWAIT_SECONDS = 1.0
"""For writing down that a group was taken, which `get_nowait` does too."""


class RolloutWorker:
    """`RolloutWorker(prompts, model, agent=…)`, or `RolloutWorker(sources)` for several agents and environments.

    `config` is that of the stream: `batch_size` groups make an update of the weights, and `max_staleness` is TRL's.
    `options` are those of `Source.create`. The worker has no queue of its own and starts with `start`.
    """

    def __init__(
        self,
        prompts: Iterable[Any],
        model: str | Endpoint | RunConfig | None = None,
        *,
        num_generations: int = 8,
        config: StreamConfig | None = None,
        make_task: Callable[[Any], Task] | None = None,
        **options: Any,
    ) -> None:
        self.config = config or StreamConfig(max_staleness=TRL_STALENESS)
        if self.config.max_staleness == 0:
            # accelerate reads one batch ahead, so a batch is trained on after the next update.
            raise ConfigError("max_staleness is 0", hint="TRL reads one batch ahead: give 1 or more")
        if self.config.deliver != "group":
            raise ConfigError(f"deliver is {self.config.deliver!r}", hint="TRL trains on advantages: deliver groups")
        if model is None:
            sources = make_sources(list(prompts))
        else:
            tasks = unique_tasks([(make_task or make_prompt_task)(prompt) for prompt in prompts])
            sources = make_sources(model, tasks=tasks, n=num_generations, **options)
        for source in sources:
            if source.config.n < 2 or not len(source.tasks):
                raise ConfigError(
                    f"{len(source.tasks)} prompts, {source.config.n} generations",
                    hint="give a prompt at least, and two generations or more: a group is compared with itself",
                )
        self.stream = Stream(sources, self.config)
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._thread = LoopThread("paddock-stream")
        self.rollout_buffer = SampleQueue(self.stream, self._thread, self.metrics_queue)
        self._is_open = False

    def start(self) -> None:
        """Raises ConfigError or ModelError if the sources cannot be opened."""
        self._thread.call(self.stream.__aenter__)
        self._is_open = True

    def stop(self) -> None:
        """Cancel what runs, and release everything."""
        if self._is_open:
            self._is_open = False
            self._thread.call(self.stream.__aexit__, None, None, None)
        self._thread.close()

    def update_model_version(self, model_version: int) -> None:
        """Calls that begin now have this version. What the trainer has got so far is acknowledged."""
        if self._is_open:
            self._thread.call(self.stream.set_version, model_version)
            self._thread.call(self.stream.acknowledge, *self.rollout_buffer.take_finished())
        else:
            self.stream.start_version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raises RolloutError if the stream failed, or no rollout has ended for `stale_after_s` seconds."""
        if not self._is_open:
            raise RolloutError("the rollout worker is stopped")
        if (failure := self.stream.failure) is not None:
            raise RolloutError(f"the rollout worker broke: {failure}") from failure
        if (quiet := self.stream.idle_seconds) > stale_after_s:
            raise RolloutError(f"the rollout worker has rolled out nothing for {quiet:.0f} s")


class SampleQueue:
    """What TRL reads: `get` takes the next group from the stream when the samples of the last one are used up."""

    def __init__(self, stream: Stream, thread: LoopThread, metrics: queue.Queue[dict[str, Any]]) -> None:
        self._stream = stream
        self._thread = thread
        self._metrics = metrics
        self._rows: deque[Any] = deque()
        self._groups: list[ScoredGroup] = []
        self._lock = threading.Lock()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The next sample. Raises queue.Empty if there is none in time."""
        with self._lock:
            while not self._rows:
                if not block and not self._stream.ready_samples:
                    raise queue.Empty
                group = self._thread.call(self._next, timeout if block else NOWAIT_SECONDS)
                self._rows.extend(rows(group))
                self._groups.append(group)
                self._metrics.put(group_metrics(group))
            row = self._rows.popleft()
            row.enqueued_at = time.time()
            return row

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def qsize(self) -> int:
        return len(self._rows) + self._stream.ready_samples

    def empty(self) -> bool:
        return self.qsize() == 0

    def take_finished(self) -> list[ScoredGroup]:
        """The groups of which the trainer has all samples."""
        with self._lock:
            held = self._groups[-1:] if self._rows else []
            finished, self._groups = self._groups[: len(self._groups) - len(held)], held
            return finished

    async def _next(self, timeout: float | None) -> ScoredGroup:
        try:
            async with asyncio.timeout(timeout):
                return await anext(self._stream)
        except (TimeoutError, StopAsyncIteration):
            raise queue.Empty from None


def unique_tasks(tasks: Sequence[Task]) -> list[Task]:
    """A prompt that comes twice is two groups, so its tasks need ids of their own."""
    counts: dict[str, int] = {}
    unique = []
    for task in tasks:
        number = counts[task.id] = counts.get(task.id, 0) + 1
        unique.append(task if number == 1 else replace(task, id=f"{task.id}-{number}"))
    return unique


def rows(group: ScoredGroup) -> list[Any]:
    """The `RolloutSample`s of a group: one for each sequence, with the advantage of its rollout."""
    import numpy
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    made = []
    for rollout in group.rollouts:
        for sample in rollout.samples:
            prompt_length = len(sample.prompt_ids)
            made.append(
                RolloutSample(
                    prompt=[{"role": "user", "content": rollout.record.instruction}],
                    completion=rollout.messages,
                    input_ids=numpy.array(sample.prompt_ids + sample.response_ids, dtype=numpy.int64),
                    completion_mask=numpy.array([0] * prompt_length + sample.mask, dtype=numpy.int64),
                    old_log_probs=numpy.array([0.0] * prompt_length + sample.logprobs, dtype=numpy.float32),
                    advantage=group.advantage(sample),
                    model_version=min(version_numbers(sample), default=group.version),
                    group_id=group.number,
                    metrics={"reward": sample.reward},
                )
            )
    return made


def group_metrics(group: ScoredGroup) -> dict[str, Any]:
    """Rates and gauges for the trainer's log."""
    size = float(len(group.rollouts))
    return {
        "rollout/reward_mean": (sum(group.rewards), float(len(group.rewards))),
        "rollout/staleness": float(group.staleness),
        "rollout/sequences": (float(len(group.samples)), size),
    }
