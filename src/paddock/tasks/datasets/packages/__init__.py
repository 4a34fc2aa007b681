"""Harbor's package store.

`store` finds the tasks of a published dataset over a `connection`, `archive` unpacks and hashes one task, `manifest`
reads a dataset.toml, and `fetch` brings tasks into the cache.
"""
