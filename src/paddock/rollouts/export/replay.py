"""A recording: what `replay:FILE` plays back, call for call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.rollouts.shown import rollout_to_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paddock.rollouts.record import RolloutRecord
    from paddock.rollouts.trace import Call


def export(record: RolloutRecord, calls: Sequence[Call]) -> Iterator[dict[str, Any]]:
    yield rollout_to_json(record, calls)
