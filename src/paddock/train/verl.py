"""verl: an agent loop that runs a rollout of ours for each row. Importing this imports verl.

# in the file that actor_rollout_ref.rollout.agent.agent_loop_config_path names
- name: paddock
  _target_: paddock.train.verl.PaddockAgentLoop
  model: http://127.0.0.1:8000/v1
  agent: opencode                    # or environment: http://127.0.0.1:9000
  make_task: my_tasks.make_task      # a function: the messages of a row to a Task with a verifier
"""

from __future__ import annotations

import inspect
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register

from paddock.errors import ConfigError, RolloutError
from paddock.export.verl import agent_loop_output
from paddock.train.prompt_rollouts import PromptRollouts
from paddock.train.sources import Source

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paddock.train.sampled import SampledRollout

VERL_OPTIONS = frozenset(("name", "tools", "hf_model_type", *inspect.signature(AgentLoopBase.__init__).parameters))
"""What verl gives to every loop, beside the options of its entry: `name` is that of the entry."""
ROLLOUT_CONFIG = "actor_rollout_ref.rollout"
_OPEN: dict[str, PromptRollouts] = {}
"""verl makes a loop for every row; those with the same options share what is open."""


@register("paddock")
class PaddockAgentLoop(AgentLoopBase):  # type: ignore[misc]
    """The options are those of `PromptRollouts`; `make_task` may be the name of a function. `every` returns all
    sequences of a rollout, as verl's v1 trainer may take them; without it the one with the most trained tokens is
    returned, and `extra_fields` counts the others.

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
        sources = plain(sources)
        fields = {name: plain(value) for name, value in options.items() if name not in VERL_OPTIONS}
        key = repr((model, sources, sorted(fields.items(), key=str)))
        if key not in _OPEN:
            _OPEN[key] = open_rollouts(model, sources, fields)
        self._rollouts = _OPEN[key]
        self._by_source = sources is not None
        self._server = server_manager if versions == "server" else None
        self._every = every
        rollout = None if trainer_config is None else OmegaConf.select(trainer_config.config, ROLLOUT_CONFIG)
        self._lengths = None if rollout is None else (int(rollout.prompt_length), int(rollout.response_length))

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Raises RolloutError if nothing of the rollout can be trained on, with the reason."""
        before = await self._version(row)
        if before is not None:
            self._rollouts.weights.advance(before)
        names = [str(row["data_source"])] if self._by_source else None
        (finished,) = await self._rollouts.run_async([list(row["raw_prompt"])], names)
        made = documents(finished)
        if self._lengths is not None:
            made = [fit(document, *self._lengths) for document in made]
        outputs = [AgentLoopOutput(**each) for each in made]
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
    make_task = options.pop("make_task", None)
    if isinstance(make_task, str):
        try:
            make_task = resolve_name(make_task)
        except (ImportError, AttributeError, ValueError) as error:
            problem = f"make_task {make_task!r} cannot be imported: {error}"
            raise ConfigError(problem, hint="give module.function") from error
    if sources is None:
        return PromptRollouts(model, make_task=make_task, **options)
    made = [Source.create(**{"model": model, **options, **own, "name": name}) for name, own in sources.items()]
    return PromptRollouts(made, make_task=make_task)


def fit(document: dict[str, Any], prompt_length: int, response_length: int) -> dict[str, Any]:
    """A document with at most so many tokens: verl pads sequences to these lengths, and longer ones break the batch.

    The end of a longer prompt becomes the masked beginning of the response, which changes nothing for the loss. The
    end of a longer response is cut off, as verl's own loops do it; `extra_fields` counts its tokens.
    """
    tail = document["prompt_ids"][prompt_length:]
    blank = {"response_ids": tail, "response_mask": [0] * len(tail), "response_logprobs": [0.0] * len(tail)}
    whole = {name: [*values, *document[name]] for name, values in blank.items()}
    cut = max(0, len(whole["response_ids"]) - response_length)
    return {
        **document,
        "prompt_ids": document["prompt_ids"][:prompt_length],
        **{name: values[:response_length] for name, values in whole.items()},
        "extra_fields": {**document["extra_fields"], "cut_off_tokens": cut},
    }


def plain(value: Any) -> Any:
    """The options of an entry are OmegaConf's lists and mappings."""
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


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
