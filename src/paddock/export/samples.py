"""Training sequences from the calls of a rollout. All forms for trainers are built from them.

Calls whose prompt begins with the whole prompt and completion of the call before, by exact token ids, make one
sequence; every other call begins a new one. Nothing is tokenized again and no mask is guessed: a token may be trained
on if, and only if, it was sampled in this rollout by a call that the policy accepts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paddock.capture.trace import Role, sent_temperature
from paddock.export.policy import Policy as Policy
from paddock.rollouts.graph import Graph, Label, label_of
from paddock.store.packing import begins_with

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paddock.capture.trace import Call
    from paddock.store.record import RolloutRecord

_ANY = Policy()


@dataclass(frozen=True, slots=True)
class Sample:
    """One training sequence."""

    rollout_id: str
    task_id: str
    group_id: str
    """The same for all rollouts of a task in a batch."""
    outcome: str
    reward: float | None
    """None where it is unknown; then `metadata["unscored"]` has the reason."""
    reward_parts: dict[str, float]
    branch: int
    """Which of the rollout's branches it is."""
    is_last: bool
    """The last sample of its rollout."""
    calls: tuple[str, ...]
    """The calls whose completions are in `response_ids`."""
    label: str
    prompt_ids: list[int]
    """All tokens before the first that may be trained on."""
    response_ids: list[int]
    """Sampled tokens and, between calls, the tokens that the environment added. Ends with a sampled one."""
    mask: list[int]
    """1 for each token of `response_ids` that may be trained on."""
    logprobs: list[float]
    """One for each token of `response_ids`; 0.0 where the mask is 0."""
    weight_versions: tuple[str | None, ...]
    """One for each of `calls`."""
    finish_reason: str | None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CallChain:
    """Calls that each continue the one before, from the first that may be trained on to the last."""

    branch: int
    label: Label
    calls: Sequence[Call]
    trained: Sequence[bool]
    """For each call, whether its completion is trained on here."""


def samples(record: RolloutRecord, calls: Sequence[Call], policy: Policy = _ANY) -> Iterator[Sample]:
    """The training sequences of a rollout; none if the policy leaves it out."""
    if policy.rejects(record) is not None:
        return
    all_chains = chains(calls, policy)
    for position, chain in enumerate(all_chains, 1):
        yield make_sample(record, chain, is_last=position == len(all_chains))


def chains(calls: Sequence[Call], policy: Policy = _ANY) -> list[CallChain]:
    """Which calls form one sequence, and which of them are trained on there. No call is trained on twice."""
    reasons = policy.rejections(calls)
    remaining = {call.id for call, reason in zip(calls, reasons, strict=True) if reason is None}
    if is_one_conversation(calls):
        chain = _chain(0, calls, remaining, lambda call: label_of(call.role))
        return [] if chain is None else [chain]
    graph = Graph.of(calls)
    result: list[CallChain] = []
    for number, path in enumerate(graph.branches()):
        chain = _chain(number, path, remaining, lambda call: graph.nodes[call.id].label)
        if chain is not None:
            remaining.difference_update(call.id for call in chain.calls)
            result.append(chain)
    return result


def _chain(
    branch: int, path: Sequence[Call], remaining: set[str], label: Callable[[Call], Label]
) -> CallChain | None:
    """The part of a path from the first call that may be trained on to the last."""
    trained = [call.id in remaining for call in path]
    if True not in trained:
        return None
    first, last = trained.index(True), len(trained) - trained[::-1].index(True)
    return CallChain(branch, label(path[first]), path[first:last], trained[first:last])


def is_one_conversation(calls: Sequence[Call]) -> bool:
    """Whether every call continues the one before it. Most rollouts do, and need no graph."""
    before: Call | None = None
    for call in calls:
        if not call.prompt_token_ids or call.role is not calls[0].role or call.role is Role.RETRIED:
            return False
        if before is not None and not (
            before.index < call.index
            and begins_with(call.prompt_token_ids, before.prompt_token_ids, before.completion_token_ids)
        ):
            return False
        before = call
    return before is not None


def make_sample(record: RolloutRecord, chain: CallChain, *, is_last: bool) -> Sample:
    """One sample of a chain: the ids, the mask, and a logprob for each id."""
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    for call, trained, following in zip(chain.calls, chain.trained, [*chain.calls[1:], None], strict=True):
        sampled = call.completion_token_ids
        ids += sampled
        mask += [int(trained)] * len(sampled)
        logprobs += call.logprobs if trained else [0.0] * len(sampled)
        if following is not None:
            added = following.prompt_token_ids[len(call.prompt_token_ids) + len(sampled) :]
            ids += added
            mask += [0] * len(added)
            logprobs += [0.0] * len(added)
    return Sample(
        rollout_id=record.rollout_id,
        task_id=record.task_id,
        group_id=group_id_of(record),
        outcome=str(record.outcome),
        reward=record.reward,
        reward_parts=dict(record.reward_parts),
        branch=chain.branch,
        is_last=is_last,
        calls=tuple(call.id for call in chain.calls),
        label=str(chain.label),
        prompt_ids=list(chain.calls[0].prompt_token_ids),
        response_ids=ids,
        mask=mask,
        logprobs=logprobs,
        weight_versions=tuple(call.weight_version for call in chain.calls),
        finish_reason=chain.calls[-1].finish_reason,
        metadata=metadata(record, chain),
    )


def group_id_of(record: RolloutRecord) -> str:
    """What the rollouts of one task in one batch have in common."""
    return f"{record.batch_id or record.rollout_id}/{record.task_id}"


def metadata(record: RolloutRecord, chain: CallChain) -> dict[str, Any]:
    """Further facts: who ran it, at which temperature each call was sampled, and what is unusual."""
    values: dict[str, Any] = {
        "agent": record.agent,
        "model": record.model,
        "member": record.member,
        "attempt": record.attempt,
        "temperatures": [sent_temperature(call) for call in chain.calls],
        "logprobs_kinds": [str(call.logprobs_kind) for call in chain.calls],
    }
    if any(call.admitted_version not in (None, call.weight_version) for call in chain.calls):
        values["admitted_versions"] = [call.admitted_version for call in chain.calls]
    if record.reward is None:
        values["unscored"] = record.reward_reason or record.error or f"it ended with {record.outcome}"
    return values


def sampling_metadata(sample: Sample) -> dict[str, Any]:
    """For each call of a sample, the temperature that was sent and which logprobs came back."""
    return {name: sample.metadata[name] for name in ("temperatures", "logprobs_kinds")}
