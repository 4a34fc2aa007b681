"""TRL: three integrations with its GRPO trainers.

    GRPOTrainer(environment_factory=environment_factory("http://127.0.0.1:8000"), …)      TRL samples, we act
    GRPOTrainer(rollout_func=rollout_func(model, agent="opencode"), reward_funcs=[reward], …)   we do both
    AsyncGRPOTrainer(rollout_worker=RolloutWorker(prompts, model, agent="opencode"), …)   and beside the training

Only the last one imports TRL, when it has its first samples.
"""

from __future__ import annotations

import copyreg
import itertools
import queue
import statistics
import threading
import time
from typing import TYPE_CHECKING, Any, cast

from paddock.errors import ConfigError, RolloutError
from paddock.train.episode import EnvironmentHandle, SyncEpisode
from paddock.train.prompt_rollouts import PromptRollouts
from paddock.train.tool_methods import identifier, make_methods

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from paddock.export.samples import Sample
    from paddock.models.endpoint import Endpoint
    from paddock.train.prompt_rollouts import SampledRollout

# -- environment_factory: TRL samples, the environment answers its tool calls ------------------------------------


class GeneratedClass(type):
    """A class that was made by `environment_factory`; in another process it is made again."""


class TrlEnvironment(metaclass=GeneratedClass):
    """What `GRPOTrainer` keeps in its pool: public methods are tools, `reset` begins an episode."""

    _environment: EnvironmentHandle
    _silent: float | None
    _factory_arguments: tuple[Any, ...]

    def __init__(self) -> None:
        self._episode = SyncEpisode(self._environment)

    def reset(self, **row: Any) -> str | None:
        """Begin an episode for a row of the dataset; what there is to see goes behind the prompt."""
        observation = self._episode.begin(row)
        prompt = row.get("prompt")
        content = prompt[-1].get("content") if isinstance(prompt, list) and prompt else prompt
        return f"\n\n{observation}" if observation and content else observation or None

    def get_reward(self) -> float | None:
        """The sum of the rewards of the steps. None if it is unknown; TRL leaves such an episode out."""
        reward = self._episode.reward
        return self._silent if reward is None and self._episode.failure is None else reward

    def _act(self, name: str, arguments: dict[str, Any]) -> str:
        return self._episode.act(name, arguments)

    def _close(self) -> None:
        """End the session. TRL never asks for it: sessions end with the process."""
        self._episode.close()


def environment_factory(
    target: str | Callable[[], Any], *, name: str | None = None, silent: float | None = None, **options: Any
) -> type[TrlEnvironment]:
    """A class for `GRPOTrainer(environment_factory=…)` with a method for each tool of an environment.

    `target` is a URL, anything that `paddock serve` takes, or an environment class. `silent` is what an episode
    is worth in which no step gave a reward, say because the model called no tool; None leaves it out of the group.
    `name` is how TRL logs the reward, by default the environment's. `options` are those of `Client`.

    Raises ConnectFailed, or TargetError, if there is no environment.
    """
    handle = EnvironmentHandle(target, options)
    methods = make_methods(handle.tools, TrlEnvironment._act, taken=("reset", "get_reward"))
    body = {"_environment": handle, "_silent": silent, "_factory_arguments": (target, name, silent, options)}
    generated: Any = GeneratedClass(name or identifier(handle.name), (TrlEnvironment,), {**methods, **body})
    return cast("type[TrlEnvironment]", generated)


def _make_again(target: Any, name: str | None, silent: float | None, options: dict[str, Any]) -> type[TrlEnvironment]:
    return environment_factory(target, name=name, silent=silent, **options)


def _reduce(generated: GeneratedClass) -> Any:
    return generated.__qualname__ if generated is TrlEnvironment else (_make_again, generated._factory_arguments)  # type: ignore[attr-defined]


copyreg.pickle(GeneratedClass, _reduce)


# -- rollout_func: whole rollouts in place of TRL's sampling -----------------------------------------------------


def rollout_func(model: str | Endpoint, **options: Any) -> Callable[[Sequence[Any], Any], dict[str, list[Any]]]:
    """A function for `GRPOTrainer(rollout_func=…)`: it runs a rollout for each prompt and returns exact tokens.

    `model` must serve the weights that are trained. `options` are those of `PromptRollouts`: `environment`,
    `make_task`, `silent`, `policy`, and the fields of `RunConfig`, such as `agent`.
    """
    rollouts = PromptRollouts(model, **options)

    def run(prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        return columns(rollouts.run(prompts), filler=trainer.processing_class.eos_token_id)

    run.close = rollouts.close  # type: ignore[attr-defined]
    return run


def columns(finished: Sequence[SampledRollout], filler: int) -> dict[str, list[Any]]:
    """What `rollout_func` returns: one sequence for each rollout, because TRL accepts only one.

    If a rollout has several (a subagent, a history that was compacted), the one with the most trained tokens is used,
    and `left_out` counts the others. A rollout without trainable tokens gets one masked token and no reward.
    """
    chosen = [max(each.samples, key=lambda sample: sum(sample.mask), default=None) for each in finished]
    return {
        "prompt_ids": [[filler] if sample is None else sample.prompt_ids for sample in chosen],
        "completion_ids": [[filler] if sample is None else sample.response_ids for sample in chosen],
        "logprobs": [[0.0] if sample is None else sample.logprobs for sample in chosen],
        "env_mask": [[0] if sample is None else sample.mask for sample in chosen],
        "reward": [None if sample is None else sample.reward for sample in chosen],
        "reward_parts": [each.record.reward_parts for each in finished],
        "outcome": [str(each.record.outcome) for each in finished],
        "rollout_id": [each.record.rollout_id for each in finished],
        "left_out": [max(0, len(each.samples) - 1) for each in finished],
    }


def reward(*, reward: Sequence[float | None], **_: Any) -> list[float | None]:
    """A reward function for `GRPOTrainer`: what the rollouts were worth."""
    return list(reward)


# -- RolloutWorker: rollouts beside the training -----------------------------------------------------------------

STOP_SECONDS = 60.0


class RolloutWorker:
    """For `AsyncGRPOTrainer(rollout_worker=…)`: rolls out group after group and puts each sequence into a queue.

    The samples of a group carry the version of the weights that was live when it began. `num_generations` is the
    size of a group, `groups` how many are rolled out at a time. A rollout without a reward is left out of its group.
    """

    def __init__(
        self,
        prompts: Iterable[Any],
        model: str | Endpoint,
        *,
        num_generations: int = 8,
        groups: int = 1,
        queue_size: int = 1024,
        **options: Any,
    ) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(queue_size)
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._prompts = list(prompts)
        if not self._prompts or num_generations < 2 or groups < 1:
            raise ConfigError(
                f"{len(self._prompts)} prompts, {num_generations} generations, {groups} groups",
                hint="give a prompt at least, and two generations or more: a group is compared with itself",
            )
        self._rollouts = PromptRollouts(model, **options)
        self._size = num_generations
        self._groups = groups
        self._version = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="paddock-rollout-worker", daemon=True)
        self._progress = time.monotonic()
        self._error: BaseException | None = None

    def start(self) -> None:
        self._progress = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Cancel the running group, and release everything."""
        self._stopping.set()
        self._rollouts.cancel()
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS)

    def update_model_version(self, model_version: int) -> None:
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raises RolloutError if the worker failed, or produced nothing for `stale_after_s` seconds."""
        if self._error is not None:
            raise RolloutError(f"the rollout worker broke: {self._error}") from self._error
        quiet = time.monotonic() - self._progress
        if not self._thread.is_alive() or quiet > stale_after_s:
            raise RolloutError(f"the rollout worker has rolled out nothing for {quiet:.0f} s")

    def _work(self) -> None:
        try:
            numbered = enumerate(itertools.cycle(self._prompts))
            while not self._stopping.is_set():
                self._roll([next(numbered) for _ in range(self._groups)])
        except BaseException as error:
            # `stop` cancels the running rollouts, which raises here.
            self._error = None if self._stopping.is_set() else error
        finally:
            self._rollouts.close()

    def _roll(self, chosen: list[tuple[int, Any]]) -> None:
        version = self._version
        # A prompt that comes twice in one batch is one group in the store. Here its number separates the two.
        finished = self._rollouts.run([prompt for _, prompt in chosen for _ in range(self._size)])
        for place, (number, prompt) in enumerate(chosen):
            group = finished[place * self._size : (place + 1) * self._size]
            for row in rows(group, prompt, number, version):
                self._put(row)
            self.metrics_queue.put(group_metrics(group))
        self._progress = time.monotonic()

    def _put(self, row: Any) -> None:
        while not self._stopping.is_set():
            row.enqueued_at = time.time()
            try:
                self.rollout_buffer.put(row, timeout=0.5)
                return
            except queue.Full:
                # Waiting for the trainer is no fault of the worker.
                self._progress = time.monotonic()


def rows(group: Sequence[SampledRollout], prompt: Any, number: int, version: int) -> list[Any]:
    """The `RolloutSample`s of a group: one for each sequence, with the advantage of its rollout."""
    import numpy
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    rewards = [each.record.reward for each in group if each.record.reward is not None]
    mean = statistics.fmean(rewards) if rewards else 0.0
    spread = statistics.pstdev(rewards) if rewards else 0.0
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)

    def row(each: SampledRollout, sample: Sample) -> Any:
        prompt_length = len(sample.prompt_ids)
        assert sample.reward is not None
        return RolloutSample(
            prompt=messages,
            completion=each.messages,
            input_ids=numpy.array(sample.prompt_ids + sample.response_ids, dtype=numpy.int64),
            completion_mask=numpy.array([0] * prompt_length + sample.mask, dtype=numpy.int64),
            old_log_probs=numpy.array([0.0] * prompt_length + sample.logprobs, dtype=numpy.float32),
            advantage=(sample.reward - mean) / (spread + 1e-4),
            model_version=version,
            group_id=number,
            metrics={"reward": sample.reward},
        )

    return [row(each, sample) for each in group for sample in each.samples if sample.reward is not None]


def group_metrics(group: Sequence[SampledRollout]) -> dict[str, tuple[float, float]]:
    """Rates for the trainer's log."""
    rewards = [each.record.reward for each in group if each.record.reward is not None]
    return {
        "rollout/reward_mean": (sum(rewards), float(len(rewards))),
        "rollout/unscored": (float(len(group) - len(rewards)), float(len(group))),
        "rollout/sequences": (float(sum(len(each.samples) for each in group)), float(len(group))),
    }
