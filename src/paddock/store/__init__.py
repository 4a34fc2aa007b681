"""The store: everything that rollouts produce, in one SQLite file.

`store.Store` is the interface. `schema` has the tables. `rows`, `calls`, `sequences` and `blobs` write and read them:
records, model calls, prefix-compressed prompts and conversations, and content-addressed data, encoded by `packing`.
`search` answers queries over many rollouts, `partial_read` reads parts of one and `bulk_read` reads many for exports.
`recovery` finishes what dead processes left, `retention` prunes, and `aborts` carries requests to stop a rollout.
"""

from __future__ import annotations

from paddock.store.recovery import Owner, Recovery, SandboxEntry
from paddock.store.retention import Pruned
from paddock.store.store import Store

__all__ = ["Owner", "Pruned", "Recovery", "SandboxEntry", "Store"]
