"""A recording: what `replay:FILE` plays back, call for call. It holds everything, so no policy applies to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.rollouts.shown import rollout_to_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paddock.rollouts.export.policy import Policy
    from paddock.rollouts.record import RolloutRecord
    from paddock.rollouts.trace import Call

WHOLE = True
PACKAGE = None


def export(record: RolloutRecord, calls: Sequence[Call], policy: Policy) -> Iterator[dict[str, Any]]:
    yield rollout_to_json(record, calls)


def complaints(document: dict[str, Any]) -> Iterator[str]:
    if not document["calls"]:
        yield "it has no calls to play"


def accept(document: dict[str, Any]) -> None:
    from paddock.testing.replay import Script

    Script.parse([document])
