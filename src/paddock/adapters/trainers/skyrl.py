"""SkyRL: two doors.

    register("paddock", entry_point=text_env("http://127.0.0.1:8000"))        SkyRL samples, the environment acts
    generator(model, environment="http://…")  or  generator(model, agent="opencode")        we do both

The first is a `BaseTextEnv` of skyrl-gym, the second a `GeneratorInterface`. SkyRL is imported when one is made.
"""

from __future__ import annotations

import asyncio
import re
from statistics import fmean
from typing import TYPE_CHECKING, Any

import orjson

from paddock.adapters.trainers.episode import Episode, Place
from paddock.adapters.trainers.rolling import Roller
from paddock.errors import RolloutError, ToolFailure
from paddock.rollouts.export.skyrl import generator_output
from paddock.rollouts.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paddock.adapters.trainers.rolling import Rolled
    from paddock.rollouts.export.samples import Sample
    from paddock.rollouts.models.endpoint import Endpoint
    from paddock.types import ToolInfo

TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
"""How models of the Qwen and Hermes families call a tool in their text."""
HOW = 'Call one as <tool_call>{"name": …, "arguments": {…}}</tool_call>.'
MOST_TURNS = 32


# -- text_env: SkyRL samples, the environment answers ---------------------------------------------------------


def text_env(target: str | Callable[[], Any], *, silent: float | None = None, max_turns: int = MOST_TURNS) -> type:
    """A class for skyrl-gym's `register`. The model calls the environment's tools in its text.

    `silent` is what an episode is worth in which no step gave a reward. Without it such an episode raises
    RolloutError at its end: SkyRL has no way to say that nobody knows, and it is not 0.
    """
    from skyrl_gym.envs.base_text_env import BaseTextEnv

    place = Place(target)

    class PaddockTextEnv(BaseTextEnv):  # type: ignore[misc]
        def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
            super().__init__()
            self.max_turns = int((extras or {}).get("max_turns") or max_turns)
            self._row = dict((extras or {}).get("reset") or {})
            self._episode = Episode(place)
            self._told = 0.0

        def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
            shown = self._episode.begin({"prompt": prompt, **self._row})
            offered = {"role": "system", "content": f"Tools:\n{described(place.tools)}\n{HOW}"}
            return [offered, *prompt, *([{"role": "user", "content": shown}] if shown else [])], {}

        def step(self, action: str) -> dict[str, Any]:
            self.turns += 1
            answers = [{"role": "user", "content": said} for said in self._answers(action)]
            done = self._episode.is_over or not TOOL_CALL.search(action) or self.turns >= self.max_turns
            total = self._total() if done else self._episode.reward or 0.0
            reward, self._told = total - self._told, total
            metadata = {"turns": self.turns, "is_over": self._episode.is_over}
            return {"observations": [] if done else answers, "reward": reward, "done": done, "metadata": metadata}

        def close(self) -> None:
            self._episode.close()

        def get_metrics(self) -> dict[str, Any]:
            return {"turns": self.turns, "reward": self._told}

        def _answers(self, action: str) -> list[str]:
            return [self._answer(written) for written in TOOL_CALL.findall(action)]

        def _answer(self, written: str) -> str:
            try:
                call = orjson.loads(written)
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


def described(tools: Sequence[ToolInfo]) -> str:
    """One line of JSON for each tool."""
    told = ({"name": each.name, "description": each.description, "parameters": each.input_schema} for each in tools)
    return "\n".join(orjson.dumps(each).decode() for each in told)


# -- generator: rollouts of ours ------------------------------------------------------------------------------


def generator(model: str | Endpoint, **options: Any) -> Any:
    """A `GeneratorInterface` that runs a rollout for each prompt and returns exact tokens, step-wise: a row for each
    sample, the rows of a rollout together (set `generator.step_wise_trajectories`).

    `model` must serve the weights that are trained; `options` are those of `Roller`. A rollout that nobody could
    score gets a masked row worth the mean of its group, so that it moves no baseline; `rollout_metrics` counts them.
    """
    from skyrl.train.generators.base import GeneratorInterface, TrajectoryID

    weights = Weights.of(options.pop("weights", None))
    roller = Roller(model, weights=weights, **options)

    class PaddockGenerator(GeneratorInterface):  # type: ignore[misc]
        async def generate(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
            if (batch := input_batch.get("batch_metadata")) is not None:
                weights.set(batch.global_step)
            prompts = input_batch["prompts"]
            known = input_batch.get("trajectory_ids") or [TrajectoryID(str(at), 0) for at in range(len(prompts))]
            rolled = await asyncio.to_thread(roller.run, prompts)
            output = joined(rolled, [(each.instance_id, each.repetition_id) for each in known])
            output["trajectory_ids"] = [TrajectoryID(**each) for each in output["trajectory_ids"]]
            return output

        def close(self) -> None:
            roller.close()

    return PaddockGenerator()


def joined(rolled: Sequence[Rolled], trajectories: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """All samples in the order of their rollouts, with a masked row for each rollout that has none."""
    rows: list[Sample] = []
    owners: list[tuple[str, int]] = []
    lost = 0
    for each, owner in zip(rolled, trajectories, strict=True):
        found = each.samples
        if not found:
            siblings = [other for other, (name, _) in zip(rolled, trajectories, strict=True) if name == owner[0]]
            found, lost = [stand_in(each, siblings)], lost + 1
        rows += found
        owners += [owner] * len(found)
    output = generator_output(rows, owners)
    output["rollout_metrics"] = {"paddock/rollouts": len(rolled), "paddock/unscored": lost, "paddock/rows": len(rows)}
    return output


def stand_in(lost: Rolled, siblings: Sequence[Rolled]) -> Sample:
    """A row that teaches nothing: a sibling's, masked, worth the mean of the group."""
    from dataclasses import replace

    scored = [each.samples[-1] for each in siblings if each.samples]
    if not scored:
        raise RolloutError(
            f"no rollout of the group of {lost.record.task_id} can be trained on: {lost.record.error or 'no reward'}",
            hint=f"paddock trace show {lost.record.rollout_id}",
        )
    sample = min(scored, key=lambda each: len(each.response_ids))
    nothing = [0] * len(sample.response_ids)
    worth = fmean(each.reward for each in scored if each.reward is not None)
    return replace(sample, reward=worth, is_last=True, mask=nothing, logprobs=[0.0] * len(nothing))
