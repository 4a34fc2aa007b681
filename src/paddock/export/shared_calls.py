"""Which rollout of an export trains on a call that several of them have.

A fork repeats the recorded calls of its source. Of all rollouts of an export that have a call, the first one in which
the policy accepts it trains on it, and in the others it is masked. So each sampled token is trained on once, also if
the source is not in the export, or has no reward. What the rollouts assumed while they ran does not count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paddock.export.trees import identity_of
from paddock.store import tree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paddock.capture.trace import Call
    from paddock.export.policy import Policy
    from paddock.store import Store
    from paddock.store.record import RolloutRecord


class SharedCalls:
    """Remembers which calls were trained on, of rollouts that were forked or are forks."""

    def __init__(self, store: Store, policy: Policy) -> None:
        self._policy = policy
        # A store of an older version that is only read does not know which rollouts were forked.
        self._forked = store.query(tree.parents) if store.is_current else None
        self._trained: set[str] = set()

    def mark(self, record: RolloutRecord, calls: Sequence[Call]) -> None:
        """Set `is_copy` of each call, and remember those that this rollout trains on."""
        if not record.fork and self._forked is not None and record.rollout_id not in self._forked:
            return
        for call in calls:
            call.is_copy = identity_of(record, call) in self._trained
        if self._policy.rejects(record) is not None:
            return
        for call, reason in zip(calls, self._policy.rejections(calls), strict=True):
            identity = identity_of(record, call)
            if reason is None and identity in self._trained:
                call.is_copy = True
            elif reason is None:
                self._trained.add(identity)
