"""A recording that the model `replay:FILE` plays back, call for call. It holds everything: no policy applies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.export import Form
from paddock.rollouts.rollout_json import rollout_to_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paddock.capture.trace import Call
    from paddock.export.policy import Policy
    from paddock.store.record import RolloutRecord


def export(record: RolloutRecord, calls: Sequence[Call], policy: Policy) -> Iterator[dict[str, Any]]:
    yield rollout_to_json(record, calls)


def find_problems(document: dict[str, Any]) -> Iterator[str]:
    if not document["calls"]:
        yield "it has no calls to play"


FORM = Form(
    summary="everything, to be played back",
    export=export,
    find_problems=find_problems,
    needs_whole_calls=True,
    is_for_training=False,
)
