"""Task sets from elsewhere: git repositories, registries, package stores, SWE-bench rows.

`source` reads the words of a user, `cache` keeps what was fetched, and `resolve` brings both together.
`tasks.taskset.load_tasks` is what callers use.
"""
