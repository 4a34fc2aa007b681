"""Tinker's `Datum`, one for each sample: inputs, and targets one token ahead of them with logprobs and a mask.

Advantages are computed over a group, by the trainer: `reward` and `group_id` are what it needs for that, and
`loss_fn_inputs["advantages"]` is the advantage times the mask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.export import Form, checks
from paddock.export.samples import Sample, samples, sampling_metadata

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paddock.capture.trace import Call
    from paddock.export.policy import Policy
    from paddock.store.record import RolloutRecord


def export(record: RolloutRecord, calls: Sequence[Call], policy: Policy) -> Iterator[dict[str, Any]]:
    for sample in samples(record, calls, policy):
        yield {
            **datum(sample),
            "reward": sample.reward,
            "rollout_id": sample.rollout_id,
            "group_id": sample.group_id,
            "task_id": sample.task_id,
            "weight_versions": list(sample.weight_versions),
            **sampling_metadata(sample),
        }


def datum(sample: Sample, advantage: float | None = None) -> dict[str, Any]:
    """`model_input` and `loss_fn_inputs`; with an advantage, that too."""
    ids = sample.prompt_ids + sample.response_ids
    context = len(sample.prompt_ids) - 1
    mask = [0.0] * context + list(map(float, sample.mask))
    inputs: dict[str, Any] = {
        "target_tokens": tensor(ids[1:], "int64"),
        "logprobs": tensor([0.0] * context + sample.logprobs, "float32"),
        "mask": tensor(mask, "float32"),
    }
    if advantage is not None:
        inputs["advantages"] = tensor([advantage * each for each in mask], "float32")
    chunk = {"type": "encoded_text", "tokens": ids[:-1]}
    return {"model_input": {"chunks": [chunk]}, "loss_fn_inputs": inputs}


def tensor(values: list[Any], kind: str) -> dict[str, Any]:
    return {"data": values, "dtype": kind, "shape": [len(values)]}


def find_problems(document: dict[str, Any]) -> Iterator[str]:
    columns = {name: tensor["data"] for name, tensor in document["loss_fn_inputs"].items()}
    columns["model_input"] = document["model_input"]["chunks"][0]["tokens"]
    yield from checks.training_sequence(
        columns, ids=("model_input", "target_tokens"), aligned=[*columns], mask_name="mask", logprobs_name="logprobs"
    )
    yield from checks.reward(document["reward"])


def validate(document: dict[str, Any]) -> None:
    import tinker

    chunks = [tinker.EncodedTextChunk(tokens=each["tokens"]) for each in document["model_input"]["chunks"]]
    inputs = {name: tinker.TensorData(**each) for name, each in document["loss_fn_inputs"].items()}
    made = tinker.Datum(model_input=tinker.ModelInput(chunks=chunks), loss_fn_inputs=inputs)
    if made.model_input.length != len(document["loss_fn_inputs"]["target_tokens"]["data"]):
        raise ValueError("the input and its targets have different lengths")


FORM = Form(
    summary="Tinker's Datum",
    export=export,
    find_problems=find_problems,
    package="tinker",
    validate=validate,
)
