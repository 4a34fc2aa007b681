"""prime-rl: batches for its trainer from a stream, in place of its orchestrator.

    async for batch in batches(stream):
        sender.send(TrainingBatch(examples=[TrainingSample(**each) for each in batch.examples], step=batch.step))
        await stream.update_weights(batch.step + 1, load)

prime-rl is on no package index: this follows its documented types (`prime_rl.transport`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paddock.export.prime import training_sample

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from paddock.train.sampled import ScoredGroup
    from paddock.train.stream import Stream

NOT_SENT = ("reward", "rollout_id", "group_id", "branch", "weight_versions", "logprobs_kinds")
"""Fields of the export that prime-rl's `TrainingSample` does not have."""


@dataclass(frozen=True, slots=True)
class PrimeBatch:
    """One step of the trainer: the fields of `TrainingSample`s, and the groups that they come from."""

    step: int
    examples: list[dict[str, Any]]
    groups: Sequence[ScoredGroup]


async def batches(stream: Stream) -> AsyncIterator[PrimeBatch]:
    """A batch for each weight version. The batch before is acknowledged when the next one is requested."""
    while groups := await stream.take():
        yield PrimeBatch(stream.version, [each for group in groups for each in examples(group)], groups)
        await stream.acknowledge(*groups)


def examples(group: ScoredGroup) -> list[dict[str, Any]]:
    """Samples with the advantage of their rollout at each token. `env_name` is the source."""
    made = []
    for sample in group.samples:
        fields = {name: value for name, value in training_sample(sample).items() if name not in NOT_SENT}
        fields["env_name"] = group.source
        fields["advantages"] = [group.advantage(sample) * mask for mask in fields["mask"]]
        made.append(fields)
    return made
