"""Training sequences from the calls of a rollout: the one bridge between what was captured and every trainer.

Calls that go on wholly from each other, by exact token ids, make one sequence; every other call begins a new
one. Nothing is tokenized again and no mask is guessed: a token may be trained on if, and only if, it was
sampled in this rollout by a call that the policy lets through.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paddock.rollouts.export.policy import Policy as Policy
from paddock.rollouts.graph import Graph, Label, label_of
from paddock.rollouts.tokens import begins_with
from paddock.rollouts.trace import Role, sent_temperature

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paddock.rollouts.record import RolloutRecord
    from paddock.rollouts.trace import Call

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
    """None where nobody knows; such a sample has `metadata["unscored"]`, the reason."""
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
    """Sampled tokens and, between calls, the tokens that the environment gave. Ends with a sampled one."""
    mask: list[int]
    """1 for each token of `response_ids` that may be trained on."""
    logprobs: list[float]
    """One for each token of `response_ids`; 0.0 where the mask is 0."""
    weight_versions: tuple[str | None, ...]
    """One for each of `calls`."""
    finish_reason: str | None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Line:
    """Calls that go on wholly from each other, from the first that may be trained on to the last."""

    branch: int
    label: Label
    calls: Sequence[Call]
    trained: Sequence[bool]
    """For each call, whether its completion is trained on here."""


def samples(record: RolloutRecord, calls: Sequence[Call], policy: Policy = _ANY) -> Iterator[Sample]:
    """The training sequences of a rollout; none if the policy leaves it out."""
    if policy.refuses(record) is not None:
        return
    found = lines(calls, policy)
    for position, line in enumerate(found, 1):
        yield make_sample(record, line, is_last=position == len(found))


def lines(calls: Sequence[Call], policy: Policy = _ANY) -> list[Line]:
    """Which calls stand in one sequence, and which of them are trained on there. No call is trained on twice."""
    refused = policy.refusals(calls)
    waiting = {call.id for call, reason in zip(calls, refused, strict=True) if reason is None}
    if is_one_conversation(calls):
        line = _line(0, calls, waiting, lambda call: label_of(call.role))
        return [] if line is None else [line]
    graph = Graph.of(calls)
    found = []
    for number, path in enumerate(graph.branches()):
        line = _line(number, path, waiting, lambda call: graph.nodes[call.id].label)
        if line is not None:
            waiting.difference_update(call.id for call in line.calls)
            found.append(line)
    return found


def _line(branch: int, path: Sequence[Call], waiting: set[str], label: Callable[[Call], Label]) -> Line | None:
    """The part of a path from the first call that may be trained on to the last."""
    trained = [call.id in waiting for call in path]
    if True not in trained:
        return None
    first, last = trained.index(True), len(trained) - trained[::-1].index(True)
    return Line(branch, label(path[first]), path[first:last], trained[first:last])


def is_one_conversation(calls: Sequence[Call]) -> bool:
    """Does every call go on wholly from the one before it? Most rollouts do, and need no graph."""
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


def make_sample(record: RolloutRecord, line: Line, *, is_last: bool) -> Sample:
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    for call, trained, following in zip(line.calls, line.trained, [*line.calls[1:], None], strict=True):
        sampled = call.completion_token_ids
        ids += sampled
        mask += [int(trained)] * len(sampled)
        logprobs += call.logprobs if trained else [0.0] * len(sampled)
        if following is not None:
            given = following.prompt_token_ids[len(call.prompt_token_ids) + len(sampled) :]
            ids += given
            mask += [0] * len(given)
            logprobs += [0.0] * len(given)
    return Sample(
        rollout_id=record.rollout_id,
        task_id=record.task_id,
        group_id=group_of(record),
        outcome=str(record.outcome),
        reward=record.reward,
        reward_parts=dict(record.reward_parts),
        branch=line.branch,
        is_last=is_last,
        calls=tuple(call.id for call in line.calls),
        label=str(line.label),
        prompt_ids=list(line.calls[0].prompt_token_ids),
        response_ids=ids,
        mask=mask,
        logprobs=logprobs,
        weight_versions=tuple(call.weight_version for call in line.calls),
        finish_reason=line.calls[-1].finish_reason,
        metadata=metadata(record, line),
    )


def group_of(record: RolloutRecord) -> str:
    return f"{record.batch_id or record.rollout_id}/{record.task_id}"


def metadata(record: RolloutRecord, line: Line) -> dict[str, Any]:
    """What else is known: who ran it, at which temperature each call was sampled, and what is unusual."""
    found: dict[str, Any] = {
        "agent": record.agent,
        "model": record.model,
        "member": record.member,
        "attempt": record.attempt,
        "temperatures": [sent_temperature(call) for call in line.calls],
        "logprobs_kinds": [str(call.logprobs_kind) for call in line.calls],
    }
    if any(call.admitted_version not in (None, call.weight_version) for call in line.calls):
        found["admitted_versions"] = [call.admitted_version for call in line.calls]
    if record.reward is None:
        found["unscored"] = record.reward_reason or record.error or f"it ended with {record.outcome}"
    return found


def sampling(sample: Sample) -> dict[str, Any]:
    """For each call of a sample, the temperature that was sent and which logprobs came back."""
    return {name: sample.metadata[name] for name in ("temperatures", "logprobs_kinds")}
