"""Tinker's `Datum`, one for each sample: inputs, and targets one token ahead of them with logprobs and a mask.

Advantages are computed over a group, by the trainer: `reward` and `group_id` are what it needs for that, and
`loss_fn_inputs["advantages"]` is the advantage times the mask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.rollouts.export import checks
from paddock.rollouts.export.samples import Sample, samples, sampling

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paddock.rollouts.export.policy import Policy
    from paddock.rollouts.record import RolloutRecord
    from paddock.rollouts.trace import Call

WHOLE = False
PACKAGE = "tinker"


def export(record: RolloutRecord, calls: Sequence[Call], policy: Policy) -> Iterator[dict[str, Any]]:
    for sample in samples(record, calls, policy):
        yield {
            **datum(sample),
            "reward": sample.reward,
            "rollout_id": sample.rollout_id,
            "group_id": sample.group_id,
            "task_id": sample.task_id,
            "weight_versions": list(sample.weight_versions),
            **sampling(sample),
        }


def datum(sample: Sample, advantage: float | None = None) -> dict[str, Any]:
    """`model_input` and `loss_fn_inputs`; with an advantage, that too."""
    ids = sample.prompt_ids + sample.response_ids
    before = len(sample.prompt_ids) - 1
    mask = [0.0] * before + list(map(float, sample.mask))
    inputs: dict[str, Any] = {
        "target_tokens": tensor(ids[1:], "int64"),
        "logprobs": tensor([0.0] * before + sample.logprobs, "float32"),
        "mask": tensor(mask, "float32"),
    }
    if advantage is not None:
        inputs["advantages"] = tensor([advantage * each for each in mask], "float32")
    chunk = {"type": "encoded_text", "tokens": ids[:-1]}
    return {"model_input": {"chunks": [chunk]}, "loss_fn_inputs": inputs}


def tensor(values: list[Any], kind: str) -> dict[str, Any]:
    return {"data": values, "dtype": kind, "shape": [len(values)]}


def complaints(document: dict[str, Any]) -> Iterator[str]:
    given = {name: each["data"] for name, each in document["loss_fn_inputs"].items()}
    given["model_input"] = document["model_input"]["chunks"][0]["tokens"]
    yield from checks.token_ids(given["model_input"], "model_input")
    yield from checks.token_ids(given["target_tokens"], "target_tokens")
    yield from checks.equal_lengths(given, *given)
    yield from checks.mask([int(each) for each in given["mask"]], "mask")
    yield from checks.logprobs(given["logprobs"], "logprobs")
    yield from checks.masked_logprobs(given["logprobs"], given["mask"], "logprobs")
    yield from checks.reward(document["reward"])


def accept(document: dict[str, Any]) -> None:
    import tinker

    chunks = [tinker.EncodedTextChunk(tokens=each["tokens"]) for each in document["model_input"]["chunks"]]
    inputs = {name: tinker.TensorData(**each) for name, each in document["loss_fn_inputs"].items()}
    made = tinker.Datum(model_input=tinker.ModelInput(chunks=chunks), loss_fn_inputs=inputs)
    if made.model_input.length != len(document["loss_fn_inputs"]["target_tokens"]["data"]):
        raise ValueError("the input and its targets have different lengths")
