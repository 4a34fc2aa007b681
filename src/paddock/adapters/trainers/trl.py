"""TRL: three doors into its GRPO trainers.

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

from paddock.adapters.trainers.episode import Episode, Place
from paddock.adapters.trainers.rolling import Roller
from paddock.adapters.trainers.tool_methods import identifier, make_methods
from paddock.errors import ConfigError, RolloutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from paddock.adapters.trainers.rolling import Rolled
    from paddock.rollouts.export.samples import Sample
    from paddock.rollouts.models.endpoint import Endpoint

# -- environment_factory: TRL samples, the environment answers its tool calls ------------------------------------


class MadeClass(type):
    """A class that was made by `environment_factory`; in another process it is made again."""


class TrlEnvironment(metaclass=MadeClass):
    """What `GRPOTrainer` keeps in its pool: public methods are tools, `reset` begins an episode."""

    _place: Place
    _silent: float | None
    _recipe: tuple[Any, ...]

    def __init__(self) -> None:
        self._episode = Episode(self._place)

    def reset(self, **row: Any) -> str | None:
        """Begin an episode for a row of the dataset; what there is to see goes behind the prompt."""
        shown = self._episode.begin(row)
        prompt = row.get("prompt")
        asked = prompt[-1].get("content") if isinstance(prompt, list) and prompt else prompt
        return f"\n\n{shown}" if shown and asked else shown or None

    def get_reward(self) -> float | None:
        """The sum of what the steps were worth. None, which TRL leaves out, if nobody knows."""
        reward = self._episode.reward
        return self._silent if reward is None and self._episode.broken is None else reward

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
    place = Place(target, options)
    methods = make_methods(place.tools, TrlEnvironment._act, taken=("reset", "get_reward"))
    body = {"_place": place, "_silent": silent, "_recipe": (target, name, silent, options)}
    made: Any = MadeClass(name or identifier(place.name), (TrlEnvironment,), {**methods, **body})
    return cast("type[TrlEnvironment]", made)


def _make_again(target: Any, name: str | None, silent: float | None, options: dict[str, Any]) -> type[TrlEnvironment]:
    return environment_factory(target, name=name, silent=silent, **options)


def _reduce(made: MadeClass) -> Any:
    return made.__qualname__ if made is TrlEnvironment else (_make_again, made._recipe)  # type: ignore[attr-defined]


copyreg.pickle(MadeClass, _reduce)


# -- rollout_func: whole rollouts in place of TRL's sampling -----------------------------------------------------


def rollout_func(model: str | Endpoint, **options: Any) -> Callable[[Sequence[Any], Any], dict[str, list[Any]]]:
    """A function for `GRPOTrainer(rollout_func=…)`: it runs a rollout for each prompt and returns exact tokens.

    `model` must serve the weights that are trained. `options` are those of `Roller`: `environment` or `agent`,
    `make_task`, `store`, `parallel`, `policy`, `budget`, and the fields of `Plan`.
    """
    roller = Roller(model, **options)

    def run(prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        return columns(roller.run(prompts), filler=trainer.processing_class.eos_token_id)

    run.close = roller.close  # type: ignore[attr-defined]
    return run


def columns(rolled: Sequence[Rolled], filler: int) -> dict[str, list[Any]]:
    """What `rollout_func` returns: one sequence for each rollout, as TRL takes no more.

    Of a rollout with several (a subagent, a history that was compacted) it is the one with most trained tokens;
    `left_out` counts the others. A rollout that nothing can be trained on has a masked token, and no reward.
    """
    chosen = [max(each.samples, key=lambda sample: sum(sample.mask), default=None) for each in rolled]
    return {
        "prompt_ids": [[filler] if sample is None else sample.prompt_ids for sample in chosen],
        "completion_ids": [[filler] if sample is None else sample.response_ids for sample in chosen],
        "logprobs": [[0.0] if sample is None else sample.logprobs for sample in chosen],
        "env_mask": [[0] if sample is None else sample.mask for sample in chosen],
        "reward": [None if sample is None else sample.reward for sample in chosen],
        "reward_parts": [each.record.reward_parts for each in rolled],
        "outcome": [str(each.record.outcome) for each in rolled],
        "rollout_id": [each.record.rollout_id for each in rolled],
        "left_out": [max(0, len(each.samples) - 1) for each in rolled],
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
        self._roller = Roller(model, **options)
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
        """Cut off the group that is under way, and give everything back."""
        self._stopping.set()
        self._roller.cancel()
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS)

    def update_model_version(self, model_version: int) -> None:
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raises RolloutError if it broke, or has rolled out nothing for so many seconds."""
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
            # Whoever stops it cuts off what runs.
            self._error = None if self._stopping.is_set() else error
        finally:
            self._roller.close()

    def _roll(self, chosen: list[tuple[int, Any]]) -> None:
        version = self._version
        # A prompt that comes twice in one go is one group in the store; here it is told apart by its number.
        rolled = self._roller.run([prompt for _, prompt in chosen for _ in range(self._size)])
        for place, (number, prompt) in enumerate(chosen):
            group = rolled[place * self._size : (place + 1) * self._size]
            for row in rows(group, prompt, number, version):
                self._put(row)
            self.metrics_queue.put(measured(group))
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


def rows(group: Sequence[Rolled], prompt: Any, number: int, version: int) -> list[Any]:
    """The `RolloutSample`s of a group: one for each sequence, with the advantage of its rollout."""
    import numpy
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    known = [each.record.reward for each in group if each.record.reward is not None]
    mean = statistics.fmean(known) if known else 0.0
    spread = statistics.pstdev(known) if known else 0.0
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)

    def row(each: Rolled, sample: Sample) -> Any:
        given = len(sample.prompt_ids)
        assert sample.reward is not None
        return RolloutSample(
            prompt=asked,
            completion=each.messages,
            input_ids=numpy.array(sample.prompt_ids + sample.response_ids, dtype=numpy.int64),
            completion_mask=numpy.array([0] * given + sample.mask, dtype=numpy.int64),
            old_log_probs=numpy.array([0.0] * given + sample.logprobs, dtype=numpy.float32),
            advantage=(sample.reward - mean) / (spread + 1e-4),
            model_version=version,
            group_id=number,
            metrics={"reward": sample.reward},
        )

    return [row(each, sample) for each in group for sample in each.samples if sample.reward is not None]


def measured(group: Sequence[Rolled]) -> dict[str, tuple[float, float]]:
    """Rates for the trainer's log."""
    known = [each.record.reward for each in group if each.record.reward is not None]
    return {
        "rollout/reward_mean": (sum(known), float(len(known))),
        "rollout/unscored": (float(len(group) - len(known)), float(len(group))),
        "rollout/sequences": (float(sum(len(each.samples) for each in group)), float(len(group))),
    }
