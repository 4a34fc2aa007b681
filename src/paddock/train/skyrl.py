"""SkyRL: two integrations.

    register("paddock", entry_point=text_env("http://127.0.0.1:8000"))        SkyRL samples, the environment acts
    generator(model, environment="http://…")  or  generator(model, agent="opencode")        we do both

The first is a `BaseTextEnv` of skyrl-gym, the second a `GeneratorInterface`. SkyRL is imported when one is made.
"""

from __future__ import annotations

import re
from statistics import fmean
from typing import TYPE_CHECKING, Any

import orjson

from paddock.errors import RolloutError, ToolFailure
from paddock.export.skyrl import generator_output
from paddock.train.episode import EnvironmentHandle, SyncEpisode
from paddock.train.prompt_rollouts import PromptRollouts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paddock.export.samples import Sample
    from paddock.models.endpoint import Endpoint
    from paddock.train.sampled import SampledRollout
    from paddock.train.sources import Source
    from paddock.types import ToolInfo

TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
"""How models of the Qwen and Hermes families call a tool in their text."""
CALL_FORMAT = 'Call one as <tool_call>{"name": …, "arguments": {…}}</tool_call>.'
MAX_TURNS = 32


# -- text_env: SkyRL samples, the environment answers ---------------------------------------------------------


def text_env(target: str | Callable[[], Any], *, silent: float | None = None, max_turns: int = MAX_TURNS) -> type:
    """A class for skyrl-gym's `register`. The model calls the environment's tools in its text.

    `silent` is what an episode is worth in which no step gave a reward. Without it such an episode raises
    RolloutError at its end: SkyRL has no way to say that nobody knows, and it is not 0.
    """
    from skyrl_gym.envs.base_text_env import BaseTextEnv

    environment = EnvironmentHandle(target)
    names = [each.name for each in environment.tools]

    class PaddockTextEnv(BaseTextEnv):  # type: ignore[misc]
        def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
            super().__init__()
            self.max_turns = int((extras or {}).get("max_turns") or max_turns)
            self._row = dict((extras or {}).get("reset") or {})
            self._episode = SyncEpisode(environment)
            self._reported = 0.0

        def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
            observation = self._episode.begin({"prompt": prompt, **self._row})
            offered = {"role": "system", "content": f"Tools:\n{describe_tools(environment.tools)}\n{CALL_FORMAT}"}
            return [offered, *prompt, *([{"role": "user", "content": observation}] if observation else [])], {}

        def step(self, action: str) -> dict[str, Any]:
            self.turns += 1
            answers = [{"role": "user", "content": answer} for answer in self._answers(action)]
            done = self._episode.is_over or not TOOL_CALL.search(action) or self.turns >= self.max_turns
            total = self._total() if done else self._episode.reward or 0.0
            reward, self._reported = total - self._reported, total
            metadata = {"turns": self.turns, "is_over": self._episode.is_over}
            return {"observations": [] if done else answers, "reward": reward, "done": done, "metadata": metadata}

        def close(self) -> None:
            self._episode.close()

        def get_metrics(self) -> dict[str, Any]:
            return {"turns": self.turns, "reward": self._reported}

        def _answers(self, action: str) -> list[str]:
            return [self._answer(written) for written in TOOL_CALL.findall(action)]

        def _answer(self, written: str) -> str:
            try:
                call = orjson.loads(written)
                if call["name"] not in names:
                    return f"Error: there is no tool {call['name']!r}. Tools: {', '.join(names)}"
                return self._episode.act(str(call["name"]), call.get("arguments") or {})
            except (orjson.JSONDecodeError, KeyError, TypeError):
                return "Error: a tool call is a JSON object with name and arguments"
            except ToolFailure as error:
                return f"Error: {error.message}"

        def _total(self) -> float:
            total = silent if self._episode.reward is None else self._episode.reward
            if total is None:
                raise RolloutError("no step of the episode gave a reward", hint="say what that is worth: silent=0.0")
            return total

    return PaddockTextEnv


def describe_tools(tools: Sequence[ToolInfo]) -> str:
    """One line of JSON for each tool."""
    schemas = (
        {"name": each.name, "description": each.description, "parameters": each.input_schema} for each in tools
    )
    return "\n".join(orjson.dumps(each).decode() for each in schemas)


# -- generator: rollouts of ours ------------------------------------------------------------------------------


def generator(model: str | Endpoint | Sequence[Source], **options: Any) -> Any:
    """A `GeneratorInterface` that runs a rollout for each prompt and returns exact tokens, step-wise: a row for each
    sample, the rows of a rollout together (set `generator.step_wise_trajectories`).

    It is asynchronous: calls of `generate` run beside each other, and each returns when its own rollouts have ended,
    as SkyRL's fully asynchronous trainer needs it. `model` must serve the weights that are trained; `options` are
    those of `PromptRollouts`. With several sources, `env_class` of a row names its source. A rollout that nobody
    could score gets a masked row worth the mean of its group, so that it moves no baseline; `rollout_metrics` counts
    them.
    """
    from skyrl.train.generators.base import GeneratorInterface, TrajectoryID

    rollouts = PromptRollouts(model, **options)
    by_class = len(rollouts.source_names) > 1

    class PaddockGenerator(GeneratorInterface):  # type: ignore[misc]
        async def generate(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
            if (batch := input_batch.get("batch_metadata")) is not None:
                rollouts.weights.advance(batch.global_step)
            prompts = input_batch["prompts"]
            trajectories = input_batch.get("trajectory_ids") or [
                TrajectoryID(str(at), 0) for at in range(len(prompts))
            ]
            names = input_batch["env_classes"] if by_class else None
            finished = await rollouts.run_async(prompts, names)
            output = join_samples(finished, [(each.instance_id, each.repetition_id) for each in trajectories])
            output["trajectory_ids"] = [TrajectoryID(**each) for each in output["trajectory_ids"]]
            return output

        def close(self) -> None:
            rollouts.close()

    return PaddockGenerator()


def join_samples(finished: Sequence[SampledRollout], trajectories: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """All samples in the order of their rollouts, with a masked row for each rollout that has none."""
    rows: list[Sample] = []
    owners: list[tuple[str, int]] = []
    lost = 0
    for each, owner in zip(finished, trajectories, strict=True):
        samples = each.samples
        if not samples:
            siblings = [other for other, (name, _) in zip(finished, trajectories, strict=True) if name == owner[0]]
            samples, lost = [stand_in(each, siblings)], lost + 1
        rows += samples
        owners += [owner] * len(samples)
    output = generator_output(rows, owners)
    output["trajectory_generation_times"] = [each.record.wall_s or 0.0 for each in finished]
    output["rollout_metrics"] = {
        "paddock/rollouts": len(finished),
        "paddock/unscored": lost,
        "paddock/rows": len(rows),
        **version_metrics(finished),
    }
    return output


def version_metrics(finished: Sequence[SampledRollout]) -> dict[str, int]:
    """The oldest and the newest weight version of all calls; empty if no call has a number."""
    pairs = [pair for each in finished if (pair := each.versions) is not None]
    if not pairs:
        return {}
    oldest, newest = min(low for low, _ in pairs), max(high for _, high in pairs)
    return {"paddock/oldest_version": oldest, "paddock/newest_version": newest}


def stand_in(lost: SampledRollout, siblings: Sequence[SampledRollout]) -> Sample:
    """A row that teaches nothing: a sibling's, masked, worth the mean of the group."""
    from dataclasses import replace

    scored = [each.samples[-1] for each in siblings if each.samples]
    if not scored:
        raise RolloutError(
            f"no rollout of the group of {lost.record.task_id} can be trained on: {lost.record.error or 'no reward'}",
            hint=f"paddock trace show {lost.record.rollout_id}",
        )
    sample = min(scored, key=lambda each: len(each.response_ids))
    zeros = [0] * len(sample.response_ids)
    mean_reward = fmean(each.reward for each in scored if each.reward is not None)
    return replace(sample, reward=mean_reward, is_last=True, mask=zeros, logprobs=[0.0] * len(zeros))
