"""verl: an agent loop that runs a rollout of ours for each row. Importing this imports verl.

# in the file that actor_rollout_ref.rollout.agent.agent_loop_config_path names
- name: paddock
  _target_: paddock.train.verl.PaddockAgentLoop
  model: http://127.0.0.1:8000/v1
  agent: opencode                    # or environment: http://127.0.0.1:9000
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register

from paddock.errors import RolloutError
from paddock.export.verl import agent_loop_output
from paddock.train.prompt_rollouts import PromptRollouts
from paddock.train.sources import Source

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paddock.train.sampled import SampledRollout

VERL_OPTIONS = (
    "tokenizer",
    "processor",
    "dataset_cls",
    "data_config",
    "hf_model_type",
)
_OPEN: dict[str, PromptRollouts] = {}
"""verl makes a loop for every row; those with the same options share what is open."""


@register("paddock")
class PaddockAgentLoop(AgentLoopBase):  # type: ignore[misc]
    """The options are those of `PromptRollouts`. `every` returns all sequences of a rollout, as verl's v1 trainer may
    take them; without it the one with the most trained tokens is returned, and `extra_fields` counts the others.

    `sources` names several agents and environments, each with the options of `Source.create`; a row's `data_source`
    chooses one. With `versions="server"` the weight version comes from verl's own servers, which the fully
    asynchronous recipe needs; otherwise it is the `global_steps` of the row.
    """

    def __init__(
        self,
        trainer_config: Any = None,
        server_manager: Any = None,
        *verl_arguments: Any,
        model: str = "",
        sources: Mapping[str, Mapping[str, Any]] | None = None,
        every: bool = False,
        versions: str = "row",
        **options: Any,
    ) -> None:
        # Nothing is rendered or sampled here, so nothing of the base is needed.
        fields = {name: value for name, value in options.items() if name not in VERL_OPTIONS}
        key = repr((model, sources, sorted(fields.items(), key=str)))
        if key not in _OPEN:
            _OPEN[key] = open_rollouts(model, sources, fields)
        self._rollouts = _OPEN[key]
        self._by_source = sources is not None
        self._server = server_manager if versions == "server" else None
        self._every = every

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Raises RolloutError if nothing of the rollout can be trained on, with the reason."""
        before = await self._version(row)
        if before is not None:
            self._rollouts.weights.advance(before)
        names = [str(row["data_source"])] if self._by_source else None
        (finished,) = await self._rollouts.run_async([list(row["raw_prompt"])], names)
        outputs = [AgentLoopOutput(**each) for each in documents(finished)]
        if self._server is not None:
            set_versions(outputs, before, await self._version(row))
        if self._every:
            return outputs
        chosen = max(outputs, key=lambda output: sum(output.response_mask))
        chosen.extra_fields["left_out"] = len(outputs) - 1
        return chosen

    async def _version(self, row: Mapping[str, Any]) -> int | None:
        """The weight version now. verl's servers report it only with tokens, so one is sampled."""
        if self._server is None:
            step = row.get("global_steps")
            return None if step is None else int(step)
        output = await self._server.generate(
            request_id=uuid4().hex, prompt_ids=[0], sampling_params={"max_tokens": 1, "temperature": 0.0}
        )
        step = output.extra_fields.get("global_steps")
        return None if step is None else int(step)


def open_rollouts(
    model: str, sources: Mapping[str, Mapping[str, Any]] | None, options: dict[str, Any]
) -> PromptRollouts:
    if sources is None:
        return PromptRollouts(model, **options)
    made = [Source.create(**{"model": model, **options, **own, "name": name}) for name, own in sources.items()]
    return PromptRollouts(made)


def set_versions(outputs: Sequence[AgentLoopOutput], before: int | None, after: int | None) -> None:
    """Which versions sampled the outputs, if no call said it: those at the start and at the end of the rollout."""
    for output in outputs:
        if before is not None:
            output.extra_fields.setdefault("min_global_steps", before)
        if after is not None:
            newest = output.extra_fields.get("max_global_steps", after)
            output.extra_fields["max_global_steps"] = max(newest, after)


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
