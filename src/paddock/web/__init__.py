"""The page: what rollouts did, token by token, while they run and afterwards; and manual steps in an environment.

A request passes `app` (access check, static files), then `rollout_routes` (which reads `parameters`), then one module
per view: `detail`, `calls`, `tokens`, `compare`, `stats`, `live`, `share`. They are functions of a SQLite connection
and a `loaded_rollout`; `read_store` runs them on worker threads. `server_status` and `play` show a server or a plane,
and `mounts` puts the page into applications. Nothing here changes a rollout, except by a request to stop it.
"""
