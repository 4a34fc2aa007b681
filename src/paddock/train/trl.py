"""TRL: three integrations with its GRPO trainers.

    GRPOTrainer(environment_factory=environment_factory("http://127.0.0.1:8000"), …)      TRL samples, we act
    GRPOTrainer(rollout_func=rollout_func(model, agent="opencode"), reward_funcs=[reward], …)   we do both
    AsyncGRPOTrainer(rollout_worker=RolloutWorker(prompts, model, agent="opencode"), …)   and beside the training

Only the last one imports TRL, when it has its first samples.
"""

from __future__ import annotations

import copyreg
from typing import TYPE_CHECKING, Any, cast

from paddock.train.episode import EnvironmentHandle, SyncEpisode
from paddock.train.prompt_rollouts import PromptRollouts
from paddock.train.tool_methods import identifier, make_methods
from paddock.train.trl_worker import RolloutWorker as RolloutWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paddock.models.endpoint import Endpoint
    from paddock.train.sampled import SampledRollout

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
