"""verl: an agent loop that runs a rollout of ours for each row. Importing this imports verl.

# in the file that actor_rollout_ref.rollout.agent.agent_loop_config_path names
- name: paddock
  _target_: paddock.adapters.trainers.verl.PaddockAgentLoop
  model: http://127.0.0.1:8000/v1
  agent: opencode                    # or environment: http://127.0.0.1:9000
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register

from paddock.adapters.trainers.rolling import Roller
from paddock.errors import RolloutError
from paddock.rollouts.export.verl import agent_loop_output
from paddock.rollouts.weights import Weights

if TYPE_CHECKING:
    from paddock.adapters.trainers.rolling import Rolled

THEIRS = ("trainer_config", "server_manager", "tokenizer", "processor", "dataset_cls", "data_config", "hf_model_type")
_ROLLERS: dict[str, tuple[Roller, Weights]] = {}
"""verl makes a loop for every row; those with the same options share what is open."""


@register("paddock")
class PaddockAgentLoop(AgentLoopBase):  # type: ignore[misc]
    """The options are those of `Roller`. `every` returns all sequences of a rollout, as verl's v1 trainer may take
    them; without it the one with the most trained tokens is returned, and `extra_fields` counts the others."""

    def __init__(self, *theirs: Any, model: str, every: bool = False, **options: Any) -> None:
        # Nothing is rendered or sampled here, so nothing of the base is needed.
        ours = {name: value for name, value in options.items() if name not in THEIRS}
        key = repr((model, sorted(ours.items(), key=str)))
        if key not in _ROLLERS:
            weights = Weights.of(ours.pop("weights", None))
            _ROLLERS[key] = Roller(model, weights=weights, **ours), weights
        self._roller, self._weights = _ROLLERS[key]
        self._every = every

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Raises RolloutError if nothing of the rollout can be trained on, with the reason."""
        if (step := row.get("global_steps")) is not None:
            self._weights.set(int(step))
        (rolled,) = await asyncio.to_thread(self._roller.run, [list(row["raw_prompt"])])
        outputs = [AgentLoopOutput(**each) for each in documents(rolled)]
        if self._every:
            return outputs
        chosen = max(outputs, key=lambda output: sum(output.response_mask))
        chosen.extra_fields["left_out"] = len(outputs) - 1
        return chosen


def documents(rolled: Rolled) -> list[dict[str, Any]]:
    record = rolled.record
    if not rolled.samples:
        raise RolloutError(
            f"nothing of rollout {record.rollout_id} can be trained on: {record.reward_reason or record.error}",
            hint=f"paddock trace show {record.rollout_id}",
        )
    seconds = {call.id: (call.ended or call.started) - call.started for call in rolled.calls}
    return [
        agent_loop_output(sample, generating=sum(seconds[name] for name in sample.calls)) for sample in rolled.samples
    ]
