"""The store: everything that rollouts leave behind, in one SQLite file.

`store` is the door. `calls` and `sequences` keep model calls as deltas, `blobs` what is shared,
`rows` the records, `ledger` the open sandboxes; `recovery` ends what a dead process left, and
`retention` makes room.
"""

from __future__ import annotations

from paddock.rollouts.store.ledger import SandboxEntry
from paddock.rollouts.store.owner import Owner
from paddock.rollouts.store.recovery import Recovery
from paddock.rollouts.store.retention import Pruned
from paddock.rollouts.store.store import Store

__all__ = ["Owner", "Pruned", "Recovery", "SandboxEntry", "Store"]
