"""verl: an agent loop that runs a rollout of ours for each row. Importing this imports verl.

# in the file that actor_rollout_ref.rollout.agent.agent_loop_config_path names
- name: paddock
  _target_: paddock.train.verl.PaddockAgentLoop
  model: http://127.0.0.1:8000/v1
  agent: opencode                    # or environment: http://127.0.0.1:9000
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register

from paddock.errors import RolloutError
from paddock.export.verl import agent_loop_output
from paddock.models.weight_version import Weights
from paddock.train.prompt_rollouts import PromptRollouts

if TYPE_CHECKING:
    from paddock.train.sampled import SampledRollout

VERL_OPTIONS = (
    "trainer_config",
    "server_manager",
    "tokenizer",
    "processor",
    "dataset_cls",
    "data_config",
    "hf_model_type",
)
_OPEN: dict[str, tuple[PromptRollouts, Weights]] = {}
"""verl makes a loop for every row; those with the same options share what is open."""


@register("paddock")
class PaddockAgentLoop(AgentLoopBase):  # type: ignore[misc]
    """The options are those of `PromptRollouts`. `every` returns all sequences of a rollout, as verl's v1 trainer may
    take them; without it the one with the most trained tokens is returned, and `extra_fields` counts the others."""

    def __init__(self, *verl_arguments: Any, model: str, every: bool = False, **options: Any) -> None:
        # Nothing is rendered or sampled here, so nothing of the base is needed.
        fields = {name: value for name, value in options.items() if name not in VERL_OPTIONS}
        key = repr((model, sorted(fields.items(), key=str)))
        if key not in _OPEN:
            weights = Weights.of(fields.pop("weight_version", None))
            _OPEN[key] = PromptRollouts(model, weight_version=weights, **fields), weights
        self._rollouts, self._weights = _OPEN[key]
        self._every = every

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Raises RolloutError if nothing of the rollout can be trained on, with the reason."""
        if (step := row.get("global_steps")) is not None:
            self._weights.set(int(step))
        (finished,) = await asyncio.to_thread(self._rollouts.run, [list(row["raw_prompt"])])
        outputs = [AgentLoopOutput(**each) for each in documents(finished)]
        if self._every:
            return outputs
        chosen = max(outputs, key=lambda output: sum(output.response_mask))
        chosen.extra_fields["left_out"] = len(outputs) - 1
        return chosen


def documents(finished: SampledRollout) -> list[dict[str, Any]]:
    record = finished.record
    if not finished.samples:
        raise RolloutError(
            f"nothing of rollout {record.rollout_id} can be trained on: {record.reward_reason or record.error}",
            hint=f"paddock trace show {record.rollout_id}",
        )
    seconds = {call.id: (call.ended or call.started) - call.started for call in finished.calls}
    return [
        agent_loop_output(sample, generation_seconds=sum(seconds[name] for name in sample.calls))
        for sample in finished.samples
    ]
